from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrun_hpc.failures.collection import Summary, WorkerFailure
from torchrun_hpc.rendezvous import protocol
from torchrun_hpc.rendezvous.protocol import (
    Failure,
    JoinRequest,
    Kind,
    Lines,
    ProtocolError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST = JoinRequest(
    "19.0", "mine", 3, 1, "jwb0002", 4711, "0.1.0", "agent 1", "jsc", 1
)
FAILURE = Failure(Kind.WORKER, (1, 2), rank=5, code=-9, text="why", finished=1)
WORKER = WorkerFailure(
    rank=5,
    size=12,
    node=1,
    local_rank=1,
    code=1,
    time=1.7e9,
    cause="ValueError: bad batch 17",
    lines=("Traceback (most recent call last):", "", "ValueError: bad batch 17"),
    log="/logs/attempt_0/1/stderr.log",
    unread="it is a terminal",
)
SUMMARY = Summary(WORKER, (6, 7), (("KeyError: 1", (0, 2)), ("was killed", (3,))), 4)

INTEGERS = st.integers(-(2**63), 2**63 - 1)
values = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)


def as_sent(value):
    """Return a value as it arrives on the other side."""
    (message,) = Lines(10**6).feed(protocol.encode({"value": value}))
    return message["value"]


# --- lines --------------------------------------------------------------------------

# What arrives, and what it means; None if it is refused.
LINES = {
    "nothing": (b"", []),
    "a message": (b'{"join":0}\n', [{"join": 0}]),
    "two": (b'{"join":0}\n{"bye":true}\n', [{"join": 0}, {"bye": True}]),
    "half a message": (b'{"join":', []),
    "one and a half": (b'{"join":0}\n{"b', [{"join": 0}]),
    "an empty object": (b"{}\n", [{}]),
    "blanks around it": (b' {"join": 0}\r\n', [{"join": 0}]),
    "letters beyond ASCII": ('{"host":"jülich"}\n'.encode(), [{"host": "jülich"}]),
    "an empty line": (b"\n", None),
    "a number": (b"1\n", None),
    "a list": (b"[]\n", None),
    "null": (b"null\n", None),
    "HTTP": (b"GET / HTTP/1.1\r\n\r\n", None),
    "no UTF-8": (b'{"a":"\xff"}\n', None),
    "a NUL": (b"\0\n", None),
    "deep": (b"[" * 90 + b"\n", None),
    "64 bits": (b'{"a":-9223372036854775808}\n', [{"a": -(2**63)}]),
    "many digits": (b'{"a":' + b"9" * 21 + b"}\n", None),
    "as long as may be": (b'{"a":"' + b"x" * 92 + b'"}\n', [{"a": "x" * 92}]),
    "too long": (b'{"a":"' + b"x" * 93 + b'"}\n', None),
    "too long without an end": (b"x" * 101, None),
    "not yet too long": (b"x" * 100, []),
}  # fmt: skip


@pytest.mark.parametrize("case", LINES)
def test_what_arrives(case):
    data, expected = LINES[case]
    lines = Lines(100)
    if expected is None:
        with pytest.raises(ProtocolError):
            lines.feed(data)
    else:
        assert lines.feed(data) == expected


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000])
def test_what_would_be_too_much_for_json(line):
    with pytest.raises(ProtocolError):
        Lines(10**6).feed(line + b"\n")


def test_the_limit_may_grow_between_two_messages():
    """It is small until the other side has sent who it is."""
    lines = Lines(protocol.JOIN_REQUEST_LIMIT)
    long = protocol.encode({"set": "x" * protocol.JOIN_REQUEST_LIMIT})
    with pytest.raises(ProtocolError, match="more than 4096 bytes"):
        lines.feed(long)
    lines = Lines(protocol.JOIN_REQUEST_LIMIT)
    assert len(lines.feed(protocol.encode({"protocol": 1}))) == 1
    lines.limit = protocol.LINE_LIMIT
    assert lines.feed(long) == [{"set": "x" * protocol.JOIN_REQUEST_LIMIT}]


def test_a_long_line_in_small_pieces():
    """Each byte is looked at once, however long the line is by then."""

    def cost(rest):
        lines = Lines(protocol.LINE_LIMIT)
        lines.feed(b"x" * rest)
        start = time.process_time()
        for _ in range(300):
            lines.feed(b"x")
        return time.process_time() - start

    # A search of all that has arrived costs some hundred times as much.
    assert min(cost(2**20) for _ in range(3)) < 20 * min(cost(1) for _ in range(3))


messages = st.dictionaries(st.text(), values, max_size=3)


@settings(deadline=None)
@given(st.lists(messages, max_size=5), st.data())
def test_lines_cut_anywhere_give_the_same_messages(sent, data):
    written = b"".join(map(protocol.encode, sent))
    assert written.count(b"\n") == len(sent)  # one line each, whatever is in it
    cuts = data.draw(st.lists(st.integers(0, len(written)), max_size=8).map(sorted))
    lines, arrived = Lines(10**6), []
    for begin, end in zip([0, *cuts], [*cuts, len(written)], strict=True):
        arrived += lines.feed(written[begin:end])
    # Text, because NaN is not itself.
    assert json.dumps(arrived) == json.dumps(sent)


@given(st.lists(st.binary(max_size=60) | st.just(b"\n") | st.just(b'{"a":[0]}\n')))
def test_any_bytes(pieces):
    lines = Lines(100)
    with suppress(ProtocolError):
        for piece in pieces:
            for message in lines.feed(piece):
                assert type(message) is dict


# --- what is in a message -----------------------------------------------------------

UNPRINTABLE = ["a\nb", "\x1b[2J", "\u202e", "\ud800"]


class Part(NamedTuple):
    """What is sent of an object in a message.

    Attributes:
        sent: A few of them; each field of the first one is set.
        write: Returns it as plain data.
        read: Returns it from plain data.
        why: What is said of data that is none.
        none: Data without its fields that is none.
        wrong: The fields, and values that they cannot have.
    """

    sent: list
    write: Callable
    read: Callable
    why: str
    none: list
    wrong: dict


PARTS = {
    "a join request": Part(
        sent=[REQUEST],
        write=asdict,
        read=protocol.join_request,
        why="not a join request",
        none=[{}],
        wrong={
            name: [None, True, 1.0, [], {}, b"x", 1 if type(value) is str else "1"]
            for name, value in asdict(REQUEST).items()
        },
    ),
    "a failure": Part(
        sent=[FAILURE, *map(Failure, Kind)],
        write=protocol.packed,
        read=protocol.unpacked,
        why="not a failure",
        none=[None, "worker", 1, ["worker"], {}],
        wrong={
            "kind": ["bored", 1, ["worker"], "WORKER"],
            "nodes": [["1"], "12", 1, [True], [1.0], [[1]]],
            "rank": ["5", True],
            "code": [float("inf"), None],
            "text": [5, *UNPRINTABLE],
            "finished": [["n0"]],
        },
    ),
    "a failure of a worker": Part(
        sent=[
            *(WORKER, WorkerFailure(5, 12, 1, 1, -9, 0), replace(WORKER, cause="中")),
        ],
        write=protocol.packed_worker,
        read=protocol.unpacked_worker,
        why="not a",
        none=[None, "worker", 1, ["worker"], {}],
        wrong={
            "rank": ["5", True, 5.0, -1, 12],
            "size": [None, 2**24 + 1],
            "node": [[1]],
            "local_rank": [""],
            "code": [float("inf"), 2**32 + 1],
            "time": ["12:00", True, None, float("inf"), float("nan"), 1e300, -1],
            "cause": [None, "x" * 501, *UNPRINTABLE],
            "lines": [
                *("abc", None, 3, [1], [["a"]], ["a", "b\r"], ["\x1b[2J"]),
                *(["a"] * 51, ["x" * 501]),
            ],
            "log": [1, "/logs/\a"],
            "unread": [False, "\x1b[2J"],
        },
    ),
    "a summary": Part(
        sent=[SUMMARY, Summary(WORKER), None],
        write=protocol.packed_summary,
        read=protocol.unpacked_summary,
        why="not a",
        none=["worker", 0, [], {}],
        wrong={
            "first": [None, {}, protocol.packed_worker(WORKER) | {"cause": "\x1b[2J"}],
            "alike": [3, None, ["1"]],
            "others": [
                *([["\x1b[2J", [1]]], [["KeyError: 1", "12"]], [["KeyError: 1"]]),
                *([["KeyError: 1", 3]], [3], 2),
            ],
            "unlisted": [float("inf"), "many", None],
        },
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_it_arrives_as_it_was_sent(name):
    part = PARTS[name]
    for value in part.sent:
        assert part.read(as_sent(part.write(value))) == value


@pytest.mark.parametrize("name", PARTS)
def test_what_is_none(name):
    part = PARTS[name]
    written = part.write(part.sent[0])
    without = [{k: v for k, v in written.items() if k != field} for field in written]
    wrong = [
        written | {field: value}
        for field, values in part.wrong.items()
        for value in values
    ]
    for data in [*part.none, *without, *wrong]:
        with pytest.raises(ProtocolError, match=part.why):
            pytest.fail(f"{data} is read as {part.read(data)}")


# --- join requests ----------------------------------------------------------------


@given(
    messages
    | st.fixed_dictionaries({}, optional=dict.fromkeys(asdict(REQUEST), values))
)
def test_any_join_request(message):
    try:
        request = protocol.join_request(message)
    except ProtocolError:
        return
    assert asdict(request).items() <= message.items()


# --- failures -----------------------------------------------------------------------


@given(
    st.builds(
        Failure,
        kind=st.sampled_from(Kind),
        nodes=st.lists(INTEGERS).map(tuple),
        rank=INTEGERS,
        code=INTEGERS,
        text=st.text(),
        finished=INTEGERS,
    )
)
def test_any_failure_arrives_and_is_one_line(failure):
    read = protocol.unpacked(as_sent(protocol.packed(failure)))
    assert replace(read, text="") == replace(failure, text="")
    assert read.text.isprintable()
    assert len(read.text) == min(len(failure.text), 500)
    if failure.text.isprintable():
        assert failure.text.startswith(read.text)
    assert protocol.unpacked(protocol.packed(read)) == read


@given(
    values
    | st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(asdict(FAILURE), values)
        | {"kind": st.sampled_from([kind.value for kind in Kind]) | values},
    )
)
def test_anything_for_a_failure(value):
    try:
        failure = protocol.unpacked(value)
    except ProtocolError:
        return
    assert protocol.unpacked(protocol.packed(failure)) == failure or (
        len(failure.text) > 500
    )


# --- failures of workers ------------------------------------------------------------


def test_the_first_worker_is_why_the_job_failed():
    expected = Failure(Kind.WORKER, (1,), 5, 1, "ValueError: bad batch 17")
    assert protocol.failure_of(WORKER) == expected


def changes_of(kind):
    """Return what may be changed in a message: of one field, or of several."""
    names = [field.name for field in fields(kind)]
    return st.dictionaries(st.sampled_from(names), values, max_size=2)


@given(values | changes_of(WORKER))
def test_anything_for_a_failure_of_a_worker(value):
    if isinstance(value, dict):
        value = protocol.packed_worker(WORKER) | value
    try:
        failure = protocol.unpacked_worker(value)
    except ProtocolError:
        return
    texts = (failure.cause, failure.log, failure.unread, *failure.lines)
    assert all(text.isprintable() for text in texts)
    again = protocol.unpacked_worker(as_sent(protocol.packed_worker(failure)))
    # Text, because NaN is not itself.
    assert repr(again) == repr(failure)


def test_what_cannot_be_printed_is_not_sent():
    odd = replace(WORKER, cause="\x1b[2J", log="/logs/\xa0x", lines=("\a",))
    failure = protocol.unpacked_worker(as_sent(protocol.packed_worker(odd)))
    assert (failure.cause, failure.log) == (" [2J", "/logs/ x")
    assert failure.lines == (" ",)


# --- what the page of the protocol says ---------------------------------------------


def test_words_of_the_protocol_do_not_change():
    """Another version has to be another `VERSION`."""
    assert protocol.VERSION == 5
    assert [kind.value for kind in Kind] == [
        *("worker", "signal", "agent", "lost"),
        *("silent", "missing", "refused", "unfit", "coordinator"),
    ]
    assert [refusal.value for refusal in protocol.Refusal] == [
        *("unknown", "version", "run_id", "nodes", "taken", "spares", "started"),
    ]

from __future__ import annotations

from dataclasses import asdict, fields, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc import wire
from torchrun_hpc.failures.collection import Summary
from torchrun_hpc.failures.failure import Failure, Kind, WorkerPart
from torchrun_hpc.rendezvous import protocol
from torchrun_hpc.rendezvous.protocol import JoinRequest
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST = JoinRequest("mine", 3, 1, "jwb0002", 4711, "0.1.0", "agent 1", "jsc", 1)
FAILURE = Failure(Kind.LOST, (1, 2), code=-9, text="why", finished=1)
PART = WorkerPart(
    rank=5,
    size=12,
    local_rank=1,
    lines=("Traceback (most recent call last):", "", "ValueError: bad batch 17"),
    log="/logs/attempt_0/1/stderr.log",
    unread="it is a terminal",
)
WORKER = Failure(
    Kind.WORKER,
    (1,),
    code=1,
    text="ValueError: bad batch 17",
    time=1.7e9,
    worker=PART,
)
SUMMARY = Summary(WORKER, (6, 7), (("KeyError: 1", (0, 2)), ("was killed", (3,))), 4)

INTEGERS = st.integers(-(2**63), 2**63 - 1)
values = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)


messages = st.dictionaries(st.text(), values, max_size=3)


def as_sent(value):
    """Return a value as it arrives on the other side."""
    (message,) = wire.Lines(10**6).feed(wire.to_line({"value": value}))
    return message["value"]


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
        write=wire.encode,
        read=partial(wire.decode, JoinRequest),
        why="not a join request",
        none=[{}],
        wrong={
            name: [None, True, 1.0, [], {}, b"x", 1 if type(value) is str else "1"]
            for name, value in asdict(REQUEST).items()
        },
    ),
    "a failure": Part(
        sent=[
            *(WORKER, FAILURE, replace(WORKER, text="中")),
            *map(Failure, Kind),
            replace(WORKER, worker=WorkerPart(5)),
        ],
        write=wire.encode,
        read=partial(wire.decode, Failure),
        why="not a failure",
        none=[None, "worker", 1, ["worker"], {}],
        wrong={
            "kind": ["bored", 1, ["worker"], "WORKER"],
            "nodes": [["1"], "12", 1, [True], [1.0], [[1]]],
            "code": [float("inf"), None, 2**32 + 1],
            "text": [None, 5, "x" * 501, *UNPRINTABLE],
            "finished": [["n0"]],
            "time": ["12:00", True, None, float("inf"), float("nan"), 1e300, -1],
            "worker": [5, [], {}],
        },
    ),
    "a worker": Part(
        sent=[PART, WorkerPart(5)],
        write=wire.encode,
        read=partial(wire.decode, WorkerPart),
        why="not a worker part",
        none=[None, "worker", 1, ["worker"], {}],
        wrong={
            "rank": ["5", True, 5.0, -1, 12],
            "size": [None, 2**24 + 1],
            "local_rank": [""],
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
        write=lambda value: value and wire.encode(value),
        read=partial(wire.decode, Summary | None),
        why="not a",
        none=["worker", 0, [], {}],
        wrong={
            "first": [None, {}, wire.encode(WORKER) | {"text": "\x1b[2J"}],
            "same_as_first": [3, None, ["1"]],
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
    needed = written.keys() - {"worker"}  # which most failures do not have
    without = [{k: v for k, v in written.items() if k != field} for field in needed]
    wrong = [
        written | {field: value}
        for field, values in part.wrong.items()
        for value in values
    ]
    for data in [*part.none, *without, *wrong]:
        with pytest.raises(WireError, match=part.why):
            pytest.fail(f"{data} is read as {part.read(data)}")


# --- join requests ----------------------------------------------------------------


@given(
    messages
    | st.fixed_dictionaries({}, optional=dict.fromkeys(asdict(REQUEST), values))
)
def test_any_join_request(message):
    try:
        request = wire.decode(JoinRequest, message)
    except WireError:
        return
    assert asdict(request).items() <= message.items()


# --- failures -----------------------------------------------------------------------


@given(
    st.builds(
        Failure,
        kind=st.sampled_from(Kind),
        nodes=st.lists(INTEGERS).map(tuple),
        code=st.integers(-(2**32), 2**32),
        text=st.text(),
        finished=INTEGERS,
    )
)
def test_any_failure_arrives_and_is_one_line(failure):
    read = wire.decode(Failure, as_sent(wire.encode(failure)))
    assert replace(read, text="") == replace(failure, text="")
    assert read.text.isprintable()
    assert len(read.text) == min(len(failure.text), 500)
    if failure.text.isprintable():
        assert failure.text.startswith(read.text)
    assert wire.decode(Failure, wire.encode(read)) == read


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
        failure = wire.decode(Failure, value)
    except WireError:
        return
    assert wire.decode(Failure, wire.encode(failure)) == failure or (
        len(failure.text) > 500
    )


# --- failures of workers ------------------------------------------------------------


def changes_of(kind):
    """Return what may be changed in a message: of one field, or of several."""
    names = [field.name for field in fields(kind)]
    return st.dictionaries(st.sampled_from(names), values, max_size=2)


@given(values | changes_of(WORKER) | changes_of(PART))
def test_anything_for_a_failure_of_a_worker(value):
    if isinstance(value, dict):
        part = {k: v for k, v in value.items() if k in asdict(PART)}
        whole = {k: v for k, v in value.items() if k not in part}
        part = {"worker": wire.encode(PART) | part}
        value = wire.encode(WORKER) | part | whole
    try:
        failure = wire.decode(Failure, value)
    except WireError:
        return
    part = failure.worker or PART
    texts = (failure.text, part.log, part.unread, *part.lines)
    assert all(text.isprintable() for text in texts)
    again = wire.decode(Failure, as_sent(wire.encode(failure)))
    # Text, because NaN is not itself.
    assert repr(again) == repr(failure)


def test_what_cannot_be_printed_is_not_sent():
    part = replace(PART, log="/logs/\xa0x", lines=("\a",))
    odd = replace(WORKER, text="\x1b[2J", worker=part)
    failure = wire.decode(Failure, as_sent(wire.encode(odd)))
    assert (failure.text, failure.worker.log) == (" [2J", "/logs/ x")
    assert failure.worker.lines == (" ",)


# --- what the page of the protocol says ---------------------------------------------


def test_words_of_the_protocol_do_not_change():
    """Another version has to be another `VERSION`."""
    assert protocol.VERSION == 9
    assert [kind.value for kind in Kind] == [
        *("worker", "signal", "agent", "lost"),
        *("silent", "missing", "refused", "excluded", "coordinator"),
    ]
    assert [refusal.value for refusal in protocol.Refusal] == [
        *("version", "run_id", "nodes", "taken", "spares", "started", "unproved"),
    ]

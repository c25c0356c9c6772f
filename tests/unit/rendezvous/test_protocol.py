from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, fields, replace

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

REQUEST = JoinRequest("19.0", "mine", 3, 1, "jwb0002", 4711, "0.1.0")
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

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
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
    "many digits": (b'{"a":' + b"9" * 80 + b"}\n", [{"a": 10**80 - 1}]),
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


# --- join requests ----------------------------------------------------------------


def test_a_join_request_arrives_as_it_was_sent():
    message = as_sent({"protocol": protocol.VERSION, **asdict(REQUEST)})
    assert protocol.join_request(message) == REQUEST


@pytest.mark.parametrize("name", list(asdict(REQUEST)))
@pytest.mark.parametrize("value", [None, True, 1.0, [], {}, b"x"])
def test_a_join_request_with_another_type(name, value):
    with pytest.raises(ProtocolError, match="not a join request"):
        protocol.join_request({**asdict(REQUEST), name: value})


@pytest.mark.parametrize("name", list(asdict(REQUEST)))
def test_a_join_request_without(name):
    message = {k: v for k, v in asdict(REQUEST).items() if k != name}
    with pytest.raises(ProtocolError, match="not a join request"):
        protocol.join_request(message)


@pytest.mark.parametrize(
    ("name", "value"),
    [("rank", "1"), ("nodes", "3"), ("pid", ""), ("job", 19), ("spares", "1")],
)
def test_a_join_request_of_numbers_and_texts_exchanged(name, value):
    with pytest.raises(ProtocolError):
        protocol.join_request({**asdict(REQUEST), name: value})


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


@pytest.mark.parametrize("kind", Kind)
def test_a_failure_of_every_kind_arrives_as_it_was_sent(kind):
    failure = replace(FAILURE, kind=kind)
    assert protocol.unpacked(as_sent(protocol.packed(failure))) == failure
    bare = Failure(kind)
    assert protocol.unpacked(as_sent(protocol.packed(bare))) == bare


@given(
    st.builds(
        Failure,
        kind=st.sampled_from(Kind),
        nodes=st.lists(st.integers()).map(tuple),
        rank=st.integers(),
        code=st.integers(),
        text=st.text(),
        finished=st.integers(),
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


NO_FAILURES = {
    "nothing": None,
    "a text": "worker",
    "a number": 1,
    "a list": ["worker"],
    "an empty object": {},
    "an unknown kind": {"kind": "bored"},
    "a kind of numbers": {"kind": 1},
    "a kind that is a list": {"kind": ["worker"]},
    "a kind by its name": {"kind": "WORKER"},
    "nodes of text": {"nodes": ["1"]},
    "nodes in a text": {"nodes": "12"},
    "one node": {"nodes": 1},
    "nodes that are true": {"nodes": [True]},
    "nodes with a point": {"nodes": [1.0]},
    "nodes of nodes": {"nodes": [[1]]},
    "a rank of text": {"rank": "5"},
    "a rank that is true": {"rank": True},
    "a code without end": {"code": float("inf")},
    "a code that is none": {"code": None},
    "a text of numbers": {"text": 5},
    "a text of two lines": {"text": "a\nb"},
    "a text that moves the cursor": {"text": "\x1b[2J"},
    "a text that turns": {"text": "\u202e"},
    "half a letter": {"text": "\ud800"},
    "nodes that have finished by name": {"finished": ["n0"]},
}


@pytest.mark.parametrize("case", NO_FAILURES)
def test_what_is_no_failure(case):
    value = NO_FAILURES[case]
    if isinstance(value, dict) and value:
        value = protocol.packed(FAILURE) | value
    with pytest.raises(ProtocolError, match="not a failure"):
        protocol.unpacked(value)


@pytest.mark.parametrize("name", list(asdict(FAILURE)))
def test_a_failure_without(name):
    value = protocol.packed(FAILURE)
    del value[name]
    with pytest.raises(ProtocolError):
        protocol.unpacked(value)


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


@pytest.mark.parametrize(
    "failure", [WORKER, WorkerFailure(5, 12, 1, 1, -9, 0), replace(WORKER, cause="中")]
)
def test_how_a_worker_failed_arrives_as_it_was_sent(failure):
    sent = as_sent(protocol.packed_worker(failure))
    assert protocol.unpacked_worker(sent) == failure


def test_the_first_worker_is_why_the_job_failed():
    expected = Failure(Kind.WORKER, (1,), 5, 1, "ValueError: bad batch 17")
    assert protocol.failure_of(WORKER) == expected


NO_WORKER_FAILURES = {
    "nothing": None,
    "a text": "worker",
    "a number": 1,
    "a list": ["worker"],
    "an empty object": {},
    "a rank of text": {"rank": "5"},
    "a rank that is true": {"rank": True},
    "a rank with a point": {"rank": 5.0},
    "a size that is none": {"size": None},
    "nodes": {"node": [1]},
    "a local rank of text": {"local_rank": ""},
    "a code without end": {"code": float("inf")},
    "a time of day": {"time": "12:00"},
    "a time that is true": {"time": True},
    "no time": {"time": None},
    "a time that never comes": {"time": float("inf")},
    "a time that is none": {"time": float("nan")},
    "a time that no calendar has": {"time": 1e300},
    "a time before time": {"time": -1},
    "one text for all lines": {"lines": "abc"},
    "a cause that is none": {"cause": None},
    "a cause of two lines": {"cause": "a\nb"},
    "a cause that moves the cursor": {"cause": "\x1b[2J"},
    "a cause that turns": {"cause": "\u202e"},
    "half a letter": {"cause": "\ud800"},
    "no lines": {"lines": None},
    "a number of lines": {"lines": 3},
    "lines of numbers": {"lines": [1]},
    "lines of lines": {"lines": [["a"]]},
    "two lines in one": {"lines": ["a", "b\r"]},
    "lines that move the cursor": {"lines": ["\x1b[2J"]},
    "a log of numbers": {"log": 1},
    "a log that rings": {"log": "/logs/\a"},
    "no reason": {"unread": False},
    "a reason that moves the cursor": {"unread": "\x1b[2J"},
}


@pytest.mark.parametrize("case", NO_WORKER_FAILURES)
def test_what_is_no_failure_of_a_worker(case):
    value = NO_WORKER_FAILURES[case]
    if isinstance(value, dict) and value:
        value = protocol.packed_worker(WORKER) | value
    with pytest.raises(ProtocolError):
        protocol.unpacked_worker(value)


@pytest.mark.parametrize("name", list(asdict(WORKER)))
def test_a_failure_of_a_worker_without(name):
    value = protocol.packed_worker(WORKER)
    del value[name]
    with pytest.raises(ProtocolError):
        protocol.unpacked_worker(value)


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


# --- what node 0 reports of them ----------------------------------------------------


@pytest.mark.parametrize("summary", [None, SUMMARY, Summary(WORKER)])
def test_a_summary_arrives_as_it_was_sent(summary):
    sent = as_sent(protocol.packed_summary(summary))
    assert protocol.unpacked_summary(sent) == summary


NO_SUMMARIES = {
    "a text": "worker",
    "a number": 0,
    "a list": [],
    "an empty object": {},
    "no first one": {"first": None},
    "a first one without a name": {"first": {}},
    "a first one that moves the cursor": {
        "first": protocol.packed_worker(WORKER) | {"cause": "\x1b[2J"}
    },
    "a number of ranks": {"alike": 3},
    "no ranks": {"alike": None},
    "ranks of text": {"alike": ["1"]},
    "others that move the cursor": {"others": [["\x1b[2J", [1]]]},
    "others of ranks of text": {"others": [["KeyError: 1", "12"]]},
    "more than all": {"unlisted": float("inf")},
    "a number of others": {"others": 2},
    "others without ranks": {"others": [["KeyError: 1"]]},
    "others of one rank": {"others": [["KeyError: 1", 3]]},
    "others without a cause": {"others": [3]},
    "many that are not listed": {"unlisted": "many"},
    "nothing that is not listed": {"unlisted": None},
}


def test_what_cannot_be_printed_is_not_sent():
    odd = replace(WORKER, cause="\x1b[2J", log="/logs/\xa0x", lines=("\a",))
    failure = protocol.unpacked_worker(as_sent(protocol.packed_worker(odd)))
    assert (failure.cause, failure.log) == (" [2J", "/logs/ x")
    assert failure.lines == (" ",)


@pytest.mark.parametrize("case", NO_SUMMARIES)
def test_what_is_no_summary(case):
    value = NO_SUMMARIES[case]
    if isinstance(value, dict) and value:
        value = protocol.packed_summary(SUMMARY) | value
    with pytest.raises(ProtocolError):
        protocol.unpacked_summary(value)


@pytest.mark.parametrize("name", list(asdict(SUMMARY)))
def test_a_summary_without(name):
    value = protocol.packed_summary(SUMMARY)
    del value[name]
    with pytest.raises(ProtocolError):
        protocol.unpacked_summary(value)


# --- what the page of the protocol says ---------------------------------------------


@pytest.mark.parametrize("enum", [Kind, protocol.Refusal])
def test_words_of_the_protocol_do_not_change(enum):
    """Another version has to be another `VERSION`."""
    assert protocol.VERSION == 3
    assert [member.value for member in enum] == {
        Kind: [
            *("worker", "signal", "agent", "lost"),
            *("silent", "missing", "refused", "unfit", "coordinator"),
        ],
        protocol.Refusal: [
            *("unknown", "version", "run_id", "nodes", "taken", "spares"),
        ],
    }[enum]

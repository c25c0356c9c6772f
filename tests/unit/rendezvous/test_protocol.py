from __future__ import annotations

import hashlib
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from typing import Annotated, Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.simulated_job import as_sent, each_wrong
from torchrun_hpc import wire
from torchrun_hpc.failures.failure import Failure, Kind, Summary, WorkerPart
from torchrun_hpc.rendezvous import protocol
from torchrun_hpc.rendezvous.protocol import FROM_AGENT, FROM_COORDINATOR, JoinRequest
from torchrun_hpc.rendezvous.record import Address
from torchrun_hpc.wire import WireError

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


# --- what is in a message -----------------------------------------------------------

ANYTHING: list[Any] = [None, True, 1, 1.0, [], {}, b"x", "1"]
UNPRINTABLE = ["a\nb", "\x1b[2J", "\u202e", "\ud800"]


class Part(NamedTuple):
    """An object in a message.

    Attributes:
        sent: A few of its values; each field of the first one is set.
        none: Data without its fields that is none.
        wrong: The fields, and values that they cannot have.
    """

    sent: list[Any]
    none: list[Any]
    wrong: dict[str, list[Any]]


PARTS = {
    "a join request": Part(
        sent=[replace(REQUEST, failed=FAILURE, asks=True), REQUEST],
        none=[{}],
        wrong={
            name: [other for other in ANYTHING if type(other) is not type(value)]
            for name, value in asdict(REQUEST).items()
        },
    ),
    "a failure": Part(
        sent=[
            *(WORKER, FAILURE, replace(WORKER, text="中")),
            *map(Failure, Kind),
            replace(WORKER, worker=WorkerPart(5)),
        ],
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
    "a worker part": Part(
        sent=[PART, WorkerPart(5)],
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
        sent=[SUMMARY, Summary(WORKER)],
        none=[None, "worker", 0, [], {}],
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
def test_what_arrives_and_what_is_none(name):
    part = PARTS[name]
    whole, kind = wire.encode(part.sent[0]), type(part.sent[0])
    for value in part.sent:
        as_sent(value, kind)
    needed = whole.keys() - {"worker", "failed"}  # which most do not have
    without = [{k: v for k, v in whole.items() if k != field} for field in needed]
    wrong = [whole | change for change in each_wrong(part.wrong)]
    for data in [*part.none, *without, *wrong]:
        with pytest.raises(WireError, match=f"not {name}"):
            pytest.fail(f"{data} is read as {wire.decode(kind, data)}")


def is_refused_or_sent(kind, data):
    """Read plain data. If it is valid, it can be sent, and arrives as it is."""
    with suppress(WireError):
        as_sent(wire.decode(kind, data), kind)


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
    assert wire.encode(request).items() <= ({"failed": None} | message).items()


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
    read = wire.decode(Failure, wire.encode(failure))
    assert replace(read, text="") == replace(failure, text="")
    assert read.text.isprintable()
    assert len(read.text) == min(len(failure.text), 500)
    if failure.text.isprintable():
        assert failure.text.startswith(read.text)
    as_sent(read, Failure)


@given(
    values
    | st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(asdict(FAILURE), values)
        | {"kind": st.sampled_from([kind.value for kind in Kind]) | values},
    )
)
def test_anything_for_a_failure(value):
    is_refused_or_sent(Failure, value)


# --- failures of workers ------------------------------------------------------------


def changes_of(kind):
    """Return what may be changed in a message: of one field, or of several."""
    names = [field.name for field in fields(kind)]
    return st.dictionaries(st.sampled_from(names), values, max_size=2)


@given(values | changes_of(WORKER) | changes_of(PART))
def test_anything_for_a_failure_of_a_worker(value):
    if isinstance(value, dict):
        changes = {k: v for k, v in value.items() if k in asdict(PART)}
        whole = {k: v for k, v in value.items() if k not in changes}
        worker = {"worker": wire.encode(PART) | changes}
        value = wire.encode(WORKER) | worker | whole
    with suppress(WireError):
        failure = as_sent(wire.decode(Failure, value), Failure)
        part = failure.worker or PART
        texts = (failure.text, part.log, part.unread, *part.lines)
        assert all(text.isprintable() for text in texts)


def test_what_cannot_be_printed_is_not_sent():
    part = replace(PART, log="/logs/\xa0x", lines=("\a",))
    odd = replace(WORKER, text="\x1b[2J", worker=part)
    worker = replace(PART, log="/logs/ x", lines=(" ",))
    printable = replace(WORKER, text=" [2J", worker=worker)
    assert wire.decode(Failure, wire.encode(odd)) == printable


# --- all messages -------------------------------------------------------------------

UNIONS: dict[str, Any] = {"an agent": FROM_AGENT, "the coordinator": FROM_COORDINATOR}
CASES = [(by, kind) for by, union in UNIONS.items() for kind in typing.get_args(union)]
TEXTS = st.text(max_size=60).filter(str.isprintable)
RANKS = st.integers(0, 11)
# Types of which not all values can be sent.
LIMITED = {
    types.NoneType: st.none(),
    Failure: st.builds(
        Failure,
        kind=st.sampled_from(Kind),
        nodes=st.lists(INTEGERS, max_size=3).map(tuple),
        code=st.integers(-(2**32), 2**32),
        text=TEXTS,
        time=st.floats(0, 2**35),
        worker=st.none() | st.builds(WorkerPart, RANKS, st.just(12), RANKS),
    ),
    Address: st.tuples(
        st.sampled_from(["n1", "10.0.0.1", "::1", "jülich.de"]), st.integers(1, 65535)
    ),
    protocol.Store: st.tuples(TEXTS, st.integers(1, 65535)),
    wire.AnyText: st.text(),
    wire.Plain: values,
    wire.Places: st.lists(INTEGERS, max_size=3).map(tuple),
    str: TEXTS,
    int: INTEGERS,
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
}
# By the origin of a type, and whether it is of any length.
MADE_OF: dict[Any, Callable[..., Any]] = {
    (Mapping, False): partial(st.dictionaries, max_size=2),
    (tuple, True): lambda part: st.lists(part, max_size=3).map(tuple),
    (tuple, False): st.tuples,
    **dict.fromkeys([(types.UnionType, False), (typing.Union, False)], st.one_of),
}


def values_of(kind: Any) -> Any:
    """Return what can be sent of a type, by the hints that `wire` reads."""
    if kind in LIMITED:
        return LIMITED[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return st.builds(kind, **{name: values_of(hints[name]) for name in hints})
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:  # a short text
        return TEXTS
    return MADE_OF[origin, ... in args](*(values_of(p) for p in args if p is not ...))


def test_no_two_messages_have_the_same_name():
    """These go both ways."""
    names = {
        by: {wire._words(kind) for kind in typing.get_args(union)}
        for by, union in UNIONS.items()
    }
    assert sum(map(len, names.values())) == len(CASES)
    assert names["an agent"] & names["the coordinator"] == {
        "heartbeat",
        "printed",
        "question",
        "reply",
    }


@pytest.mark.parametrize(("by", "kind"), CASES)
@settings(max_examples=25)
@given(data=st.data())
def test_any_message_arrives_as_it_was_sent(by, kind, data):
    message = data.draw(values_of(kind))
    sent = wire.encode(message, UNIONS[by])
    assert len(sent) == 1
    as_sent(message, UNIONS[by])


@given(
    st.sampled_from([*UNIONS]),
    messages | st.dictionaries(st.sampled_from(["join", "go", "refused"]), values),
)
def test_anything_for_a_message(by, message):
    is_refused_or_sent(UNIONS[by], message)


@settings(max_examples=500)
@given(st.sampled_from(CASES), st.data())
def test_a_message_with_anything_in_it(case, data):
    by, kind = case
    ((name, sent),) = wire.encode(data.draw(values_of(kind)), UNIONS[by]).items()
    if isinstance(sent, dict):
        changes = st.dictionaries(st.sampled_from([*sent, "more"]), values, max_size=2)
        sent |= data.draw(changes)
        sent.pop(data.draw(st.sampled_from([*sent, ""])), None)
    else:
        sent = data.draw(values)
    is_refused_or_sent(UNIONS[by], {name: sent})


# --- the version ----------------------------------------------------------------------


def add_forms(kind: Any, forms: dict[str, Any]) -> None:
    """Add the fields, or values, of a type and of all types in it, by its name.

    The modules of the types do not matter.
    """
    if isinstance(kind, type) and issubclass(kind, Enum):
        forms[kind.__name__] = [each.value for each in kind]
    elif isinstance(kind, type) and is_dataclass(kind) and kind.__name__ not in forms:
        hints = typing.get_type_hints(kind)
        written = {n: re.sub(r"[a-z_.]+\.", "", str(hints[n])) for n in hints}
        forms[kind.__name__] = written
        for hint in hints.values():
            add_forms(hint, forms)
    for part in typing.get_args(kind):
        add_forms(part, forms)


def test_another_protocol_has_another_version():
    """If this fails, increase `VERSION`, and write both numbers here."""
    forms: dict[str, Any] = {}
    for kind in (FROM_AGENT, FROM_COORDINATOR, JoinRequest):
        add_forms(kind, forms)
    digest = hashlib.sha256(json.dumps(forms, sort_keys=True).encode()).hexdigest()
    assert (protocol.VERSION, digest[:8]) == (10, "7b1b0df8")

"""What all members know of a job, and who takes whose place."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.simulated_job import as_sent, each_wrong
from torchrun_hpc import wire
from torchrun_hpc.rendezvous import record as records
from torchrun_hpc.rendezvous.record import (
    LOSSES,
    Record,
    assigned,
    blamed,
    excluded,
    first_record,
    lost,
)
from torchrun_hpc.wire import WireError, printable

# Five members, of which two are spares, in the second round.
RECORD = Record((1, 2), 1, (0, 1, 2))
WHY = "its workers were the first to fail in two consecutive rounds"


@pytest.mark.parametrize(
    ("nodes", "spares", "active"),
    [(3, 1, (0, 1)), (4, 1, (0, 1, 2)), (5, 2, (0, 1, 2)), (3, 0, (0, 1, 2))],
)
def test_the_last_members_are_spares_at_first(nodes, spares, active):
    assert first_record(nodes, spares, 1) == Record((0, 1), -1, active)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({}, {"round": 2}),
        ({}, {"term": (1, 3)}),
        ({"term": (1, 9)}, {"term": (2, 0)}),
        ({"term": (9, 9)}, {"round": 2}),
    ],
)
def test_which_of_two_records_is_the_newer_one(older, newer):
    assert replace(RECORD, **older).age < replace(RECORD, **newer).age


# --- who is active ------------------------------------------------------------------

# The changes of the record; who is ready; who is not waited for; who is active.
ASSIGNED: dict[str, tuple[dict[str, Any], Any, Any, Any]] = {
    "all are there": ({}, {0, 1, 2, 3, 4}, (), (0, 1, 2)),
    "no spare is needed": ({}, {0, 1, 2}, (), (0, 1, 2)),
    "nobody is there": ({}, (), (), None),
    "nobody is there, and nobody waited for": ({}, (), {0, 1, 2}, None),
    "one is waited for": ({}, {0, 2, 3, 4}, (), None),
    "one leaves": ({}, {0, 2, 3, 4}, {1}, (0, 3, 2)),
    "the first one leaves": ({}, {1, 2, 3, 4}, {0}, (3, 1, 2)),
    "two leave": ({}, {2, 3, 4}, {0, 1}, (3, 4, 2)),
    "two leave, and one spare is there": ({}, {2, 4}, {0, 1}, None),
    "three leave": ({}, {3, 4}, {0, 1, 2}, None),
    "one leaves, and another is waited for": ({}, {0, 3, 4}, {1}, None),
    "who leaves is there": ({}, {0, 1, 2, 3, 4}, {1}, (0, 1, 2)),
    "one is out": ({"excluded": {1: "why"}}, {0, 1, 2, 3, 4}, (), (0, 3, 2)),
    "one is out, and gone": ({"excluded": {1: "why"}}, {0, 2, 4}, (), (0, 4, 2)),
    "a spare is out": ({"excluded": {3: "why"}}, {0, 2, 3, 4}, {1}, (0, 4, 2)),
    "no spare is left": ({"excluded": {3: "why", 4: "why"}}, {0, 2, 3, 4}, {1}, None),
    "a spare is at work": ({"active": (0, 3, 2)}, {0, 1, 2, 3}, (), (0, 3, 2)),
    "who was lost is a spare": ({"active": (0, 3, 2)}, {0, 1, 3, 4}, {2}, (0, 3, 1)),
    "ranks stay in another order": ({"active": (4, 0, 3)}, {0, 1, 3}, {4}, (1, 0, 3)),
}


@pytest.mark.parametrize("case", ASSIGNED)
def test_who_is_active(case):
    changes, ready, leaving, expected = ASSIGNED[case]
    assert assigned(replace(RECORD, **changes), ready, leaving) == expected


members = st.integers(0, 6)


@settings(deadline=None)
@given(st.permutations(range(7)), st.sets(members), st.sets(members), st.sets(members))
def test_whoever_is_active_is_there_once_and_keeps_its_rank(order, ready, leaving, out):
    record = Record((0, 0), 3, tuple(order[:4]), excluded=dict.fromkeys(out, "why"))
    active = assigned(record, ready, leaving)
    fit = ready - out
    if active is None:
        missing = set(record.active) - fit
        assert missing - leaving - out or len(fit) < len(record.active)
        return
    assert len(set(active)) == len(record.active)
    assert fit.issuperset(active)
    for before, after in zip(record.active, active, strict=True):
        assert after == before or before in (leaving | out) - fit


# --- who is lost, or out ------------------------------------------------------------


def test_losses_are_counted_for_each_member():
    record = RECORD
    for member in (1, 2, 1):
        record = lost(record, member)
    assert record == replace(RECORD, losses={1: LOSSES, 2: 1})


def test_who_fails_when_a_member_is_lost_is_not_suspect_any_more():
    assert lost(replace(RECORD, suspect=2), 1).suspect == -1


def test_members_that_are_out_have_a_reason():
    record = excluded(excluded(RECORD, 1, "its disk is full"), 3, "it was lost 2 times")
    expected = {1: "its disk is full", 3: "it was lost 2 times"}
    assert record == replace(RECORD, excluded=expected)


# --- who is blamed ------------------------------------------------------------------

FULL = {4: "its disk is full"}
OUT = {"suspect": -1, "excluded": {1: WHY}, "moved_from": {1: 1}}
MOVED = {"excluded": {1: WHY}, "moved_from": {1: 1}, "active": (0, 3, 2)}
EXCUSED = {"suspect": -1, "excluded": {}, "moved_from": {}, "script_faults": (1,)}

# The record's changes before; who fails first; whether there is a spare; what changes.
BLAMED: dict[str, tuple[dict[str, Any], int, bool, dict[str, Any]]] = {
    "once": ({}, 1, True, {"suspect": 1}),
    "in two consecutive rounds": ({"suspect": 1}, 1, True, OUT),
    "another one after it": ({"suspect": 1}, 2, True, {"suspect": 2}),
    "the same node rank on the next node": (MOVED, 3, True, EXCUSED),
    "another node rank after it": (MOVED, 2, True, {"suspect": 2}),
    "a script's fault": (
        {"script_faults": (1,), "suspect": 1},
        1,
        True,
        {"suspect": -1},
    ),
    "another script's fault": ({"script_faults": (0,), "suspect": 1}, 1, True, OUT),
    "others stay out": (
        MOVED | {"excluded": {1: WHY} | FULL},
        3,
        True,
        EXCUSED | {"excluded": FULL},
    ),
    "in two consecutive rounds, without a spare": ({"suspect": 1}, 1, False, {}),
    "the same node rank on the next node, without a spare": (MOVED, 3, False, EXCUSED),
}


@pytest.mark.parametrize("case", BLAMED)
def test_who_is_blamed(case):
    changes, member, has_spare, expected = BLAMED[case]
    record = replace(RECORD, **changes)
    after = blamed(record, member, has_spare=has_spare)
    assert after == replace(record, **expected)


def test_a_script_that_fails_everywhere_costs_no_node():
    """The place of its node is taken once, and then nobody is blamed for it."""
    record = RECORD
    for member in (1, 1, 3, 1, 1, 1):
        active = tuple(member if rank == 1 else rank for rank in range(3))
        record = blamed(replace(record, active=active), member, has_spare=True)
    assert record == replace(RECORD, script_faults=(1,))


# --- as plain data ------------------------------------------------------------------

numbers = st.integers(-1, 10**6)
hosts = st.sampled_from(["n1", "jwb0001i.juwels", "10.0.0.1", "fe80::1%ib0.8001"])
texts = st.text(max_size=5).map(lambda text: printable(text, 5))
some_numbers = st.lists(numbers, max_size=4).map(tuple)


def by_number(values):
    return st.dictionaries(numbers, values, max_size=4)


any_records = st.builds(
    Record,
    term=st.tuples(numbers, numbers),
    round=numbers,
    active=some_numbers,
    addresses=by_number(st.tuples(hosts, st.integers(1, 2**16 - 1))),
    losses=by_number(numbers),
    excluded=by_number(texts),
    suspect=numbers,
    moved_from=by_number(numbers),
    script_faults=some_numbers,
)


@settings(deadline=None, max_examples=50)
@given(any_records)
def test_a_record_arrives_as_it_was_sent(record):
    as_sent(record, Record)


def changed(**changes):
    """Return a record as plain data, with changes."""
    return wire.encode(RECORD) | changes


NUMBERS = [None, "n1", [1], float("nan"), float("inf")]
WRONG: dict[str, list[Any]] = {
    "term": [None, 1, [1], [1, 2, 3], ["first", 0]],
    "round": NUMBERS,
    "active": [None, 1, ["n1"]],
    "addresses": [
        *([[1, ["n1"]]], [[1, ["n1", "ssh"]]], [["n1", ["n1", 4000]]]),
        *([["n1", 4000]], {"n1": ["n1", 4000]}),
    ],
    "losses": [2, [[1]], [[1, []]]],
    "excluded": [[[1]], [[1, "a\nb"]], [[1, "\x1b[2J"]], [[1, "\u202e"]]],
    "suspect": NUMBERS,
    "moved_from": [[[1, None]]],
    "script_faults": [1, ["n1"]],
    "leased": [1, ["n1"]],
}


# For `wire.decode`, because mypy has no type for it.
Address: type[records.Address] = cast("Any", records.Address)
ADDRESSES = [
    *(["n1", 1], ["n1", 65535], ["10.0.0.1", 4000], ["::1", 4000]),
    *(["fe80::1%ib0.8001", 4000], ["::ffff:10.0.0.1", 4000], ["node_1", 4000]),
    *(["jwb0001i.juwels", 4000], ["n1.cluster.", 4000], ["jülich", 4000]),
    *(["x" * 63, 4000], [".".join(["x" * 62] * 4), 4000]),
]
NO_HOSTS = (
    *("", ".", "n1..cluster", ".n1", "n1.cluster..", "n\0001", "n 1", "n1\n"),
    *("\x1b[2J", "n1\xa0", "\ud800", "a。。b", "xn--\udcff", "fe80::1%a b"),
    *("fe80::1%\0", "\u200b", "\u202en1", "x" * 64, "x" * 10**5, "ü" * 63),
    *(".".join(["x" * 62] * 5), None, 1, ["n1"], True),
)
NO_ADDRESSES = [
    *(None, "n1", 4000, [], ["n1"], ["n1", 4000, 0], {"n1": 4000}),
    *(["n1", port] for port in (0, -1, 65536, 70000, 10**30, True, "4000", 4e3, None)),
    *([host, 4000] for host in NO_HOSTS),
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address(address):
    assert wire.decode(Address, address) == tuple(address)
    record = wire.decode(Record, changed(addresses=[[1, address]]))
    assert record.addresses == {1: tuple(address)}


@pytest.mark.parametrize("address", NO_ADDRESSES, ids=lambda each: repr(each)[:40])
def test_what_is_no_address(address):
    with pytest.raises(ValueError):  # noqa: PT011 - any, which may be a codec's
        wire.decode(Address, address)
    with pytest.raises(WireError, match="not a record"):
        wire.decode(Record, changed(addresses=[[1, address]]))


@given(st.text() | st.from_regex(r"[\w.%:-]{0,80}"), st.integers())
def test_an_address_can_be_looked_for(host, port):
    """Whatever is one, the system's own functions take it, or say that it is none."""
    try:
        address = wire.decode(Address, [host, port])
    except ValueError:
        return
    assert address == (host, port)
    host.encode("idna")
    with suppress(OSError):
        socket.getaddrinfo(host, port, flags=socket.AI_NUMERICHOST)


WITHOUT_A_FIELD = [
    {name: value for name, value in changed().items() if name != field.name}
    for field in fields(Record)
]
WITH_A_WRONG_FIELD = [changed(**change) for change in each_wrong(WRONG)]
NO_RECORDS = [None, "record", 1, [1], {}, *WITHOUT_A_FIELD, *WITH_A_WRONG_FIELD]


@pytest.mark.parametrize("value", NO_RECORDS)
def test_what_is_no_record(value):
    with pytest.raises(WireError, match="not a record"):
        wire.decode(Record, value)

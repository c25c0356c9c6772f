"""What all members know of a job, and who takes whose place."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrun_hpc import wire
from torchrun_hpc.rendezvous.record import (
    LOSSES,
    Address,
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


def as_sent(value):
    """Return plain data as it arrives on the other side."""
    return json.loads(json.dumps(value))


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

# What is otherwise in the record; who is ready; who is not waited for; who is active.
ASSIGNED = {
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

# What is known; who fails first; what has changed.
WITH_SPARE = {
    "once": ({}, 1, {"suspect": 1}),
    "two rounds running": ({"suspect": 1}, 1, OUT),
    "another one after it": ({"suspect": 1}, 2, {"suspect": 2}),
    "the same node rank on the next node": (MOVED, 3, EXCUSED),
    "another node rank after it": (MOVED, 2, {"suspect": 2}),
    "one that is script_faults": (
        {"script_faults": (1,), "suspect": 1},
        1,
        {"suspect": -1},
    ),
    "another one than is script_faults": (
        {"script_faults": (0,), "suspect": 1},
        1,
        OUT,
    ),
    "others stay out": (
        MOVED | {"excluded": {1: WHY} | FULL},
        3,
        EXCUSED | {"excluded": FULL},
    ),
}
WITHOUT_SPARE = {
    "two rounds running": ({"suspect": 1}, 1, {"suspect": 1}),
    "the same node rank on the next node": (MOVED, 3, EXCUSED),
}


def assert_blamed(changes, member, expected, *, has_spare):
    record = replace(RECORD, **changes)
    found = blamed(record, member, has_spare=has_spare)
    assert found == replace(record, **expected)


@pytest.mark.parametrize("case", WITH_SPARE)
def test_who_is_blamed(case):
    assert_blamed(*WITH_SPARE[case], has_spare=True)


@pytest.mark.parametrize("case", WITHOUT_SPARE)
def test_who_is_blamed_without_a_spare(case):
    assert_blamed(*WITHOUT_SPARE[case], has_spare=False)


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


records = st.builds(
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
@given(records)
def test_a_record_arrives_as_it_was_sent(record):
    assert wire.decode(Record, as_sent(wire.encode(record))) == record


NUMBERS = [None, "n1", [1], float("nan"), float("inf")]
WRONG = {
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


ADDRESSES = [
    *(["n1", 1], ["n1", 65535], ["10.0.0.1", 4000], ["::1", 4000]),
    *(["fe80::1%ib0.8001", 4000], ["::ffff:10.0.0.1", 4000], ["node_1", 4000]),
    *(["jwb0001i.juwels", 4000], ["n1.cluster.", 4000], ["jülich", 4000]),
    *(["x" * 63, 4000], [".".join(["x" * 62] * 4), 4000]),
]
NO_ADDRESSES = [
    *(None, "n1", 4000, [], ["n1"], ["n1", 4000, 0], {"n1": 4000}),
    *([None, 4000], [1, 4000], [["n1"], 4000], [True, 4000]),
    *(["n1", port] for port in (0, -1, 65536, 70000, 10**30, True, "4000", 4e3, None)),
    *([host, 4000] for host in ("", ".", "n1..cluster", ".n1", "n1.cluster..")),
    *([host, 4000] for host in ("n\0001", "n 1", "n1\n", "\x1b[2J", "n1\xa0")),
    *([host, 4000] for host in ("\ud800", "a。。b", "xn--\udcff")),
    *([host, 4000] for host in ("fe80::1%a b", "fe80::1%\0", "\u200b", "\u202en1")),
    *([host, 4000] for host in ("x" * 64, "x" * 10**5, ".".join(["x" * 62] * 5))),
    ["ü" * 63, 4000],
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address(address):
    assert wire.decode(Address, as_sent(address)) == tuple(address)
    value = as_sent(wire.encode(RECORD)) | {"addresses": [[1, address]]}
    assert wire.decode(Record, value).addresses == {1: tuple(address)}


@pytest.mark.parametrize("address", NO_ADDRESSES, ids=lambda each: repr(each)[:40])
def test_what_is_no_address(address):
    with pytest.raises(ValueError):  # noqa: PT011 - any, which may be a codec's
        wire.decode(Address, address)
    with pytest.raises(WireError, match="not a record"):
        wire.decode(
            Record, as_sent(wire.encode(RECORD)) | {"addresses": [[1, address]]}
        )


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


@pytest.mark.parametrize("value", [None, "record", 1, [1], {}])
def test_what_is_no_record(value):
    with pytest.raises(WireError, match="not a record"):
        wire.decode(Record, value)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]]
)
def test_what_a_record_cannot_have(name, value):
    with pytest.raises(WireError, match="not a record"):
        wire.decode(Record, as_sent(wire.encode(RECORD)) | {name: value})


@pytest.mark.parametrize("name", [field.name for field in fields(Record)])
def test_a_record_without(name):
    value = as_sent(wire.encode(RECORD))
    del value[name]
    with pytest.raises(WireError, match="not a record"):
        wire.decode(Record, value)

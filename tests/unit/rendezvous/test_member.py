"""What a member knows, and whom it follows."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from tests.support.simulated_job import address, addresses, as_sent
from torchrun_hpc import wire
from torchrun_hpc.rendezvous.member import Member
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    Confirm,
    Join,
    Prepare,
    Present,
    Standby,
    Unhealthy,
    Welcome,
)
from torchrun_hpc.rendezvous.record import Record, first_record
from torchrun_hpc.wire import WireError

RECORD = Record((1, 2), 3, (0, 1, 2))
GONE = None  # no answer
ALONE = Standby()
THIRD = Standby(follows=3)
COORDINATES = Standby(coordinates=True)
IS_STRONG = Standby(coordinates=True, has_quorum=True)


def member_of(number, record, hints=()):
    """Return a member with this record, which knows where some others may be."""
    member = Member(number, record)
    member.listens(address(number), addresses(*hints))
    return member


def make_member(number, **changes):
    """Return one of four members that know of each other, with a changed record."""
    return member_of(number, replace(first_record(4, 1, 0), **changes), range(4))


# --- what another member answers ----------------------------------------------------


def fields_of(*values):
    return dict(zip(("follows", "coordinates", "has_quorum"), values, strict=False))


@pytest.mark.parametrize(
    "values",
    [(None, False, False), (2, False, False), (0, True, False), (0, True, True)],
)
def test_an_answer(values):
    fields = fields_of(*values)
    standby = Standby(**fields)
    assert wire.encode(standby, FROM_COORDINATOR) == {"standby": fields}
    as_sent(standby, FROM_COORDINATOR)


NO_ANSWERS = [
    *((), ("n2", False, False), (2.0, False, False), (2, 0, 0), (2, None, False)),
    *((None, False), (2,)),
]
NO_MESSAGES: list[dict[str, Any]] = [
    *({}, {"standby": None}, {"welcome": 3}, {"refused": "unknown"}),
    *({"standby": fields_of(*values)} for values in NO_ANSWERS),
    *({"prepare": {}}, {"prepare": {"record": None}}, {"prepare": {"record": {}}}),
]


@pytest.mark.parametrize("message", NO_MESSAGES)
def test_what_is_no_message(message):
    with pytest.raises(WireError):
        wire.decode(FROM_COORDINATOR, message)


# --- whom it asks -------------------------------------------------------------------


def asked(member, answers):
    """Return whom a member asks, in order, and what it does then.

    Args:
        member: The member.
        answers: What each of the others answers; ``None`` if it does not in time.

    Returns:
        The members that it asks, and itself last if it must take over.
    """
    asked_members, reply = [], None
    candidates = member.candidates()
    with suppress(StopIteration):
        while True:
            number, place = candidates.send(reply)
            assert place == member.addresses[number]
            asked_members.append(number)
            if number == member.number:
                break
            reply = answers.get(number)
    return asked_members


# Who asks; what each answers; whom it asks in which order, itself if it takes over.
ORDERS = {
    "the first one is gone": (1, {0: GONE}, [0, 1]),
    "the first one is silent": (1, {}, [0, 1]),
    "the first two are gone": (2, {0: GONE, 1: GONE}, [0, 1, 2]),
    "the first one is the one that asks": (0, {}, [0]),
    "one before it is alive": (2, {0: GONE, 1: ALONE}, [0, 1]),
    "one before it is alive, and one is silent": (3, {1: ALONE}, [0, 1]),
    "one before it follows another": (2, {1: THIRD}, [0, 1, 3]),
    "one before it follows it": (2, {1: Standby(follows=2)}, [0, 1, 2]),
    "one before it follows one that is gone": (2, {1: Standby(follows=0)}, [0, 1]),
    "one before it follows nobody's number": (2, {1: Standby(follows=9)}, [0, 1]),
    "another that it is sent to is gone": (2, {0: THIRD, 1: GONE, 3: GONE}, [0, 3]),
    "those behind it are not asked": (1, {0: GONE, 2: ALONE, 3: ALONE}, [0, 1]),
    "two that point at each other": (
        3,
        {0: Standby(follows=1), 1: Standby(follows=0), 2: ALONE},
        [0, 1],
    ),
}


@pytest.mark.parametrize("case", ORDERS)
def test_whom_it_asks(case):
    number, answers, expected = ORDERS[case]
    assert asked(make_member(number), answers) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, [0, 1, 2]),
        (ALONE, [0, 1, 2]),  # it will not take over
        (THIRD, [0, 3]),
        (Standby(follows=0, coordinates=True), [0]),  # and has not accepted this one
    ],
)
def test_one_that_is_out_is_asked_and_may_coordinate(answer, expected):
    """It was the coordinator already, or knows which one is."""
    member = make_member(2, excluded={0: "why"})
    assert asked(member, {0: answer}) == expected


def test_a_member_that_is_out_does_not_take_over():
    member = make_member(1, excluded={1: "why"})
    assert asked(member, dict.fromkeys((0, 2, 3), GONE)) == [0, 2, 3]


@pytest.mark.parametrize("excluded", [{}, {2: "why"}])
def test_a_coordinator_asks_itself_first(excluded):
    """It has only lost the connection to itself: others may follow it."""
    member = make_member(2, excluded=excluded)
    member.coordinates = True
    assert asked(member, dict.fromkeys((0, 1, 3), ALONE)) == [2]


def test_it_begins_again():
    member = make_member(2)
    assert asked(member, {0: GONE, 1: ALONE}) == [0, 1]
    assert asked(member, {}) == [0, 1, 2]
    assert member.follows is None


def test_known_addresses_are_better_than_likely_ones():
    member = make_member(1, addresses={2: ("10.20.0.3", 25593)})
    assert member.addresses == addresses(0, 1, 3) | {2: ("10.20.0.3", 25593)}
    assert [*member.addresses] == [0, 1, 2, 3]


def test_members_of_which_nothing_is_known_are_not_asked():
    record = replace(first_record(4, 1, 0), addresses=addresses(3))
    assert asked(member_of(2, record), {}) == [2]
    assert asked(member_of(3, record), {}) == [3]


# --- to whom it gives way -----------------------------------------------------------

# The other members' answers, and whom it must follow.
GIVES_WAY = {
    "nobody answers": ({}, None),
    "others do not coordinate": ({0: ALONE, 3: Standby(follows=0)}, None),
    "one that is strong": ({3: IS_STRONG}, 3),
    "one before it": ({0: COORDINATES}, 0),
    "one behind it": ({3: COORDINATES}, None),
    "the first of two": ({1: COORDINATES, 0: COORDINATES}, 0),
}


@pytest.mark.parametrize("case", GIVES_WAY)
def test_to_whom_it_should_step_down(case):
    answers, expected = GIVES_WAY[case]
    member = make_member(2)
    member.follows = 2
    assert member.should_step_down(answers) is (expected is not None)
    first = asked(member, {})[0]
    assert first == (0 if expected is None else expected)


def test_it_is_asked_first_only_once():
    member = make_member(2)
    assert member.should_step_down({3: IS_STRONG})
    assert asked(member, {}) == [3, 0, 1, 2]
    assert asked(member, {}) == [0, 1, 2]


@pytest.mark.parametrize(
    ("follows", "expected"), [(None, False), (2, False), (0, True)]
)
def test_it_should_step_down_where_it_follows_another(follows, expected):
    member = make_member(2)
    member.follows = follows
    assert member.should_step_down({}) is expected


def test_one_that_is_out_and_has_a_world_is_followed():
    member = make_member(2, excluded={3: "why"})
    assert member.should_step_down({3: IS_STRONG})
    assert asked(member, {})[0] == 3


# --- with a coordinator -------------------------------------------------------------


def told(member, age=(-1, (0, 0)), coordinator=0):
    """Return what a member tells a coordinator that has accepted it."""
    welcome = as_sent(Welcome(0, age, coordinator), FROM_COORDINATOR)
    return [as_sent(each, FROM_AGENT) for each in member.accepted(welcome)]


PRESENT = Present(address(1), done=False, term=(0, 0), round=-1)
UNFIT = [PRESENT, Unhealthy("why")]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, [PRESENT]),
        ({"is_ready": True}, [PRESENT, Join()]),
        ({"is_done": True}, [replace(PRESENT, done=True)]),
        *(({"unhealthy": "why", "is_ready": ready}, UNFIT) for ready in (False, True)),
    ],
)
def test_what_it_tells_a_coordinator(state, expected):
    member = make_member(1)
    for name, value in state.items():
        setattr(member, name, value)
    assert told(member) == expected
    assert member.follows == 0


@pytest.mark.parametrize(
    ("age", "is_wanted"),
    [
        ((2, (1, 2)), True),
        ((3, (1, 1)), True),
        ((3, (1, 2)), False),
        ((3, (1, 3)), False),
        ((4, (0, 0)), True),  # of a lower term: this one may still begin
    ],
)
def test_it_tells_what_the_coordinator_does_not_know(age, is_wanted):
    member = member_of(1, RECORD)
    (present,) = told(member, age=age, coordinator=3)
    assert present.term == RECORD.term
    assert present.record == (RECORD if is_wanted else None)
    assert member.follows == 3


def test_it_tells_the_next_coordinator_that_it_saw_the_end_of_the_last_one():
    member = member_of(1, RECORD)
    member.saw_end()  # of nobody's
    assert told(member, coordinator=3)[0].gone is None
    member.saw_end()
    present, *_ = told(member, coordinator=0)
    assert present.gone == (3, RECORD.round)


def test_a_member_that_nobody_can_ask_tells_nothing():
    """There are no spares."""
    assert told(Member(1, first_record(4, 1, 0))) == []


def prepare(member, record):
    """Let a coordinator prepare a round."""
    return member.prepared(as_sent(Prepare(record), FROM_COORDINATOR).record)


@pytest.mark.parametrize(("number", "is_active"), [(1, True), (3, False)])
def test_it_takes_part_in_a_round_that_is_prepared(number, is_active):
    member = make_member(number)
    assert prepare(member, RECORD) == (RECORD if is_active else None)
    assert member.record == RECORD


@pytest.mark.parametrize(
    "older", [{"term": (1, 1)}, {"term": (0, 9)}, {"round": 2, "term": (9, 9)}]
)
def test_it_confirms_no_round_that_is_older_than_its_own(older):
    member = member_of(1, RECORD)
    with pytest.raises(WireError, match="a round of a lower term"):
        prepare(member, replace(RECORD, **older))
    assert member.record == RECORD


@pytest.mark.parametrize(
    "newer", [{}, {"round": 4}, {"term": (1, 3)}, {"term": (2, 0)}]
)
def test_it_confirms_a_round_that_is_newer(newer):
    member = member_of(1, RECORD)
    record = replace(RECORD, **newer)
    assert prepare(member, record) == record


def test_node_rank_0_opens_the_store_once_for_each_round():
    """It may be asked to confirm a round again."""
    hosts = iter(["n0", "n1"])

    def open_store():
        return next(hosts), 1

    member = make_member(0)
    for number, host in [(3, "n0"), (3, "n0"), (4, "n1")]:
        record = replace(RECORD, round=number)
        confirm = as_sent(member.confirmation(record, open_store), FROM_AGENT)
        assert confirm == Confirm(RECORD.term, number, (host, 1))


def test_another_node_rank_opens_no_store():
    confirm = make_member(1).confirmation(RECORD, pytest.fail)
    assert as_sent(confirm, FROM_AGENT) == Confirm(RECORD.term, RECORD.round)


@pytest.mark.parametrize(
    ("changes", "is_used"),
    [
        ({"losses": {2: 1}}, True),  # of the same round
        ({"round": 4}, True),
        ({"term": (2, 1)}, True),
        ({"round": 2, "losses": {2: 1}}, False),
        ({"term": (1, 1), "losses": {2: 1}}, False),
    ],
)
def test_it_takes_note_of_what_has_changed(changes, is_used):
    member = member_of(1, RECORD)
    record = replace(RECORD, **changes)
    member.informed(as_sent(record, FROM_COORDINATOR))
    assert member.record == (record if is_used else RECORD)

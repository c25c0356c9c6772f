"""A coordinator on standby, that takes over and gives way."""

from __future__ import annotations

import pytest

from tests.support import loopback
from tests.support.loopback import as_sent
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous.coordinator import Coordinator
from torchrun_hpc.rendezvous.member import Member
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    Close,
    Ended,
    Present,
    Read,
    Settings,
    Standby,
    Welcome,
    read_request,
)
from torchrun_hpc.rendezvous.record import Record, first_record
from torchrun_hpc.rendezvous.rounds import Phase

SETTINGS = Settings("mine", 4, 1, 40, 9, 200, 1, spare_after=60, kill=5)
FAILURE = Failure(Kind.SIGNAL, (1,), code=15)


def address(member):
    return f"n{member}", 4000 + member


def make_standby(record=None):
    """Return what member 1 of four answers."""
    member = Member(1, record or first_record(4, 1, 0))
    member.listens(address(1), {member: address(member) for member in range(4)})
    return Coordinator(SETTINGS, member), member


def coordinating(*members, record=None, follows=None):
    """Return what member 1 of four answers, to which others are connected."""
    standby, own = make_standby(record)
    own.follows = follows
    standby.coordinate(own.record)
    for member in members:
        connect(standby, member)
    return standby


def request_of(member, **changes):
    values = {"nodes": 4, "spares": 1, "asks": False} | changes
    return loopback.request_of(member, **values)


def sent(standby):
    """Return what was sent since the last time, and forget it as a server does."""
    found = [
        (to, each if isinstance(each, Close) else as_sent(each, FROM_COORDINATOR))
        for to, each in standby.outbox
    ]
    standby.outbox.clear()
    return found


def here(standby):
    return [*standby.members.agents]


def connect(standby, member):
    """Let a member connect, as a coordinator of which this one knows nothing."""
    standby.request(member, read_request(request_of(member)))
    present = Present(address(member), done=False, term=(0, 0), round=-1)
    standby.receive(member, as_sent(present, FROM_AGENT))
    return sent(standby)


# --- it does not coordinate ---------------------------------------------------------


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("follows", [None, 0, 2])
def test_it_answers_whom_it_follows(asks, follows):
    standby, own = make_standby()
    own.follows = follows
    standby.request("peer", read_request(request_of(2, asks=asks)))
    assert sent(standby) == [("peer", Standby(follows)), ("peer", Close.CLOSE)]
    assert sent(standby) == []


def test_nothing_happens_without_a_coordinator():
    standby, _ = make_standby()
    standby.tick()
    standby.fail(FAILURE)
    standby.disconnected("peer")
    standby.disconnected("peer", ended=True)
    standby.step_down()
    assert sent(standby) == []
    assert standby.all_informed
    assert not standby.expects_nodes
    assert standby.absent(ask_all=True) is None


# --- it coordinates -----------------------------------------------------------------


def test_it_accepts_members():
    standby = coordinating()
    ((connection, welcome),) = connect(standby, 2)
    assert (connection, welcome) == (2, Welcome(0, (-1, (0, 0)), 1))
    assert here(standby) == [2]
    assert not standby.all_informed


@pytest.mark.parametrize("has_quorum", [False, True])
def test_it_answers_that_it_coordinates(has_quorum):
    standby = coordinating(*range(3 if has_quorum else 2), follows=1)
    standby.request("peer", read_request(request_of(3, asks=True)))
    answer = Standby(1, coordinates=True, has_quorum=has_quorum)
    assert sent(standby) == [("peer", answer), ("peer", Close.CLOSE)]
    assert 3 not in here(standby)


def test_it_is_asked_to_coordinate_twice():
    standby = coordinating(2)
    standby.coordinate(Record((0, 0), 5, (0, 1, 2)))
    assert here(standby) == [2]
    assert standby.roster.record.round == -1


def test_the_end_of_a_connection():
    standby = coordinating(2)
    standby.disconnected("nobody's")
    assert here(standby) == [2]
    standby.disconnected(2)
    assert here(standby) == []


def test_time_passes_for_the_coordinator():
    standby = coordinating(2)
    for _ in range(SETTINGS.silence_timeout):
        standby.tick()
    assert here(standby) == []
    member, last = sent(standby)[-1]
    assert member == 2
    assert last is Close.RESET


def test_it_ends_the_job():
    standby = coordinating(2)
    standby.fail(FAILURE)
    ((_, message),) = sent(standby)
    assert isinstance(message, Ended)
    assert message.failure == FAILURE
    assert not standby.all_informed
    standby.receive(2, as_sent(Read(), FROM_AGENT))
    assert standby.all_informed


@pytest.mark.parametrize(("has_begun", "expected"), [(False, True), (True, False)])
def test_members_are_expected_that_have_not_come(has_begun, expected):
    record = Record((0, 0), 0, (0, 1, 2)) if has_begun else None
    standby = coordinating(record=record)
    standby.fail(Failure(Kind.AGENT, (1,), text="why"))
    assert standby.expects_nodes is expected


# --- who is not there ---------------------------------------------------------------


def test_members_are_looked_for_that_have_gone():
    standby = coordinating(0, 2, 3)
    standby.disconnected(2)
    assert standby.absent(ask_all=False) == {2: address(2)}


def test_a_member_whose_process_has_ended_is_not_looked_for():
    standby = coordinating(0, 2, 3)
    standby.disconnected(2, ended=True)
    assert standby.absent(ask_all=False) == {}


def test_all_are_looked_for_until_enough_are_here():
    standby = coordinating(2)
    absent = {member: address(member) for member in (0, 1, 3)}
    assert standby.absent(ask_all=True) == absent
    assert standby.absent(ask_all=False) == {}
    for member in (0, 1):
        connect(standby, member)
    assert standby.absent(ask_all=True) is None


# --- it gives way -------------------------------------------------------------------


def test_it_should_step_down():
    standby = coordinating(1, 2)
    assert standby.step_down()
    left = sent(standby)
    assert sorted(member for member, _ in left) == [1, 2]
    assert {message for _, message in left} == {Close.RESET}  # its process lives
    assert standby.rounds.phase is Phase.STANDBY
    for member in (1, 2):
        standby.disconnected(member)
    standby.request("peer", read_request(request_of(2)))
    assert sent(standby)[0] == ("peer", Standby())


def test_it_does_not_step_down_when_enough_are_here():
    """It asked the others before the last one came."""
    standby = coordinating(1, 2, 3)
    assert not standby.step_down()
    assert sent(standby) == []
    assert here(standby) == [1, 2, 3]


def test_it_coordinates_again():
    standby = coordinating(2)
    standby.step_down()
    sent(standby)
    standby.coordinate(Record((0, 0), 5, (0, 1, 2)))
    assert here(standby) == []
    assert standby.roster.record.round == 5

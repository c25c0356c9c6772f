"""A coordinator on standby: it takes over, and gives way."""

from __future__ import annotations

import pytest

from tests.support.simulated_job import (
    SILENCE,
    SimulatedJob,
    addresses,
    to,
    welcome,
)
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous.protocol import Close, Ended, Read, Standby
from torchrun_hpc.rendezvous.record import Record
from torchrun_hpc.rendezvous.rounds import Phase

FAILURE = Failure(Kind.SIGNAL, (1,), code=15)
ROUND = Record((0, 0), 5, (0, 1, 2))


def standby():
    """Return a job of four nodes whose node 1 does not coordinate."""
    return SimulatedJob(spares=1, coordinator=1, coordinates=False)


def coordinating(*ranks, record=None):
    """Return a job of four nodes that node 1 coordinates; connect some of them."""
    job = SimulatedJob(record, spares=1, coordinator=1)
    job.connect(*ranks)
    return job


def ask(job, rank, *, asks=True):
    """Let another member ask who coordinates."""
    return job.connect(rank, connection="peer", asks=asks)


# --- it does not coordinate ---------------------------------------------------------


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("follows", [None, 0, 2])
def test_it_answers_which_coordinator_it_follows(asks, follows):
    job = standby()
    job.member.follows = follows
    assert ask(job, 2, asks=asks) == {"peer": [Standby(follows), "close"]}
    assert job.sent() == {}


def test_nothing_happens_without_a_coordinator():
    job = standby()
    job.coordinator.tick()
    job.coordinator.fail(FAILURE)
    job.coordinator.disconnected("peer")
    job.coordinator.disconnected("peer", ended=True)
    job.coordinator.step_down()
    assert job.sent() == {}
    assert job.coordinator.all_informed
    assert not job.coordinator.expects_nodes
    assert job.coordinator.absent(ask_all=True) is None


# --- it coordinates -----------------------------------------------------------------


def test_it_accepts_members():
    job = coordinating()
    assert job.connect(2) == {2: [welcome(age=(-1, (0, 1)), coordinator=1)]}
    assert job.connected == {2}
    assert not job.coordinator.all_informed


@pytest.mark.parametrize("has_quorum", [False, True])
def test_it_answers_that_it_coordinates(has_quorum):
    job = coordinating(*range(3 if has_quorum else 2))
    job.member.follows = 1
    answer = Standby(1, coordinates=True, has_quorum=has_quorum)
    assert ask(job, 3) == {"peer": [answer, "close"]}
    assert 3 not in job.connected


def test_it_is_asked_to_coordinate_twice():
    job = coordinating(2)
    job.coordinator.coordinate(ROUND)
    assert job.connected == {2}
    assert job.record.round == -1


def test_the_end_of_a_connection():
    job = coordinating(2)
    job.lose("nobody's")
    assert job.connected == {2}
    job.lose(2)
    assert job.connected == set()


def test_time_passes_for_the_coordinator():
    job = coordinating(2)
    assert job.wait(SILENCE, 2) == {SILENCE: {2: ["reset"]}}
    assert job.connected == set()


def test_it_ends_the_job():
    job = coordinating(2)
    job.coordinator.fail(FAILURE)
    assert job.sent() == {2: [Ended(FAILURE, is_certain=False)]}
    assert not job.coordinator.all_informed
    job.send(2, Read())
    assert job.coordinator.all_informed


@pytest.mark.parametrize("has_begun", [False, True])
def test_members_that_have_not_come_are_expected_before_the_first_round(has_begun):
    job = coordinating(record=ROUND if has_begun else None)
    job.coordinator.fail(Failure(Kind.AGENT, (1,), text="why"))
    assert job.coordinator.expects_nodes is not has_begun


# --- which members are absent -------------------------------------------------------


@pytest.mark.parametrize("ended", [False, True])
def test_lost_members_are_looked_for_unless_their_process_has_ended(ended):
    job = coordinating(0, 2, 3)
    job.lose(2, ended=ended)
    absent = {} if ended else addresses(2)
    assert job.coordinator.absent(ask_all=False) == absent


def test_all_are_looked_for_until_enough_are_connected():
    job = coordinating(2)
    assert job.coordinator.absent(ask_all=True) == addresses(0, 1, 3)
    assert job.coordinator.absent(ask_all=False) == {}
    job.connect(0, 1)
    assert job.coordinator.absent(ask_all=True) is None


# --- it gives way -------------------------------------------------------------------


def test_it_steps_down():
    job = coordinating(1, 2)
    assert job.coordinator.step_down()
    outbox = [*job.coordinator.outbox]
    assert outbox == [(1, Close.RESET), (2, Close.RESET)]  # its process lives
    assert job.sent() == to((1, 2), "reset")
    assert job.rounds.phase is Phase.STANDBY
    job.lose(1, 2)
    assert ask(job, 2) == {"peer": [Standby(), "close"]}


def test_it_does_not_step_down_when_enough_are_connected():
    """It asked the others before the last one came."""
    job = coordinating(1, 2, 3)
    assert not job.coordinator.step_down()
    assert job.sent() == {}
    assert job.connected == {1, 2, 3}


def test_it_coordinates_again():
    job = coordinating(2)
    job.coordinator.step_down()
    job.sent()
    job.coordinator.coordinate(ROUND)
    assert job.connected == set()
    assert job.record.round == 5

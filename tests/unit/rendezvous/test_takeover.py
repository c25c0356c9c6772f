"""What a coordinator does that takes over from a lost one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.simulated_job import (
    JOIN,
    LEASE,
    SILENCE,
    SimulatedJob,
    addresses,
    welcome,
)
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous.messages import Replaced
from torchrun_hpc.rendezvous.record import Record, first_record

# The coordinator was member 0, and the second round runs.
BEFORE = Record((0, 0), 1, (0, 3, 2), addresses(0, 1), {1: 1})
ALL_KNOWN = replace(BEFORE, addresses=addresses(0, 1, 2, 3))

LOST = Failure(Kind.LOST, (0,))


def taken_over(*ranks, record=BEFORE, spares=1, nodes=4, max_restarts=9):
    """Return a job whose first coordinator is lost, and whose other members come."""
    job = SimulatedJob(
        record, spares=spares, nodes=nodes, coordinator=1, max_restarts=max_restarts
    )
    assert job.sent() == {}
    connect(job, *ranks, record=record)
    return job


def connect(job, *ranks, record=BEFORE):
    """Let members of the second round connect."""
    for rank in ranks:
        answer = welcome(2, age=(1, (0, 0)), coordinator=1)
        assert job.connect(rank, knows=record) == {rank: [answer]}


def test_another_member_takes_over():
    job = taken_over(1, 2, 3)
    assert job.join(1, 2, 3) == {}
    assert job.record == replace(
        BEFORE,
        term=(1, 1),
        round=2,
        active=(1, 3, 2),
        addresses=addresses(1, 2, 3),
        losses={1: 1, 0: 1},
        leased=(0,),
    )
    job.gone(0)
    assert job.sent() == job.begun(2, (1, 3, 2))
    assert job.record.leased == ()
    assert job.news == [Replaced(((0, 0, 1),), 2, LOST)]


def test_the_workers_of_the_first_coordinator_have_time_to_end():
    job = taken_over(1, 2, 3)
    job.join(1, 2, 3)
    assert job.wait(2 * LEASE) == {LEASE: job.begun(2, (1, 3, 2))}


def test_a_member_that_comes_while_workers_of_others_may_run():
    """All hear of it when the round has begun, although some were asked again."""
    job = taken_over(2, 3)
    job.connect(1, knows=BEFORE)
    job.confirms = False
    job.join(1, 2, 3)
    job.wait(3)
    job.connect(0, knows=BEFORE)
    job.wait(LEASE - 4)
    job.confirm()
    job.records.clear()
    job.wait(2)
    assert job.is_running
    records = [each for _, each in job.records if type(each) is Record]
    assert records
    assert all(0 in record.addresses for record in records)


def test_the_workers_of_members_that_follow_have_time_to_end():
    job = taken_over(1, 2, 3)
    job.gone(0)
    assert job.join(1, 2) == {}
    assert job.join(3) == job.begun(2, (1, 3, 2))


def test_the_first_coordinator_comes_back():
    job = taken_over(0, 1, 2, 3)
    assert job.join(0, 1, 2, 3) == job.begun(2, (0, 3, 2))


@pytest.mark.parametrize(
    ("ranks", "failure", "is_certain"),
    [
        # The others may be a world.
        ((1,), Failure(Kind.MISSING, (0, 3, 2), code=JOIN), False),
        ((1, 3), Failure(Kind.SILENT, (0, 2), code=LEASE), True),
    ],
)
def test_a_member_without_enough_others_gives_up(ranks, failure, is_certain):
    job = taken_over(*ranks)
    job.join(*ranks)
    assert not job.rounds.has_quorum
    away = tuple(sorted({0, 1, 2, 3} - {*ranks}))
    ended = job.ended(failure, out_at_end=away, takeovers=1, is_certain=is_certain)
    assert job.wait(2 * JOIN) == {failure.code: ended}


def test_an_end_that_was_seen_in_an_earlier_round_proves_nothing():
    """An agent that was started again since then may have workers."""
    job = taken_over(1, 3, record=replace(BEFORE, addresses=addresses(0, 1, 2)))
    job.gone(2, number=BEFORE.round - 1)
    job.join(1, 3)
    job.gone(0)
    assert job.failure is None
    job.gone(2)
    assert job.failure == Failure(Kind.LOST, (0, 2))


def test_workers_of_a_round_before_the_one_that_was_prepared():
    """Member 4 was cut off, and its place taken, when the coordinator was lost.

    It may have followed an earlier coordinator, which has to miss the others first.
    """
    record = replace(BEFORE, leased=(4,))
    job = taken_over(1, 2, 3, record=record, nodes=5, spares=2)
    job.join(1, 2, 3)
    job.gone(0)
    assert not job.is_running
    assert job.wait(2 * LEASE) == {SILENCE + LEASE: job.begun(2, (1, 3, 2))}


@pytest.mark.parametrize("ends", [False, True])
def test_a_coordinator_that_is_cut_off_may_renew_the_leases_of_others(ends):
    """Until it has missed the connected members. Then it ends its own workers."""
    job = taken_over(1, 3, 4, nodes=5)
    if ends:
        job.gone(0)
    job.join(1, 3, 4)
    limits = {2: LEASE} if ends else {0: LEASE, 2: SILENCE + LEASE}
    assert job.roster.leases == limits


def test_a_second_witness_of_an_end_makes_nobody_wait_longer():
    job = taken_over(1, 3, 4, nodes=5)
    job.gone(0)
    job.wait(10)
    job.gone(0)
    assert job.roster.leases[2] == LEASE - 10


def test_a_later_round_hides_no_earlier_one_that_another_coordinator_may_begin():
    """Members 3 and 4 confirmed it, and then followed this coordinator again.

    It has only prepared its own round: it had not noticed that they had left.
    """
    job = SimulatedJob(spares=2, max_restarts=9).at_work()
    job.lose(1, 2, 3, 4)
    job.join(0)
    another = Record((1, 2), job.record.round, (3, 4, 2), leased=(1,))
    job.roster.record = replace(job.record, round=another.round + 1)
    for rank in (3, 4):
        job.connect(rank, knows=another)
    job.join(3, 4)
    assert job.record.leased == (1, 2)
    assert job.record.round > another.round
    assert job.roster.leases == {1: SILENCE + LEASE, 2: LEASE}


def test_too_few_members_do_not_count_the_seconds_of_the_others():
    """The others may be a world, which continues."""
    job = taken_over(1, nodes=5, spares=2)
    job.wait(3 * LEASE)
    connect(job, 3, 4)
    job.join(1, 3, 4)
    (second,) = job.wait(2 * LEASE)
    assert second >= LEASE


def test_the_first_coordinator_never_came():
    """All have looked for it as long as a spare waits. They do not look again."""
    job = SimulatedJob(first_record(4, 1, 0), spares=1, coordinator=1)
    assert job.come(1, 2, 3) == job.begun(0, (3, 1, 2))


def test_another_node_than_the_first_coordinates_from_the_beginning():
    """Slurm 26.05 numbers tasks by topology. Node 0 is only late."""
    job = SimulatedJob(spares=1, coordinator=1)
    assert job.come(1, 2, 3) == {}
    assert job.rounds.ending.takeovers == 0
    assert job.come(0) == job.begun(0, (0, 1, 2))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_member_that_had_finished_before_another_took_over(rank):
    record = Record((0, 0), 0, (0, 1, 2))
    job = SimulatedJob(record, spares=1, coordinator=1)
    job.connect(rank, knows=record, is_done=True)
    # Member 0 is not lost, but its connection was.
    kind = Kind.AGENT if rank == 0 else Kind.LOST
    assert job.failure == Failure(kind, (0,), finished=1)


def test_a_member_that_is_on_its_way_is_not_bad():
    """Member 3 has not found the new coordinator yet."""
    job = taken_over(1, record=ALL_KNOWN)
    job.gone(0, 2)
    lost = Failure(Kind.LOST, (0, 2))
    assert job.sent() == job.ended(lost, out_at_end=(0, 2), takeovers=1)


def test_no_restart_is_left_for_a_takeover():
    job = taken_over(1, 2, 3, max_restarts=1)
    ended = job.ended(LOST, out_at_end=(0,), takeovers=1)
    assert job.join(1, 2, 3) == ended


# --- records of other coordinators --------------------------------------------------


@pytest.mark.parametrize("term", [(1, 2), (3, 3), (5, 1)])
def test_the_term_is_above_all_that_were_confirmed(term):
    """Another member may have tried to take over."""
    job = taken_over(1, 2)
    job.connect(3, knows=replace(BEFORE, term=term))
    job.join(1, 2, 3)
    assert job.record.term == (term if term[1] == 1 else (term[0] + 1, 1))
    assert job.record.round == 2


def test_a_member_knows_of_a_newer_round():
    """This one was cut off while it began."""
    newer = replace(BEFORE, term=(2, 3), round=4, active=(1, 3, 2), losses={1: 1, 0: 1})
    job = taken_over(1)
    job.connect(3, knows=newer)
    assert replace(job.record, losses=newer.losses) == newer
    job.connect(2, knows=newer)
    assert job.join(1, 2, 3) == {}  # what it knew of member 0 also counts
    record = job.record
    assert (record.term, record.round, record.active) == ((3, 1), 5, (1, 3, 2))
    assert job.wait(2 * LEASE) == {LEASE: job.begun(5, (1, 3, 2))}


def test_members_of_a_newer_round_have_time_to_end_their_workers():
    newer = replace(BEFORE, term=(2, 3), round=4, active=(0, 3, 1))
    job = taken_over(1, 2)
    job.connect(3, knows=newer)
    assert job.join(1, 2, 3) == {}  # member 0 may be at work in the newer one
    assert job.wait(2 * LEASE) == {LEASE: job.begun(5, (2, 3, 1))}


@pytest.mark.parametrize("older", [replace(BEFORE, round=0, active=(0, 1, 2)), BEFORE])
def test_a_record_that_is_not_newer_changes_nothing(older):
    job = taken_over(1, 2)
    before = job.record
    assert before.losses == {1: 1, 0: 1}
    job.connect(3, knows=older)
    assert replace(job.record, addresses=before.addresses) == before


def test_a_member_that_knows_less_hears_of_it():
    job = taken_over()
    job.connect(2, knows=replace(BEFORE, round=0))
    ((_, record),) = job.records
    assert replace(record, addresses={}) == replace(job.record, addresses={})


def test_an_end_that_was_seen_does_not_count_when_a_later_round_is_known():
    job = taken_over(1, record=ALL_KNOWN)
    job.gone(0)
    assert job.absent == {2, 3}
    later = replace(BEFORE, round=2, active=(0, 3, 2))
    job.connect(2, knows=later)
    assert job.absent == {0, 3}


def test_a_connected_member_has_not_ended():
    job = taken_over(1, 2)
    job.gone(2)
    assert 2 in job.roster.left

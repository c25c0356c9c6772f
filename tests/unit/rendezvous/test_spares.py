"""Which nodes take part in the next round of a job with spares, and when it begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.simulated_job import (
    JOIN,
    KILL,
    LEASE,
    SILENCE,
    SPARE_AFTER,
    STORE,
    SimulatedJob,
    address,
    addresses,
    each_wrong,
    over,
    request_of,
    to,
    welcome,
    worker_failure,
)
from torchrun_hpc import wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.limits import HEARTBEAT_INTERVAL
from torchrun_hpc.rendezvous.messages import (
    Excluded,
    Leased,
    Replaced,
    Silent,
    Waiting,
)
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    Bye,
    Confirm,
    Ended,
    GaveUp,
    Heartbeat,
    Present,
    Read,
    Unhealthy,
    Welcome,
    read_request,
)
from torchrun_hpc.rendezvous.record import Record
from torchrun_hpc.wire import WireError

BLAMED = "its workers were the first to fail in two consecutive rounds"
UNFIT = "its health check ended with exit code 1: bad GPU"

LOST = {rank: Failure(Kind.LOST, (rank,)) for rank in range(4)}
SILENT = {rank: Failure(Kind.SILENT, (rank,), code=SILENCE) for rank in range(4)}


def spare_job(record=None, spares=1, max_restarts=9, **changes):
    """Return a job of three nodes and one spare."""
    return SimulatedJob(record, spares=spares, max_restarts=max_restarts, **changes)


def running_job(**changes):
    return spare_job(**changes).at_work()


def fails(job, rank, **changes):
    """Let the first worker of an active node fail; return what is sent."""
    worker = worker_failure(4 * job.active.index(rank), **changes)
    return job.died(worker, connection=rank)


def replaced(number, *places, because=None):
    """Return the news that spares take places in a round: node rank, old and new."""
    return Replaced(places, number, because)


# --- a job that goes well -----------------------------------------------------------


def ended_early(end):
    """Return a job that has ended before its spare has come."""
    job = spare_job(max_restarts=0)
    job.come(0, 1, 2)
    if end == "finished":
        job.finish()
    else:
        job.coordinator.fail(Failure(Kind(end), (1,)))
    for rank in range(3):
        job.send(rank, Read())
        job.send(rank, Bye())
    return job


@pytest.mark.parametrize(("end", "kind"), [("finished", None), ("worker", Kind.WORKER)])
def test_a_spare_that_comes_after_the_end_hears_of_it(end, kind):
    """Nobody else could tell it, and it would wait for the others."""
    job = ended_early(end)
    assert job.coordinator.expects_nodes
    assert not job.coordinator.all_informed
    (*_, ended) = job.connect(3)[3]
    assert isinstance(ended, Ended)
    assert (ended.failure and ended.failure.kind) is kind
    job.send(3, Read())
    assert not job.coordinator.expects_nodes
    job.send(3, Bye())
    assert job.coordinator.all_informed


def test_a_spare_that_does_not_come_is_not_waited_for_forever():
    job = ended_early("finished")
    for _ in range(JOIN):
        assert not job.coordinator.all_informed
        job.wait(1)
    assert job.coordinator.all_informed


def test_nobody_waits_after_a_signal():
    assert ended_early("signal").coordinator.all_informed


def test_a_spare_that_was_connected_is_not_waited_for():
    job = running_job()
    job.lose(3)
    job.finish()
    for rank in range(3):
        job.send(rank, Bye())
    assert job.coordinator.all_informed


def test_it_starts_without_the_spare():
    job = spare_job()
    assert job.come(0, 1, 2) == job.begun(0, (0, 1, 2))
    job.records.clear()
    assert job.connect(3) == {3: [welcome(age=(0, (0, 0)))]}
    assert job.records == [(3, job.record)]
    assert job.join(3) == {}
    assert job.is_running


@pytest.mark.parametrize("without", [0, 1, 2])
def test_all_active_members_confirm_a_round(without):
    job = spare_job()
    job.confirms = False
    job.come(0, 1, 2, 3)
    assert job.confirm(*{0, 1, 2, 3} - {without}) == {}
    assert job.confirm(without) == job.begun(0, (0, 1, 2))


def test_nobody_confirms_before_the_round_is_prepared():
    job = spare_job()
    job.confirms = False
    job.come(0, 1)
    for rank in (0, 1):
        job.send(rank, Confirm((0, 0), 0, STORE))
    job.come(2)
    assert job.confirm(2) == {}
    assert not job.is_running


def test_the_first_active_member_gives_the_address_of_the_workers_store():
    job = spare_job(Record((0, 0), -1, (2, 1, 0)))
    job.confirms = False
    job.come(0, 1, 2)
    for rank in (0, 1):
        confirm = Confirm(job.record.term, job.record.round, ("10.9.9.9", 1))
        job.send(rank, confirm)
    assert job.confirm(2) == job.begun(0, (2, 1, 0))


def assert_all_know(job, *ranks):
    """Check that each node was sent the record; the others get parts of addresses."""
    sent = {each: record for each, record in job.records if type(record) is Record}
    assert sorted(sent) == [*ranks]
    for record in sent.values():
        assert replace(record, addresses=job.record.addresses) == job.record
        assert record.addresses.items() <= job.record.addresses.items()
    assert sent[min(ranks)] == job.record


def test_all_hear_where_a_member_is_that_may_have_to_take_over():
    job = spare_job()
    job.come(0, 2, 3)
    job.wait(SPARE_AFTER)
    assert job.record.addresses == addresses(0, 2, 3)
    job.come(1)
    job.records.clear()
    job.wait(1)
    assert job.record.addresses == addresses(0, 1, 2, 3)
    assert_all_know(job, 0, 1, 2, 3)
    job.records.clear()
    job.wait(30)
    assert job.records == []


def test_those_that_may_have_to_take_over_know_where_all_are():
    job = spare_job(spares=2, nodes=7)
    job.come(*range(7))
    for rank, prepared in job.records:
        ranks = range(7) if rank < 3 else range(3)
        assert prepared.record == replace(job.record, addresses=addresses(*ranks))


@pytest.mark.parametrize("last", ["a second spare", "an excluded member"])
def test_nobody_has_to_hear_of_others(last):
    """A lost job cannot continue with them: more nodes are lost than it has spares."""
    if last == "a second spare":
        job = spare_job(spares=2, nodes=7)
        job.come(*range(6))
        job.come(6)
    else:
        job = spare_job().all_connected()
        job.send(1, Unhealthy(UNFIT))
        job.join(0, 2, 3)
    assert job.is_running
    job.records.clear()
    job.wait(30)
    assert job.records == []


WRONG: dict[str, list[Any]] = {
    "address": [
        *(["n1"], ["n1", "ssh"], ["n1", 70000], ["n1", -1], ["n1", True]),
        *(["n1..cluster", 4000], ["n1\0", 4000], ["", 4000], [1, 4000]),
    ],
    "term": [None, [1]],
    "round": [None, "first", float("inf")],
    "record": [{}, "record"],
}


PRESENT = Present(address(1), done=False, term=(0, 0), round=-1)
WRONG_FIELDS = [wire.encode(PRESENT) | change for change in each_wrong(WRONG)]


@pytest.mark.parametrize("value", [None, 1, "n1", [], {}, *WRONG_FIELDS])
def test_what_no_member_says(value):
    with pytest.raises(WireError):
        wire.decode(FROM_AGENT, {"present": value})


def test_a_member_that_does_not_say_where_it_is_takes_no_part():
    job = spare_job()
    job.confirms = False
    request = request_of(1, nodes=4, spares=1)
    job.coordinator.request(1, read_request(request))
    job.coordinator.outbox.clear()  # it does not answer
    job.come(0, 2)
    job.join(1)
    assert job.record.round == -1
    job.send(1, PRESENT)
    job.join(1)
    assert job.record.round == 0


# --- members that are lost ----------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2])
def test_a_spare_takes_the_place_of_a_lost_member(rank):
    job = running_job()
    left = [each for each in range(4) if each != rank]
    assert job.lose(rank) == to(left, over(0)) | {rank: ["reset"]}
    job.gone(rank)
    active = tuple(3 if each == rank else each for each in range(3))
    assert job.join(*left) == job.begun(1, active)
    assert (job.record.round, job.active) == (1, active)
    assert job.record.losses == {rank: 1}
    assert job.news == [replaced(1, (rank, rank, 3), because=LOST[rank])]


def test_nothing_begins_while_a_member_runs_its_workers():
    job = running_job()
    job.lose(1, ended=True)
    assert job.join(0, 3) == {}
    assert job.wait(LEASE - 1) == {}
    assert job.join(2) == job.begun(1, (0, 3, 2))


def let_be_silent(job, rank):
    """Let a member answer nothing, and lose its connection for that."""
    assert [*job.wait(SILENCE, rank)] == [SILENCE]
    assert rank not in job.connected


@pytest.mark.parametrize(
    ("lost", "seconds", "because", "reported"),
    [
        (SimulatedJob.lose, LEASE, LOST[1], [Leased((1,), LEASE - 10)]),  # once
        # It has ended its workers, or is about to.
        (let_be_silent, KILL, SILENT[1], [Silent((1,), 30, SILENCE - 30)]),
    ],
)
def test_the_workers_of_a_member_that_cannot_be_asked_have_time_to_end(
    lost, seconds, because, reported
):
    job = running_job()
    lost(job, 1)
    assert job.join(0, 2, 3) == {}
    assert job.wait(seconds + 10) == {seconds: job.begun(1, (0, 3, 2))}
    assert job.news == [*reported, replaced(1, (1, 1, 3), because=because)]


@pytest.mark.parametrize("lost", [SimulatedJob.lose, let_be_silent])
def test_a_member_whose_process_has_ended_runs_no_workers(lost):
    job = running_job()
    lost(job, 1)
    assert job.join(0, 2, 3) == {}
    job.gone(1)
    assert job.sent() == job.begun(1, (0, 3, 2))


def test_a_member_that_comes_back_has_ended_its_workers():
    job = running_job()
    job.lose(1)
    job.join(0, 2, 3)
    job.connect(1)
    assert not job.is_running
    assert job.join(1) == job.begun(1, (0, 3, 2))


def test_a_member_that_comes_back_in_time_keeps_its_place():
    job = running_job()
    job.lose(1)
    job.connect(1)
    assert job.join(0, 2, 3) == {}
    assert job.join(1) == job.begun(1, (0, 1, 2))


@pytest.mark.parametrize("lost", [SimulatedJob.lose, let_be_silent])
def test_a_lost_spare_ends_no_round(lost):
    job = running_job()
    lost(job, 3)
    assert job.is_running
    assert job.record.losses == {}
    job.come(3)
    job.lose(1, ended=True)
    assert job.join(0, 2, 3) == job.begun(1, (0, 3, 2))


def test_a_connected_member_is_not_gone():
    job = running_job()
    job.lose(1)
    job.connect(1)
    job.gone(1)
    assert job.join(0, 1, 2, 3) == job.begun(1, (0, 1, 2))


def test_a_member_that_has_not_come_yet_is_not_gone():
    job = spare_job()
    job.come(0, 2, 3)
    job.gone(1)
    assert job.come(1) == job.begun(0, (0, 1, 2))
    assert job.failure is None


def test_an_active_member_that_connects_again_begins_another_round():
    """The end of its first connection was not seen yet."""
    job = running_job()
    sent = job.connect(1, connection="again")
    again = {"again": [welcome(1, age=(0, (0, 0)))]}
    assert sent == to((0, 2, 3), over(0)) | {1: ["reset"]} | again


def test_a_member_that_is_lost_before_the_round_begins():
    job = spare_job()
    job.confirms = False
    job.come(0, 1, 2, 3)
    job.confirm(0, 2)
    job.lose(1)
    assert job.active == (0, 3, 2)
    assert job.confirm(0, 2) == {}
    assert job.confirm(3) == job.begun(1, (0, 3, 2))


def test_each_round_counts_the_workers_that_end_again():
    job = running_job(spares=2)
    for number, (rank, spare) in enumerate([(1, 3), (3, 4)], 1):
        job.lose(rank, ended=True)
        assert job.join(*job.connected) == job.begun(number, (0, spare, 2))


# --- members that do not come -------------------------------------------------------


def test_a_spare_takes_the_place_of_a_member_that_does_not_come():
    job = spare_job()
    assert job.come(0, 2, 3) == {}
    assert job.wait(SPARE_AFTER + 10) == {SPARE_AFTER: job.begun(0, (0, 3, 2))}
    waited = [Waiting((1,), 10, ()), Waiting((1,), 40, ())]
    assert job.news == [*waited, replaced(0, (1, 1, 3))]


def test_a_member_that_comes_too_late_is_a_spare():
    job = spare_job()
    job.confirms = False
    job.come(0, 2, 3)
    job.wait(SPARE_AFTER)
    assert job.come(1) == {}
    assert job.confirm() == job.begun(0, (0, 3, 2))


def test_two_that_do_not_come_and_one_spare():
    job = spare_job()
    job.come(0, 3)
    missing = Failure(Kind.MISSING, (1, 2), code=JOIN)
    # The two missing ones cannot be a world without these.
    assert job.wait(2 * JOIN) == {JOIN: job.ended(missing)}


@pytest.mark.parametrize(
    ("health_check", "seconds"), [(0, SPARE_AFTER), (100, KILL + 100)]
)
def test_a_restart_waits_for_the_health_check(health_check, seconds):
    job = running_job(health_check=health_check)
    fails(job, 0)
    assert job.join(0, 2, 3) == {}
    assert job.wait(seconds + 10) == {seconds: job.begun(1, (0, 3, 2))}


# --- too few members ----------------------------------------------------------------


def test_two_are_lost_and_there_is_one_spare():
    job = running_job()
    job.lose(1, 2)
    job.join(0, 3)
    job.gone(1)
    assert job.sent() == {}
    job.gone(2)
    lost = Failure(Kind.LOST, (1, 2))
    assert job.sent() == job.ended(lost, out_at_end=(1, 2))


def test_two_are_not_reached_and_there_is_one_spare():
    """They may come back."""
    job = running_job()
    job.lose(1, 2)
    job.join(0, 3)
    silent = Failure(Kind.SILENT, (1, 2), code=LEASE)
    assert job.wait(2 * JOIN) == {LEASE: job.ended(silent, out_at_end=(1, 2))}


def test_two_are_not_reached_and_one_comes_back():
    job = running_job()
    job.lose(1, 2)
    job.join(0, 3)
    assert job.wait(LEASE - 1) == {}
    job.come(2)
    assert (job.active, job.failure) == ((0, 3, 2), None)


@pytest.mark.parametrize(("join_timeout", "limit"), [(JOIN, JOIN), (1, LEASE)])
def test_a_coordinator_with_few_members_waits_longer(join_timeout, limit):
    """The others may be a world, and want this one as a spare later."""
    job = running_job(join_timeout=join_timeout)
    job.lose(1, 2, 3)
    silent = Failure(Kind.SILENT, (1, 2, 3), code=limit)
    ended = job.ended(silent, out_at_end=(1, 2, 3), is_certain=False)
    assert job.wait(2 * JOIN) == {limit: ended}


@pytest.mark.parametrize(
    ("lost", "has_quorum"), [((), True), ((1,), True), ((1, 2), False), ((3,), True)]
)
def test_whether_enough_are_connected(lost, has_quorum):
    job = running_job()
    job.lose(*lost)
    assert job.rounds.has_quorum is has_quorum
    assert job.connected == set(range(4)) - {*lost}


def test_which_nodes_are_looked_for():
    job = running_job()
    job.lose(3)
    assert job.absent == set()  # all is well without it
    job.lose(1)
    assert job.absent == {1, 3}
    job.gone(3)
    assert job.absent == {1}
    job.coordinator.fail(Failure(Kind.SIGNAL, (0,), code=15))
    assert job.absent == set()


# --- members that are excluded ------------------------------------------------------


@pytest.mark.parametrize("is_restart", [False, True])
def test_an_unhealthy_member_is_replaced(is_restart):
    """Its workers have ended: otherwise it would not have looked."""
    job = running_job() if is_restart else spare_job().all_connected()
    if is_restart:
        fails(job, 2, text="RuntimeError: CUDA error")
    job.join(0, 2, 3)
    sent = job.send(1, Unhealthy(UNFIT))
    assert sent == job.begun(int(is_restart), (0, 3, 2)) | {1: [Excluded(1, UNFIT)]}
    cause = worker_failure(8, node=2, text="RuntimeError: CUDA error")
    because = cause if is_restart else None
    places = replaced(int(is_restart), (1, 1, 3), because=because)
    assert job.news == [Excluded(1, UNFIT), places]


def test_an_unhealthy_spare_takes_no_place():
    job = spare_job(spares=2).all_connected()
    job.join(0, 1, 2, 4)
    job.send(3, Unhealthy(UNFIT))
    job.lose(1, ended=True)
    assert job.join(0, 2, 4) == job.begun(1, (0, 4, 2))


def test_too_many_are_unhealthy():
    job = spare_job().all_connected()
    job.send(1, Unhealthy("its disk is full"))
    sent = job.send(3, Unhealthy(UNFIT))
    excluded = Failure(Kind.EXCLUDED, (1, 3), text=UNFIT)
    ended = job.ended(excluded, out_at_end=(1, 3))
    assert sent == ended | {3: [Excluded(3, UNFIT), *ended[3]]}


def test_what_cannot_be_printed_of_a_reason():
    job = spare_job()
    job.connect(0, 1)
    job.send(1, Unhealthy("\x1b[2J" + 500 * "x"))
    assert job.record.excluded == {1: " [2J" + 196 * "x"}


def test_an_excluded_member_hears_so_when_it_comes_back():
    job = spare_job().all_connected()
    job.send(1, Unhealthy(UNFIT))
    job.lose(1)
    assert Excluded(1, UNFIT) in job.connect(1)[1]


def test_a_member_that_was_lost_twice_is_excluded():
    job = running_job()
    for number, (rank, spare) in enumerate([(1, 3), (3, 1), (1, 3)], 1):
        job.lose(rank, ended=True)
        left = [each for each in range(4) if each != rank]
        assert job.join(*left) == job.begun(number, job.active)
        assert spare in job.active
        out = "it was lost 2 times"
        is_told = Excluded(rank, out) in job.connect(rank)[rank]
        assert is_told is (number == 3)
        assert job.record.excluded == ({1: out} if number == 3 else {})
        job.join(rank)
    assert job.news[-1] == Excluded(1, out)


# --- nodes on which workers fail ----------------------------------------------------


def fail_on(job, rank):
    """Let a worker of a member fail, and all begin again; return what is sent."""
    fails(job, rank)
    spares = sorted(job.connected - {*job.active})
    sent = job.join(*spares, *job.active)
    assert job.is_running
    return sent


def test_a_node_that_is_the_first_to_fail_in_two_rounds_is_excluded():
    job = running_job()
    fail_on(job, 1)
    assert (job.active, job.record.suspect) == ((0, 1, 2), 1)
    sent = fail_on(job, 1)
    assert Excluded(1, BLAMED) in sent[1]
    assert job.active == (0, 3, 2)
    assert job.record.excluded == {1: BLAMED}
    assert job.news[1] == Excluded(1, BLAMED)


def test_two_nodes_that_fail_in_turns_are_not_blamed():
    job = running_job()
    for rank in (1, 2, 1, 2):
        fail_on(job, rank)
    assert (job.active, job.record.excluded) == ((0, 1, 2), {})


def test_no_node_is_blamed_if_nothing_could_take_its_place():
    job = running_job()
    job.lose(3)
    for _ in range(3):
        fail_on(job, 1)
    assert (job.active, job.record.excluded) == ((0, 1, 2), {})


def test_a_script_that_also_fails_on_the_next_node():
    job = running_job()
    fail_on(job, 1)
    fail_on(job, 1)
    sent = fail_on(job, 3)
    assert Excluded(1, "") in sent[1]
    assert Excluded(1, "") in job.news
    assert (job.record.excluded, job.record.script_faults) == ({}, (1,))
    for _ in range(2):
        fail_on(job, 3)
    assert (job.active, job.record.excluded) == ((0, 3, 2), {})


def test_the_first_worker_that_fails_counts():
    """The others lose their connection to it."""
    job = running_job()
    for _ in range(2):
        fails(job, 2, text="RuntimeError: Connection closed by peer")
        job.died(worker_failure(4, text="ValueError: bad batch 17"))
        job.join(3, 0, 1, 2)
    assert (job.active, job.record.excluded) == ((0, 3, 2), {1: BLAMED})


def test_a_lost_member_is_not_a_failure_of_the_script():
    """Workers fail because of it, on any node."""
    job = running_job(spares=2)
    fail_on(job, 1)
    fails(job, 1)
    job.lose(2, ended=True)
    job.join(3, 4, 0, 1)
    assert (job.active, job.record.excluded) == ((0, 1, 3), {})


# --- how it ends --------------------------------------------------------------------


@pytest.mark.parametrize("done", [(0,), (0, 2)])
@pytest.mark.parametrize(
    ("lost", "kind"), [(SimulatedJob.lose, Kind.LOST), (let_be_silent, Kind.SILENT)]
)
def test_no_restart_after_others_have_finished(lost, kind, done):
    job = running_job()
    job.finish(*done)
    lost(job, 1)
    assert (job.failure.kind, job.failure.nodes) == (kind, (1,))
    assert job.failure.finished == len(done)


def test_a_member_that_has_finished_may_go():
    job = running_job()
    job.finish(1)
    job.lose(1)
    assert job.is_running
    assert job.finish(0, 2) == to((0, 2, 3), Ended(out_at_end=(1,)))


def test_a_round_may_end_without_members_that_have_ended():
    """The spare is killed, and a member ends its process when it has finished."""
    job = running_job(nodes=3)
    job.lose(2, ended=True)
    job.finish(0)
    job.lose(0, ended=True)
    assert job.finish(1) == {1: [Ended(out_at_end=(0, 2))]}


def test_lost_nodes_are_named_at_the_end():
    job = running_job(spares=2)
    job.lose(1, ended=True)
    job.join(0, 2, 3, 4)
    job.send(4, Unhealthy(UNFIT))
    assert job.finish() == to((0, 2, 3, 4), Ended(out_at_end=(1, 4)))


@pytest.mark.parametrize("coordinator", [0, 2])
def test_the_coordinator_reports_how_the_job_failed(coordinator):
    job = running_job(coordinator=coordinator, max_restarts=0)
    assert fails(job, 1) == job.ended(worker_failure(4))


def test_nodes_that_never_came_are_not_bad():
    """The job has not begun: nobody knows."""
    job = spare_job()
    job.connect(0, 1)
    given_up = Failure(Kind.AGENT, (0,), text="why")
    assert job.send(0, GaveUp(given_up)) == job.ended(given_up)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_member_is_lost_and_no_restart_is_left(rank):
    job = running_job(max_restarts=0)
    sent = job.lose(rank)
    ended = job.ended(LOST[rank], out_at_end=(rank,))
    assert sent == ended | {rank: ["reset"]}


def test_a_second_agent_of_a_silent_member():
    job = running_job()
    job.coordinator.members.agents[2].silent_for = SILENCE - 1
    job.connect(2, connection="second", agent="second")
    ((_, sent),) = job.wait(1, 2).items()
    assert sent[2] == ["reset"]
    assert isinstance(sent["second"][0], Welcome)
    job.lose("second")
    assert job.failure is None


def test_a_member_comes_when_the_job_has_ended():
    job = running_job()
    job.lose(3)
    job.finish()
    assert job.connect(3) == {3: [welcome(age=(0, (0, 0))), Ended()]}


@pytest.mark.parametrize("is_new", [True, False])
def test_a_node_that_gives_up_is_replaced(is_new):
    """Its own fault: a full disk, a missing GPU."""
    given_up = Failure(Kind.AGENT, (1,), text="HPC012 no GPU")
    job = spare_job()
    job.connect(0, 2, 3)
    # A new agent connects only to say so.
    job.connect(1, failed=wire.encode(given_up) if is_new else None)
    (*_, ended) = job.send(1, GaveUp(given_up))[1]
    assert ended == Ended(given_up, is_certain=False)
    assert job.failure is None
    assert job.join(0, 2, 3) == job.begun(0, (0, 3, 2))
    excluded = Excluded(1, "HPC012 no GPU")
    assert job.news == [excluded, replaced(0, (1, 1, 3), because=given_up)]


def test_two_nodes_give_up_and_there_is_one_spare():
    job = running_job()
    for rank in (3, 2):
        given_up = Failure(Kind.AGENT, (rank,), text="no space left")
        job.send(rank, GaveUp(given_up))
    assert job.failure == given_up


def test_a_replaced_member_comes_back_that_had_finished():
    job = running_job()
    job.lose(1, ended=True)
    job.join(0, 2, 3)
    assert job.is_running
    job.connect(1, knows=Record((0, 0), 0, (0, 1, 2)), is_done=True)
    assert job.failure is None
    assert 1 in job.record.excluded


def test_a_lone_excluded_member_gives_up():
    """No round was formed yet: it waits for the others, but not forever."""
    job = spare_job()
    job.come(0)
    job.send(0, Unhealthy(UNFIT))
    assert [*job.wait(2 * JOIN)] == [JOIN]
    assert job.failure.kind is Kind.MISSING


# --- time ---------------------------------------------------------------------------


def test_a_late_second_is_counted_in_full():
    """Another coordinator, and the members, have also counted it."""
    job = running_job()
    job.coordinator.tick(SILENCE - 2)
    assert job.is_running
    job.coordinator.tick()
    job.coordinator.tick()
    assert not job.is_running


def test_a_member_that_is_lost_at_once_is_not_reported_as_silent():
    """The second that shows it comes late."""
    job = running_job()
    job.coordinator.tick(SILENCE - 11)
    job.receive(0, Heartbeat(1.0))
    job.coordinator.tick(12)
    job.sent()
    assert not job.is_running
    assert not [each for each in job.news if isinstance(each, Silent)]


def test_time_for_workers_to_end_is_counted_in_ticks():
    """A suspended coordinator may have read nothing meanwhile."""
    job = running_job()
    job.lose(1)
    job.join(0, 2, 3)
    job.coordinator.tick(SILENCE - 1)
    for rank in (0, 2, 3):
        job.receive(rank, Heartbeat(1.0))
    assert [*job.wait(LEASE)] == [LEASE - 1]


def test_the_coordinator_repeats_what_it_heard_last():
    job = spare_job()
    job.come(0)
    for seconds in (0.0, 5.5, 7, 9.5):
        job.send_line(0, {"heartbeat": {"seconds": seconds}})
        job.heartbeats.clear()
        for _ in range(HEARTBEAT_INTERVAL):
            job.coordinator.tick()
        job.sent()
        assert job.heartbeats == [(0, Heartbeat(seconds))]


@pytest.mark.parametrize("seconds", [True, "x", None])
def test_what_is_no_heartbeat(seconds):
    with pytest.raises(WireError):
        wire.decode(FROM_AGENT, {"heartbeat": {"seconds": seconds}})


@pytest.mark.parametrize("ended", [True, False])
def test_an_end_of_file_is_the_end_of_a_process_and_a_reset_is_silence(ended):
    job = running_job()
    job.lose(1, ended=ended)
    assert bool(job.join(0, 2, 3)) is ended


def test_a_member_that_says_good_bye_has_no_workers():
    job = running_job()
    job.send(1, GaveUp(Failure(Kind.AGENT, (1,), text="no disk")))
    job.send(1, Bye())
    assert job.join(0, 2, 3) == job.begun(1, (0, 3, 2))

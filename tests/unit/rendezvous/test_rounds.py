"""When a round begins, and when it ends: with and without spares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.simulated_job import (
    BAD,
    CLOSED,
    JOIN,
    KILLED,
    STORE,
    SimulatedJob,
    over,
    to,
    welcome,
    worker_failure,
)
from torchrun_hpc import wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.limits import RESTART_REPORT
from torchrun_hpc.names import placed
from torchrun_hpc.rendezvous.messages import Differ, Finishing, Restart, Waiting
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    Answer,
    Ask,
    Bye,
    Check,
    Confirm,
    Done,
    Ended,
    Over,
    Printed,
    Set,
)
from torchrun_hpc.wire import WireError

both = pytest.mark.parametrize("spares", [0, 1])


# --- a job that goes well -----------------------------------------------------------


@both
def test_a_job_from_its_beginning_to_its_end(spares):
    job = SimulatedJob(spares=spares)
    nodes = range(3 + spares)
    for rank in reversed(nodes):
        assert job.connect(rank) == {rank: [welcome()]}
    assert job.join(*nodes[1:]) == {}
    assert job.records == []
    assert job.join(0) == job.begun(0, range(3))
    prepared = {connection for connection, _ in job.records}
    assert prepared == ({*nodes} if spares else {0})
    assert (job.record.term, job.record.round, job.active) == ((0, 0), 0, (0, 1, 2))
    assert job.finish(2, 0) == {}
    assert not job.is_finished
    assert job.finish(1) == to(nodes, Ended())
    assert job.is_finished
    for rank in nodes:
        assert not job.coordinator.all_informed
        assert job.send(rank, Bye()) == {rank: ["reset"]}
    assert job.coordinator.all_informed
    assert (job.failure, job.news) == (None, [])


@both
@pytest.mark.parametrize("store", [STORE, None])
def test_node_rank_0_gives_the_address_of_the_workers_store(spares, store):
    job = SimulatedJob(spares=spares)
    job.confirms = False
    job.all_connected().join(0, 1, 2)
    assert job.send(1, Confirm((0, 0), 0, ("10.9.9.9", 1))) == {}
    assert job.send(2, Confirm((0, 0), 0)) == {}
    confirm = Confirm((0, 0), 0, store)
    if store is None:
        with pytest.raises(WireError, match="no store"):
            job.send(0, confirm)
        assert not job.is_running
    else:
        assert job.send(0, confirm) == job.begun(0, range(3))


@both
@pytest.mark.parametrize(("term", "number"), [((0, 0), 1), ((0, 1), 0), ((1, 0), 0)])
def test_only_the_prepared_round_is_confirmed(spares, term, number):
    job = SimulatedJob(spares=spares)
    job.confirms = False
    job.all_connected().join(0, 1, 2)
    for rank in range(3):
        assert job.send(rank, Confirm(term, number, STORE)) == {}
    assert not job.is_running
    assert job.confirm() == job.begun(0, range(3))


NO_STORES = ["x", [], ["n0"], ["n0", 0], ["n0", 65536], [5, 5], ["n0", "5"]]
NO_CONFIRMATIONS = [
    *(None, [], [0, 0], 0, {"term": [0], "round": 0}),
    *({"term": [0, 0], "round": 0, "store": store} for store in NO_STORES),
]


@pytest.mark.parametrize("confirm", NO_CONFIRMATIONS, ids=str)
def test_what_is_no_confirmation(confirm):
    with pytest.raises(WireError):
        wire.decode(FROM_AGENT, {"confirm": confirm})


@pytest.mark.parametrize("store", [None, *NO_STORES], ids=str)
def test_no_round_begins_without_a_store(store):
    with pytest.raises(WireError):
        wire.decode(FROM_COORDINATOR, {"go": {"round": 0, "store": store}})


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        (("", "", ""), None),
        (("jsc", "jsc", "jsc"), None),
        (("derecho", "", ""), {"derecho": (0,), "": (1, 2)}),
        (("", "derecho", ""), {"": (0, 2), "derecho": (1,)}),
        (("a", "b", "c"), {"a": (0,), "b": (1,), "c": (2,)}),
    ],
)
def test_nodes_with_different_values_are_named_once(values, reported):
    job = SimulatedJob(max_restarts=1)
    for rank in (2, 1, 0):
        job.connect(rank, compared=values[rank])
    assert job.join(0, 1, 2) == job.begun(0, range(3))
    job.died(KILLED)
    assert job.join(0, 1, 2) == job.begun(1, range(3))
    differ = [each for each in job.news if isinstance(each, Differ)]
    assert differ == ([] if reported is None else [Differ(reported)])


def test_each_node_tells_its_own_name():
    """Slurm 26.05 numbers tasks by topology, not in the order of its node list."""
    job = SimulatedJob()
    for rank, host in ((0, "n2"), (2, "n1"), (1, "n3")):
        job.connect(rank, host=host)
    job.lose(1)
    hosts = job.coordinator.members.hosts
    assert placed(("n1", "n2", "n3"), hosts) == ("n2", "n3", "n1")


# --- restarts -----------------------------------------------------------------------


@both
def test_a_worker_that_dies_is_a_restart_for_all(spares):
    job = SimulatedJob(spares=spares, max_restarts=1).at_work()
    assert job.died(KILLED) == to(range(3 + spares), over(0))
    assert not job.is_running
    assert job.died(worker_failure(9)) == {}  # a consequence
    assert job.join(*reversed(range(3 + spares))) == job.begun(1, range(3))
    assert job.active == (0, 1, 2)
    assert job.news == [Restart(1, KILLED)]


@both
def test_an_agent_that_joins_the_next_round_restarts_all(spares):
    """Torch's agent was the first to see the failure."""
    job = SimulatedJob(spares=spares, max_restarts=1).at_work()
    assert job.join(1) == to(range(3 + spares), over(0))
    assert job.join(0, 2) == job.begun(1, range(3))
    job.join(1)
    text = "it asked for another restart"
    assert job.failure == Failure(Kind.AGENT, (1,), text=text)


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_restarts_are_counted_for_the_job(max_restarts):
    """Each restart counts, on whichever node a worker dies."""
    job = SimulatedJob(max_restarts=max_restarts).at_work()
    for number in range(max_restarts):
        job.died(worker_failure(4 * (number % 3)))
        assert job.rounds.round == number + 1
        job.join(0, 1, 2)
    assert job.died(KILLED) == job.ended(KILLED)
    assert job.failure == KILLED


def test_the_store_is_empty_after_a_restart():
    job = SimulatedJob(max_restarts=1).at_work()
    job.send(1, Ask(1, Set({"torchelastic/role_info/1": "old"})))
    job.died(KILLED)
    job.join(0, 1, 2)
    sent = job.send(0, Ask(7, Check(("torchelastic/role_info/1",))))
    assert sent == {0: [Answer(7, value=False)]}


@both
@pytest.mark.parametrize("done", [(0,), (0, 2)])
def test_no_restart_after_others_have_finished(spares, done):
    """They would never join."""
    job = SimulatedJob(spares=spares, max_restarts=3).at_work()
    job.finish(*done)
    failed = replace(KILLED, finished=len(done))
    assert job.died(KILLED) == job.ended(failed)


def test_no_restart_if_one_finished_before_it_was_informed():
    """The end of its workers and the restart have crossed each other."""
    job = SimulatedJob(max_restarts=3).at_work()
    job.died(KILLED)
    job.join(1)
    assert job.send(2, Done(0)) == job.ended(replace(KILLED, finished=1))
    assert not job.is_finished


@pytest.mark.parametrize("done", [-1, 1])
def test_no_end_of_a_round_that_does_not_run(done):
    job = SimulatedJob(max_restarts=3).all_connected()
    assert job.send(2, Done(done)) == {}
    job.join(0, 1, 2)
    assert job.send(2, Done(done)) == {}
    assert job.is_running
    job.died(KILLED)
    assert job.send(2, Done(done)) == {}
    assert job.failure is None


def test_agents_hear_that_a_collective_failed():
    """They look at their workers before they stop them."""
    job = SimulatedJob(max_restarts=1).at_work()
    sent = job.died(worker_failure(1, text="Timed out waiting 9ms for recv operation"))
    assert sent == to(range(3), Over(0, hangs=True))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_restart_is_reported_with_the_failure_that_was_the_first(is_first):
    job = SimulatedJob(max_restarts=1).at_work()
    if not is_first:
        job.died(worker_failure(9, text=CLOSED.format(2)))
    job.died(KILLED)
    assert job.news == []  # another failure may have been the first
    if is_first:
        assert job.news_within(5) == {RESTART_REPORT: [Restart(1, KILLED)]}
    else:
        job.join(0, 1, 2)
    job.wait(5)
    assert job.news == [Restart(1, KILLED)]


# --- which workers have failed ------------------------------------------------------


def test_what_follows_from_a_failure_comes_after_it():
    """Even if it arrives before."""
    job = SimulatedJob().at_work()
    peer = worker_failure(0, text=CLOSED.format(2))
    first = worker_failure(5, text=BAD.format(17))
    assert job.died(peer) == job.ended(peer)
    assert job.died(first) == {}
    assert job.died(worker_failure(9, text=CLOSED.format(1))) == {}
    summary = job.reported()
    assert (summary.first, summary.same_as_first) == (first, ())
    assert summary.others == (("RuntimeError: Connection closed by peer", (0, 9)),)


def test_equal_failures_are_counted():
    job = SimulatedJob().at_work()
    for rank in (5, 8, 0, 11, 2):
        job.died(worker_failure(rank, text=BAD.format(rank)))
    job.died(KILLED)  # it has failed already
    summary = job.reported()
    assert summary.first == worker_failure(5, text=BAD.format(5))
    assert summary.same_as_first == (0, 2, 8, 11)
    assert (summary.others, summary.unlisted) == ((), 0)


@pytest.mark.parametrize("claimed", [0, 2, -1, 99])
def test_a_worker_is_on_the_node_of_its_agent(claimed):
    job = SimulatedJob().at_work()
    elsewhere = replace(KILLED, nodes=(claimed,))
    assert job.died(elsewhere, connection=1) == job.ended(KILLED)
    assert job.reported().first == KILLED


def test_only_the_report_has_what_a_worker_wrote():
    """All nodes hear of a failure: with tracebacks, these messages would be long."""
    job = SimulatedJob().at_work()
    first = worker_failure(5, text=BAD.format(17), lines=("x" * 500,) * 16)
    assert job.died(first) == job.ended(first.brief)
    assert job.reported().first == first


def test_failures_before_a_restart_are_not_reported_after_it():
    job = SimulatedJob(max_restarts=1).at_work()
    job.died(worker_failure(9))
    job.join(0, 1, 2)
    assert job.reported() is None
    job.died(KILLED)
    assert (job.reported().first, job.reported().same_as_first) == (KILLED, ())


# Which nodes have joined when a worker fails, and the round that its agent names.
TOO_EARLY_OR_TOO_LATE = {
    "nobody has joined": ((), 0),
    "a node has not joined": ((0, 1), 0),
    "another round": ((0, 1, 2), 1),
    "a round before the first": ((0, 1, 2), -1),
}


@pytest.mark.parametrize("case", TOO_EARLY_OR_TOO_LATE)
def test_a_worker_of_another_round_is_ignored(case):
    joined, number = TOO_EARLY_OR_TOO_LATE[case]
    job = SimulatedJob(max_restarts=1).all_connected()
    job.join(*joined)
    assert job.died(KILLED, number) == {}
    assert job.reported() is None
    assert (job.rounds.round, job.failure) == (0, None)


@pytest.mark.parametrize("number", [None, "0", True, 0.0])
def test_a_round_is_a_number(number):
    job = SimulatedJob(max_restarts=1).at_work()
    for name, message in {"died": {"failure": wire.encode(KILLED)}, "done": {}}.items():
        with pytest.raises(WireError):
            job.send_line(1, {name: message | {"round": number}})
    assert job.reported() is None
    assert job.is_running


def test_all_hear_that_the_failures_are_reported():
    job = SimulatedJob().at_work()
    job.died(KILLED)
    assert job.send(0, Printed()) == to(range(3), Printed())


# --- waiting ------------------------------------------------------------------------


def test_missing_nodes_are_reported_until_the_timeout():
    job = SimulatedJob(join_timeout=100).all_connected()
    assert job.news_within(50) == {}  # nobody has joined: a dry run
    job.join(2)
    assert job.news_within(99) == {
        second: [Waiting((0, 1), second, ())] for second in (10, 40, 70)
    }
    job.news.clear()
    missing = Failure(Kind.MISSING, (0, 1), code=100)
    assert job.wait(100) == {1: job.ended(missing)}
    assert job.news == [Waiting((0, 1), 100, ())]


def test_no_report_without_node_0_and_the_head_node():
    job = SimulatedJob(join_timeout=100, coordinator=-1)
    job.connect(2)
    job.join(2)
    missing = Failure(Kind.MISSING, (0, 1), code=100)
    assert job.wait(100) == {100: job.ended(missing)}
    assert job.news == []


def test_a_restart_has_all_the_time_of_a_start():
    job = SimulatedJob(join_timeout=100, max_restarts=1).all_connected()
    job.confirms = False
    job.join(0)
    job.wait(99)
    job.join(1, 2)
    job.wait(50)
    job.confirm(0)
    assert job.wait(1000) == {}  # at work
    job.died(KILLED)
    job.wait(50)  # their workers end first
    job.join(0, 1)
    assert [*job.news_within(99)] == [10, 40, 70]
    assert job.failure is None
    job.wait(1)
    assert job.failure == Failure(Kind.MISSING, (2,), code=100)


def test_the_workers_store_has_all_the_time_of_a_start():
    """The last node may join late, and node 0 open the store in the next second."""
    job = SimulatedJob(join_timeout=100).all_connected()
    job.confirms = False
    job.join(0)
    job.wait(99)
    job.join(1, 2)
    assert [*job.news_within(99)] == [10, 40, 70]
    assert job.failure is None
    job.wait(1)
    assert job.failure == Failure(Kind.MISSING, (0,), code=100)


def test_a_member_that_has_not_confirmed_is_asked_again():
    """Nothing is lost with its confirmation, and no job waits in silence."""
    job = SimulatedJob(spares=1)
    job.confirms = False
    job.all_connected().join(0, 1, 2, 3)
    job.confirm(0, 2)
    job.records.clear()
    job.wait(JOIN)
    again = [connection for connection, _ in job.records]
    assert again == [1] * (JOIN // 5)
    assert job.news[0] == Waiting((1,), 10, ())
    assert job.confirm(1) == job.begun(0, range(3))


def test_nodes_at_work_are_reported_without_a_timeout():
    job = SimulatedJob(join_timeout=20).at_work()
    assert job.news_within(100) == {}
    job.send(2, Done(0))
    assert job.news_within(45) == {
        second: [Finishing((0, 1), second)] for second in (10, 40)
    }
    job.send(0, Done(0))
    assert job.news_within(12) == {10: [Finishing((1,), 10)]}
    job.send(1, Done(0))
    assert job.news_within(100) == {}
    assert job.failure is None

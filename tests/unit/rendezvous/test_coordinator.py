"""The coordinator and its agents: how they are lost or silent, and how a job ends."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tests.support.simulated_job import (
    KILLED,
    SILENCE,
    SimulatedJob,
    go,
    over,
    to,
    welcome,
    worker_failure,
)
from torchrun_hpc import limits, wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous.messages import Answering, Lost, Silent, Unproved
from torchrun_hpc.rendezvous.protocol import (
    FROM_COORDINATOR,
    Answer,
    Ask,
    Bye,
    Ended,
    GaveUp,
    Get,
    Heartbeat,
    Join,
    Read,
    Set,
)
from torchrun_hpc.wire import WireError

# --- agents that are gone -----------------------------------------------------------


@pytest.mark.parametrize("how", ["its connection ends", "it leaves"])
def test_nothing_is_kept_of_what_an_agent_waited_for(how):
    job = SimulatedJob(max_restarts=1).at_work()
    job.send(1, Ask(1, Get(("a",))))
    store = job.rounds.store
    assert list(store._missing) == [1]
    if how == "it leaves":
        job.send(1, Bye())
    else:
        job.lose(1)
    assert not store._missing
    assert not store._waiting


@pytest.mark.parametrize("joined", [(0, 1, 2), (0, 2)])
def test_an_agent_is_lost_for_good(joined):
    """At work, or while others are waited for."""
    job = SimulatedJob().all_connected()
    job.join(*joined)
    expected = job.ended(Failure(Kind.LOST, (2,)))
    assert job.lose(2) == expected | {2: ["reset"]}


def test_an_agent_is_lost_and_started_again():
    job = SimulatedJob(max_restarts=1).at_work()
    assert job.lose(2) == to((0, 1), over(0)) | {2: ["reset"]}
    assert job.news == [Lost(2)]
    job.join(0, 1)
    sent = job.connect(2, connection="again", agent="second")
    assert sent == {"again": [welcome(1)]}
    assert job.send("again", Join()) == to((0, 1, "again"), go(1))


def test_an_agent_is_lost_while_others_are_waited_for():
    """That is no restart: no worker runs yet."""
    job = SimulatedJob(max_restarts=1).all_connected()
    job.join(0, 2)
    assert job.lose(2) == {2: ["reset"]}
    assert job.news == [Lost(2)]
    job.connect(2, connection="again", agent="second")
    assert (job.rounds.round, job.failure) == (0, None)
    job.join(1)
    assert not job.is_running
    job.send("again", Join())
    assert job.is_running


def test_an_agent_is_lost_before_it_confirms():
    job = SimulatedJob(max_restarts=1).all_connected()
    job.confirms = False
    job.join(0, 1, 2)
    job.confirms = True
    assert job.lose(2) == {2: ["reset"]}
    job.connect(2, connection="again", agent="second")
    assert not job.is_running
    job.send("again", Join())
    assert job.is_running


def test_an_agent_that_has_only_looked_may_go():
    """A dry run does: it joins nothing."""
    job = SimulatedJob().all_connected()
    assert job.lose(2) == {2: ["reset"]}
    assert job.failure is None
    assert job.connect(2) == {2: [welcome()]}


def test_an_agent_that_leaves_as_it_should_is_no_loss():
    job = SimulatedJob().at_work()
    assert job.send(2, Bye()) == {2: ["reset"]}
    assert job.lose(2) == {}
    assert job.failure is None


def test_an_agent_that_has_finished_is_no_loss():
    job = SimulatedJob().at_work()
    job.finish(2)
    assert job.lose(2) == {2: ["reset"]}
    assert job.finish(0, 1) == to((0, 1), Ended())


def test_an_agent_that_is_started_again_after_it_has_finished():
    job = SimulatedJob(max_restarts=1).at_work()
    job.finish(2)
    job.lose(2)
    sent = job.connect(2, connection="again", agent="second")
    failed = Failure(Kind.LOST, (2,), finished=1)
    assert sent["again"] == [Ended(failed)]


def test_the_last_agents_of_a_job_that_has_finished():
    """An agent that connects again hears of the end."""
    job = SimulatedJob(max_restarts=1).at_work()
    job.finish()
    assert job.lose(2) == {2: ["reset"]}
    assert job.send(1, GaveUp(KILLED)) == {}
    assert job.send(1, Join()) == {}
    assert job.failure is None
    assert job.connect(2) == {2: [welcome(age=(0, (0, 0))), Ended()]}


@pytest.mark.parametrize("coordinator", [0, 1, 2])
def test_the_coordinators_node_reports_the_loss_of_node_0(coordinator):
    job = SimulatedJob(max_restarts=1, coordinator=coordinator).at_work()
    assert job.lose(0) == to((1, 2), over(0)) | {0: ["reset"]}
    assert job.news == ([Lost(0)] if coordinator else [])  # no other node hears it


# --- how it ends --------------------------------------------------------------------


def test_an_agent_that_gives_up():
    job = SimulatedJob(max_restarts=3).at_work()
    gone = Failure(Kind.SIGNAL, (1,), code=2)
    assert job.send(1, GaveUp(gone)) == job.ended(gone)
    assert not job.coordinator.all_informed
    job.send(0, Read())
    job.send(2, Bye())
    assert not job.coordinator.all_informed
    job.lose(1)
    assert job.coordinator.all_informed


STOP = Failure(Kind.SIGNAL, (1,), code=15)


def stop(job, *ranks):
    """Let agents report SIGTERM; return what is sent because of it."""
    for rank in ranks:
        job.receive(rank, GaveUp(Failure(Kind.SIGNAL, (rank,), code=15)))
    return job.sent()


def test_sigterm_for_all_agents_ends_the_job_at_once():
    job = SimulatedJob(max_restarts=3).at_work()
    assert stop(job, 1, 0) == {}
    assert stop(job, 2) == job.ended(STOP)


def test_sigterm_for_one_agent():
    """Whatever follows is a consequence, but not the loss of another agent."""
    job = SimulatedJob(max_restarts=3).at_work()
    assert stop(job, 1) == {}
    assert job.died(worker_failure(9)) == {}
    assert job.send(2, Join()) == {}
    assert job.lose(1) == {1: ["reset"]}  # the launcher has killed it
    sent = job.wait(limits.LOSS_TO_TERM)
    assert sent == {limits.LOSS_TO_TERM: job.ended(STOP)}


@pytest.mark.parametrize("kind", [Kind.AGENT, Kind.WORKER])
def test_another_failure_after_sigterm(kind):
    """A loss was first, but is seen later. The other failures are consequences."""
    job = SimulatedJob(max_restarts=3).at_work()
    stop(job, 1)
    assert job.send(0, GaveUp(Failure(kind, (0,)))) == {}
    job.lose(2)
    assert job.failure == Failure(Kind.LOST, (2,))


def test_sigterm_and_other_failures_of_all_agents():
    job = SimulatedJob(max_restarts=3).at_work()
    stop(job, 1)
    for rank in (0, 2):
        job.send(rank, GaveUp(Failure(Kind.WORKER, (rank,))))
    assert job.failure == STOP


@pytest.mark.parametrize("seconds", [0, 2, 3])
def test_sigterm_after_a_loss(seconds):
    """A signal soon after a loss is a consequence; a later one is another reason."""
    job = SimulatedJob(max_restarts=3).at_work()
    job.lose(2)
    job.wait(seconds)
    stop(job, 1)
    assert job.failure == (Failure(Kind.LOST, (2,)) if seconds < 3 else STOP)


@pytest.mark.parametrize("is_lost", [False, True])
def test_sigterm_of_pbs(is_lost):
    """PBS sends none after a loss. It kills the tasks of other nodes by SIGKILL."""
    job = SimulatedJob(signals_on_loss=False, max_restarts=3).at_work()
    if is_lost:
        job.lose(2)
    stop(job, 1)
    job.lose(0)
    assert job.failure == STOP


def test_sigterm_while_a_job_starts():
    job = SimulatedJob()
    job.connect(1)
    assert stop(job, 1) == job.ended(STOP)


def test_the_first_failure_counts():
    job = SimulatedJob(max_restarts=3).at_work()
    job.send(1, GaveUp(KILLED))
    other = Failure(Kind.SIGNAL, (2,), code=15)
    assert job.send(2, GaveUp(other)) == {}
    assert job.died(worker_failure(9)) == {}
    assert job.send(2, Join()) == {}
    assert job.finish() == {}
    job.coordinator.fail(other)
    assert job.sent() == {}
    assert job.lose(2) == {2: ["reset"]}  # nobody is waited for
    assert job.failure == KILLED
    assert (job.rounds.round, job.is_finished) == (0, False)


def test_a_late_agent_is_informed_of_the_failure():
    job = SimulatedJob()
    job.connect(0, 1)
    job.send(1, GaveUp(KILLED))
    assert job.connect(2) == {2: [Ended(KILLED)]}
    for rank in range(3):
        assert not job.coordinator.all_informed
        job.send(rank, Read())
    assert job.coordinator.all_informed


def test_nobody_is_there():
    job = SimulatedJob()
    assert job.coordinator.all_informed
    assert job.wait(5000) == {}
    assert job.failure is None


@pytest.mark.parametrize(
    "message",
    [
        {"gave_up": {"failure": None}},
        {"gave_up": {"failure": {}}},
        {"gave_up": {"failure": {**wire.encode(KILLED), "kind": "bored"}}},
        {"died": {"failure": "worker", "round": 0}},
        {"died": {"failure": None, "round": 0}},
        {"died": {"failure": wire.encode(Failure(Kind.WORKER, (1,))), "round": 0}},
        {"died": {"failure": {**wire.encode(KILLED), "text": "\x1b[2J"}, "round": 0}},
    ],
)
def test_a_failure_that_is_none(message):
    job = SimulatedJob(max_restarts=1).at_work()
    with pytest.raises(WireError):
        job.send_line(1, message)
    assert job.failure is None
    assert job.is_running


# --- silence ------------------------------------------------------------------------


def silent(*ranks):
    """Return the news of agents that do not answer."""
    return Silent(ranks, seconds=30, left=SILENCE - 30)


def test_everybody_is_asked_within_five_seconds_and_not_all_at_once():
    job = SimulatedJob().at_work()
    asked = defaultdict(list)
    for second in range(20):
        job.heartbeats.clear()
        job.wait(1)
        for connection, _ in job.heartbeats:
            asked[connection].append(second)
    assert [len(seconds) for seconds in asked.values()] == [4, 4, 4]
    assert len(set(map(tuple, asked.values()))) == 3


def test_an_agent_that_does_not_answer_is_named_and_ends_the_job():
    job = SimulatedJob(max_restarts=9).at_work()
    assert job.news_within(SILENCE - 1, 1) == {30: [silent(1)]}
    failed = Failure(Kind.SILENT, (1,), code=SILENCE)
    assert job.wait(1, 1) == {1: job.ended(failed)}
    assert job.news_within(200, 1) == {}
    job.send(0, Read())
    assert not job.coordinator.all_informed
    job.send(2, Read())
    assert job.coordinator.all_informed  # nobody waits for the silent one


@pytest.mark.parametrize("last", [29, 30, SILENCE - 1])
def test_a_message_ends_the_silence(last):
    job = SimulatedJob().at_work()
    job.wait(last, 1)
    job.news.clear()
    job.send(1, Heartbeat())
    # An agent that was reported as silent is reported again.
    again = {} if last < 30 else {1: [Answering((1,))]}
    assert job.news_within(30, 1) == again | {30: [silent(1)]}
    assert job.failure is None


def test_several_are_named_together():
    job = SimulatedJob(silence_timeout=120).at_work()
    assert job.news_within(60, 1, 2) == {30: [Silent((1, 2), 30, 90)]}
    for rank in (1, 2):
        job.send(rank, Heartbeat())
    assert job.news_within(50) == {1: [Answering((1, 2))]}


@pytest.mark.parametrize("how", ["it ends", "it is started again"])
def test_an_agent_that_connects_again_does_not_answer_again(how):
    job = SimulatedJob(max_restarts=1, silence_timeout=120).at_work()
    job.wait(60, 1)
    job.lose(1)
    if how == "it is started again":
        job.connect(1, agent="second")
    assert job.news_within(20) == {}


def test_a_limit_below_the_first_report():
    """For example, ``--rdzv-conf=keep_alive_interval=5,keep_alive_max_attempt=3``."""
    job = SimulatedJob(silence_timeout=15).at_work()
    sent = job.wait(100, 1)
    assert list(sent) == [15]
    assert job.failure == Failure(Kind.SILENT, (1,), code=15)


KEY = "~/.torchrun_hpc/key"


def test_a_caller_without_a_proof_is_reported_once():
    """And again with the missing nodes. Of many callers, eight are reported."""
    job = SimulatedJob()
    came_unproved = job.coordinator.members.came_unproved
    came_unproved("10.0.0.7", KEY)  # nobody can report it yet
    job.connect(0)
    assert job.news_within(1) == {1: [Unproved("10.0.0.7", KEY)]}
    for number in range(20):
        came_unproved("10.0.0.7", KEY)
        came_unproved(f"127.0.1.{number}", KEY)
    for number in range(20):
        came_unproved(f"10.0.1.{number}", KEY)
    addresses = ["127.0.0.1", *(f"10.0.1.{number}" for number in range(6))]
    job.sent()
    assert job.news[1:] == [Unproved(address, KEY) for address in addresses]
    job.join(0)
    (waiting,) = job.news_within(10)[10]
    assert waiting.unproved == ("10.0.0.7", *addresses)


# --- the store of torch's agents ----------------------------------------------------


def test_agents_share_values():
    job = SimulatedJob().at_work()
    assert job.send(1, Ask(4, Get(("a",)))) == {}
    assert job.send(0, Ask(1, Set({"a": "1"}))) == {
        1: [Answer(4, ["1"])],
        0: [Answer(1, value=True)],
    }
    with pytest.raises(WireError):
        job.send_line(1, {"get": {"number": 1}})


def test_a_lost_agent_gets_no_answer_of_the_store():
    job = SimulatedJob(max_restarts=1).at_work()
    job.send(1, Ask(4, Get(("a",))))
    job.lose(1)
    sent = job.send(0, Ask(1, Set({"a": "1"})))
    assert sent[0] == [Answer(1, value=True)]


# --- how much is sent ---------------------------------------------------------------


@pytest.mark.parametrize("nodes", [10, 1000])
def test_each_node_receives_the_same_amount_in_a_job_of_any_size(nodes):
    job = SimulatedJob(nodes=nodes, max_restarts=1)
    amounts: dict[Any, int] = defaultdict(int)
    for sent in (
        job.connect(*range(nodes)),
        job.join(*range(nodes)),
        job.died(KILLED),
        job.join(*range(nodes)),
        job.finish(),
    ):
        for connection, messages in sent.items():
            for message in messages:
                line = wire.to_line(wire.encode(message, FROM_COORDINATOR))
                amounts[connection] += len(line)
    assert job.is_finished
    assert len(amounts) == nodes
    assert max(amounts.values()) == min(amounts.values()) < 300

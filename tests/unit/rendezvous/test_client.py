"""Agents and their coordinator over loopback: real sockets, no torch."""

from __future__ import annotations

import _thread
import asyncio
import math
import os
import re
import signal
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

from tests.support.loopback import (
    LIMIT,
    OTHER_PROGRAMS,
    WELCOME,
    Clock,
    after_proof,
    answer_with,
    failure_of,
    join_all,
    other_program,
    settle,
    started,
    take_part,
    together,
    waits,
)
from tests.support.patience import PATIENCE, until
from tests.support.simulated_job import STORE, worker_failure
from torchrun_hpc import limits
from torchrun_hpc.agent.elastic import ask_for_stacks
from torchrun_hpc.failures.failure import Failure, Kind, Summary
from torchrun_hpc.planning.meeting import Meeting
from torchrun_hpc.rendezvous.client import JobState, Listener
from torchrun_hpc.rendezvous.connection import request_of
from torchrun_hpc.rendezvous.errors import CoordinatorNotFoundError, JobFailedError
from torchrun_hpc.rendezvous.messages import (
    CoordinatorAnswers,
    CoordinatorSilent,
    Lost,
    Restart,
    Silent,
)
from torchrun_hpc.rendezvous.protocol import (
    Add,
    Answer,
    Ask,
    Check,
    Done,
    Get,
    Go,
    Question,
    Reply,
    Set,
)
from torchrun_hpc.stacks.inspection import HANG, STACKS


def test_each_process_is_an_agent_of_its_own(monkeypatch):
    """Also a fork, where a worker launches once more."""
    meeting = Meeting("c10d", hosts=("n0",))
    requests = [request_of(meeting, run_id) for run_id in ("mine", "")]
    monkeypatch.setattr(os, "getpid", lambda: 1)
    first, same = (request.agent for request in requests)
    fork = request_of(meeting, "").agent
    assert first == same != fork
    assert re.fullmatch(rf"[0-9a-f]{{32}}\.{requests[0].pid}", first)


# --- a job --------------------------------------------------------------------------


def test_a_job_from_its_beginning_to_its_end(job):
    clients = job.connected()
    assert [client.state.next_round for client in clients] == [0, 0, 0]
    for go in join_all(clients):
        assert go == Go(0, STORE)
    together(*(client.finish for client in clients))
    together(*(client.leave for client in clients))
    job.server.close()
    assert failures_of(clients) == [None] * 3
    assert job.simulated.is_finished


BAD = "ValueError: bad batch 17"
FIRST = worker_failure(5, text=BAD, lines=("Traceback ...", BAD))
PEER = worker_failure(9, text="RuntimeError: Connection closed by peer [::1]:4711")
WHY = FIRST.brief  # what all hear


def failures_of(clients):
    """Return why the job has failed, as each agent knows."""
    return [client.state.failure for client in clients]


def all_hear_that_the_round_is_over(clients):
    until(lambda: all(client.state.is_over for client in clients))


def test_a_job_that_restarts(job):
    clients = job.at_work(max_restarts=1)
    clients[1].worker_failed(FIRST)
    all_hear_that_the_round_is_over(clients)
    clients[2].worker_failed(PEER)  # of the same round: because of it
    assert [client.state.next_round for client in clients] == [1, 1, 1]
    assert [go.round for go in join_all(clients)] == [1, 1, 1]
    assert not any(client.state.is_over for client in clients)
    job.clock.go_on(2 * limits.COLLECT_CAUSE_TIMEOUT)
    assert failures_of(clients) == [None] * 3
    assert job.events == [[Restart(1, FIRST)], [], []]  # no report
    killed = worker_failure(9, code=-9)
    clients[2].worker_failed(killed)
    until(lambda: all(failures_of(clients)))
    assert failures_of(clients) == [killed] * 3
    for client in clients:
        with pytest.raises(JobFailedError):
            take_part(client)
        with pytest.raises(JobFailedError):
            client.finish()


def test_a_forgotten_attempt_to_connect_ends_nothing(job, capfd):
    """It was cancelled when its refusal arrived, because another one has succeeded."""
    (client,) = job.connected(0)

    def forget():
        forgotten = asyncio.get_running_loop().create_future()
        forgotten.set_exception(ConnectionRefusedError(111, "Connect call failed"))

    client._loop.call(forget)
    settle(client)
    assert client.state.failure is None
    assert capfd.readouterr().err == ""


def test_leaving_without_having_come(job):
    client = job.client(0, (job.unused_port(),))
    client.leave()
    client.fail(Failure(Kind.AGENT, (0,)))
    client.leave()


# --- workers that fail --------------------------------------------------------------


def all_hear_of(failure, clients):
    """Wait until all agents have heard why the job failed, by the coordinator."""
    until(lambda: all(client.state.ending for client in clients))
    settle(*clients)
    assert failures_of(clients) == [failure] * len(clients)


def leave(clients):
    """Let all leave, and time stand still; return what ends when they have left."""
    left = [started(client.leave) for client in clients]
    until(lambda: all(map(waits, clients)))
    return left


def have_left(left):
    for later in left:
        later.result(PATIENCE)


def test_a_worker_that_fails_is_reported_by_node_0(job):
    clients = job.at_work()
    clients[1].worker_failed(FIRST)
    all_hear_of(WHY, clients)
    assert job.events == [[], [], []]  # there may be more
    clients[2].worker_failed(worker_failure(10, text=BAD))
    job.clock.go_on(limits.COLLECT_TIMEOUT)
    until(lambda: job.events[0])
    assert job.events == [[Summary(FIRST, same_as_first=(10,))], [], []]


def test_the_failure_that_was_the_first_is_known_with_the_report(job):
    clients = job.at_work()
    clients[2].worker_failed(PEER)
    all_hear_of(PEER, clients)
    job.clock.go_on(limits.COLLECT_TIMEOUT)
    assert job.events == [[], [], []]  # a lost connection is no reason
    clients[1].worker_failed(FIRST)
    job.clock.go_on(limits.COLLECT_CAUSE_TIMEOUT)
    until(lambda: job.events[0])
    assert job.events[0][0].first == FIRST
    until(lambda: clients[0].state.failure == FIRST)


def test_why_there_is_no_restart_stays_known_with_the_report(job):
    clients = job.at_work(max_restarts=1)
    clients[2].send(Done(0))
    until(lambda: job.simulated.rounds._done)
    clients[1].worker_failed(FIRST)
    all_hear_of(replace(WHY, finished=1), clients)
    job.clock.go_on(limits.COLLECT_TIMEOUT)
    until(lambda: job.events[0])
    until(lambda: clients[0].state.is_reported)
    assert clients[0].state.failure == replace(FIRST, finished=1)


# How a worker's failure gets to the coordinator, and whether there is a report.
HOW = {
    "it is seen at once": (lambda client: client.worker_failed(FIRST), True),
    "torch has seen it": (lambda client: client.fail(WHY), False),
}


@pytest.mark.parametrize("how", HOW)
def test_all_leave_as_soon_as_it_is_reported(job, how):
    fail, is_reported = HOW[how]
    clients = job.at_work()
    fail(clients[1])
    all_hear_of(WHY, clients)
    left = leave(clients)
    assert job.events == [[], [], []]
    job.clock.go_on(limits.COLLECT_TIMEOUT)
    have_left(left)
    assert [len(each) for each in job.events] == [is_reported, 0, 0]
    assert not any(client.state.is_unreported for client in clients)
    job.server.close()
    until(lambda: not any(client.state.is_running for client in clients))


def test_nobody_waits_forever_for_the_report(job, monkeypatch):
    never = 2 * limits.REPORT_TIMEOUT
    monkeypatch.setattr(limits, "COLLECT_TIMEOUT", never)
    monkeypatch.setattr(limits, "COLLECT_CAUSE_TIMEOUT", never)
    clients = job.at_work()
    clients[1].worker_failed(FIRST)
    all_hear_of(WHY, clients)
    left = leave(clients)
    job.clock.go_on(limits.REPORT_TIMEOUT)
    have_left(left)
    assert job.events == [[], [], []]
    assert all(client.state.is_unreported for client in clients)


OTHERS = [Failure(kind, (1,)) for kind in Kind if kind is not Kind.WORKER]


@pytest.mark.parametrize("failure", OTHERS, ids=lambda failure: failure.kind.value)
def test_nobody_waits_for_a_report_where_no_worker_has_failed(job, failure):
    clients = job.at_work()
    clients[1].fail(failure)
    all_hear_of(failure, clients)
    together(*(client.leave for client in clients))


def test_others_end_after_the_coordinators_node(job):
    """Some launchers end all tasks with the first one that ends with an error."""
    clients = job.at_work()
    silent = Failure(Kind.SILENT, (1,), code=120)
    clients[1].fail(silent)
    all_hear_of(silent, clients)
    is_urgent = threading.Event()
    urgent = started(lambda: clients[1].leave(LIMIT, is_urgent.is_set))
    left = started(lambda: clients[2].leave(LIMIT))
    until(lambda: waits(clients[1]) and waits(clients[2]))
    clients[0].leave()
    settle(*clients)
    assert not urgent.done()
    assert not left.done()
    is_urgent.set()  # by a second signal
    urgent.result(PATIENCE)
    assert not left.done()
    job.server.close()
    left.result(PATIENCE)


def test_workers_that_fail_because_an_agent_is_gone_are_not_why(job):
    """They follow from it, whatever they say."""
    clients = job.at_work()
    gone = Failure(Kind.LOST, (2,))
    clients[1].fail(gone)
    clients[1].worker_failed(FIRST)
    all_hear_of(gone, clients)
    job.clock.go_on(2 * limits.COLLECT_CAUSE_TIMEOUT)
    assert job.events == [[], [], []]
    assert clients[0].state.failure == gone


def test_nobody_waits_for_a_report_without_a_coordinator(job):
    clients = job.at_work()
    clients[1].worker_failed(FIRST)
    all_hear_of(WHY, clients)
    job.end_server()
    together(*(client.leave for client in clients))
    assert failures_of(clients) == [WHY] * 3
    assert all(client.state.is_unreported for client in clients)


def test_an_agent_that_hears_nothing_knows_its_own_workers(job):
    """The coordinator's node is lost, and nothing says so."""
    clients = job.at_work()
    goes_on = threading.Event()
    job.server._loop.call(goes_on.wait)
    clients[1].worker_failed(FIRST)
    clients[1].worker_failed(worker_failure(6, code=-9))
    clients[1].fail(worker_failure(6, code=-9))  # what torch says
    clock = Clock()
    clock.drive(clients[1])
    clock.passes_while(clients[1].leave, step=limits.REPORT_TIMEOUT)
    goes_on.set()
    assert clients[1].state.is_unreported
    assert clients[1].state.failure == FIRST


# --- what the workers are doing -----------------------------------------------------


class Sampled:
    """Three agents, which answer with the stacks of their workers.

    Attributes:
        silent: Nodes that do not answer.
        question: The latest one.
    """

    def __init__(self, job):
        self.clock = job.clock
        job.start_server(max_restarts=1)
        self.silent = set()
        self.question = None
        self.clients = [
            job.client(rank, listener=Listener(reply=partial(self._reply, rank)))
            for rank in range(3)
        ]
        together(*(client.connect for client in self.clients))
        join_all(self.clients)

    def _reply(self, rank, question):
        self.question = question
        if rank not in self.silent:
            assert question.what in (STACKS, HANG)
            reply = Reply(question.asker, question.number, [f"of {rank}"])
            self.clients[rank].send(reply)

    def ask(self, *answered, what=STACKS):
        """Let node 0 ask for stacks; wait until these nodes have answered."""
        asking = self.clients[0]
        stacks = started(lambda: ask_for_stacks(asking, what, LIMIT))
        until(lambda: [*map(set, asking.state.replies.values())] == [{*answered}])
        until(lambda: waits(asking))
        return stacks

    def ask_in_vain(self, *answered):
        """Let node 0 ask for stacks, of which only these come; return them."""
        stacks = self.ask(*answered)
        self.clock.go_on(LIMIT, LIMIT)
        return stacks.result(PATIENCE)

    def __iter__(self):
        return iter(self.clients)

    def __getitem__(self, rank):
        return self.clients[rank]


@pytest.fixture
def sampled(job):
    return Sampled(job)


ANSWERS = {rank: [f"of {rank}"] for rank in range(3)}


def test_an_agent_that_does_not_send_its_stacks(sampled):
    sampled.silent.add(1)
    assert sampled.ask_in_vain(0, 2) == {0: ["of 0"], 2: ["of 2"]}
    # Stacks that come too late are not taken for others.
    question = sampled.question
    sampled[1].send(Reply(question.asker, question.number, ["late"]))
    assert sampled.ask_in_vain(0, 2) == {0: ["of 0"], 2: ["of 2"]}
    sampled.silent.clear()
    assert ask_for_stacks(sampled[0], STACKS, LIMIT) == ANSWERS
    assert sampled[0].state.failure is None


def test_stacks_while_the_main_thread_asks_the_store(sampled):
    late = started(lambda: sampled[0].ask(Get(("late",)), LIMIT))
    until(lambda: waits(sampled[0]))
    stacks = [ask_for_stacks(sampled[0], STACKS, LIMIT) for _ in range(3)]
    assert stacks == [ANSWERS] * 3
    sampled[1].ask(Set({"late": "1"}), LIMIT)
    assert late.result(PATIENCE) == ["1"]


def test_many_questions_from_two_threads(sampled):
    """None gets the answer to another one's, nor what another node has asked for."""

    def ask_the_store():
        key = Add(key="a", by=1)
        return [sampled[0].ask(key, LIMIT) for _ in range(200)]

    def ask_often(client=sampled[0]):
        return [ask_for_stacks(client, STACKS, LIMIT) for _ in range(50)]

    asking = [partial(ask_often, client) for client in sampled]
    counted, *stacks = together(ask_the_store, ask_often, *asking)
    assert counted == [*range(1, 201)]
    assert stacks == [[ANSWERS] * 50] * 4


def test_a_job_that_has_failed(sampled):
    """Its agents still answer what their workers did. A lost one is not missed."""
    sampled[1].fail(worker_failure(1))
    until(lambda: sampled[0].state.failure)
    sampled.silent = {0, 1}
    stacks = sampled.ask(2, what=HANG)
    cut(sampled[1])
    assert stacks.result(PATIENCE) == {2: ["of 2"]}


def test_stacks_where_an_agent_is_gone(sampled):
    cut(sampled[2])
    until(lambda: sampled[0].state.is_over)
    assert sampled.ask_in_vain(0, 1) == {0: ["of 0"], 1: ["of 1"]}


def test_stacks_without_a_coordinator(sampled, job):
    job.end_server()
    assert ask_for_stacks(sampled[0], STACKS, LIMIT) == {}


def test_stacks_after_the_end(sampled):
    together(*(client.finish for client in sampled))
    together(*(client.leave for client in sampled))
    assert ask_for_stacks(sampled[0], STACKS, math.inf) == {}  # nobody is waited for


def test_stacks_before_the_coordinator_is_found(job):
    """It is not: that is for the main thread, which has to be told."""
    client = job.client(1, (job.unused_port(),))
    stacks = started(lambda: ask_for_stacks(client, STACKS, math.inf))
    with pytest.raises(CoordinatorNotFoundError):
        job.clock.passes_while(client.connect, step=LIMIT)
    assert stacks.result(PATIENCE) == {}


@pytest.mark.parametrize("number", [99, -1])
def test_a_reply_that_nobody_has_asked_for(number):
    state = JobState(replies={1: {}})
    assert state.after(Reply(0, number, [])) == state


# --- who is gone --------------------------------------------------------------------


def cut(client):
    """End an agent's connection without a word, as its death does."""
    client._loop.call(client._channel.transport.abort)


def test_an_agent_that_is_started_again(job):
    clients = job.at_work(max_restarts=1)
    cut(clients[2])
    all_hear_that_the_round_is_over(clients[:2])
    clients[2] = job.connect(2, agent="second")
    assert clients[2].state.next_round == 1
    assert [go.round for go in join_all(clients)] == [1, 1, 1]
    assert job.events[0] == [Lost(2)]


def test_the_coordinator_is_gone(job):
    clients = job.at_work()
    job.end_server()
    for client in clients:
        assert failure_of(client) == Failure(Kind.COORDINATOR)


def test_the_end_of_the_coordinator_is_no_loss_to_an_agent_that_has_finished(job):
    clients = job.at_work()
    together(*(client.finish for client in clients))
    job.end_server()
    until(lambda: not any(client.state.is_running for client in clients))
    assert failures_of(clients) == [None] * 3


def test_an_agent_that_does_not_answer(job, raw):
    clients = job.connected(0, 1, silence_timeout=60)
    silent = raw().accepted(2)
    together(partial(join_all, clients), silent.take_part)
    agents = job.simulated.coordinator.members.agents
    for _ in range(12):
        until(lambda: agents[0].silent_for < 5 > agents[1].silent_for)
        job.clock.go_on(5)
    for client in clients:
        assert failure_of(client) == Failure(Kind.SILENT, (2,), code=60)
    # All others have answered all the time.
    reported = [event for event in job.events[0] if isinstance(event, Silent)]
    assert reported == [Silent((2,), 30, 30)]


def welcomes(later=lambda _: None):
    """Welcome an agent, and answer like this what it sends `later`."""
    answers = iter([answer_with(WELCOME)])

    def answer(data):
        return next(answers, later)(data)

    return answer


@pytest.fixture
def silent_coordinator(job):
    """Start a coordinator that sends a welcome, and nothing after it."""
    with other_program(after_proof(welcomes())) as job.port:
        yield


@pytest.mark.usefixtures("silent_coordinator")
def test_a_coordinator_that_does_not_answer(job):
    client = job.connect(1, silence_timeout=50)
    job.clock.go_on(49)
    assert client.state.failure is None
    with pytest.raises(JobFailedError) as caught:
        job.clock.passes_while(lambda: take_part(client))
    assert caught.value.failure == Failure(Kind.COORDINATOR, code=50)
    assert job.events[1] == [CoordinatorSilent(limits.SILENCE_REPORT, 20)]


def test_a_coordinator_that_answers_again(job):
    answers = answer_with(Answer(1, value=False))
    program = welcomes(lambda data: answers(data) if b'"check"' in data else None)
    with other_program(after_proof(program)) as job.port:
        client = job.connect(1, silence_timeout=1000)
        job.clock.go_on(1 + limits.SILENCE_REPORT)  # it has just answered
        for number in range(3):
            client.send(Ask(number, Check(("a",))))
            until(lambda: client._channel.has_received)
            job.clock.go_on(1)
    assert job.events[1] == [CoordinatorSilent(30, 970), CoordinatorAnswers(31)]


def test_a_coordinator_that_is_stopped_for_a_while(job):
    """As all of them, by the scheduler: nobody is older than what it did itself."""
    job.start_server(silence_timeout=60)
    client = job.connect(0, silence_timeout=60)
    job.clock.go_on(75, 75)
    assert job.events[0] == []
    assert client.state.failure is None


# --- one loop for the coordinator and the agent of its node ------------------------


@pytest.fixture
def reads():
    """Return whether there is a reader of what the coordinator's node reports."""
    has_reader = threading.Event()
    yield has_reader
    has_reader.set()


@pytest.fixture
def sharing(job, reads):
    """Start the coordinator and its node's agent in one loop, and two others."""
    job.start_server(max_restarts=1)
    loop = job.server._loop

    def wait(what):
        reads.wait(PATIENCE)
        return getattr(what, "first", None)

    clients = [job.client(0, loop=loop, listener=Listener(wait, wait, wait))]
    clients += [job.client(rank) for rank in (1, 2)]
    together(*(client.connect for client in clients))
    return clients


def test_a_report_that_nobody_reads_stops_nothing(job, sharing, reads):
    join_all(sharing)
    sharing[1].worker_failed(FIRST)
    all_hear_that_the_round_is_over(sharing)
    agents = job.simulated.coordinator.members.agents
    assert [go.round for go in join_all(sharing)] == [1, 1, 1]  # this is reported
    sharing[0].send(Question(1, STACKS, None))  # and this
    for _ in range(60):
        job.clock.now += 1
        settle(job.server, *sharing, aside=False)
        assert {each.silent_for < 10 for each in agents.values()} == {True}
    assert sharing[0]._loop._aside.is_alive()
    assert sharing[0].ask(Add(key="a", by=1), LIMIT) == 1
    assert not reads.is_set()
    assert failures_of(sharing) == [None] * 3


def test_a_report_that_nobody_reads_is_not_confirmed(job, sharing, reads):
    """The others stay until it is written, but not forever."""
    join_all(sharing)
    sharing[1].worker_failed(FIRST)
    all_hear_that_the_round_is_over(sharing)
    join_all(sharing)
    sharing[1].worker_failed(FIRST)
    until(lambda: all(client.state.ending for client in sharing))
    job.clock.now += limits.COLLECT_TIMEOUT
    settle(job.server, aside=False)
    assert all(client.state.is_unreported for client in sharing)
    reads.set()
    until(lambda: not any(client.state.is_unreported for client in sharing))


def test_a_fault_of_the_agent_leaves_the_coordinator(sharing):
    sharing[0]._channel.on_message = lambda _: 1 / 0
    sharing[0].send(Ask(1, Check(())))
    assert failure_of(sharing[0]).text == "ZeroDivisionError: division by zero"
    assert sharing[1].ask(Add(key="a", by=1), LIMIT) == 1
    assert sharing[1].state.failure is None


def test_a_fault_of_the_coordinator_ends_its_agent(job, sharing, monkeypatch, caplog):
    """Otherwise all would wait for it."""
    monkeypatch.setattr(job.simulated.coordinator, "tick", lambda _: 1 / 0)
    job.server._loop.call(job.server.catch_up, 0)
    text = failure_of(sharing[0]).text
    assert text == "ZeroDivisionError: division by zero"
    assert "ZeroDivisionError" in caplog.text


def test_a_call_that_fails_ends_the_agent(sharing):
    sharing[1].send(Reply(0, 1, object()))
    assert failure_of(sharing[1]).text.startswith("TypeError: ")


def test_the_coordinator_stays_when_its_own_agent_has_left(job, sharing):
    sharing[0].fail(Failure(Kind.AGENT, (0,), text="why"))
    sharing[0].leave()
    assert not sharing[0].state.is_running
    assert {failure_of(client).text for client in sharing} == {"why"}
    job.server.close()


# --- the store ----------------------------------------------------------------------


def test_an_answer_waits_until_the_key_exists(job):
    clients = job.at_work()
    late = started(lambda: clients[1].ask(Get(("a",)), LIMIT))
    until(lambda: waits(clients[1]))
    assert clients[0].ask(Set({"a": "\xff"}), LIMIT) is True
    assert late.result(PATIENCE) == ["\xff"]


def test_an_answer_that_does_not_come(job):
    (client,) = job.connected(0)
    with pytest.raises(TimeoutError):
        job.clock.passes_while(lambda: client.ask(Get(("a",)), LIMIT), step=LIMIT)
    assert client.ask(Set({"a": "1"}), LIMIT) is True
    assert client.ask(Get(("a",)), LIMIT) == ["1"]


def test_a_late_answer_hides_no_later_one():
    """The first request was given up."""
    state = JobState(asked=2).after(Answer(2, value=False))
    assert state.after(Answer(1, value=["late"])).answer == Answer(2, value=False)


def test_no_answer_any_more(job):
    clients = job.at_work()
    answer = started(lambda: clients[0].ask(Get(("a",)), LIMIT))
    until(lambda: waits(clients[0]))
    clients[1].fail(Failure(Kind.AGENT, (1,), text="why"))
    with pytest.raises(JobFailedError):
        answer.result(PATIENCE)


# --- signals ------------------------------------------------------------------------


class Signalled(Exception):  # noqa: N818
    """What torch's handler raises."""


def send_to_this_process(number):
    os.kill(os.getpid(), number)


@pytest.fixture
def signalled():
    """Send this process SIGTERM while it waits, which raises in the main thread."""

    def handle(_number, _frame):
        raise Signalled

    before = signal.signal(signal.SIGTERM, handle)

    @contextmanager
    def while_it_waits(client, send=send_to_this_process):
        def send_it():
            until(lambda: waits(client))
            send(signal.SIGTERM)

        sent = started(send_it)
        with pytest.raises(Signalled):
            yield
        sent.result(PATIENCE)

    yield while_it_waits
    signal.signal(signal.SIGTERM, before)


def leave_at_once(client):
    # After SIGTERM the coordinator looks for a lost agent first.
    client.fail(Failure(Kind.SIGNAL, (client.request.rank,), code=signal.SIGINT))
    client.leave()
    until(lambda: not client.state.is_running)


@pytest.mark.parametrize("who", ["nobody", *list(OTHER_PROGRAMS)[:2]])
def test_a_signal_while_the_coordinator_is_looked_for(job, who, signalled):
    nobody = job.unused_port()
    with other_program(OTHER_PROGRAMS.get(who, OTHER_PROGRAMS["noise"])) as port:
        client = job.client(0, (nobody if who == "nobody" else port,))
        with signalled(client):
            client.connect()
        leave_at_once(client)


def test_a_signal_while_others_are_waited_for(job, signalled):
    client, other = job.connected(0, 1)
    with signalled(client):
        take_part(client)
    leave_at_once(client)
    assert failure_of(other) == Failure(Kind.SIGNAL, (0,), code=signal.SIGINT)


def test_a_signal_that_does_not_wake_the_main_thread(job, signalled, monkeypatch):
    """As one that arrives just before the main thread begins to wait."""
    monkeypatch.setattr(limits, "CLIENT_SIGNAL_TIMEOUT", 0.05)
    (client,) = job.connected(0)
    with signalled(client, _thread.interrupt_main):
        take_part(client)


def test_a_signal_while_an_answer_is_waited_for(job, signalled):
    clients = job.at_work()
    with signalled(clients[0]):
        clients[0].ask(Get(("a",)), LIMIT)
    leave_at_once(clients[0])
    until(lambda: clients[1].state.failure)


def test_a_signal_while_others_are_at_work(job, signalled):
    clients = job.at_work()
    with signalled(clients[1]):
        clients[1].finish()
    leave_at_once(clients[1])
    assert failure_of(clients[2]) == Failure(Kind.SIGNAL, (1,), code=signal.SIGINT)


@pytest.mark.usefixtures("silent_coordinator")
def test_a_signal_and_a_coordinator_that_does_not_answer(job, signalled):
    client = job.connect(1)
    with signalled(client):
        take_part(client)
    client.fail(Failure(Kind.SIGNAL, (1,), code=15))
    left = leave([client])
    job.clock.go_on(limits.DECISION_TIMEOUT)
    have_left(left)

"""Agents and their coordinator over loopback: real sockets, no torch."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import pytest
from loopback import (
    LIMIT,
    OTHER_PROGRAMS,
    STORE,
    failure_of,
    free_port,
    join_all,
    line,
    listening,
    other_program,
    together,
    wait_until,
    worker_failure,
)

from torchrun_hpc.failures.collection import Summary
from torchrun_hpc.rendezvous import client as clients
from torchrun_hpc.rendezvous import coordinator, protocol
from torchrun_hpc.rendezvous.client import JobFailedError
from torchrun_hpc.rendezvous.protocol import Failure, Kind
from torchrun_hpc.rendezvous.search import CoordinatorNotFoundError

# --- a job --------------------------------------------------------------------------


def test_a_job_from_its_beginning_to_its_end(job):
    job.start_server()
    made = job.all_connected()
    assert [client.next_round for client in made] == [0, 0, 0]
    for go in join_all(made):
        assert go == {"go": 0, "store": list(STORE)}
    together(*(client.finish for client in made))
    together(*(client.leave for client in made))
    start = time.monotonic()
    job.server.close(5, 5)
    assert time.monotonic() - start < 1
    assert [client.failure for client in made] == [None] * 3
    assert job.server.coordinator.finished


def test_a_job_that_restarts(job):
    job.start_server(max_restarts=1)
    made = job.all_at_work()
    made[1].worker_failed(worker_failure(5, code=7))
    wait_until(lambda: all(client.is_over for client in made))
    assert [client.next_round for client in made] == [1, 1, 1]
    for go in join_all(made):
        assert go["go"] == 1
    assert not any(client.is_over for client in made)
    assert [client.failure for client in made] == [None] * 3
    made[2].worker_failed(worker_failure(9, code=-9))
    wait_until(lambda: all(client.failure for client in made))
    assert {client.failure for client in made} == {
        Failure(Kind.WORKER, (2,), rank=9, code=-9)
    }
    for client in made:
        with pytest.raises(JobFailedError):
            client.join(None)
        with pytest.raises(JobFailedError):
            client.finish()


def test_an_agent_that_gives_up(job):
    job.start_server(max_restarts=3)
    made = job.all_at_work()
    gone = Failure(Kind.SIGNAL, (1,), code=15)
    made[1].fail(gone)
    for client in (made[0], made[2]):
        with pytest.raises(JobFailedError) as caught:
            client.finish()
        assert caught.value.failure == gone


def test_the_first_failure_is_everybodys(job):
    job.start_server()
    made = job.all_at_work()
    first = Failure(Kind.SIGNAL, (1,), code=15)
    made[1].fail(first)
    wait_until(lambda: job.server.coordinator.failure)
    made[2].failure = None  # as if it was not informed yet
    made[2].fail(Failure(Kind.AGENT, (2,), text="mine"))
    made[2].leave()
    wait_until(lambda: made[0].failure)
    assert {made[0].failure, made[1].failure} == {first}


def test_a_late_agent_is_informed_of_the_failure(job):
    job.start_server()
    early = job.client(1)
    early.connect()
    gone = Failure(Kind.AGENT, (1,), text="why")
    early.fail(gone)
    wait_until(lambda: job.server.coordinator.failure)
    late = job.client(2)
    with suppress(JobFailedError):  # now or at the next step
        late.connect()
    with pytest.raises(JobFailedError) as caught:
        late.join(None)
    assert caught.value.failure == gone


def test_leaving_without_having_come(job):
    client = job.client(0, (free_port(),))
    client.leave()
    client.fail(Failure(Kind.AGENT, (0,)))
    client.leave()


# --- workers that fail --------------------------------------------------------------

BAD = "ValueError: bad batch 17"
FIRST = worker_failure(5, cause=BAD, lines=("Traceback ...", BAD))
PEER = worker_failure(9, cause="RuntimeError: Connection closed by peer [::1]:4711")
WHY = Failure(Kind.WORKER, (1,), rank=5, code=1, text=BAD)


@pytest.fixture
def at_work(job):
    """Let three agents start to work; return them, and what each is to report."""

    def start(**settings):
        job.start_server(**settings)
        events = [[], [], []]
        made = [job.client(rank, on_event=events[rank].append) for rank in range(3)]
        together(*(client.connect for client in made))
        join_all(made)
        return made, events

    return start


def all_hear_of(failure, made):
    """Wait until all agents have heard why the job failed, by the coordinator."""
    wait_until(lambda: all(client._is_decided for client in made))
    assert {client.failure for client in made} == {failure}


def test_a_worker_that_fails_is_reported_by_node_0(at_work):
    made, events = at_work()
    made[1].worker_failed(FIRST)
    all_hear_of(WHY, made)
    assert events == [[], [], []]  # there may be more
    made[2].worker_failed(worker_failure(10, cause=BAD))
    wait_until(lambda: events[0])
    assert events == [[{"report": Summary(FIRST, alike=(10,))}], [], []]


def test_the_failure_that_was_the_first_is_known_with_the_report(at_work):
    made, events = at_work()
    made[2].worker_failed(PEER)
    all_hear_of(protocol.failure_of(PEER), made)
    made[1].worker_failed(FIRST)
    wait_until(lambda: events[0])
    assert events[0][0]["report"].first == FIRST
    wait_until(lambda: made[0].failure == WHY)


def test_why_there_is_no_restart_stays_known_with_the_report(at_work, job):
    made, events = at_work(max_restarts=1)
    made[2].send({"done": 0})
    wait_until(lambda: job.server.coordinator._done)
    made[1].worker_failed(FIRST)
    all_hear_of(replace(WHY, finished=1), made)
    wait_until(lambda: events[0])
    wait_until(lambda: made[0]._is_reported)
    assert made[0].failure == replace(WHY, finished=1)


def test_a_worker_that_fails_while_restarts_are_left_is_a_restart_for_all(at_work):
    made, events = at_work(max_restarts=1)
    made[1].worker_failed(FIRST)
    wait_until(lambda: all(client.is_over for client in made))
    made[2].worker_failed(PEER)  # of the same round: because of it
    for go in join_all(made):
        assert go["go"] == 1
    time.sleep(clients.COLLECT_TIMEOUT + 0.2)
    assert [client.failure for client in made] == [None] * 3
    ((event,), *others) = events  # no report
    assert (event["restart"], protocol.unpacked(event["because"])) == (1, WHY)
    assert others == [[], []]


# How a worker's failure gets to the coordinator, and whether there is a report.
HOW = {
    "it is seen at once": (lambda client: client.worker_failed(FIRST), True),
    "torch has seen it": (lambda client: client.fail(WHY), False),
}


@pytest.mark.parametrize("how", HOW)
def test_all_leave_as_soon_as_it_is_reported(at_work, job, how):
    fail, is_reported = HOW[how]
    made, events = at_work()
    start = time.monotonic()
    fail(made[1])
    all_hear_of(WHY, made)
    together(*(client.leave for client in made))
    assert [len(each) for each in events] == [is_reported, 0, 0]
    assert not any(client.is_unreported for client in made)
    job.server.close(5, 5)
    assert clients.COLLECT_TIMEOUT <= time.monotonic() - start < 3
    assert not any(client._thread.is_alive() for client in made)


def test_nobody_waits_for_ever_for_the_report(at_work, monkeypatch):
    monkeypatch.setattr(clients, "COLLECT_TIMEOUT", LIMIT)
    monkeypatch.setattr(clients, "_REPORT_TIMEOUT", 0.4)
    made, events = at_work()
    made[1].worker_failed(FIRST)
    all_hear_of(WHY, made)
    start = time.monotonic()
    together(*(client.leave for client in made))
    assert 0.4 <= time.monotonic() - start < 2
    assert events == [[], [], []]
    assert all(client.is_unreported for client in made)


OTHERS = [Failure(kind, (1,)) for kind in Kind if kind is not Kind.WORKER]


@pytest.mark.parametrize("failure", OTHERS, ids=lambda failure: failure.kind.value)
def test_nobody_waits_for_a_report_where_no_worker_has_failed(at_work, failure):
    made, _ = at_work()
    made[1].fail(failure)
    all_hear_of(failure, made)
    start = time.monotonic()
    together(*(client.leave for client in made))
    assert time.monotonic() - start < clients.COLLECT_TIMEOUT


def test_workers_that_fail_because_an_agent_is_gone_are_not_why(at_work):
    """They follow from it, whatever they say."""
    made, events = at_work()
    gone = Failure(Kind.LOST, (2,))
    made[1].fail(gone)
    made[1].worker_failed(FIRST)
    all_hear_of(gone, made)
    time.sleep(clients.COLLECT_TIMEOUT + 0.3)
    assert events == [[], [], []]
    assert made[0].failure == gone


def test_nobody_waits_for_a_report_without_a_coordinator(at_work, job):
    made, _ = at_work()
    made[1].worker_failed(FIRST)
    all_hear_of(WHY, made)
    start = time.monotonic()
    job.server._loop.call_soon_threadsafe(job.server._loop.stop)
    together(*(client.leave for client in made))
    assert time.monotonic() - start < 2
    assert [client.failure for client in made] == [WHY] * 3
    assert all(client.is_unreported for client in made)


def test_an_agent_that_hears_nothing_knows_its_own_workers(at_work, job, monkeypatch):
    """The coordinator's node is lost, and nothing says so."""
    monkeypatch.setattr(clients, "_LEAVE_TIMEOUT", 0.2)
    monkeypatch.setattr(clients, "_REPORT_TIMEOUT", 0.2)
    made, _ = at_work()
    job.server._loop.call_soon_threadsafe(time.sleep, 2)
    made[1].worker_failed(FIRST)
    made[1].worker_failed(worker_failure(6, code=-9))
    made[1].fail(Failure(Kind.WORKER, (1,), rank=6, code=-9))  # what torch says
    made[1].leave()
    assert made[1].is_unreported
    assert made[1].failure == WHY


# --- what the workers are doing -----------------------------------------------------


class Sampled:
    """Three agents, which answer with the stacks of their workers.

    Attributes:
        silent: Nodes that do not answer.
    """

    def __init__(self, job):
        job.start_server(max_restarts=1)
        self.silent = set()
        self.made = [
            job.client(rank, on_event=partial(self._answer, rank)) for rank in range(3)
        ]
        together(*(client.connect for client in self.made))
        join_all(self.made)

    def _answer(self, rank, event):
        if "stacks" in event and rank not in self.silent:
            self.made[rank].send({"sampled": event["stacks"], "of": [f"of {rank}"]})

    def __iter__(self):
        return iter(self.made)

    def __getitem__(self, rank):
        return self.made[rank]


@pytest.fixture
def sampled(job):
    return Sampled(job)


ANSWERS = {rank: [f"of {rank}"] for rank in range(3)}


def test_the_stacks_of_all_nodes(sampled):
    start = time.monotonic()
    for client in sampled:
        assert client.stacks(LIMIT) == ANSWERS
    assert time.monotonic() - start < 2


def test_all_ask_for_stacks_at_the_same_time(sampled):
    asking = [lambda c=client: c.stacks(LIMIT) for client in sampled] * 4
    assert together(*asking) == [ANSWERS] * 12


def test_an_agent_that_does_not_send_its_stacks(sampled):
    sampled.silent.add(1)
    start = time.monotonic()
    assert sampled[0].stacks(0.5) == {0: ["of 0"], 2: ["of 2"]}
    assert 0.5 <= time.monotonic() - start < 2
    sampled.silent.clear()
    assert sampled[0].stacks(LIMIT) == ANSWERS


def test_stacks_that_come_too_late_are_not_taken_for_others(sampled):
    sampled.silent.add(1)
    sampled[0].stacks(0.1)
    sampled[1].send({"sampled": [0, sampled[0]._asked], "of": ["late"]})
    assert sampled[0].stacks(0.5) == {0: ["of 0"], 2: ["of 2"]}
    assert sampled[0].failure is None


def test_stacks_while_the_main_thread_asks_the_store(sampled):
    def wait_for_it():
        return sampled[0].ask({"get": ["late"]}, LIMIT)

    def ask_for_stacks():
        time.sleep(0.2)
        found = [sampled[0].stacks(LIMIT) for _ in range(3)]
        sampled[1].ask({"set": {"late": "1"}}, LIMIT)
        return found

    assert together(wait_for_it, ask_for_stacks) == [["1"], [ANSWERS] * 3]


def test_many_questions_from_two_threads(sampled):
    """None gets the answer to another one's."""

    def ask_the_store():
        key = {"add": "a", "by": 1}
        return [sampled[0].ask(key, LIMIT) for _ in range(200)]

    def ask_for_stacks():
        return [sampled[0].stacks(LIMIT) for _ in range(50)]

    counted, *found = together(ask_the_store, ask_for_stacks, ask_for_stacks)
    assert counted == [*range(1, 201)]
    assert found == [[ANSWERS] * 50] * 2


def test_stacks_of_a_job_that_restarts(sampled):
    """Asked for while nobody is in a round."""
    sampled[1].worker_failed(FIRST)
    wait_until(lambda: all(client.is_over for client in sampled))
    assert sampled[2].stacks(LIMIT) == ANSWERS


def test_stacks_of_a_job_that_fails(sampled):
    """There is nothing to wait for."""
    sampled.silent.add(1)
    start = time.monotonic()
    found, _ = together(
        lambda: sampled[0].stacks(LIMIT),
        lambda: (time.sleep(0.3), sampled[1].fail(Failure(Kind.AGENT, (1,)))),
    )
    assert found == {0: ["of 0"], 2: ["of 2"]}
    assert time.monotonic() - start < 3


def test_stacks_where_an_agent_is_gone(sampled):
    cut(sampled[2])
    wait_until(lambda: sampled[0].is_over)
    start = time.monotonic()
    assert sampled[0].stacks(0.5) == {0: ["of 0"], 1: ["of 1"]}
    assert time.monotonic() - start < 2


def test_stacks_without_a_coordinator(sampled, job):
    job.server._loop.call_soon_threadsafe(job.server._loop.stop)
    start = time.monotonic()
    assert sampled[0].stacks(LIMIT) == {}
    assert time.monotonic() - start < 3


def test_stacks_after_the_end(sampled):
    together(*(client.finish for client in sampled))
    together(*(client.leave for client in sampled))
    assert sampled[0].stacks(0.3) == {}


def test_stacks_before_the_coordinator_is_found(job):
    """It is not: that is for the main thread, which has to be told."""
    client = job.client(1, (free_port(),), where={"timeout": 0.3})

    def connect():
        with pytest.raises(CoordinatorNotFoundError):
            client.connect()

    found, _ = together(lambda: client.stacks(LIMIT), connect)
    assert found == {}


@pytest.mark.parametrize("number", [None, "x", 99, [], {}])
def test_an_agent_that_answers_what_nobody_has_asked(job, raw, number):
    """The others go on."""
    job.start_server()
    made = [job.client(0), job.client(1)]
    odd = raw()
    odd.request(2)
    odd.send_message(join=0)
    together(*(client.connect for client in made))
    join_all(made)
    odd.send_message(sampled=[0, number], of=[])
    assert made[0].ask({"set": {"a": "1"}}, LIMIT) is True
    time.sleep(0.2)
    assert made[0].failure is None


# --- who is gone --------------------------------------------------------------------


def cut(client):
    """End an agent's connection without a word, as its death does."""
    client._in_thread(client._channel._transport.abort)


def test_an_agent_that_is_gone(job):
    job.start_server()
    events = []
    made = [job.client(0, on_event=events.append), job.client(1), job.client(2)]
    together(*(client.connect for client in made))
    join_all(made)
    cut(made[2])
    for client in made[:2]:
        assert failure_of(client) == Failure(Kind.LOST, (2,))
    assert events == []  # nobody is waited for


def test_an_agent_that_is_started_again(job):
    job.start_server(max_restarts=1)
    events = []
    made = [job.client(0, on_event=events.append), job.client(1), job.client(2)]
    together(*(client.connect for client in made))
    join_all(made)
    cut(made[2])
    wait_until(lambda: made[0].is_over and made[1].is_over)
    again = job.client(2, pid=999)
    again.connect()
    assert again.next_round == 1
    made[2] = again
    for go in join_all(made):
        assert go["go"] == 1
    assert events == [{"lost": 2}]


def test_the_coordinator_is_gone(job):
    job.start_server()
    made = job.all_at_work()
    job.server._loop.call_soon_threadsafe(job.server._loop.stop)
    for client in made:
        assert failure_of(client) == Failure(Kind.COORDINATOR)


def test_the_end_of_the_coordinator_is_no_loss_to_an_agent_that_has_finished(job):
    job.start_server()
    made = job.all_at_work()
    together(*(client.finish for client in made))
    job.server.close(0, 0)
    time.sleep(0.2)
    assert [client.failure for client in made] == [None] * 3


@pytest.mark.usefixtures("quick")
def test_an_agent_that_does_not_answer(job, raw):
    job.start_server(silence_timeout=60)
    events = []
    made = [job.client(0, on_event=events.append), job.client(1)]
    silent = raw()
    silent.request(2)
    silent.send_message(join=0)
    together(*(client.connect for client in made))
    join_all(made)
    for client in made:
        assert failure_of(client) == Failure(Kind.SILENT, (2,), code=60)
    # All others have answered all the time.
    reported = [event for event in events if "silent" in event]
    assert reported == [{"silent": [2], "left": 30}]


@pytest.fixture
def silent_coordinator(job):
    """Start a coordinator that sends a welcome, and nothing after it."""
    server = listening()
    job.port = server.getsockname()[1]
    ended = threading.Event()

    def serve():
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            welcome = {"welcome": protocol.VERSION, "job": "19.0", "round": 0}
            connection.sendall(protocol.encode(welcome))
            ended.wait(LIMIT)

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    ended.set()
    thread.join()
    server.close()


@pytest.mark.usefixtures("quick", "silent_coordinator")
def test_a_coordinator_that_does_not_answer(job):
    events = []
    where = {"silence_timeout": 50}
    client = job.client(1, where=where, on_event=events.append)
    client.connect()
    with pytest.raises(JobFailedError) as caught:
        client.join(None)
    assert caught.value.failure == Failure(Kind.COORDINATOR, code=50)
    assert events == [{"coordinator_silent": coordinator.SILENCE_REPORT, "left": 20}]


@pytest.mark.usefixtures("quick")
def test_a_coordinator_that_answers_again(job):
    with other_program(line(welcome=protocol.VERSION, job="19.0", round=0)) as port:
        events = []
        where = {"silence_timeout": 1000}
        client = job.client(1, (port,), where=where, on_event=events.append)
        client.connect()
        wait_until(lambda: events)
        for number in range(3):
            client.send({"ask": number})
            time.sleep(0.2)
    reported = [event for event in events if "welcome" not in event]
    assert [*map(list, reported)] == [
        ["coordinator_silent", "left"],
        ["coordinator_answers"],
    ]
    assert coordinator.SILENCE_REPORT < reported[1]["coordinator_answers"] < 1000


@pytest.mark.usefixtures("quick")
def test_a_coordinator_that_is_stopped_for_a_while(job):
    """As all of them, by the scheduler: nobody is older than what it did itself."""
    job.start_server(silence_timeout=60)
    events = []
    where = {"silence_timeout": 60}
    client = job.client(0, where=where, on_event=events.append)
    client.connect()
    for loop in (job.server._loop, client._loop):
        loop.call_soon_threadsafe(time.sleep, 1.5)  # 75 of their seconds
    time.sleep(1.7)
    assert events == []
    assert client.failure is None


# --- the store ----------------------------------------------------------------------


def test_questions_to_the_store(job):
    job.start_server()
    made = job.all_at_work()
    assert made[1].ask({"set": {"a": "1", "b": "\xff"}}, LIMIT) is True
    assert made[2].ask({"get": ["b", "a"]}, LIMIT) == ["\xff", "1"]
    assert made[0].ask({"add": "a", "by": 2}, LIMIT) == 3
    assert made[0].ask({"check": ["a", "c"]}, LIMIT) is False

    def set_late():
        time.sleep(0.2)
        return made[0].ask({"set": {"c": "late"}}, LIMIT)

    answers = together(lambda: made[1].ask({"get": ["c"]}, LIMIT), set_late)
    assert answers == [["late"], True]


def test_an_answer_that_does_not_come(job):
    job.start_server()
    client = job.client(0)
    client.connect()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        client.ask({"get": ["a"]}, 0.3)
    assert 0.3 <= time.monotonic() - start < 2
    assert client.ask({"set": {"a": "1"}}, LIMIT) is True
    assert client.ask({"get": ["a"]}, LIMIT) == ["1"]


def test_no_answer_any_more(job):
    job.start_server()
    made = job.all_at_work()

    def fail():
        time.sleep(0.2)
        made[1].fail(Failure(Kind.AGENT, (1,), text="why"))

    def ask():
        with pytest.raises(JobFailedError):
            made[0].ask({"get": ["a"]}, LIMIT)

    together(ask, fail)


# --- signals ------------------------------------------------------------------------


class Signalled(Exception):  # noqa: N818
    """What torch's handler raises."""


def send_to_this_process(number):
    os.kill(os.getpid(), number)


@pytest.fixture
def signal_soon():
    """Send this process SIGTERM in a moment, which raises in the main thread."""

    def handle(_number, _frame):
        raise Signalled

    old = signal.signal(signal.SIGTERM, handle)
    started = []

    @contextmanager
    def soon(send=send_to_this_process, limit=1.0):
        timer = threading.Timer(0.3, send, (signal.SIGTERM,))
        started.append(timer)
        start = time.monotonic()
        timer.start()
        with pytest.raises(Signalled):
            yield
        assert time.monotonic() - start < 0.3 + limit

    yield soon
    for timer in started:
        timer.join()
    signal.signal(signal.SIGTERM, old)


def leave_at_once(client):
    start = time.monotonic()
    client.fail(Failure(Kind.SIGNAL, (client.request.rank,), code=15))
    client.leave()
    assert time.monotonic() - start < 1.5
    assert not client._thread.is_alive()


@pytest.mark.parametrize("who", ["nobody", *list(OTHER_PROGRAMS)[:2]])
def test_a_signal_while_the_coordinator_is_looked_for(job, who, signal_soon):
    nobody = free_port()
    with other_program(OTHER_PROGRAMS.get(who, OTHER_PROGRAMS["noise"])) as port:
        client = job.client(0, (nobody if who == "nobody" else port,))
        with signal_soon():
            client.connect()
        leave_at_once(client)


def test_a_signal_while_others_are_waited_for(job, signal_soon):
    job.start_server()
    client, other = job.client(0), job.client(1)
    client.connect()
    other.connect()
    with signal_soon():
        client.join(STORE)
    leave_at_once(client)
    assert failure_of(other) == Failure(Kind.SIGNAL, (0,), code=15)


def test_a_signal_that_does_not_wake_the_main_thread(job, signal_soon):
    """As one that arrives just before the main thread begins to wait."""
    job.start_server()
    client, other = job.client(0), job.client(1)
    client.connect()
    other.connect()
    with signal_soon(_thread.interrupt_main, limit=LIMIT / 2):
        client.join(STORE)


def test_a_signal_while_an_answer_is_waited_for(job, signal_soon):
    job.start_server()
    made = job.all_at_work()
    with signal_soon():
        made[0].ask({"get": ["a"]}, LIMIT)
    leave_at_once(made[0])
    wait_until(lambda: made[1].failure)


def test_a_signal_while_others_are_at_work(job, signal_soon):
    job.start_server()
    made = job.all_at_work()
    with signal_soon():
        made[1].finish()
    leave_at_once(made[1])
    assert failure_of(made[2]) == Failure(Kind.SIGNAL, (1,), code=15)


@pytest.mark.usefixtures("silent_coordinator")
def test_a_signal_and_a_coordinator_that_does_not_answer(job, signal_soon):
    client = job.client(1)
    client.connect()
    with signal_soon():
        client.join(None)
    start = time.monotonic()
    client.fail(Failure(Kind.SIGNAL, (1,), code=15))
    client.leave()
    assert time.monotonic() - start < 3

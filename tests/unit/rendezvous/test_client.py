"""Agents and their coordinator over loopback: real sockets, no torch."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

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
)

from torchrun_hpc.rendezvous import client as clients
from torchrun_hpc.rendezvous import coordinator, protocol
from torchrun_hpc.rendezvous.client import JobFailedError
from torchrun_hpc.rendezvous.protocol import Failure, Kind

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
    made[1].watch({4: lambda: None, 5: lambda: 7})
    wait_until(lambda: all(client.is_over for client in made))
    assert [client.next_round for client in made] == [1, 1, 1]
    for go in join_all(made):
        assert go["go"] == 1
    assert not any(client.is_over for client in made)
    assert [client.failure for client in made] == [None] * 3
    made[2].watch({9: lambda: -9})
    wait_until(lambda: all(client.failure for client in made))
    assert {client.failure for client in made} == {
        Failure(Kind.WORKER, (2,), rank=9, code=-9)
    }
    for client in made:
        with pytest.raises(JobFailedError):
            client.join(None)
        with pytest.raises(JobFailedError):
            client.finish()


def test_workers_that_are_no_longer_watched(job):
    job.start_server()
    made = job.all_at_work()
    code = [None]
    made[1].watch({5: lambda: code[0]})
    made[1].watch({})
    code[0] = 1
    time.sleep(0.3)
    assert made[0].failure is None


def test_a_last_look_at_the_workers(job):
    job.start_server()
    made = job.all_at_work()
    made[1]._workers = {4: lambda: 0, 5: lambda: 3, 6: lambda: 1}
    made[1].check_workers()
    made[1].check_workers()
    assert failure_of(made[0]) == Failure(Kind.WORKER, (1,), rank=5, code=3)


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


@pytest.fixture
def signal_soon():
    """Send this process SIGTERM in a moment, which raises in the main thread."""

    def handle(_number, _frame):
        raise Signalled

    old = signal.signal(signal.SIGTERM, handle)
    started = []

    @contextmanager
    def soon():
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
        started.append(timer)
        start = time.monotonic()
        timer.start()
        with pytest.raises(Signalled):
            yield
        assert time.monotonic() - start < 1.3

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


# --- workers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(255)", 255),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_the_exit_code_of_a_child(program, code):
    child = subprocess.Popen([sys.executable, "-S", "-c", program])
    look = functools.partial(clients.exit_code_of, child.pid)
    wait_until(lambda: look() is not None)
    assert [look(), look()] == [code, code]  # it is still there to be collected
    assert child.wait() == code
    assert look() is None


def test_a_child_that_still_runs():
    child = subprocess.Popen(["sleep", "60"])
    assert clients.exit_code_of(child.pid) is None
    child.kill()
    child.wait()


def test_a_process_that_is_no_child():
    assert clients.exit_code_of(os.getppid()) is None

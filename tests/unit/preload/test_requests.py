"""What the agent and the fork server tell each other."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.patience import PATIENCE
from torchrun_hpc import waiting
from torchrun_hpc.preload import requests
from torchrun_hpc.preload.requests import ForkedWorker, Request, request_of
from torchrun_hpc.stacks.calls import ASK_ALL, AT_END

texts = st.text(st.characters(exclude_categories=())).filter(
    lambda text: "\0" not in text
)


def received_from(connection):
    """Return a request and its files."""
    received = requests.receive(connection)
    assert received is not None
    return received


@given(
    st.lists(texts, max_size=5),
    st.dictionaries(texts, texts, max_size=5),
    st.lists(st.integers(1, 64)),
)
def test_a_request_arrives_as_it_is(command, environ, numbers):
    request = Request(command, environ, numbers, numbers[:2], [(1, 2, -1)], numbers)
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull) as file:  # noqa: PTH123
        requests.send(ours, request, 5 * [file.fileno()])
        requests.send(ours, request, 5 * [file.fileno()])
        for _ in range(2):
            received, files = received_from(theirs)
            assert received == request
            kinds = {os.fstat(number).st_rdev for number in files}
            assert kinds == {os.fstat(file.fileno()).st_rdev}
            for number in files:
                os.close(number)
        ours.close()
        assert requests.receive(theirs) is None


def test_a_request_that_is_larger_than_any_buffer():
    request = Request(["python"], {"LONG": "x" * 2_000_000}, [], [], [], [])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(
            target=requests.send, args=(ours, request, [0, 0, 0, 0, 0])
        )
        sender.start()
        received, files = received_from(theirs)
        sender.join()
        for number in files:
            os.close(number)
    assert received == request


def test_what_this_process_hands_on():
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    try:
        request = request_of(["python"], {})
    finally:
        signal.signal(signal.SIGUSR2, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert signal.SIGUSR2 in request.ignored
    assert signal.SIGPIPE not in request.ignored  # Python's own
    assert signal.SIGTTOU in request.blocked


@pytest.fixture
def answered():
    """Make a worker that is answered as given, and the other end of its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:

        def make(answer):
            theirs.send(answer)
            return ForkedWorker(["python"], ours, ours, lambda: None), theirs

        yield make


def test_a_worker_that_ends(answered, monkeypatch):
    worker, server = answered(b"started 4711")
    assert (worker.pid, worker.poll(), worker.returncode) == (4711, None, None)
    passed: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(passed), sleep=passed.append)
    monkeypatch.setattr(waiting, "time", clock)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(20)
    assert 20 < sum(passed) < 21
    server.send(b"-15")
    assert (worker.wait(), worker.poll(), worker.wait(0)) == (-15, -15, -15)


def test_a_fork_server_that_ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lost = []
    theirs.send(b"started 4711")
    worker = ForkedWorker(["python"], ours, ours, lambda: lost.append(True))
    theirs.close()
    assert (worker.wait(), worker.poll(), lost) == (-signal.SIGKILL, -9, [True])
    assert ours.fileno() == -1  # closed


def test_no_more_processes(answered):
    with pytest.raises(BlockingIOError) as found:
        answered(b"error %d" % errno.EAGAIN)
    assert found.value.strerror == os.strerror(errno.EAGAIN)


def test_a_worker_that_ends_before_it_begins(answered):
    with pytest.raises(ChildProcessError, match="with exit code -9"):
        answered(b"-9")


def test_no_fork_server():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    with ours, pytest.raises(EOFError):
        ForkedWorker(["python"], ours, ours, lambda: None)


def test_a_signal(answered, monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda *args: killed.append(args))
    worker, server = answered(b"started 4711")
    worker.send_signal(signal.SIGTERM)
    assert killed == [(4711, signal.SIGTERM)]
    server.send(b"-15")
    worker.send_signal(signal.SIGTERM)  # nobody has its number any more
    assert killed == [(4711, signal.SIGTERM)]
    assert worker.poll() == -signal.SIGTERM


# --- questions to a worker ------------------------------------------------------------


@pytest.fixture
def asked():
    """Make a worker that can be asked, and its end of the sockets."""
    answers, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with answers, server, ours, theirs:
        server.send(b"started 4711")
        yield ForkedWorker(["python"], answers, ours, lambda: None), theirs


def answering(worker, text):
    """Let the worker answer the next question."""
    thread = threading.Thread(target=lambda: worker.send(text * len(worker.recv(1))))
    thread.start()
    return thread


def test_a_worker_that_answers(asked):
    worker, theirs = asked
    for text in (b"here", b"there"):
        thread = answering(theirs, text)
        assert worker.told(ASK_ALL, PATIENCE) == text
        thread.join()
    assert worker.told(b"", PATIENCE) == b""  # nobody has asked


def test_an_answer_that_comes_too_late_is_not_used(asked):
    worker, theirs = asked
    assert worker.told(ASK_ALL, 0.01) == b""
    theirs.send(b"late")
    assert worker.told(ASK_ALL, 0.01) == b""
    assert (theirs.recv(9), theirs.recv(9)) == (ASK_ALL, ASK_ALL)


def test_last_words_remain(asked):
    """Also of a worker that did not read the question, and has left a child."""
    worker, theirs = asked
    assert worker.told(ASK_ALL, 0.01) == b""
    theirs.send(b"late")
    theirs.send(AT_END + b"words")
    with theirs.dup():
        theirs.close()
        assert (
            worker.told(b"", PATIENCE)
            == worker.told(ASK_ALL, PATIENCE)
            == worker.told(b"", PATIENCE)
            == b"words"
        )


def test_a_worker_that_left_nothing(asked):
    worker, theirs = asked
    theirs.close()
    assert worker.told(ASK_ALL, PATIENCE) == b""


def test_a_worker_that_does_not_read(asked):
    """The questions fill the socket; the agent does not wait."""
    worker, _ = asked
    assert {worker.told(ASK_ALL, 1e-4) for _ in range(2000)} == {b""}


def test_several_threads_ask(asked):
    """None gets the answer to another one's question, and none waits forever."""
    worker, theirs = asked
    theirs.settimeout(PATIENCE)
    answers: list[bytes] = []

    def answer():
        for number in range(60):
            theirs.recv(1)
            theirs.send(b"%d" % number)

    def ask():
        answers.extend(worker.told(ASK_ALL, PATIENCE) for _ in range(20))

    threads = [threading.Thread(target=each) for each in (answer, ask, ask, ask)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(answers, key=int) == [b"%d" % number for number in range(60)]

"""The command and the agent over real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.patience import PATIENCE, until
from torchrun_hpc import limits
from torchrun_hpc.stacks import service
from torchrun_hpc.stacks.service import Service, ask, launches

pytestmark = pytest.mark.usefixtures("own_names")

NOBODY = 65534  # user
LARGE = "x" * 2**22  # more than a socket keeps for one that does not read


def names_of(launch_id):
    return [name for found, name in launches() if found == launch_id]


def connect(name):
    """Connect as anybody may who does not look at the other side."""
    opened = socket.socket(socket.AF_UNIX)
    opened.settimeout(PATIENCE)
    opened.connect(name)
    return opened


# --- an answer ------------------------------------------------------------------------


@pytest.mark.parametrize("launch_id", ["19.0", "", "19_3.0-r1", "a/b c", "x" * 300])
def test_an_answer(serve, launch_id):
    serve(launch_id, lambda: {"workers": ["ä\n", LARGE]})
    (name,) = names_of(launch_id[:60])
    for _ in range(2):
        assert ask(name, PATIENCE) == {"workers": ["ä\n", LARGE]}


def test_two_of_one_process(serve):
    """A program may launch twice at the same time: both answer."""
    first = serve("19.0", lambda: "first")
    serve("19.0", lambda: "second")
    answers = [ask(name, PATIENCE) for name in names_of("19.0")]
    assert sorted(map(str, answers)) == ["first", "second"]
    first.close()
    until(lambda: len(names_of("19.0")) == 1)
    (name,) = names_of("19.0")
    assert str(ask(name, PATIENCE)) == "second"


def test_nobody_can_take_the_name_before(serve, other_program):
    for pid in range(os.getpid() - 5, os.getpid() + 5):
        other_program(b"", pid)
    before = {*names_of("19.0")}
    serve("19.0", lambda: {"workers": []})
    (name,) = {*names_of("19.0")} - before
    assert ask(name, PATIENCE) == {"workers": []}


def test_a_launch_that_is_answering_is_one_launch(serve):
    """The accepted connection also has the name of the socket."""
    asked, answered = threading.Event(), threading.Event()

    def collect():
        asked.set()
        answered.wait(PATIENCE)
        return {}

    serve("19.0", collect)
    (name,) = names_of("19.0")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, name, PATIENCE)
        asked.wait(PATIENCE)
        try:
            assert names_of("19.0") == [name]
        finally:
            answered.set()
        assert answer.result(PATIENCE) == {}


# --- the end --------------------------------------------------------------------------


def has_ended(launch_id):
    """Wait until a service has no socket and no thread any more."""
    until(lambda: not names_of(launch_id))
    until(lambda: "stacks" not in [each.name for each in threading.enumerate()])


def test_the_end(serve):
    """A program may launch once more."""
    Service("19.0", dict).close()  # it has not begun
    for number in range(3):
        made = serve("19.0", lambda number=number: {"number": number})
        (name,) = names_of("19.0")
        assert ask(name, PATIENCE) == {"number": number}
        made.close()
        has_ended("19.0")
        with pytest.raises(ConnectionRefusedError):
            ask(name, PATIENCE)
        made.close()  # once more


def test_the_end_while_somebody_asks(serve):
    """The launch has ended: nobody waits for the answer."""
    asked, may_answer, answered = (threading.Event() for _ in range(3))

    def collect():
        asked.set()
        may_answer.wait(PATIENCE)
        answered.set()
        return {}

    made = serve("19.0", collect)
    (name,) = names_of("19.0")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, name, PATIENCE)
        asked.wait(PATIENCE)
        made.close()
        assert not answered.is_set()
        may_answer.set()
        assert answer.result(PATIENCE) == {}
    has_ended("19.0")


# --- who does not behave --------------------------------------------------------------


def test_one_that_never_reads_does_not_keep_the_next_one_waiting(serve, monkeypatch):
    monkeypatch.setattr(limits, "STACKS_READ_TIMEOUT", 0.02)
    monkeypatch.setattr(limits, "STACKS_PAUSE", 0)
    answers = iter([LARGE, "", LARGE, "last"])
    serve("19.0", lambda: {"workers": [next(answers)]})
    (name,) = names_of("19.0")
    with connect(name), connect(name), connect(name):
        assert ask(name, PATIENCE) == {"workers": ["last"]}


def test_one_that_never_reads_waits_for_less_time_than_the_next_one():

    assert 2 * limits.STACKS_READ_TIMEOUT < limits.STACKS_COMMAND_TIMEOUT


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_answer_that_cannot_be_collected(serve, monkeypatch):
    """As where no process can be started: the next one may be lucky."""
    monkeypatch.setattr(limits, "STACKS_PAUSE", 0)
    errors = [OSError, RuntimeError, StopIteration]

    def collect():
        if errors:
            raise errors.pop()
        return {"workers": []}

    serve("19.0", collect)
    (name,) = names_of("19.0")
    for _ in range(3):
        with pytest.raises(ConnectionError):
            ask(name, PATIENCE)
    assert ask(name, PATIENCE) == {"workers": []}


@pytest.fixture
def other_program():
    """Let another program of this user have the name of a launch."""
    with contextlib.ExitStack() as ending:

        def listen(answer, pid=1):
            listening = ending.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(f"\0{service._PREFIX}/{os.getuid()}/19.0/{pid}")
            listening.listen()

            def serve():
                with contextlib.suppress(OSError), listening.accept()[0] as asking:
                    asking.sendall(answer)
                    if not answer:
                        ending.push(asking.dup())

            threading.Thread(target=serve, daemon=True).start()
            return names_of("19.0")[0]

        yield listen


@pytest.mark.parametrize("answer", [b"{", b"\xff", b"no JSON"])
def test_an_answer_that_cannot_be_read(other_program, answer):
    with pytest.raises(ConnectionError):
        ask(other_program(answer), PATIENCE)


def test_no_answer(other_program):
    with pytest.raises(TimeoutError):
        ask(other_program(b""), 0.02)


def test_another_user_gets_no_answer_and_is_not_asked(serve, monkeypatch):
    collected = []
    serve("19.0", lambda: collected.append(1))
    (name,) = names_of("19.0")
    monkeypatch.setattr(service, "user_of", lambda _: NOBODY)
    with connect(name) as asking:
        assert asking.recv(1) == b""
    assert ask(name, PATIENCE) is None
    assert collected == []

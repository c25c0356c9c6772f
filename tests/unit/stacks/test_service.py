"""The command and the agent over real sockets; and other users, who get nothing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from loopback import wait_until

from torchrun_hpc.stacks import service
from torchrun_hpc.stacks.service import Service, ask, launches

pytestmark = pytest.mark.usefixtures("own_names")

LIMIT = 10.0  # seconds
NOBODY = 65534  # user and group
LARGE = "x" * 2**22  # more than a socket keeps for one that does not read


@pytest.fixture
def serve():
    """Start services that end with the test."""
    with contextlib.ExitStack() as ending:

        def serve(launch_id, collect):
            made = Service(launch_id, collect)
            ending.callback(made.close)
            made.start()
            return made

        yield serve


def names_of(launch_id):
    return [name for found, name in launches() if found == launch_id]


def connect(name):
    """Connect as anybody may who does not look at the other side."""
    opened = socket.socket(socket.AF_UNIX)
    opened.settimeout(LIMIT)
    opened.connect(name)
    return opened


# --- an answer ------------------------------------------------------------------------


@pytest.mark.parametrize("launch_id", ["19.0", "", "19_3.0-r1", "a/b c", "x" * 300])
def test_an_answer(serve, launch_id):
    serve(launch_id, lambda: {"workers": ["ä\n", LARGE]})
    (name,) = names_of(launch_id[:60])
    for _ in range(2):
        assert ask(name, LIMIT) == {"workers": ["ä\n", LARGE]}


def test_two_launches(serve):
    serve("19.0", lambda: {"launch": 0})
    serve("19.1", lambda: {"launch": 1})
    found = {launch_id: ask(name, LIMIT) for launch_id, name in launches()}
    assert found == {"19.0": {"launch": 0}, "19.1": {"launch": 1}}


def test_two_of_one_process(serve):
    """A program may launch twice at the same time: the first one answers."""
    first = serve("19.0", lambda: {"which": "first"})
    second = serve("19.0", lambda: {"which": "second"})
    (name,) = names_of("19.0")
    assert ask(name, LIMIT) == {"which": "first"}
    second.close()
    assert ask(name, LIMIT) == {"which": "first"}
    first.close()


def test_one_after_the_other_in_one_process(serve):
    for number in range(3):
        made = serve("19.0", lambda number=number: {"number": number})
        (name,) = names_of("19.0")
        assert ask(name, LIMIT) == {"number": number}
        made.close()
        has_ended("19.0")


def test_it_answers_several_one_after_the_other(serve):
    serve("19.0", lambda: {"workers": []})
    (name,) = names_of("19.0")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(name, LIMIT), range(32)))
    assert answers == [{"workers": []}] * 32


def test_a_launch_that_is_answering_is_one_launch(serve):
    """The connection that it has accepted has the name of the socket, too."""
    asked, answered = threading.Event(), threading.Event()

    def collect():
        asked.set()
        answered.wait(LIMIT)
        return {}

    serve("19.0", collect)
    (name,) = names_of("19.0")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, name, LIMIT)
        asked.wait(LIMIT)
        try:
            assert names_of("19.0") == [name]
        finally:
            answered.set()
        assert answer.result(LIMIT) == {}


def test_there_is_no_launch():
    assert list(launches()) == []


# --- the end --------------------------------------------------------------------------


def has_ended(launch_id):
    """Wait until a service has no socket and no thread any more."""
    wait_until(lambda: not names_of(launch_id))
    wait_until(lambda: "stacks" not in [each.name for each in threading.enumerate()])


def test_the_end(serve):
    made = serve("19.0", dict)
    (name,) = names_of("19.0")
    made.close()
    has_ended("19.0")
    with pytest.raises(ConnectionRefusedError):
        ask(name, LIMIT)
    made.close()  # once more


def test_the_end_without_a_beginning():
    Service("19.0", dict).close()


def test_the_end_while_somebody_asks(serve):
    """The launch has ended: nobody waits for the answer."""
    asked, answered = threading.Event(), threading.Event()

    def collect():
        asked.set()
        answered.wait(LIMIT)
        return {}

    made = serve("19.0", collect)
    (name,) = names_of("19.0")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, name, LIMIT)
        asked.wait(LIMIT)
        start = time.monotonic()
        made.close()
        assert time.monotonic() - start < 1
        answered.set()
        assert answer.result(LIMIT) == {}
    has_ended("19.0")


# --- who does not behave --------------------------------------------------------------


def test_one_that_goes_without_an_answer(serve):
    serve("19.0", lambda: {"workers": [LARGE]})
    (name,) = names_of("19.0")
    for _ in range(3):
        connect(name).close()
    assert ask(name, LIMIT) == {"workers": [LARGE]}


@pytest.mark.parametrize("answer", ["", LARGE])
def test_one_that_never_reads_does_not_keep_the_next_one_waiting(
    serve, monkeypatch, answer
):
    monkeypatch.setattr(service, "_TIMEOUT", 0.5)
    serve("19.0", lambda: {"workers": [answer]})
    (name,) = names_of("19.0")
    start = time.monotonic()
    with connect(name), connect(name):
        assert ask(name, LIMIT) == {"workers": [answer]}
    assert time.monotonic() - start < 5


def test_one_that_never_reads_waits_for_less_time_than_the_next_one():
    from torchrun_hpc.stacks import __main__ as command  # noqa: PLC0415

    assert 2 * service._TIMEOUT < command._TIMEOUT


@pytest.mark.parametrize("error", [OSError, RuntimeError, StopIteration])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_answer_that_cannot_be_collected(serve, error):
    """As where no process can be started: the next one may be lucky."""
    answers = [{"workers": []}, None]

    def collect():
        answer = answers.pop()
        if answer is None:
            raise error
        return answer

    serve("19.0", collect)
    (name,) = names_of("19.0")
    with pytest.raises(ConnectionError):
        ask(name, 2)
    assert ask(name, 2) == {"workers": []}


@pytest.fixture
def other_program():
    """Let another program of this user have the name of a launch."""
    with contextlib.ExitStack() as ending:

        def listen(answer):
            listening = ending.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(f"\0{service._PREFIX}/{os.getuid()}/19.0/1")
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
        ask(other_program(answer), LIMIT)


def test_no_answer(other_program):
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        ask(other_program(b""), 0.5)
    assert time.monotonic() - start < 5


# --- other users ----------------------------------------------------------------------


def bytes_of(name):
    """Return what the service sends, whoever has it."""
    with connect(name) as asking:
        return b"".join(iter(lambda: asking.recv(2**16), b"")).decode()


def result_of_ask(name):
    try:
        return ask(name, LIMIT)
    except OSError as error:
        return type(error).__name__


def test_another_user_gets_no_answer(serve, as_nobody):
    collected = []
    serve("19.0", lambda: collected.append(1))
    (name,) = names_of("19.0")
    assert bytes_of(name) == "null"
    assert as_nobody(bytes_of, name) == ""
    assert len(collected) == 1  # nor is anything looked at
    assert bytes_of(name) == "null"


def test_launches_of_other_users_are_not_found(serve, as_nobody):
    serve("19.0", dict)
    assert as_nobody(names_of, "19.0") == []


def test_the_agent_of_another_user_is_not_asked(serve, as_nobody):
    """Whatever its name, and also if it would answer."""
    serve("19.0", dict)
    (name,) = names_of("19.0")
    assert as_nobody(result_of_ask, name) == "PermissionError"


@pytest.mark.usefixtures("pretender")
def test_another_user_may_not_pretend_to_be_this_one():
    """Everybody may take a name. What stands there is not even read."""
    (name,) = names_of("19.0")
    with pytest.raises(PermissionError):
        ask(name, LIMIT)


def test_root_may_ask_everybody(beside_nobody):
    """It can look at every process all the same."""

    def serve(ready, wait):
        made = Service("19.0", lambda: {"user": os.getuid()})
        made.start()
        ready()
        wait()

    with beside_nobody(serve):
        prefix = f"{service._PREFIX}/{NOBODY}/19.0/"
        number = service._SOCKETS.read_text().partition(prefix)[2].splitlines()[0]
        assert json.loads(bytes_of(f"\0{prefix}{number}")) == {"user": NOBODY}

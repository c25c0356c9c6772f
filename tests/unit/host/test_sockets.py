"""Names that one process of a user holds, and what other users do to them."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from torchrun_hpc import limits
from torchrun_hpc.host.sockets import hold, user_of


@pytest.fixture
def what(request):
    return f"{request.node.name} by process {os.getpid()}"


def is_held(what):
    try:
        hold(what).close()
    except BlockingIOError:
        return True
    return False


def test_one_process_at_a_time(what):
    with hold(what):
        assert is_held(what)
        assert not is_held(f"{what}, another one")
    assert not is_held(what)


def test_many_at_once(what):
    """Some find the name before its holder listens."""

    def try_to_hold(_):
        with suppress(BlockingIOError):
            return hold(what)

    with ThreadPoolExecutor(16) as pool:
        for _ in range(20):
            holders = [*filter(None, pool.map(try_to_hold, range(16)))]
            assert len(holders) == 1
            holders[0].close()


def test_any_text_is_a_name(what):
    with hold(f"{what} {chr(0xDC80)} {'x' * 1000}"):
        assert is_held(f"{what} {chr(0xDC80)} {'x' * 1000}")


def test_the_user_of_a_connection():
    one, other = socket.socketpair()
    with one, other:
        assert user_of(one) == user_of(other) == os.getuid()


# How another user takes a name: a socket with this name, and perhaps a full backlog.
SQUATTERS = {
    "it listens": (socket.SOCK_STREAM, 4096),
    "it lets all others wait": (socket.SOCK_STREAM, 0),
    "it does not listen": (socket.SOCK_STREAM, None),
    "it is of another type": (socket.SOCK_DGRAM, None),
}


@pytest.mark.parametrize("case", SQUATTERS)
def test_a_name_of_another_user_holds_nobody(what, case, beside_nobody):
    kind, backlog = SQUATTERS[case]
    with hold(what) as held:
        name = held.getsockname()

    def squat(ready, wait):
        with socket.socket(socket.AF_UNIX, kind) as taken:
            taken.bind(name)
            if backlog is not None:
                taken.listen(backlog)
            ready()
            wait()

    with beside_nobody(squat):
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for each in waiting * (backlog == 0):
            each.settimeout(0)
            with suppress(BlockingIOError):
                each.connect(name)
        assert not is_held(what)
        for each in waiting:
            each.close()
    with hold(what) as held:
        assert held.getsockname() == name
    assert limits.LISTEN_TIMEOUT < 1  # a fault is reported after this time

"""Handlers of SIGUSR1 and SIGUSR2; what is forwarded needs workers: tests/more."""

from __future__ import annotations

import signal
import threading

import pytest

from torchrun_hpc.agent import signals

USR1 = signal.SIGUSR1


def theirs(_number, _frame):
    """Stand for a handler of the program's own."""


@pytest.mark.parametrize("handler", [theirs, signal.SIG_IGN])
def test_handlers_of_others_stay(handler):
    before = signal.signal(USR1, handler)
    forwarder = signals._Forwarder()
    try:
        forwarder.install()
        assert signal.getsignal(USR1) is handler
        forwarder.leave_to_torch(["SIGUSR1"])
        forwarder.uninstall()
        assert signal.getsignal(USR1) is handler
    finally:
        signal.signal(USR1, before)


def test_a_thread_installs_none():
    forwarder = signals._Forwarder()
    thread = threading.Thread(target=forwarder.install)
    thread.start()
    thread.join()
    assert signal.getsignal(USR1) == signal.SIG_DFL
    forwarder.begin(scheduled=True)
    assert forwarder._probe is None

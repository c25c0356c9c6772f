"""What holds for all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Take Ctrl-C also where a shell has started the tests behind `&`.

    There SIGINT is ignored, and so it would be in every program that a test starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

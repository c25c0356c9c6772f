"""Health checks of a node: a user's command before each round."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING

from torchrun_hpc import waiting
from torchrun_hpc.failures.failure import ending
from torchrun_hpc.failures.worker import end_of, exit_code_of
from torchrun_hpc.wire import printable

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST = 150  # characters of its last line
_KILL_TIMEOUT = 5  # seconds for a killed command to end


def check(command: str, limit: float, is_over: Callable[[], object]) -> str:
    """Run a command for ``/bin/sh``; return why the node is unhealthy, or nothing.

    Kill it and its children after ``limit`` seconds, or if the job is over.
    """
    try:
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        process = subprocess.Popen(  # noqa: S602 - the user's own command
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return f"its health check cannot be started: {error.strerror}"
    try:
        waiting.until(lambda: exit_code_of(process.pid) is not None or is_over(), limit)
    finally:
        code = exit_code_of(process.pid)
        with suppress(OSError):  # before it is collected: nobody else has its id
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # the kernel keeps it
            process.wait(_KILL_TIMEOUT)
    with output:
        text = end_of(output.fileno()).decode(errors="backslashreplace")
    texts = [line.strip() for line in text.splitlines() if line.strip()]
    last = f": {printable(texts[-1], _LONGEST)}" if texts else ""
    if code is None:
        return f"its health check did not end within {limit:g} s{last}"
    return f"its health check {ending(code)}{last}" if code else ""

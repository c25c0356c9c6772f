"""Health checks of a node: a user's command before each round."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress

from torchrun_hpc.failures.failure import ending
from torchrun_hpc.failures.worker import end_of, exit_code_of
from torchrun_hpc.wire import printable

_LONGEST = 150  # characters of its last line
_KILL_TIMEOUT = 5  # seconds for a killed command to end


class HealthCheck:
    """A running health check: a command for ``/bin/sh``, and its limit in seconds."""

    def __init__(self, command: str, limit: float) -> None:
        self._limit = limit
        self._end = time.monotonic() + limit
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(  # noqa: S602 - the user's own command
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def has_ended(self) -> bool:
        """Whether it has ended or has no time left."""
        code = exit_code_of(self._process.pid)
        return code is not None or time.monotonic() > self._end

    def end(self) -> str:
        """End it and its children; return why the node is unhealthy, or nothing."""
        code = exit_code_of(self._process.pid)
        with suppress(OSError):  # before it is collected: nobody else has its id
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # the kernel keeps it
            self._process.wait(_KILL_TIMEOUT)
        with self._output:
            text = end_of(self._output.fileno()).decode(errors="backslashreplace")
        texts = [line.strip() for line in text.splitlines() if line.strip()]
        last = f": {printable(texts[-1], _LONGEST)}" if texts else ""
        if code is None:
            return f"its health check did not end within {self._limit:g} s{last}"
        return f"its health check {ending(code)}{last}" if code else ""

"""Steps of Slurm that run beside a test."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from commands import ENVIRON, ONE_TASK, SCRIPTS
from waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed import Cluster

AGENT = [sys.executable, str(SCRIPTS / "agent.py")]
# Seconds: one, and what a busy machine needs to end a Python that has imported torch.
SOON = 4
LATE = "test $SLURM_NODEID = {node} && exec sleep 60; exec "


class Step:
    """A step that runs beside the test."""

    def __init__(self, cluster: Cluster, *argv: str) -> None:
        self.cluster = cluster
        self.program = cluster.popen(
            ["srun", "-N3", ONE_TASK, *argv], env=ENVIRON, stderr=subprocess.STDOUT
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.program.stdout is not None
        for line in self.program.stdout:
            self.output += line

    def says(self, text: str, timeout: float = PATIENCE) -> str:
        """Wait for a line with some text, and return all there is."""
        end = time.monotonic() + timeout
        while not re.search(text, self.output):
            assert time.monotonic() < end, f"no {text!r} in:\n{self.output}"
            assert self.program.poll() is None or text in self.output, self.output
            time.sleep(0.05)
        return self.output

    def end(self, timeout: float = 60) -> int:
        """Wait for its end, and return the exit code."""
        code = self.program.wait(timeout)
        self._reader.join(5)
        return code

    def agent(self, host: str, *args: str) -> str:
        """Do something to the agent on a node; see scripts/agent.py."""
        done = self.cluster.run([*AGENT, *args], host=host, env=ENVIRON, check=True)
        return done.stdout.strip()


@contextlib.contextmanager
def step(cluster: Cluster, *argv: str) -> Iterator[Step]:
    """Start a step, and end it in any case."""
    started = Step(cluster, *argv)
    try:
        yield started
    finally:
        cluster.end(started.program)

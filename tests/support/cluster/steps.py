"""Steps of Slurm that run beside a test."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from tests.support.cluster.commands import ENVIRON, ONE_TASK, SCRIPTS
from tests.support.patience import NEVER_S, PATIENCE, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from typing_extensions import Self

    from tests.support.cluster.testbed import Cluster

AGENT = [sys.executable, str(SCRIPTS / "agent.py")]
# Before a command: this node never comes to it.
LATE = f"test $SLURM_NODEID = {{node}} && exec sleep {NEVER_S}; exec "


class Step:
    """A step that runs beside the test, and ends with its block.

    Args:
        cluster: Where.
        *argv: The command, in one task on each node.
        nodes: How many nodes.
        environ: Variables beside `ENVIRON`.
        cwd: The working directory.
    """

    def __init__(
        self,
        cluster: Cluster,
        *argv: str,
        nodes: int = 3,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.cluster = cluster
        self.program = cluster.popen(
            ["srun", f"-N{nodes}", ONE_TASK, *argv],
            env=ENVIRON | dict(environ or {}),
            cwd=cwd,
            stderr=subprocess.STDOUT,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.end(self.program)
        print(self.output)  # shown if the test fails

    def _read(self) -> None:
        assert self.program.stdout is not None
        for line in self.program.stdout:
            self.output += line

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds, as long as the step runs."""
        seen = until(
            lambda: (condition() and "it holds") or self._has_ended(),
            lambda: self.output,
        )
        assert seen == "it holds" or condition(), self.output

    def _has_ended(self) -> bool:
        ended = self.program.poll() is not None
        if ended:
            self._reader.join(PATIENCE)
        return ended

    def says(self, text: str) -> str:
        """Wait for a line with some text, and return all there is."""
        self.wait(lambda: re.search(text, self.output))
        return self.output

    def end(self) -> int:
        """Wait for its end, and return the exit code."""
        until(self._has_ended, lambda: self.output)
        return self.program.returncode

    def agent(self, host: str, *args: str) -> str:
        """Do something to the agent on a node; see scripts/agent.py."""
        done = self.cluster.run([*AGENT, *args], host=host, env=ENVIRON, check=True)
        return done.stdout.strip()

    def send(self, host: str, name: str) -> None:
        """Send a signal to the agent on a node, and see that it ends."""
        ended = self.agent(host, name, str(PATIENCE))
        assert ended not in {"none", "alive"}, f"{host}: {ended}\n{self.output}"

    def launch_id_and_port(self) -> tuple[str, str]:
        """Return the launch's id, and the port of the head node, n9."""
        said = self.says(r" at n9:\d+")
        ((launch_id, port),) = re.findall(r"Slurm (\S+?);.* at n9:(\d+)", said)
        return launch_id, port

    @contextlib.contextmanager
    def hostile(self, folder: Path, *places: str) -> Iterator[dict[str, int]]:
        """Let somebody else's program do what it can; see scripts/hostile.py.

        Args:
            folder: Where it would leave a marker, if anybody ran what it sends.
            places: The addresses of this job's ports.

        Yields:
            What it did, while its connections are open.
        """
        marker = folder / "marker"
        launch_id, _ = self.launch_id_and_port()
        words = (sys.executable, SCRIPTS / "hostile.py", marker, launch_id, *places)
        program = self.cluster.popen(words, host="n9", env=ENVIRON, stderr=None)
        try:
            assert program.stdout is not None
            did = json.loads(program.stdout.readline())
            yield did
        finally:
            self.cluster.end(program)
        expected = {"held": 300, "pretended": 27, "disclosed": 0}
        assert did["garbage"] >= 11, (did, self.output)
        assert {name: did[name] for name in expected} == expected, self.output
        assert self.output.count("HPC237]: ignored 10.10.0.1, which") == 1, self.output
        assert not marker.exists(), self.output
        assert "Traceback" not in self.output, self.output

    def see_end(self, *hosts: str) -> None:
        """See that the agents on some nodes end."""
        for host in hosts:
            ended = self.agent(host, "wait", str(PATIENCE))
            assert ended != "alive", f"{host}: {ended}\n{self.output}"

    def joins(self, host: str) -> None:
        """Wait until the head node has answered the agent on a node."""
        (port,) = set(
            re.findall(r"(?:meeting|rendezvous) at \w+:(\d+)", self.says(" at "))
        )
        asked = ["ss", "-Htin", "state", "established", f"dport = :{port}"]
        self.wait(
            lambda: "bytes_received:" in self.cluster.run(asked, host=host).stdout
        )

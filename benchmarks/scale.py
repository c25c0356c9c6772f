"""A job of many nodes, for real: it starts, restarts, fails, and ends well.

    python benchmarks/scale.py [NODES]

On a test cluster of 64 nodes (root, see tests/support), or of NODES. Each has one agent
and one worker, a fork. A first job restarts once, stays at rest for 20 s, and ends
well. A second one fails. Prints how long each step takes, and what the nodes have while
the first job is at rest. On two cores it takes five minutes. A node needs 250 MiB.
Fails if a job does not end as it should, or if its messages fill more than a screen.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from usage import agents, usage  # noqa: E402

from tests.support.cluster.testbed import Cluster, missing  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from usage import Usage

NODES = 64
REST = 20  # seconds
SCREEN = 24  # lines
PATIENCE = 1800  # seconds, for each step
NEIGHBOURS = Path("/proc/sys/net/ipv4/neigh/default")

# Says when all have met, in each attempt.
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
folder, attempt = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
rank, last = dist.get_rank(), dist.get_world_size() - 1
if rank == 0:
    (folder / f"met.{attempt}").touch()
while not (folder / "end").exists():
    if rank == last and (folder / f"fail.{attempt}").exists():
        raise RuntimeError("this worker was told to fail")
    time.sleep(0.2)
dist.barrier()
dist.destroy_process_group()
time.sleep(0.2)  # gloo's threads outlive it: see examples/ddp.py
"""


class Job:
    """A job on all nodes of a cluster, whose workers look into a folder."""

    def __init__(self, cluster: Cluster, folder: Path, *options: str) -> None:
        self._folder = folder
        folder.mkdir()
        script = folder / "script.py"
        script.write_text(SCRIPT, encoding="utf-8")
        self._stderr = (folder / "stderr").open("w+", encoding="utf-8")
        self._begin = time.monotonic()
        self._process = cluster.popen(
            ["srun", f"--nodes={len(cluster.names)}", "--ntasks-per-node=1",
             "--kill-on-bad-exit=0", "python", "-m", "torchrun_hpc",
             *options, str(script), str(folder)],
            env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=self._stderr,
        )  # fmt: skip

    def seconds(self) -> float:
        """Return the seconds since the last call."""
        now = time.monotonic()
        passed, self._begin = now - self._begin, now
        print(f"{passed:.1f} s", flush=True)
        return round(passed, 1)

    def has(self, name: str) -> float:
        """Wait until the workers have made a file; return for how long."""
        deadline = time.monotonic() + PATIENCE
        while not (self._folder / name).exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the job has ended early, or hangs:\n{self.messages()}")
            time.sleep(0.1)
        return self.seconds()

    def tell(self, name: str) -> None:
        """Make a file that the workers look for."""
        self.seconds()
        (self._folder / name).touch()

    def end(self) -> tuple[int, float]:
        """Wait for the job's end; return its exit code, and for how long."""
        return self._process.wait(PATIENCE), self.seconds()

    def messages(self) -> str:
        """Return what all nodes have printed."""
        return (self._folder / "stderr").read_text(encoding="utf-8")


def main() -> None:
    """Measure, report, and judge."""
    reason = missing()
    if reason is not None:
        sys.exit(f"this needs the test cluster: {reason}")
    number = int(sys.argv[1]) if len(sys.argv) > 1 else NODES
    names = [f"n{k:03}" for k in range(1, number + 1)]
    with (
        tempfile.TemporaryDirectory() as folder,
        _neighbours(2 * (number + 2) ** 2),
        Cluster(names, management="open", fast_names=str) as cluster,
    ):
        found = _lives(cluster, Path(folder, "lives"))
        found |= _fails(cluster, Path(folder, "fails"))
    for name, value in found.items():
        print(f"{name}: {value}")


@contextmanager
def _neighbours(number: int) -> Iterator[None]:
    """Make room in the kernel's table of neighbours, which all hosts share."""
    files = [NEIGHBOURS / f"gc_thresh{k}" for k in (3, 2, 1)]
    before = [file.read_text(encoding="ascii") for file in files]
    for file in files:
        file.write_text(str(max(number, int(before[0]))), encoding="ascii")
    try:
        yield
    finally:
        for file, text in zip(files[::-1], before[::-1], strict=True):
            file.write_text(text, encoding="ascii")


def _lives(cluster: Cluster, folder: Path) -> dict[str, Any]:
    job = Job(cluster, folder, "--max-restarts=1")
    found = {"start": job.has("met.0")}
    job.tell("fail.0")
    found["restart"] = job.has("met.1")
    before = cluster.foreign_bytes(cluster.fast)
    time.sleep(REST)
    after = cluster.foreign_bytes(cluster.fast)
    took = job.seconds()
    rates = [(after[name] - before[name]) / took for name in cluster.names]
    nodes = {name: usage(agent) for name, agent in agents(cluster.names)}
    job.tell("end")
    code, found["end"] = job.end()
    print(job.messages())
    if code or len(nodes) != len(cluster.names):
        sys.exit(f"exit code {code}, {len(nodes)} agents")
    head, *others = (nodes[name] for name in cluster.names)
    found["bytes per second, head node"] = round(rates[0])
    found["bytes per second, other nodes"] = round(statistics.mean(rates[1:]))
    return found | _taken("head node", [head]) | _taken("other nodes", others)


def _fails(cluster: Cluster, folder: Path) -> dict[str, Any]:
    job = Job(cluster, folder)
    job.has("met.0")
    job.tell("fail.0")
    code, seconds = job.end()
    print(job.messages())
    lines = sum(not line.startswith("srun: ") for line in job.messages().splitlines())
    if code != 1 or lines > SCREEN:
        sys.exit(f"exit code {code}, {lines} lines")
    return {"failure": seconds, "lines": lines}


def _taken(title: str, nodes: list[Usage]) -> dict[str, Any]:
    """Return the largest of each value."""
    return {
        f"{title}, {name}": round(max(getattr(node, name) for node in nodes))
        for name in ("private", "shared", "files", "threads")
    }


if __name__ == "__main__":
    main()

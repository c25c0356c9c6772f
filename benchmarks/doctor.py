"""The doctor's pairs on many simulated nodes: seconds, and bytes at node 0.

    python benchmarks/doctor.py [--nodes 32,64,128]

Each node is a process; node 0 is this one. They measure each other on loopback, so all
share the cores of one machine, and the figures of links mean nothing here: what takes
time on a cluster is that each pair sends for 0.3 s. No node looks at itself, and
torch is not there. Runs in a network namespace of its own (``unshare``).

Fails if 128 nodes take more than 60 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torchrun_hpc.doctor.board import Board, met
from torchrun_hpc.doctor.conductor import Conductor
from torchrun_hpc.doctor.examiner import Examiner, Options, TaskRecord
from torchrun_hpc.doctor.link import Links
from torchrun_hpc.doctor.place import Place
from torchrun_hpc.doctor.results import no_torch
from torchrun_hpc.options.values import SCHEDULER
from torchrun_hpc.planning.meeting import KeyFile, Meeting
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.rendezvous.key import Key
from torchrun_hpc.schedulers.job import Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchrun_hpc.doctor.results import Node, Torch
    from torchrun_hpc.doctor.workers import Workers

NODES = (32, 64, 128)
LIMITS = {128: 60.0}  # seconds
HOST, PORT = "127.0.0.1", 20000
MTU = 65536
_INSIDE = "--inside-the-namespace"


class Counted(Board):
    """A board that counts what this node puts there."""

    size = 0

    def put(self, key: str, value: Any) -> None:
        """Set a value."""
        self.size += len(key) + len(json.dumps(value))
        super().put(key, value)


class NoWorkers:
    """No torch."""

    def torch(self, _timeout: float) -> Torch:
        """Return that there is none."""
        return no_torch("none")


class SimulatedNode(Examiner):
    """A node that shows nothing of itself but where it is."""

    def look(self, _environ: Mapping[str, str]) -> TaskRecord:
        """Return where it is."""
        rank = self.here.task.rank
        shown: Any = {
            "rank": rank,
            "host": f"n{rank:04}",
            "address": HOST,
            "interface": "lo",
            "port": self._links.port,
            "interfaces": [
                {"name": "lo", "addresses": [HOST], "is_up": True, "mtu": MTU,
                 "speed_mbit": 0},
            ],
            "names": {}, "routes": {}, "fast_host": "", "workers": 1,
            "wants_gpus": False, "resolver": "unknown",
            "resolver_s": 0.0, "limits": {}, "folders": [], "cpus": "", "cores": 0,
            "gpus": [], "driver": "", "versions": {}, "torch": None, "variables": {},
            "findings": [],
        }  # fmt: skip
        return TaskRecord(
            rank=rank,
            node_rank=rank,
            workers=1,
            host=f"n{rank:04}",
            address=HOST,
            port=0,
            node=cast("Node", shown),
        )


class Timed(Conductor):
    """It knows how long the pairs have taken."""

    seconds = 0.0

    def _measure_pairs(self, board: Board) -> None:
        start = time.monotonic()
        super()._measure_pairs(board)
        self.seconds = time.monotonic() - start


def place_of(nodes: int, rank: int) -> Place:
    """Return where a node is, and where all meet."""
    hosts = tuple(f"n{number:04}" for number in range(nodes))
    meeting = Meeting(
        backend=SCHEDULER,
        nodes=nodes,
        node_rank=rank,
        launch_id="benchmark",
        hosts=hosts,
        endpoint=f"{HOST}:{PORT}",
        connect_host=HOST,
        ports=(PORT,),
        coordinator=0,
        is_coordinator=rank == 0,
        local_address=HOST,
        listen=(HOST, PORT) if rank == 0 else None,
    )
    return Place(
        mode=Mode.SEVERAL_NODES,
        meeting=meeting,
        tasks_meeting=meeting,
        task=Task(rank, nodes),
        node_rank=rank,
        workers=1,
        hostname=hosts[rank],
    )


@contextlib.contextmanager
def introduced(nodes: int, rank: int) -> Iterator[tuple[SimulatedNode, Counted]]:
    """Let a node meet the others, and yield it, and what it tells them by."""
    here, nobody = place_of(nodes, rank), cast("Workers", NoWorkers())
    key = Key(KeyFile(), "benchmark")
    with (
        contextlib.closing(Links(key, HOST)) as links,
        met(here.tasks_meeting, {}, 120, lambda _: None) as board,
    ):
        node = SimulatedNode(here, Options(), links, nobody)
        counted = Counted(board._client)  # noqa: SLF001
        node.introduce(counted, {})
        yield node, counted


def follow(nodes: int, rank: int) -> None:
    """Take part as one node that is not the first."""
    with introduced(nodes, rank) as (node, board):
        node.follow(board)


def measure(nodes: int) -> float:
    """Measure one number of nodes, and print it; return the seconds."""
    processes = [
        multiprocessing.Process(target=follow, args=[nodes, rank])
        for rank in range(1, nodes)
    ]
    for process in processes:
        process.start()
    with introduced(nodes, 0) as (node, board):
        conductor = Timed(node, lambda _: None)
        links = conductor.conduct(board)["links"]
    for process in processes:
        process.join()
    failed = sum(bool(link["problem"]) for link in links)
    size = len(json.dumps(links)) / max(len(links), 1)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"{nodes:5} {len(links):6} {failed:6} {conductor.seconds:8.1f} {size:8.0f} "
        f"{board.size / 2**10:10.0f} {memory:7}",
        flush=True,
    )
    return conductor.seconds


def main() -> int:
    """Measure all numbers of nodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default=",".join(map(str, NODES)))
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.inside_the_namespace:
        shell = f'ip link set lo up; exec {sys.executable} "$0" "$@"'
        words = [str(Path(__file__)), *sys.argv[1:], _INSIDE]
        unshare = shutil.which("unshare") or "unshare"
        os.execv(unshare, ["unshare", "--net", "sh", "-c", shell, *words])  # noqa: S606
    print("nodes  pairs failed  seconds  B/pair  KiB put  MiB node 0")
    seconds = {nodes: measure(nodes) for nodes in map(int, args.nodes.split(","))}
    late = {n: s for n, s in seconds.items() if s > LIMITS.get(n, float("inf"))}
    for nodes, taken in late.items():
        print(f"{nodes} nodes took {taken:.0f} s, the limit is {LIMITS[nodes]:.0f}")
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())

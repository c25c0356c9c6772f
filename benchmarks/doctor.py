"""The doctor's pairs on many simulated nodes: seconds, and memory of node 0.

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
from typing import TYPE_CHECKING

from torchrun_hpc import wire
from torchrun_hpc.doctor.conductor import Conductor
from torchrun_hpc.doctor.examination import Examinee
from torchrun_hpc.doctor.place import Place
from torchrun_hpc.doctor.results import InterfaceReport, NodeReport
from torchrun_hpc.options.options import Options
from torchrun_hpc.options.values import SCHEDULER
from torchrun_hpc.planning.meeting import Meeting
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.preflight import Preflight
from torchrun_hpc.rendezvous.client import Listener
from torchrun_hpc.rendezvous.connection import Connection
from torchrun_hpc.rendezvous.protocol import Settings
from torchrun_hpc.schedulers.job import Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrun_hpc.rendezvous.client import Client

NODES = (32, 64, 128)
LIMITS = {128: 60.0}  # seconds
HOST, PORT = "127.0.0.1", 20000
MTU = 65536
_INSIDE = "--inside-the-namespace"


class SimulatedNode(Examinee):
    """A node that shows nothing of itself but where it is."""

    def look(self) -> NodeReport:
        """Return where it is."""
        return NodeReport(
            rank=self.place.node_rank,
            host=self.place.host,
            address=HOST,
            interface="lo",
            fast_host="",
            port=self._links.port if self._links else 0,
            workers=1,
            interfaces=(InterfaceReport("lo", (HOST,), True, MTU, 0),),  # noqa: FBT003
            names={},
            routes={},
            resolver_s=0.0,
            limits={},
            folders=(),
            cpus="",
            cores=0,
            gpus=(),
            driver="",
            versions={},
            variables={},
        )


class Timed(Conductor):
    """It knows how long the pairs have taken, and launches nothing."""

    seconds = 0.0

    def _measure_pairs(self) -> None:
        start = time.monotonic()
        super()._measure_pairs()
        self.seconds = time.monotonic() - start

    def _launch(self) -> None:
        """Do nothing."""


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
        facts=Preflight(None, None, {}, hosts[rank], "COMMAND"),
        mode=Mode.SEVERAL_NODES,
        meeting=meeting,
        tasks_meeting=meeting,
        task=Task(rank, nodes),
        node_rank=rank,
        options=(),
        asked=Options(),
    )


@contextlib.contextmanager
def met(nodes: int, rank: int) -> Iterator[tuple[SimulatedNode, Client]]:
    """Let a node meet the others, and yield it, and its connection to them."""
    place = place_of(nodes, rank)
    node = SimulatedNode(place)
    settings = Settings("doctor", nodes, 0, silence_timeout=3600, join_timeout=3600)
    connection = Connection(
        place.tasks_meeting, settings, {}, Listener(), replies=node.replies
    )
    node.key = connection.key
    try:
        client = connection.open(120)
        yield node, client
    finally:
        node.close()
        connection.close()


def follow(nodes: int, rank: int) -> None:
    """Take part as one node that is not the first."""
    with met(nodes, rank) as (node, client):
        client.until(node.ended.is_set)


def measure(nodes: int) -> float:
    """Measure one number of nodes, and print it; return the seconds."""
    processes = [
        multiprocessing.Process(target=follow, args=[nodes, rank])
        for rank in range(1, nodes)
    ]
    for process in processes:
        process.start()
    with met(nodes, 0) as (node, client):
        conductor = Timed(node.place, lambda _: None)
        links = conductor.conduct(client).links
    for process in processes:
        process.join()
    failed = sum(bool(link.problem) for link in links)
    size = len(json.dumps([*map(wire.encode, links)])) / max(len(links), 1)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"{nodes:5} {len(links):6} {failed:6} {conductor.seconds:8.1f} {size:8.0f} "
        f"{memory:7}",
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
    print("nodes  pairs failed  seconds  B/pair  MiB node 0")
    seconds = {nodes: measure(nodes) for nodes in map(int, args.nodes.split(","))}
    late = {n: s for n, s in seconds.items() if s > LIMITS.get(n, float("inf"))}
    for nodes, taken in late.items():
        print(f"{nodes} nodes took {taken:.0f} s, the limit is {LIMITS[nodes]:.0f}")
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())

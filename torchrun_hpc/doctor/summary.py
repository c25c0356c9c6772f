"""The report, made from all records."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from torchrun_hpc import __version__
from torchrun_hpc.doctor import checks, compute, judgement
from torchrun_hpc.doctor.results import SCHEMA, Finding, Report, printable, worst_first
from torchrun_hpc.errors import on_one_line
from torchrun_hpc.host import network
from torchrun_hpc.names import fold_ranks, host, ranges
from torchrun_hpc.preload.imports import NO_TORCH

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrun_hpc.doctor.place import Place
    from torchrun_hpc.doctor.results import Collective, Link, Node, Worker
    from torchrun_hpc.planning.meeting import Meeting

_PROBED = 10  # absent nodes
_PROBE_TIMEOUT = 2.0  # seconds
_UNHEARD = "look at its output. If it has none, the launcher did not start the doctor"


@dataclass
class Found:
    """The records of an examination so far.

    Attributes:
        nodes: Records of the nodes, by rank.
        causes: Why a launch ended too early: texts, with the nodes to blame.
        said: Node ranks by the launcher's message there: code, text, and whether it
            refused to start.
        missing: Ranks of the tasks that are absent, or whose reply has another form.
        hung: When nodes stopped responding, by rank.
        started: Start time, in seconds since the epoch.
    """

    nodes: dict[int, Node] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    rows: list[Collective] = field(default_factory=list)
    backend: str = ""
    causes: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    said: dict[tuple[str, str, bool], set[int]] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    hung: dict[int, str] = field(default_factory=dict)
    started: float = field(default_factory=time.time)

    def hosts(self, where: Meeting) -> list[str]:
        """Return the names of all nodes, by rank; empty if unknown."""
        hosts = [*where.hosts] or [""] * where.nodes
        for node in self.nodes.values():
            hosts[node.rank] = node.host or hosts[node.rank]
        return hosts


def report(found: Found, here: Place, timeout: float) -> Report:
    """Return the report; `timeout` is the number of seconds for the nodes to join."""
    where, nodes = here.meeting, [found.nodes[rank] for rank in sorted(found.nodes)]
    hosts = found.hosts(where)
    links = [x for x in found.links if not {x.first, x.second} & found.hung.keys()]
    findings = [
        *_absent(found, here, hosts, timeout),
        *judgement.findings(links, hosts),
        *compute.findings(found.workers, found.nodes, hosts),
        *checks.findings(nodes, hosts),
        *_of_launcher(found, hosts),
        *judgement.of_collectives(found.rows, found.causes),
    ]
    started = datetime.fromtimestamp(int(found.started), timezone.utc)
    return printable(
        Report(
            schema=SCHEMA,
            launch_id=where.launch_id,
            site=str(where.site.value) if where.site else "",
            scheduler=here.job.scheduler if here.job else "",
            started=started.isoformat(),
            seconds=time.time() - found.started,
            torchrun_hpc=__version__,
            backend=found.backend,
            hosts=tuple(hosts),
            nodes=tuple(nodes),
            links=tuple(found.links),
            workers=tuple(sorted(found.workers, key=lambda worker: worker.rank)),
            collectives=tuple(found.rows),
            findings=worst_first(findings),
        )
    )


def _absent(
    found: Found, here: Place, hosts: Sequence[str], timeout: float
) -> Iterator[Finding]:
    absent = [rank for rank in range(len(hosts)) if rank not in found.nodes]
    who = [(f"{host(rank, hosts)} did not join", [rank]) for rank in absent]
    hint = closed = ""
    if 1 < len(absent) == len(hosts) - 1:  # this one is perhaps not reachable
        where, hint = here.meeting.endpoint, here.meeting.network_hint
        closed = f". The network of {where} ({here.meeting.interface}) may be closed"
        who = [("no other node joined", [])]
    if here.mode.is_direct:
        who.append((f"some tasks ({ranges(found.missing)}) did not join", []))
    for number, (what, nodes) in enumerate(who if found.missing else ()):
        is_probed = nodes and number < _PROBED
        seen = _seen_from_here(nodes[0], here) if is_probed else closed
        text = f"{what} within {timeout:.0f} s{seen}"
        yield Finding("HPC178", text, on_one_line(hint) or _UNHEARD, tuple(nodes))
    for rank, when in found.hung.items():
        text = f"{host(rank, hosts)} stopped responding {when}"
        remedy = "log in, and look at its processes and at the system log"
        yield Finding("HPC179", text, remedy, (rank,))


def _seen_from_here(rank: int, here: Place) -> str:
    world, ports = here.meeting, here.tasks_meeting.ports
    if not (world.hosts and ports):
        return ""
    texts, own = [], network.this_node()
    for name in dict.fromkeys((world.fast_hosts[rank], world.hosts[rank])):
        if known := own.addresses_of(name):
            _, state = network.reach(str(known[0]), ports[0], _PROBE_TIMEOUT)
            texts.append(f"{name} ({known[0]}) {state}")
        else:
            texts.append(f"{name} does not resolve")
    return f". Node 0 sees: {', '.join(texts)}"


def _of_launcher(found: Found, hosts: Sequence[str]) -> Iterator[Finding]:
    """Yield the launcher's messages, with their nodes.

    Nodes without torch are to blame if others have it. A setting is no node's fault.
    """
    is_on_others = any(node.torch for node in found.nodes.values())
    for (code, text, is_refusal), ranks in found.said.items():
        is_of_all = len(ranks) == len(hosts)
        where = "" if is_of_all else f"on {fold_ranks(sorted(ranks), hosts)}: "
        is_their_fault = is_on_others and where and text.startswith(NO_TORCH)
        blamed = tuple(sorted(ranks)) if is_their_fault else ()
        yield Finding(code, where + text, nodes=blamed, is_suspect=is_refusal)

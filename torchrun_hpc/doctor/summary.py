"""The report: all that was found, and what is wrong with it."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from torchrun_hpc import __version__
from torchrun_hpc.doctor import checks, judgement
from torchrun_hpc.doctor.results import SCHEMA, Finding, Report, worst_first
from torchrun_hpc.host import network
from torchrun_hpc.names import fold_ranks, host, ranges

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrun_hpc.doctor.place import Place
    from torchrun_hpc.doctor.results import Collective, Link, Node

_PROBED = 10  # nodes that have not come
_PROBE_TIMEOUT = 2.0  # seconds


@dataclass
class Found:
    """What an examination has found so far.

    Attributes:
        nodes: What the nodes show of themselves, by rank.
        links: What is between them.
        steady: How steady one pair is, see `judgement.steadiness`.
        workers: The workers of the launch.
        rows: Torch's collectives.
        backend: Of these.
        causes: Why a launch has ended too early: texts, with the nodes to blame.
        said: What the launcher itself has said, on which nodes: code, text, and whether
            it has refused to start, with their ranks.
        missing: Ranks of the tasks that have not come, or cannot be understood.
        hung: Ranks of nodes that have stopped to answer, and when that was.
        started: When it began.
    """

    nodes: dict[int, Node] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    steady: float = 1.0
    workers: list[Worker] = field(default_factory=list)
    rows: list[Collective] = field(default_factory=list)
    backend: str = ""
    causes: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    said: dict[tuple[str, str, bool], list[int]] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    hung: dict[int, str] = field(default_factory=dict)
    started: float = field(default_factory=time.time)

    def has_hung(self, link: Link) -> bool:
        """Return whether a link is that of a node that has stopped responding."""
        return not self.hung.keys().isdisjoint((link.first, link.second))


def report(found: Found, here: Place, timeout: float) -> Report:
    """Write the report.

    Args:
        found: What was found.
        here: Where this task is.
        timeout: Seconds that the nodes had to come.
    """
    where = here.meeting
    hosts = [*where.hosts] or [""] * where.nodes
    for node in found.nodes:
        hosts[node["rank"]] = node["host"] or hosts[node["rank"]]
    links = [link for link in found.links if not found.has_hung(link)]
    findings = [
        *_absent(found, here, hosts, timeout),
        *judgement.findings(links, hosts, found.steady),
        *checks.findings(found.nodes, hosts),
        *_of_launcher(found.nodes, hosts, is_direct=here.mode.is_direct),
        *judgement.of_collectives(found.rows, found.problems),
    ]
    started = datetime.fromtimestamp(found.started, timezone.utc)
    return Report(
        schema=SCHEMA,
        launch_id=where.launch_id,
        site=str(where.site.value) if where.site else "",
        scheduler=here.scheduler,
        started=started.isoformat(timespec="seconds"),
        seconds=time.time() - found.started,
        torchrun_hpc=__version__,
        backend=found.backend,
        hosts=hosts,
        nodes=found.nodes,
        links=found.links,
        collectives=found.rows,
        findings=worst_first(findings),
    )


def _absent(
    found: Found, here: Place, hosts: Sequence[str], timeout: float
) -> Iterator[Finding]:
    """Say which nodes have not come, and which have stopped to answer."""
    came = {node["rank"] for node in found.nodes}
    absent = [rank for rank in range(len(hosts)) if rank not in came]
    who = [(f"{host(rank, hosts)} has not", [rank]) for rank in absent]
    hint = closed = ""
    if 1 < len(absent) == len(hosts) - 1:  # they may be well, and not reach this one
        where, hint = here.meeting.endpoint, here.meeting.network_hint
        closed = f"; the network of {where} ({here.meeting.interface}) may be closed"
        who = [("no other node has", [])]
    if here.mode.is_direct:
        who.append((f"a part of the tasks ({ranges(found.missing)}) has not", []))
    for number, (what, nodes) in enumerate(who if found.missing else ()):
        is_probed = nodes and number < _PROBED
        seen = _seen_from_here(nodes[0], here) if is_probed else closed
        yield Finding(
            code="HPC178",
            text=f"{what} come within {timeout:.0f} s{seen}",
            remedy=hint
            or "see what it has printed itself; if nothing, the launcher "
            "has not started it there, or it is another release of torchrun_hpc",
            nodes=nodes,
            is_suspect=True,
        )
    for rank, when in found.hung.items():
        yield Finding(
            code="HPC179",
            text=f"{hosts[rank]} has stopped to answer {when}",
            remedy="log in and look at its processes, and at the system's log",
            nodes=[rank],
            is_suspect=True,
        )


def _seen_from_here(rank: int, here: Place) -> str:
    """Say whether a node that has not come is reached, on each network."""
    world, port = here.meeting, here.tasks_meeting.ports[0]
    if not world.hosts:
        return ""
    texts, own = [], network.this_node()
    for name in dict.fromkeys((world.fast_hosts[rank], world.hosts[rank])):
        known = own.addresses_of(name)
        if known:
            _, state = network.reach(str(known[0]), port, _PROBE_TIMEOUT)
            texts.append(f"{name} ({known[0]}) {state}")
        else:
            texts.append(f"{name} does not resolve")
    return f"; from here: {', '.join(texts)}"


def _of_launcher(
    nodes: Sequence[Node], hosts: Sequence[str], *, is_direct: bool
) -> list[Finding]:
    """Return what the launcher would say; the same of several nodes once.

    It blames no node: another one would not cure what is set or typed.
    """
    texts: dict[tuple[str, str], Finding] = {}
    ranks = defaultdict[tuple[str, str], list[int]](list)
    for node in nodes:
        of_torch = node["torch"]["findings"] if node["torch"] and not is_direct else []
        for finding in (*node["findings"], *of_torch):
            key = finding["code"], finding["text"]
            texts.setdefault(key, finding)
            if finding["nodes"] or finding in of_torch:
                ranks[key].append(node["rank"])
    found = []
    for key, finding in texts.items():
        is_of_all = len(ranks[key]) in {0, len(hosts)}
        where = fold_ranks(ranks[key], hosts)
        text = finding["text"] if is_of_all else f"on {where}: {finding['text']}"
        found.append(Finding(**{**finding, "text": text, "nodes": []}))
    return found

"""The report, made from all records, and its comparison with an earlier report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from statistics import median
from typing import TYPE_CHECKING

from torchrun_hpc import __version__, limits
from torchrun_hpc.doctor import checks, judgement
from torchrun_hpc.doctor.results import (
    SCHEMA,
    DoctorReport,
    Finding,
    duration,
    printable,
    rate,
    size,
    worst_first,
)
from torchrun_hpc.errors import count, on_one_line
from torchrun_hpc.host import network
from torchrun_hpc.names import fold_ranks, host, placed, ranges

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrun_hpc.doctor.launch import Cause, LaunchEnd
    from torchrun_hpc.doctor.place import Place
    from torchrun_hpc.doctor.results import Collective, Link, NodeReport, WorkerReport
    from torchrun_hpc.planning.meeting import Meeting

    Rows = list[tuple[Collective, Collective]]  # now, and in the earlier report

_PROBED = 10  # absent nodes
_UNHEARD = "look at its output. If it has none, the launcher did not start the doctor"
_NO_TORCH = "HPC018"

_SLOWER = 1.25  # times as slow as before is a finding
# Bytes of a collective: times of smaller ones are noise. It is 1 MiB, less what is lost
# when the part of each worker is rounded down.
_LARGE = 0.9 * 2**20


@dataclass
class Records:
    """The records of an examination so far.

    Attributes:
        nodes: Records of the nodes, by rank.
        causes: Why a launch ended too early, with the nodes to blame.
        messages: Node ranks by the launcher's error or warning there.
        missing: Ranks of the tasks that are absent, or whose reply has another form.
        hung: When nodes stopped responding, by rank.
        started: Start time, in seconds since the epoch.
    """

    nodes: dict[int, NodeReport] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    workers: list[WorkerReport] = field(default_factory=list)
    rows: list[Collective] = field(default_factory=list)
    backend: str = ""
    causes: list[Cause] = field(default_factory=list)
    messages: dict[Finding, set[int]] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    hung: dict[int, str] = field(default_factory=dict)
    started: float = field(default_factory=time.time)

    def keep(self, rank: int, end: LaunchEnd) -> None:
        """Add the results of a launch on a node."""
        node = self.nodes[rank]
        for torch in end.imports:
            node = replace(node, torch=torch.after(node.torch))
        self.nodes[rank] = node
        self.rows += [replace(x, scope=x.scope and node.host) for x in end.rows]
        self.workers += [replace(worker, node=rank) for worker in end.workers]
        self.backend = end.backend or self.backend
        for message in end.messages:
            if end.is_refusal or not message.is_suspect:
                self.messages.setdefault(message, set()).add(rank)

    def hosts(self, meeting: Meeting) -> tuple[str, ...]:
        """Return the names of all nodes, by rank; empty if unknown."""
        guesses = meeting.hosts or ("",) * meeting.nodes
        return placed(guesses, {rank: node.host for rank, node in self.nodes.items()})


def report(records: Records, place: Place) -> DoctorReport:
    """Return the report."""
    meeting, job, hung = place.meeting, place.facts.job, records.hung.keys()
    nodes = [records.nodes[rank] for rank in sorted(records.nodes)]
    hosts = records.hosts(meeting)
    links = [link for link in records.links if hung.isdisjoint(link.pair)]
    findings = [
        *_absent(records, place, hosts),
        *_hung(records, hosts),
        *judgement.findings(links, hosts),
        *checks.of_workers(records.workers, records.nodes, hosts),
        *checks.findings(nodes, hosts),
        *_of_launcher(records, hosts),
        *checks.of_collectives(records.rows, records.causes),
    ]
    started = datetime.fromtimestamp(int(records.started), timezone.utc)
    return printable(
        DoctorReport(
            schema=SCHEMA,
            launch_id=meeting.launch_id,
            site=str(meeting.site.value) if meeting.site else "",
            scheduler=job.scheduler if job else "",
            started=started.isoformat(),
            seconds=time.time() - records.started,
            torchrun_hpc=__version__,
            backend=records.backend,
            hosts=hosts,
            nodes=tuple(nodes),
            links=tuple(records.links),
            workers=tuple(sorted(records.workers, key=lambda worker: worker.rank)),
            collectives=tuple(records.rows),
            findings=worst_first(findings),
        )
    )


def _absent(records: Records, place: Place, hosts: Sequence[str]) -> Iterator[Finding]:
    if not records.missing:
        return
    absent = [rank for rank in range(len(hosts)) if rank not in records.nodes]
    who = [(f"{host(rank, hosts)} did not join", [rank]) for rank in absent]
    hint = closed = ""
    if 1 < len(absent) == len(hosts) - 1:  # this one is perhaps not reachable
        meeting, hint = place.meeting, place.meeting.network_hint
        address = f"{meeting.endpoint} ({meeting.interface})"
        closed = f". The network of {address} may be closed"
        who = [("no other node joined", [])]
    if place.mode.is_direct:
        who.append((f"some tasks ({ranges(records.missing)}) did not join", []))
    for number, (what, nodes) in enumerate(who):
        is_probed = nodes and number < _PROBED
        state = _state_of(nodes[0], place) if is_probed else closed
        text = f"{what} within {place.wishes.timeout:.0f} s{state}"
        yield Finding("HPC178", text, on_one_line(hint) or _UNHEARD, tuple(nodes))


def _hung(records: Records, hosts: Sequence[str]) -> Iterator[Finding]:
    for rank, when in records.hung.items():
        text = f"{host(rank, hosts)} stopped responding {when}"
        remedy = "log in, and look at its processes and at the system log"
        yield Finding("HPC179", text, remedy, (rank,))


def _state_of(rank: int, place: Place) -> str:
    """Return what this node learns about an absent node's network."""
    meeting, ports = place.meeting, place.tasks_meeting.ports
    if not (meeting.hosts and ports):
        return ""
    texts, this_node = [], network.this_node()
    for name in dict.fromkeys((meeting.fast_hosts[rank], meeting.hosts[rank])):
        if addresses := this_node.addresses_of(name):
            address, limit = str(addresses[0]), limits.ABSENT_NODE_TIMEOUT
            state = network.state_of(address, ports[0], limit)
            texts.append(f"{name} ({address}) {state}")
        else:
            texts.append(f"{name} does not resolve")
    return f". Node 0 sees: {', '.join(texts)}"


def _of_launcher(records: Records, hosts: Sequence[str]) -> Iterator[Finding]:
    """Yield the launcher's messages, with their nodes.

    Nodes without torch are to blame if others have it. A setting is no node's fault.
    """
    has_torch = any(node.torch for node in records.nodes.values())
    for message, nodes in records.messages.items():
        ranks = tuple(sorted(nodes))
        if len(ranks) == len(hosts):
            yield message
            continue
        text = f"on {fold_ranks(ranks, hosts)}: {message.text}"
        blamed = ranks if message.code == _NO_TORCH and has_torch else ()
        yield replace(message, text=text, nodes=blamed)


# --- an earlier report ------------------------------------------------------------


def with_slower(report: DoctorReport, earlier: DoctorReport) -> DoctorReport:
    """Add findings about slower values to a report.

    Medians are compared, because each job has other nodes.
    """
    remedy = "compare the versions and variables. If they are equal, report it"
    slower = [
        Finding("HPC194", f"{text} on {earlier.started[:16]}", remedy, is_suspect=False)
        for text in _slower(report, earlier)
    ]
    return replace(report, findings=worst_first([*report.findings, *slower]))


def scope(report: DoctorReport, earlier: DoctorReport) -> str:
    """Write what is compared with which report."""
    nodes, (_, reason) = count(len(earlier.nodes), "node"), _both(report, earlier)
    text = f"compared with {nodes} of {earlier.started[:16]}"
    return text + (f". Collectives were not compared: {reason}" if reason else "")


def _both(report: DoctorReport, earlier: DoctorReport) -> tuple[Rows, str]:
    """Return the collectives of both reports, or why there are none."""
    for side, name in ((earlier, "the earlier report"), (report, "this one")):
        if not side.collectives:
            return [], f"{name} has none"
    now, then = (
        f"{count(sum(node.workers for node in side.nodes), 'worker')} of {side.backend}"
        for side in (report, earlier)
    )
    if now != then:
        return [], f"{then} then, and {now} now"
    before = {(row.operation, row.size, row.scope): row for row in earlier.collectives}
    largest = {}
    for row in sorted(report.collectives, key=lambda row: row.size):
        old = before.get((row.operation, row.size, ""))
        if old and row.size >= _LARGE and not row.scope:
            largest[row.operation] = row, old
    nothing = "the reports share no size of 1 MiB or more. Pass the same --max-bytes"
    return [*largest.values()], "" if largest else nothing


def _slower(report: DoctorReport, earlier: DoctorReport) -> Iterator[str]:
    sides = report, earlier
    links = [[link for link in side.links if link.is_measured] for side in sides]
    if all(links):
        now, before = (median(link.slower for link in each) for each in links)
        if now * _SLOWER < before:
            yield f"median bandwidth of the pairs: {rate(now)} now, {rate(before)}"
        now, before = (median(link.latency_s for link in each) for each in links)
        if now > 2 * before + 1e-4:
            times = f"{duration(now)} now, {duration(before)}"
            yield f"median latency of the pairs: {times}"
    imports = [[x.torch.import_s for x in side.nodes if x.torch] for side in sides]
    if all(imports):
        now, before = map(median, imports)
        if now > max(_SLOWER * before, before + 1):
            yield f"import of torch: {now:.1f} s now, {before:.1f} s"
    for row, old in _both(report, earlier)[0]:
        if row.time_s > _SLOWER * old.time_s > 0:
            times = f"{duration(row.time_s)} now, {duration(old.time_s)}"
            yield f"{row.operation} of {size(row.size)}: {times}"

"""Comparison with an earlier report from the same site."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from torchrun_hpc.doctor.judgement import is_measured
from torchrun_hpc.doctor.results import Finding, worst_first
from torchrun_hpc.doctor.units import duration, rate, size
from torchrun_hpc.errors import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrun_hpc.doctor.results import Collective, Report

    Rows = list[tuple[Collective, Collective]]  # now, and in the earlier report

_SLOWER = 1.25  # times as slow as before is a finding
# Bytes of a collective: times of smaller ones are noise. It is 1 MiB, less what is lost
# when the part of each worker is rounded down.
_LARGE = 0.9 * 2**20


def with_slower(report: Report, earlier: Report) -> Report:
    """Add findings about slower values to a report.

    Medians are compared, because each job has other nodes.
    """
    since, found = earlier.started[:16], [*report.findings]
    remedy = "compare the versions and variables. If they are equal, report it"
    for what, now, before in _slower(report, earlier):
        text = f"{what}: {now} now, {before} on {since}"
        found.append(Finding("HPC194", text, remedy, is_suspect=False))
    return replace(report, findings=worst_first(found))


def scope(report: Report, earlier: Report) -> str:
    """Write what is compared with which report."""
    nodes, (_, reason) = count(len(earlier.nodes), "node"), _both(report, earlier)
    text = f"compared with {nodes} of {earlier.started[:16]}"
    return text + (f". Collectives were not compared: {reason}" if reason else "")


def _both(report: Report, earlier: Report) -> tuple[Rows, str]:
    for side, where in ((earlier, "the earlier report"), (report, "this one")):
        if not side.collectives:
            return [], f"{where} has none"
    here, there = (
        f"{count(sum(node.workers for node in side.nodes), 'worker')} of {side.backend}"
        for side in (report, earlier)
    )
    if here != there:
        return [], f"{there} then, and {here} now"
    before = {(row.operation, row.size, row.scope): row for row in earlier.collectives}
    found = {}
    for row in sorted(report.collectives, key=lambda row: row.size):
        old = before.get((row.operation, row.size, ""))
        if old and row.size >= _LARGE and not row.scope:
            found[row.operation] = row, old
    nothing = "the reports share no size of 1 MiB or more. Pass the same --max-bytes"
    return [*found.values()], "" if found else nothing


def _slower(report: Report, earlier: Report) -> Iterator[tuple[str, str, str]]:
    sides = report, earlier
    links = [[*filter(is_measured, side.links)] for side in sides]
    if all(links):
        now, before = (median(min(x.forward, x.backward) for x in own) for own in links)
        if now * _SLOWER < before:
            yield "median bandwidth of the pairs", rate(now), rate(before)
        now, before = (median(x.latency_s for x in own) for own in links)
        if now > 2 * before + 1e-4:
            yield "median latency of the pairs", duration(now), duration(before)
    imports = [[x.torch.import_s for x in side.nodes if x.torch] for side in sides]
    if all(imports):
        now, before = map(median, imports)
        if now > max(_SLOWER * before, before + 1):
            yield "import of torch", f"{now:.1f} s", f"{before:.1f} s"
    for row, old in _both(report, earlier)[0]:
        if row.time_s > _SLOWER * old.time_s > 0:
            what = f"{row.operation} of {size(row.size)}"
            yield what, duration(row.time_s), duration(old.time_s)

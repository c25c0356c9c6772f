"""What became slower since an earlier examination of the same centre."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from torchrun_hpc.doctor.judgement import is_measured
from torchrun_hpc.doctor.results import Finding, worst_first
from torchrun_hpc.doctor.units import duration, rate, size
from torchrun_hpc.errors import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchrun_hpc.doctor.results import Collective, Report

# A figure that is worse than before by this factor, or more, is a finding.
_SLOWER = 1.25
_LATER, _LATER_S = 2.0, 1e-4  # of latencies, which are short
# Bytes of a collective; times of smaller ones are noise. It is 1 MiB, from which a part
# for each worker may be rounded down.
_LARGE = 0.9 * 2**20


def with_slower(report: Report, earlier: Report) -> Report:
    """Add to a report what became slower.

    Medians are compared, and collectives of the same size on as many workers: the nodes
    are others in each job. One node that is slow is found without an earlier report.

    Args:
        report: Of this examination.
        earlier: Of the earlier one.
    """
    since = earlier.started[:16]
    found = [
        Finding(
            code="HPC194",
            text=f"{what}: {now} now, {before} on {since}",
            remedy="compare the versions and the variables of both reports; if they "
            "are the same, tell the administrator",
            nodes=(),
            is_suspect=False,
        )
        for what, now, before in _slower(report, earlier)
    ]
    return replace(report, findings=worst_first([*report.findings, *found]))


def scope(report: Report, earlier: Report) -> str:
    """Write what can be compared, and with what."""
    nodes, reason = count(len(earlier.nodes), "node"), _difference(report, earlier)
    text = f"compared with {nodes} of {earlier.started[:16]}"
    return text + (f", but for torch's collectives: {reason}" if reason else "")


def _difference(report: Report, earlier: Report) -> str:
    """Return why collectives cannot be compared; empty if they can."""
    sides = ((earlier, "there"), (report, "here"))
    for side, where in sides:
        if not side.collectives:
            return f"none have run {where}"
    if _workers(report) != _workers(earlier):
        return " and ".join(
            f"{count(_workers(side), 'worker')} {where}" for side, where in sides
        )
    if report.backend != earlier.backend:
        return " and ".join(f"{side.backend} {where}" for side, where in sides)
    if not _comparable(report, earlier):
        return "no size of 1 MiB or more is in both; pass the same --max-bytes"
    return ""


def _workers(report: Report) -> int:
    return sum(node.workers for node in report.nodes)


def _slower(report: Report, earlier: Report) -> Iterator[tuple[str, str, str]]:
    """Yield what is slower, how it is now, and how it was."""

    def medians(value: Callable[..., float]) -> tuple[float, float]:
        now, before = (
            [value(link) for link in each.links if is_measured(link)]
            for each in (report, earlier)
        )
        return (median(now), median(before)) if now and before else (0.0, 0.0)

    now, before = medians(lambda link: min(link.forward, link.backward))
    if now * _SLOWER < before:
        what = "median bandwidth of the pairs, each in its slower direction"
        yield what, rate(now), rate(before)
    now, before = medians(lambda link: link.latency_s)
    if now > before * _LATER + _LATER_S and before:
        yield "median latency of the pairs", duration(now), duration(before)
    imports = [
        [each.torch.import_s for each in side.nodes if each.torch]
        for side in (report, earlier)
    ]
    if all(imports):
        now, before = map(median, imports)
        if now > before * _SLOWER and now - before > 1:
            yield "import of torch", f"{now:.1f} s", f"{before:.1f} s"
    yield from _slower_collectives(report, earlier)


def _slower_collectives(
    report: Report, earlier: Report
) -> Iterator[tuple[str, str, str]]:
    """Yield what is slower of the largest sizes that both have."""
    if _difference(report, earlier):
        return
    for row, old in _comparable(report, earlier):
        if row.time_s > _SLOWER * old.time_s > 0:
            what = f"{row.operation} of {size(row.size)}"
            yield what, duration(row.time_s), duration(old.time_s)


def _comparable(report: Report, earlier: Report) -> list[tuple[Collective, Collective]]:
    """Return the largest size of each operation that both have, now and then."""
    now, before = (
        {
            (row.operation, row.size): row
            for row in sorted(each.collectives, key=lambda row: row.size)
            if not row.scope and row.size >= _LARGE
        }
        for each in (report, earlier)
    )
    common = {key[0]: (now[key], before[key]) for key in now if key in before}
    return [*common.values()]  # of each operation the last one, which is the largest

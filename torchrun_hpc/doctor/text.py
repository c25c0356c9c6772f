"""The report on stdout: verdict, findings, and figures.

`torchrun_hpc.doctor.page` has the same lines and tables, but all rows and columns.
"""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from operator import attrgetter
from statistics import median_high, median_low
from typing import TYPE_CHECKING, Any

from torchrun_hpc.doctor.judgement import usual, ways
from torchrun_hpc.doctor.results import exclude, exit_code, suspects
from torchrun_hpc.doctor.units import duration, gigabytes, rate, size, speed
from torchrun_hpc.errors import count
from torchrun_hpc.names import fold_ranks, host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrun_hpc.doctor.judgement import Way
    from torchrun_hpc.doctor.results import Collective, Finding, Node, Report

Row = dict[str, str]  # a table is its rows: cells by the titles of columns

_WIDTH, _COLUMNS, _ROWS = 100, 9, 10  # of a terminal; of its tables
_INDENT = " " * 17

# The form, the worst value, and the median: the better of two middle values, because a
# partner can be at fault itself.
_FIGURES: dict[str, Any] = {
    "latency": (duration, max, median_low),
    "bandwidth": (rate, min, median_high),
}


def render(report: Report, *, is_quiet: bool = False) -> str:
    """Write a report for a terminal of 100 columns, or only its verdict."""
    nodes = [line[:_COLUMNS] for line in cells(node_rows(report))]
    blocks = [
        [verdict(report), *filter(str.strip, [f"    {exclude(report)}"])],
        [title(report)],
        finding_lines(report.findings[:_ROWS])
        + _more(len(report.findings), "findings"),
        _aligned(nodes[: _ROWS + 1]) + _more(len(nodes) - 1, "nodes"),
        pair_lines(report) + worker_lines(report),
        _collectives(report),
    ]
    texts = ["\n".join(block) + "\n" for block in blocks if block]
    return texts[0] if is_quiet else "\n".join(texts)


def title(report: Report) -> str:
    """Write what was examined."""
    came, every = len(report.nodes), len(report.hosts)
    what = f"{came} of " * (came < every) + count(every, "node")
    site = report.site and f", site {report.site}"
    launch = report.launch_id and f", launch {report.launch_id}"
    return f"{what} examined in {report.seconds:.1f} s{site}{launch}"


def verdict(report: Report) -> str:
    """Write which nodes are suspect, in one line."""
    blamed, hosts = suspects(report), report.hosts
    every, number = count(len(hosts), "node"), len(report.findings)
    if blamed:
        cause = " Look for a common cause." * (1 < len(hosts) < 2 * len(blamed))
        where = f"{fold_ranks(blamed, hosts)} ({len(blamed)} of {every})"
        return f"Suspicious: {where}.{cause}"
    if exit_code(report):
        codes = dict.fromkeys(f.code for f in report.findings if f.is_suspect)
        none = " No single node is named." * (len(hosts) > 1)
        return f"Suspicious: see {', '.join(codes)}.{none}"
    advice = f"; {number} piece{'s'[: number - 1]} of advice" * bool(number)
    return f"Nothing suspicious on {every}{advice}."


def pair_lines(report: Report) -> list[str]:
    """Summarize the pairs."""
    hosts, than, measured = report.hosts, usual(report.links), ways(report.links)
    pairs = count(len(hosts) * (len(hosts) - 1) // 2, "pair")
    lines = [f"{len(measured) // 2} of {pairs} measured"] if len(hosts) > 1 else []
    for what, (write, worst, _) in _FIGURES.items() if measured else ():
        way = worst(measured, key=attrgetter(what))
        known, bad = write(getattr(than, what)), write(getattr(way, what))
        where = f"from {host(way.sender, hosts)} to {host(way.receiver, hosts)}"
        lines.append(f"{what}: {known} is usual, worst {bad} {where}")
    return lines


def worker_lines(report: Report) -> list[str]:
    """Summarize the compute test."""
    tested = [worker for worker in report.workers if worker.flops]
    if not tested:
        return []
    worst = min(tested, key=lambda worker: worker.flops[0])
    middle = median_high(worker.flops[0] for worker in tested)
    where = f"on rank {worst.rank} ({host(worst.node, report.hosts)})"
    rates = f"{speed(middle)} is usual, worst {speed(worst.flops[0])}"
    return [f"compute in {worst.dtype}: {rates} {where}"]


def _usual(what: str, ways: Sequence[Way]) -> str:
    write, _, middle = _FIGURES[what]
    return write(middle(getattr(way, what) for way in ways)) if ways else ""


def node_rows(report: Report) -> list[Row]:
    """Describe each node, the worst first."""
    codes, sent, received = (defaultdict[int, list[Any]](list) for _ in range(3))
    for finding in report.findings:
        for rank in finding.nodes:
            codes[rank].append(finding.code)
    for way in ways(report.links):
        sent[way.sender].append(way)
        received[way.receiver].append(way)
    nodes = {node.rank: _described(node) for node in report.nodes}
    return [
        {
            "node": host(rank, report.hosts),
            "findings": " ".join(dict.fromkeys(codes[rank])),
            "latency": _usual("latency", sent[rank]),
            "sends": _usual("bandwidth", sent[rank]),
            "receives": _usual("bandwidth", received[rank]),
            **nodes.get(rank, {}),
        }
        for rank in dict.fromkeys([*codes, *range(len(report.hosts))])
    ]


def _described(node: Node) -> Row:
    torch = node.torch
    return {
        "import": f"{torch.import_s:.1f} s" if torch else "",
        "torch": torch.version if torch else "",
        "GPUs": str(max(len(node.gpus), torch.gpus if torch else 0)),
        "address": node.address,
        "interface": node.interface,
        "model": ", ".join(dict.fromkeys(gpu.model for gpu in node.gpus)),
        "CPUs": f"{node.cpus} of {node.cores}",
    }


def collective_rows(rows: Sequence[Collective]) -> list[Row]:
    """Write collectives with the columns of nccl-tests."""
    return [
        {
            "operation": row.operation,
            "workers": row.scope or "all",
            "size": size(row.size),
            "count": str(row.count),
            "time": duration(row.time_s),
            "algbw": gigabytes(row.algbw),
            "busbw": gigabytes(row.busbw),
            "#wrong": str(row.wrong) if row.wrong >= 0 else "",
        }
        for row in rows
    ]


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return the titles of all columns, and the lines below them."""
    titles = dict.fromkeys(title for row in rows for title in row)
    return [[*titles], *([row.get(title) or "-" for title in titles] for row in rows)]


def is_numeric(column: Sequence[str]) -> bool:
    """Return whether a column has only numbers, which are aligned to the right."""
    known = [cell for cell in column if cell != "-"]
    return known != [] and all(re.fullmatch(r"\d+(\.\d+)?( \S+)?", x) for x in known)


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    columns = []
    for column in zip(*lines, strict=True):
        width = max(map(len, column))
        align = str.rjust if is_numeric(column[1:]) else str.ljust
        columns.append([align(cell, width) for cell in column])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def _more(number: int, what: str) -> list[str]:
    return [f"and {number - _ROWS} more {what}"] if number > _ROWS else []


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Write findings, each with its remedy."""
    lines, broken = [], textwrap.TextWrapper(_WIDTH, subsequent_indent=_INDENT)
    broken.break_on_hyphens = False  # options
    for finding in findings:
        lines += broken.wrap(f"{finding.code:6}  {finding.kind:7}  {finding.text}")
        if finding.remedy:  # the launcher's messages include it
            lines += broken.wrap(f"{_INDENT}remedy: {finding.remedy}")
    return lines


def _collectives(report: Report) -> list[str]:
    chosen = {
        (bool(row.scope), row.operation): row  # the last one remains
        for row in sorted(report.collectives, key=lambda x: (x.size, -x.busbw))
    }
    rows = collective_rows([chosen[key] for key in sorted(chosen)])
    what = "largest size, slowest node; count in elements of 4 bytes"
    head = f"torch's collectives over {report.backend} ({what})"
    return [head, *_aligned(cells(rows))] if rows else []

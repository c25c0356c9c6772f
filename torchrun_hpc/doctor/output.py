"""The outputs of a report: text on stdout, an HTML page, and JSON.

The text has the verdict, the findings, and figures. The page has the same lines and
tables, but all rows and columns, and no external parts.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections import defaultdict
from html import escape
from importlib import resources
from operator import attrgetter
from pathlib import Path
from statistics import median_high, median_low
from string import Template
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrun_hpc import files, wire
from torchrun_hpc.doctor.judgement import usual, ways
from torchrun_hpc.doctor.results import (
    duration,
    exclude,
    exit_code,
    gigabytes,
    rate,
    size,
    speed,
    suspects,
)
from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.names import fold_ranks, host
from torchrun_hpc.reporting import console, streams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchrun_hpc.doctor.judgement import Usual, Way
    from torchrun_hpc.doctor.results import (
        Collective,
        DoctorReport,
        Finding,
        Link,
        NodeReport,
    )

    Tell = Callable[[Message], None]

Row = dict[str, str]  # a table is its rows: cells by the titles of columns

STDOUT = "-"  # instead of a file

_WIDTH, _COLUMNS, _ROWS = 100, 9, 10  # of a terminal; of its tables
_INDENT = " " * 17

# The form, the worst value, and the median: the better of two middle values, because a
# partner can be at fault itself.
_FIGURES: dict[str, Any] = {
    "latency": (duration, max, median_low),
    "bandwidth": (rate, min, median_high),
}


class Output(NamedTuple):
    """The wanted outputs: names of files, or empty. ``json`` can be `STDOUT`."""

    json: str = ""
    html: str = ""
    is_quiet: bool = False

    def start_check(self, tell: Tell) -> None:
        """Start `check` in a daemon thread, because a file system can hang."""
        Thread(target=self.check, args=[tell], daemon=True).start()

    def check(self, tell: Tell) -> None:
        """Report files that cannot be written, before the examination takes minutes."""
        for file in self._files():
            try:
                files.check(Path(file))
            except OSError as error:  # noqa: PERF203 - of two files
                tell(_unwritable(file, error, ". The report is printed anyway"))

    def write(self, report: DoctorReport) -> bool:
        """Write all outputs if possible; return whether all succeeded."""
        is_data, is_done = self.json == STDOUT, True
        text = render(report, is_quiet=self.is_quiet or is_data)
        if is_data:  # for a pipe
            streams.write(text, sys.stderr)
        try:
            console.output(_as_json(report) if is_data else text)
        except LaunchError as fault:
            console.refuse(fault)  # the other nodes have ended, so they are not told
            is_done = False
        for file, content in self._files().items():
            try:
                files.write(Path(file), content(report))
            except OSError as error:  # noqa: PERF203 - of two files
                console.write(_unwritable(file, error), "error")
                is_done = False
        return is_done

    def _files(self) -> dict[str, Callable[[DoctorReport], str]]:
        """Return the functions that make the contents, by file."""
        wanted = {self.json: _as_json, self.html: as_page}
        return {file: wanted[file] for file in wanted if file not in ("", STDOUT)}


def _as_json(report: DoctorReport) -> str:
    return json.dumps(wire.encode(report), indent=1) + "\n"


def _unwritable(file: str, error: OSError, more: str = "") -> Message:
    return Message("HPC197", f"cannot write {file}: {error.strerror}{more}")


# --- text -------------------------------------------------------------------------


def render(report: DoctorReport, *, is_quiet: bool = False) -> str:
    """Write a report for a terminal of 100 columns, or only its verdict."""
    nodes = [line[:_COLUMNS] for line in cells(node_rows(report))]
    first = [verdict(report)]
    if option := exclude(report):
        first.append(f"    {option}")
    blocks = [
        first,
        [title(report)],
        finding_lines(report.findings[:_ROWS])
        + _more(len(report.findings), "findings"),
        _aligned(nodes[: _ROWS + 1]) + _more(len(nodes) - 1, "nodes"),
        pair_lines(report) + worker_lines(report),
        _collectives(report),
    ]
    texts = ["\n".join(block) + "\n" for block in blocks if block]
    return texts[0] if is_quiet else "\n".join(texts)


def title(report: DoctorReport) -> str:
    """Write what was examined."""
    joined, every = len(report.nodes), len(report.hosts)
    some = f"{joined} of " if joined < every else ""
    site = f", site {report.site}" if report.site else ""
    launch = f", launch {report.launch_id}" if report.launch_id else ""
    examined = f"{some}{count(every, 'node')} examined"
    return f"{examined} in {report.seconds:.1f} s{site}{launch}"


def verdict(report: DoctorReport) -> str:
    """Write which nodes are suspect, in one line."""
    blamed, hosts = suspects(report), report.hosts
    every = count(len(hosts), "node")
    if blamed:
        is_most = 1 < len(hosts) < 2 * len(blamed)
        cause = " Look for a common cause." if is_most else ""
        names = f"{fold_ranks(blamed, hosts)} ({len(blamed)} of {every})"
        return f"Suspicious: {names}.{cause}"
    if exit_code(report):
        codes = dict.fromkeys(f.code for f in report.findings if f.is_suspect)
        none = " No single node is named." if len(hosts) > 1 else ""
        return f"Suspicious: see {', '.join(codes)}.{none}"
    pieces = count(len(report.findings), "piece")
    advice = f"; {pieces} of advice" if report.findings else ""
    return f"Nothing suspicious on {every}{advice}."


def pair_lines(report: DoctorReport) -> list[str]:
    """Summarize the pairs."""
    hosts, than, measured = report.hosts, usual(report.links), ways(report.links)
    if len(hosts) == 1:
        return []
    pairs = count(len(hosts) * (len(hosts) - 1) // 2, "pair")
    lines = [f"{len(measured) // 2} of {pairs} measured"]
    if not measured:
        return lines
    for what, (write, worst, _) in _FIGURES.items():
        way = worst(measured, key=attrgetter(what))
        typical, bad = write(getattr(than, what)), write(getattr(way, what))
        nodes = f"from {host(way.sender, hosts)} to {host(way.receiver, hosts)}"
        lines.append(f"{what}: {typical} is usual, worst {bad} {nodes}")
    return lines


def worker_lines(report: DoctorReport) -> list[str]:
    """Summarize the compute test."""
    tested = [worker for worker in report.workers if worker.flops]
    if not tested:
        return []
    worst = min(tested, key=lambda worker: worker.flops[0])
    middle = median_high(worker.flops[0] for worker in tested)
    rank = f"on rank {worst.rank} ({host(worst.node, report.hosts)})"
    rates = f"{speed(middle)} is usual, worst {speed(worst.flops[0])}"
    return [f"compute in {worst.dtype}: {rates} {rank}"]


def _middle(what: str, ways: Sequence[Way]) -> str:
    write, _, middle = _FIGURES[what]
    return write(middle(getattr(way, what) for way in ways)) if ways else ""


def node_rows(report: DoctorReport) -> list[Row]:
    """Describe each node, the worst first."""
    codes = defaultdict[int, list[str]](list)
    for finding in report.findings:
        for rank in finding.nodes:
            codes[rank].append(finding.code)
    sent = defaultdict[int, list[Any]](list)
    received = defaultdict[int, list[Any]](list)
    for way in ways(report.links):
        sent[way.sender].append(way)
        received[way.receiver].append(way)
    nodes = {node.rank: _described(node) for node in report.nodes}
    return [
        {
            "node": host(rank, report.hosts),
            "findings": " ".join(dict.fromkeys(codes[rank])),
            "latency": _middle("latency", sent[rank]),
            "sends": _middle("bandwidth", sent[rank]),
            "receives": _middle("bandwidth", received[rank]),
            **nodes.get(rank, {}),
        }
        for rank in dict.fromkeys([*codes, *range(len(report.hosts))])
    ]


def _described(node: NodeReport) -> Row:
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
    lines = [[row.get(title) or "-" for title in titles] for row in rows]
    return [[*titles], *lines]


def is_numeric(column: Sequence[str]) -> bool:
    """Return whether a column has only numbers, which are aligned to the right."""
    filled = [cell for cell in column if cell != "-"]
    number = re.compile(r"\d+(\.\d+)?( \S+)?")
    return filled != [] and all(number.fullmatch(cell) for cell in filled)


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


def _collectives(report: DoctorReport) -> list[str]:
    chosen = {
        (bool(row.scope), row.operation): row  # the last one remains
        for row in sorted(report.collectives, key=lambda row: (row.size, -row.busbw))
    }
    rows = collective_rows([chosen[key] for key in sorted(chosen)])
    what = "largest size, slowest node; count in elements of 4 bytes"
    head = f"torch's collectives over {report.backend} ({what})"
    return [head, *_aligned(cells(rows))] if rows else []


# --- page -------------------------------------------------------------------------


def as_page(report: DoctorReport) -> str:
    """Write one HTML file."""
    findings = [
        {"code": f.code, "kind": f.kind, "finding": f.text, "remedy": f.remedy}
        for f in report.findings
    ]
    lines = pair_lines(report)
    form = resources.files(__package__).joinpath("page.html")
    return Template(form.read_text(encoding="utf-8")).substitute(
        title=escape(title(report)),
        started=escape(report.started),
        version=escape(report.torchrun_hpc),
        kind="suspect" if exit_code(report) else "healthy",
        verdict=escape(verdict(report)),
        exclude=escape(exclude(report)),
        findings=_table(findings),
        nodes=_table(node_rows(report)),
        pairs="" if lines else 'hidden=""',
        lines=_lines(lines),
        squares=_squares(report),
        workers=_lines(worker_lines(report)),
        collectives=_table(collective_rows(report.collectives)),
    )


def _lines(lines: Sequence[str]) -> str:
    return "<br>\n".join(map(escape, lines))


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return "<p>None.</p>"
    head, *lines = cells(rows)
    columns = zip(*lines, strict=True)
    kinds = [' class="number"' if is_numeric(column) else "" for column in columns]

    def line(tag: str, cells: Sequence[str]) -> str:
        pairs = zip(kinds, cells, strict=True)
        inner = "".join(f"<{tag}{kind}>{escape(x)}</{tag}>" for kind, x in pairs)
        return f"<tr>{inner}</tr>\n"

    body = "".join(line("td", cells) for cells in lines)
    return f"<table>\n{line('th', head)}{body}</table>"


def _squares(report: DoctorReport) -> str:
    """Draw each node's pairs, at most 31, as a row of squares. Bad ones are red."""
    hosts, than = report.hosts, usual(report.links)
    rows = defaultdict[int, dict[int, str]](dict)
    for link in report.links:
        one, other, square = link.first, link.second, "<i></i>"
        if link.is_measured:
            words = (
                f"{host(one, hosts)} to {host(other, hosts)}: {rate(link.forward)}, "
                f"back: {rate(link.backward)}, latency: {duration(link.latency_s)}"
            )
            bad = f"--bad: {_badness(link, than):.2f}"
            square = f'<i style="{bad}" title="{escape(words)}"></i>'
        rows[one][other] = rows[other][one] = square
    lines = [
        f"<tr><td>{escape(host(node, hosts))}</td>"
        f"<td>{''.join(row[other] for other in sorted(row))}</td></tr>"
        for node, row in sorted(rows.items())
    ]
    return "\n".join(["<table>", *lines, "</table>"])


def _badness(link: Link, than: Usual) -> float:
    """Return 1 for half the usual rate or three times the usual latency; 0 if usual."""
    slow = link.slower / than.bandwidth
    return min(max(2 * (1 - slow), (link.latency_s / than.latency - 1) / 2, 0), 1)

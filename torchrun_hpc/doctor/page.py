"""The report as one HTML file without external parts."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from torchrun_hpc.doctor import text
from torchrun_hpc.doctor.judgement import is_measured, usual
from torchrun_hpc.doctor.results import exclude, exit_code
from torchrun_hpc.doctor.units import duration, rate
from torchrun_hpc.names import host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrun_hpc.doctor.judgement import Usual
    from torchrun_hpc.doctor.results import Link, Report


def write(report: Report) -> str:
    """Write the page."""
    findings = [
        {"code": f.code, "kind": f.kind, "finding": f.text, "remedy": f.remedy}
        for f in report.findings
    ]
    lines = text.pair_lines(report)
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return Template(page).substitute(
        title=escape(text.title(report)),
        started=escape(report.started),
        version=escape(report.torchrun_hpc),
        kind="suspect" if exit_code(report) else "healthy",
        verdict=escape(text.verdict(report)),
        exclude=escape(exclude(report)),
        findings=_table(findings),
        nodes=_table(text.node_rows(report)),
        pairs="" if lines else 'hidden=""',
        lines=_lines(lines),
        squares=_squares(report),
        workers=_lines(text.worker_lines(report)),
        collectives=_table(text.collective_rows(report.collectives)),
    )


def _lines(lines: Sequence[str]) -> str:
    return "<br>\n".join(map(escape, lines))


def _table(rows: Sequence[text.Row]) -> str:
    if not rows:
        return "<p>None.</p>"
    head, *lines = text.cells(rows)
    kinds = [' class="number"' * text.is_numeric(x) for x in zip(*lines, strict=True)]

    def line(tag: str, cells: Sequence[str]) -> str:
        pairs = zip(kinds, cells, strict=True)
        inner = "".join(f"<{tag}{kind}>{escape(x)}</{tag}>" for kind, x in pairs)
        return f"<tr>{inner}</tr>\n"

    body = "".join(line("td", cells) for cells in lines)
    return f"<table>\n{line('th', head)}{body}</table>"


def _squares(report: Report) -> str:
    """Draw each node's pairs, at most 31, as a row of squares. Bad ones are red."""
    hosts, than = report.hosts, usual(report.links)
    rows = defaultdict[int, dict[int, str]](dict)
    for link in report.links:
        one, other, square = link.first, link.second, "<i></i>"
        if is_measured(link):
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
    slow = min(link.forward, link.backward) / than.bandwidth
    return min(max(2 * (1 - slow), (link.latency_s / than.latency - 1) / 2, 0), 1)

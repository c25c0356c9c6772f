"""An examination as a page of HTML: one file that needs nothing from outside."""

from __future__ import annotations

import io
import math
import warnings
from collections import defaultdict
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

import numpy as np
from cycler import cycler
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from torchrun_hpc.doctor import text
from torchrun_hpc.doctor.judgement import is_measured, usual, ways
from torchrun_hpc.doctor.results import exclude, exit_code, printable, suspects
from torchrun_hpc.names import fold_ranks, host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrun_hpc.doctor.results import Report

_SETTINGS = {
    "axes.prop_cycle": cycler(color=["#0072b2", "#d55e00", "#009e73", "#cc79a7"]),
    "figure.figsize": (4.5, 4.5),
    "image.interpolation": "none",
    "legend.frameon": False,
    "savefig.bbox": "tight",
    "savefig.transparent": True,
    "svg.fonttype": "none",  # letters, which can be searched
    "svg.hashsalt": "torchrun_hpc",  # the same report gives the same page
    "text.parse_math": False,
}
_NAMES, _LETTERS = 16, 20  # beside a map, and of each
# By what is drawn: its title, its unit, and where its colours begin and end, in times
# what is usual.
_MAPS = {
    "bandwidth": ("Bandwidth in Gbit/s, row to column", 8e-9, (0, 1), "coolwarm_r"),
    "latency": ("Latency in us, there and back", 1e6, (1, 4), "coolwarm"),
}


def write(report: Report) -> str:
    """Write the page."""
    report = printable(report)
    findings = [
        {"code": f.code, "kind": f.kind, "finding": f.text, "remedy": f.remedy}
        for f in report.findings
    ]
    with style.context(["default", _SETTINGS]):
        maps, curves = _maps(report), _curves(report)
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
        pairs="" if report.links else 'hidden=""',
        lines=_lines(text.pair_lines(report)),
        maps=maps,
        workers=_lines(text.worker_lines(report)),
        curves=curves,
        collectives=_table(text.collective_rows(report.collectives)),
    )


def _lines(lines: Sequence[str]) -> str:
    return "<br>\n".join(map(escape, lines))


def _table(rows: Sequence[text.Row]) -> str:
    if not rows:
        return "<p>None.</p>"
    head, *lines = text.cells(rows)
    columns = zip(*lines, strict=True)
    kinds = [' class="number"' * text.is_numeric(column) for column in columns]

    def line(tag: str, cells: Sequence[str]) -> str:
        pairs = zip(kinds, cells, strict=True)
        inner = "".join(f"<{tag}{kind}>{escape(x)}</{tag}>" for kind, x in pairs)
        return f"<tr>{inner}</tr>\n"

    body = "".join(line("td", cells) for cells in lines)
    return f"<table>\n{line('th', head)}{body}</table>"


# --- pictures -------------------------------------------------------------------------


def _maps(report: Report) -> str:
    """Draw what is between the nodes, by rank: blue is usual, and red is bad."""
    hosts, known, than = report.hosts, ways(report.links), usual(report.links)
    silent = [(x.first, x.second) for x in report.links if not is_measured(x)]
    more = "; x has no figures" if silent else ""
    if blamed := suspects(report):
        more += f"; suspect: {fold_ranks(blamed, hosts)}"
    shown = range(0, len(hosts), math.ceil(len(hosts) / _NAMES))
    labels = [host(rank, hosts)[:_LETTERS] for rank in shown]
    pictures = []
    for what, (caption, unit, limits, colours) in _MAPS.items() if known else ():
        matrix = np.full((len(hosts), len(hosts)), np.nan)
        for way in known:
            matrix[way.sender, way.receiver] = unit * getattr(way, what)
        low, high = (unit * times * getattr(than, what) for times in limits)
        figure = Figure()
        axes = figure.add_subplot()
        image = axes.imshow(matrix, colours, vmin=low, vmax=high)
        figure.colorbar(image, location="bottom", extend="max", fraction=0.05, pad=0.04)
        for ends in silent:
            axes.plot(ends, ends[::-1], "kx")
        axes.set_xticks(shown, labels, rotation=90)
        axes.set_yticks(shown, labels)
        axes.xaxis.tick_top()
        pictures.append(_figure(caption + more, figure))
    return "".join(pictures)


def _curves(report: Report) -> str:
    """Draw a curve for each operation; within a node it is that of the slowest one."""
    curves = defaultdict[tuple[str, str], dict[int, float]](dict)
    for row in report.collectives:
        if 0 < row.busbw < math.inf:
            curve = curves[row.operation, ", within a node" if row.scope else ""]
            curve[row.size] = min(curve.get(row.size, math.inf), row.busbw)
    if not curves:
        return ""
    figure = Figure()
    axes = figure.add_subplot()
    operations = [*dict.fromkeys(operation for operation, _ in curves)]
    for (operation, scope), curve in curves.items():
        kind, colour = "o--" if scope else "o-", f"C{operations.index(operation)}"
        points = zip(*sorted(curve.items()), strict=True)
        axes.loglog(*points, kind, color=colour, label=operation + scope)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.yaxis.set_major_formatter(EngFormatter("B/s"))
    axes.minorticks_off()
    axes.grid()
    figure.legend(loc="upper left", bbox_to_anchor=(0.1, 0.04))
    return _figure(f"Bus bandwidth over the size, with {report.backend}", figure)


def _figure(caption: str, figure: Figure) -> str:
    """Return a picture as SVG, in the colour of the page, with its caption."""
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    buffer = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its font may lack a letter: the browser's not
        figure.savefig(buffer, format="svg", metadata=nothing)
    svg = buffer.getvalue().partition("<svg")[2].replace("#000000", "currentColor")
    words = escape(caption)
    svg = f'<svg role="img" aria-label="{words}"{svg}'
    return f"<figure>\n<figcaption>{words}</figcaption>\n{svg}</figure>\n"

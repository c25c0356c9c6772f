"""An examination as a page of HTML: one file that needs nothing from outside."""

from __future__ import annotations

import io
import math
import re
import warnings
from functools import partial
from html import escape
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from torchrun_hpc.doctor import text
from torchrun_hpc.doctor.judgement import usual
from torchrun_hpc.doctor.results import exclude, exit_code, suspects
from torchrun_hpc.errors import count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.figure import Figure

    from torchrun_hpc.doctor.results import Report

    Levels = dict[tuple[int, int], int]  # by ranks: the row's, the column's
    Curves = dict[tuple[str, bool], dict[int, float]]  # GB/s by bytes

# Where a colour of a map ends: shares of the usual bandwidth, multiples of the latency.
# From the third colour on, a warm one, `torchrun_hpc.doctor.judgement` may find fault.
_SHARES = (0.9, 0.75, 0.5, 0.25)
_MULTIPLES = (1.25, 3.0, 6.0, 12.0)

# What matplotlib draws with, for each colour of the style sheet.
_LEVELS, _SERIES = 5, 4
_COLOURS = ["suspect", "grid", *(f"level-{i}" for i in range(_LEVELS))]
_COLOURS += [f"series-{i}" for i in range(_SERIES)]
_INK = {name: f"#7e57{i:02x}" for i, name in enumerate(_COLOURS)}

# For matplotlib, and as letters.
_MARKERS = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"))

# Of pictures: inches, points, and characters of a name.
_WIDTH, _FONT, _LABEL = 5.0, 10, 16
_KIBI = 1024


def write(report: Report) -> str:
    """Write the page.

    Raises:
        ImportError: There is something to draw, and no matplotlib.
    """
    report = text.printable(report)
    option, kind = exclude(report), "suspect" if exit_code(report) else "healthy"
    leave = f"<p>For the next job: <code>{escape(option)}</code></p>" if option else ""
    head, when = escape(text.title(report)), escape(report["started"])
    sections = {
        "Findings": _findings(report),
        "Pairs of nodes": _pairs(report),
        "Collectives": _collectives(report),
        "Nodes": _table("nodes", text.node_columns(report)),
        "How it was measured": _METHOD,
    }
    return (
        f"{_HEAD}<title>{head}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{head}</h1>\n"
        f"<p>Begun {when}, torchrun_hpc {escape(report['torchrun_hpc'])}</p>\n"
        f'<div class="verdict {kind}">\n'
        f"<p><strong>{escape(text.verdict(report))}</strong></p>\n{leave}</div>\n"
        + "".join(
            f"<section>\n<h2>{name}</h2>\n{content}\n</section>\n"
            for name, content in sections.items()
        )
        + "</main>\n</body>\n</html>\n"
    )


# --- sections -------------------------------------------------------------------------


def _findings(report: Report) -> str:
    every = text.findings(report)
    if not every:
        return "<p>None.</p>"
    most = len(report["hosts"]) - 1
    columns = {
        "code": [finding["code"] for finding in every],
        "kind": ["suspect" if f["is_suspect"] else "advice" for f in every],
        "nodes": [text.names(report, finding["nodes"], most) for finding in every],
        "what is wrong": [finding["text"] for finding in every],
        "what to do": [finding["remedy"] for finding in every],
    }
    return _table("findings", columns)


def _pairs(report: Report) -> str:
    """Write a summary, and a map of bandwidth and one of latency."""
    than = usual(report["links"])
    if than is None:
        return "<p>No pair has figures.</p>"
    slow = [text.gbit(share * than.bandwidth) for share in _SHARES]
    late = [multiple * than.latency_s * 1e6 for multiple in _MULTIPLES]
    bandwidth: Levels = {}
    latency: Levels = {}
    for link in text.measured(report):
        one, other = link["first"], link["second"]
        ways = {(one, other): link["forward"], (other, one): link["backward"]}
        for cell, speed in ways.items():
            bandwidth[cell] = sum(text.gbit(speed) < limit for limit in slow)
            latency[cell] = sum(link["latency_s"] * 1e6 > limit for limit in late)
    maps = _map(report, "Bandwidth in Gbit/s, from row to column", bandwidth, slow)
    maps += _map(report, "Latency in microseconds, there and back", latency, late)
    summary = _table("pairs", text.pair_columns(report))
    return f'{summary}<div class="pictures">\n{maps}</div>'


def _map(report: Report, title: str, levels: Levels, limits: Sequence[float]) -> str:
    between = [f"{one:.3g} to {other:.3g}" for one, other in pairwise(limits)]
    ranges = [f"{limits[0]:.3g} or better", *between, f"worse than {limits[-1]:.3g}"]
    legend = [
        (f'<i style="background: var(--level-{level})"></i>', words)
        for level, words in enumerate(ranges)
        if level in levels.values()
    ]
    if any(link["problem"] for link in report["links"]):
        legend.append(
            ('<b class="problem">&times;</b>', "no figures: see the findings")
        )
    legend.append(("<i></i>", "not measured"))
    return _figure(title, partial(_draw_map, report, levels), legend)


def _collectives(report: Report) -> str:
    """Write curves of the bandwidth, and all figures."""
    rows = report["collectives"]
    if not rows:
        return "<p>None was measured.</p>"
    curves: Curves = {}
    for row in rows:
        if 0 < row["busbw"] < math.inf:
            curve = curves.setdefault((row["operation"], bool(row["scope"])), {})
            least = curve.get(row["size"], math.inf)
            curve[row["size"]] = min(least, row["busbw"] / 1e9)
    legend = [
        (f'<b style="color: var(--series-{i % _SERIES})">{sign}</b>', operation)
        for operation, (i, _, sign) in _styles(curves).items()
    ]
    if any(is_inner for _, is_inner in curves):
        legend.append(("○", "hollow: within a node, the slowest one"))
    title = f"Bus bandwidth in GB/s over the size, {report['backend']}"
    figure = _figure(title, partial(_draw_curves, curves), legend) if curves else ""
    table = _table("collectives", text.collective_columns(rows))
    summary = f"<summary>All figures: {count(len(rows), 'row')}</summary>"
    return f"{figure}<details>\n{summary}\n{table}</details>"


def _styles(curves: Curves) -> dict[str, tuple[int, str, str]]:
    """Give each operation a number, for its colour, and its markers."""
    operations = dict.fromkeys(operation for operation, _ in curves)
    return {
        name: (i, *_MARKERS[i % len(_MARKERS)]) for i, name in enumerate(operations)
    }


# --- parts ----------------------------------------------------------------------------


def _table(label: str, columns: text.Columns) -> str:
    """Write a table that scrolls in its own box, with a header for each row."""
    sides = [' class="number"' * text.is_numeric(cells) for cells in columns.values()]
    titles = [
        f'<th scope="col"{side}>{escape(head)}</th>'
        for side, head in zip(sides, columns, strict=True)
    ]
    rows = []
    for row in zip(*columns.values(), strict=True):
        cells = [f"{side}>{escape(x)}" for side, x in zip(sides, row, strict=True)]
        rest = "".join(f"<td{cell}</td>" for cell in cells[1:])
        rows.append(f'<tr><th scope="row"{cells[0]}</th>{rest}</tr>\n')
    return (
        f'<div class="scroll {label}" role="region" aria-label="{label}" tabindex="0">'
        f"\n<table>\n<thead><tr>{''.join(titles)}</tr></thead>\n"
        f"<tbody>\n{''.join(rows)}</tbody>\n</table>\n</div>\n"
    )


def _figure(
    title: str, draw: Callable[[Figure], None], legend: Sequence[tuple[str, str]]
) -> str:
    """Write a picture and its legend: signs, as HTML, and words."""
    items = "".join(f"<li>{sign} {escape(words)}</li>\n" for sign, words in legend)
    return (
        f"<figure>\n<figcaption>{escape(title)}</figcaption>\n{_picture(title, draw)}"
        f'<ul class="legend">\n{items}</ul>\n</figure>\n'
    )


# --- pictures -------------------------------------------------------------------------


def _picture(label: str, draw: Callable[[Figure], None]) -> str:
    """Draw, and return SVG with the colours and the font of the page."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra, of this alone
    from matplotlib.figure import Figure  # noqa: PLC0415

    buffer = io.StringIO()
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its font may lack a letter: the browser's not
        mpl.rcdefaults()
        mpl.rc("font", size=_FONT)
        mpl.rc("svg", fonttype="none", hashsalt=label)
        figure = Figure()
        draw(figure)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<style.*?</style>|(?<=<g) id="[^"]*"', "", svg)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"|font-family: [^;"]*;? ?', "", svg)
    for name, ink in {**_INK, "text": "#000000"}.items():
        svg = svg.replace(ink, f"var(--{name})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)


def _draw_map(report: Report, levels: Levels, figure: Figure) -> None:
    """Draw a square for each pair; names beside and above, of suspect nodes always."""
    nodes, blamed = text.ranks(report)[-1] + 1, suspects(report)
    names = [_short(text.name(report, rank)) for rank in range(nodes)]
    margin = (0.25 + 0.6 * _FONT / 72 * max(map(len, names))) / _WIDTH
    width = 0.98 - margin
    figure.set_size_inches(_WIDTH, _WIDTH)
    axes = figure.add_axes((margin, 0.02, width, width))
    axes.set(xlim=(-0.5, nodes - 0.5), ylim=(nodes - 0.5, -0.5), xticks=[], yticks=[])
    axes.spines[:].set_color(_INK["grid"])

    cell = width * _WIDTH * 72 / nodes  # points
    size = cell * (0.92 if cell > _FONT / 2 else 1.05)  # small ones without gaps
    for level in range(_LEVELS):
        pairs = [pair for pair, found in levels.items() if found == level]
        axes.plot(
            [column for _, column in pairs],
            [row for row, _ in pairs],
            "s",
            color=_INK[f"level-{level}"],
            markersize=size,
            markeredgewidth=0,
        )
    for link in report["links"]:
        if link["problem"]:
            ends, size = (link["first"], link["second"]), min(max(cell / 2, 3.0), 12.0)
            axes.plot(ends, ends[::-1], "x", color=_INK["suspect"], markersize=size)

    gap = 1.2 * _FONT / cell  # between two names, in cells
    step = 1 << (math.ceil(gap) - 1).bit_length()
    regular = range(0, nodes, step)
    free = [r for r in regular if all(abs(r - bad) >= 1.5 * gap for bad in blamed)]
    shown = sorted({*blamed, *free})
    style: dict[str, Any] = {"annotation_clip": False, "parse_math": False}
    line = {"arrowstyle": "-", "color": _INK["grid"], "shrinkA": 0, "shrinkB": 0}
    beside = {"ha": "right", "va": "center"}, {"relpos": (1, 0.5)}
    above = {"ha": "center", "va": "bottom", "rotation": 90}, {"relpos": (0.5, 0)}
    for rank, place in zip(shown, _spread(shown, gap, nodes - 1), strict=True):
        bold = {"color": _INK["suspect"], "weight": "bold"} if rank in blamed else {}
        for point, at, (side, start) in (
            ((-0.5, rank), (-0.5 - gap / 2, place), beside),
            ((rank, -0.5), (place, -0.5 - gap / 2), above),
        ):
            how = {**style, **bold, **side, "arrowprops": {**line, **start}}
            axes.annotate(names[rank], point, at, **how)


def _short(name: str) -> str:
    half = _LABEL // 2
    return name if len(name) <= _LABEL else f"{name[: half - 1]}…{name[-half:]}"


def _spread(ranks: Sequence[int], gap: float, last: int) -> list[float]:
    """Move names apart, as little as they need; they stay between 0 and the last."""
    gap = min(gap, last / max(len(ranks) - 1, 1))
    loose = [rank - gap * i for i, rank in enumerate(ranks)]
    down = accumulate(loose, max)
    up = reversed([*accumulate(reversed(loose), min)])
    room = last - gap * (len(ranks) - 1)
    return [
        gap * i + min(max((low + high) / 2, 0.0), room)
        for i, (low, high) in enumerate(zip(up, down, strict=True))
    ]


def _draw_curves(curves: Curves, figure: Figure) -> None:
    """Draw a curve for each operation; one within a node is dashed and hollow."""
    figure.set_size_inches(_WIDTH, 0.65 * _WIDTH)
    axes = figure.add_axes((0.12, 0.12, 0.86, 0.86))
    styles = _styles(curves)
    for (operation, is_inner), curve in curves.items():
        number, marker, _ = styles[operation]
        axes.plot(
            sorted(curve),
            [curve[size] for size in sorted(curve)],
            "--" if is_inner else "-",
            color=_INK[f"series-{number % _SERIES}"],
            marker=marker,
            markersize=5,
            markerfacecolor="none" if is_inner else None,
        )
    figures = [busbw for curve in curves.values() for busbw in curve.values()]
    low, high = min(figures) / 1.6, max(figures) * 1.6
    axes.set(xscale="log", yscale="log", ylim=(low, high))
    sizes = sorted({size for curve in curves.values() for size in curve})
    shown = sizes[:: math.ceil(len(sizes) / 6)]
    axes.set_xticks(shown, [_bytes(size) for size in shown])
    digits = (1,) if high / low > _KIBI else (1, 2, 5)
    powers = [digit * 10.0**power for power in range(-9, 9) for digit in digits]
    ticks = [tick for tick in powers if low < tick < high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(color=_INK["grid"])
    axes.spines[:].set_color(_INK["grid"])


def _bytes(size: float) -> str:
    units = ["B", "KiB", "MiB", "GiB"]
    while size >= _KIBI and len(units) > 1:
        size, units = size / _KIBI, units[1:]
    return f"{size:.3g} {units[0]}"


# --- what is the same on every page ---------------------------------------------------

_METHOD = """<p>Each pair of nodes sent small messages there and back over TCP, whose
tenth percentile is the latency, and then a stream in each direction; of a pair that was
looked at again, the best figures count. The collectives are torch's own, as nccl-tests
has them: algbw is size / time, and busbw is that corrected by the number of workers,
to be compared with what the hardware can do.</p>"""

_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
"""

_STYLE = """
:root {
  color-scheme: light dark;
  --back: #ffffff; --text: #1b1f24; --grid: #c3cad2;
  --box: #f3f5f7; --suspect: #b3261e; --healthy: #1a6e34;
  --level-0: #a9cfe8; --level-1: #6aaadb; --level-2: #c86f00;
  --level-3: #b2341c; --level-4: #67001f;
  --series-0: #0072b2; --series-1: #d55e00; --series-2: #009e73; --series-3: #cc79a7;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #14171c; --text: #e6e9ee; --grid: #48515c;
    --box: #1d2229; --suspect: #ff9d92; --healthy: #7fd99a;
    --level-0: #1f4e79; --level-1: #2f7fb8; --level-2: #d0780f;
    --level-3: #ff9a80; --level-4: #ffe0d0;
    --series-0: #56b4e9; --series-1: #e69f00;
  }
}
body { margin: 0; background: var(--back); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin-top: 2rem; }
p { max-width: 45rem; overflow-wrap: anywhere; }
code { display: inline-block; user-select: all; word-break: break-all;
  background: var(--box); padding: 0.1rem 0.3rem; }
.verdict { border-left: 0.4rem solid; padding: 0.1rem 1rem; background: var(--box); }
.verdict p:first-child::first-letter { text-transform: uppercase; }
.suspect { border-color: var(--suspect); }
.healthy { border-color: var(--healthy); }
.scroll { overflow-x: auto; max-height: 40rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.6rem;
  white-space: nowrap; border-bottom: 1px solid var(--grid); }
thead th { position: sticky; top: 0; z-index: 1; background: var(--box); }
tbody th { position: sticky; left: 0; background: var(--back); }
.number { text-align: right; }
.pictures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); }
figure { margin: 1rem 0; max-width: 34rem; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--text); font-family: system-ui, sans-serif; }
.legend { list-style: none; padding: 0; margin: 0.5rem 0; display: flex;
  flex-wrap: wrap; gap: 0.2rem 1rem; }
.legend i { display: inline-block; width: 0.9em; height: 0.9em;
  border: 1px solid var(--grid); vertical-align: -0.1em; }
.problem { color: var(--suspect); }
.findings { max-height: none; }
.findings td { white-space: normal; }
.findings td:nth-child(n + 4) { min-width: 14rem; }
@media (max-width: 45rem) {
  .findings thead { display: none; }
  .findings tr, .findings th, .findings td { display: block; border: 0; }
  .findings tr { border-bottom: 1px solid var(--grid); padding: 0.5rem 0; }
  .findings td:nth-child(3)::before { content: "nodes: "; }
  .findings td:nth-child(5)::before { content: "remedy: "; }
}
@media print { .scroll { max-height: none; } }
"""

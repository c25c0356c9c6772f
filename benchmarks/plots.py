"""Draw what the benchmarks have recorded: ``python benchmarks/plots.py``.

    python benchmarks/launch.py --record      # writes results/start.json
    python benchmarks/rendezvous.py --record  # writes results/rendezvous.json

Writes pictures into docs/images. Each has its colours for light and dark, and follows
the page that shows it.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from measured import recorded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IMAGES = Path(__file__).parents[1] / "docs" / "images"

# Each colour stands in the picture for one of light, and one of dark pages.
TEXT, GRID, BACK = "#1f2328", "#d1d9e0", "#f6f8fa"
OURS, OTHER, STOCK = "#0b5cad", "#59636e", "#a4370a"
DARK = {
    TEXT: "#f0f6fc",
    GRID: "#3d444d",
    BACK: "#151b23",
    OURS: "#79b8ff",
    OTHER: "#9198a1",
    STOCK: "#ffa366",
}
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "torchrun_hpc",  # the same names in each run
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color"), TEXT),
    **dict.fromkeys(("ytick.color", "axes.titlecolor"), TEXT),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), GRID),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), BACK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "lines.linewidth": 2,
}
WIDTH, HEIGHT = 5.6, 4.1  # inches of 72 pixels: 403 x 295


def start() -> str:
    """Draw how long a job takes to start."""
    shapes = {part["title"]: part["values"] for part in recorded("start.json")}
    titles = [title for title in shapes if "first all-reduce" in title]
    kinds = {
        "torchrun": ("torchrun", STOCK),
        "srun by hand": ("srun, variables by hand", OTHER),
        "torchrun_hpc": ("torchrun_hpc", OURS),
        "by exec": ("with --hpc-preload=none", OURS),
    }
    figure, axes = _figure("Seconds from srun to the first all-reduce")
    height = 0.2
    for number, (kind, (label, colour)) in enumerate(kinds.items()):
        places = [row + (number - 1.5) * height for row in range(len(titles))]
        values = [shapes[title][kind]["median"] for title in titles]
        hatch = "" if kind != "by exec" else "////"
        face = colour if not hatch else BACK
        bars = axes.barh(
            places, values, 0.85 * height,
            label=label, color=face, edgecolor=colour, hatch=hatch,
        )  # fmt: skip
        axes.bar_label(bars, [f"{value:.1f}" for value in values], padding=3)
    names = [title.partition(":")[0].replace(" of ", "\nof ") for title in titles]
    axes.set_yticks(range(len(titles)), names)
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.margins(x=0.12)
    figure.legend(loc="outside lower center", ncols=2)
    return _svg(figure, "Seconds from srun to the first all-reduce, by launcher")


def nodes_meet() -> str:
    """Draw how long nodes take to meet."""
    data = recorded("rendezvous.json")
    figure, axes = _of_nodes("Seconds until the last node has joined", data)
    for kind, rows in data["kinds"].items():
        done = [row for row in rows if not row["problem"]]
        _line(axes, kind, done, "seconds")
        late = next((row for row in rows if row["problem"]), None)
        if late is not None:
            last, bound = done[-1], data["bound"]
            axes.plot(
                [last["nodes"], late["nodes"]], [last["seconds"], bound],
                color=STOCK, linestyle="--", marker="s", markevery=[1],
            )  # fmt: skip
            axes.annotate(
                f"not within {bound} s", (late["nodes"], bound),
                xytext=(8, -4), textcoords="offset points",
            )  # fmt: skip
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    return _svg(figure, "Seconds until the last node has joined, by number of nodes")


def bytes_afterwards() -> str:
    """Draw what all nodes send each other while the workers run."""
    data = recorded("rendezvous.json")
    figure, axes = _of_nodes("Bytes per second afterwards, all nodes", data)
    for kind, rows in data["kinds"].items():
        _line(axes, kind, [row for row in rows if not row["problem"]], "rate")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _scaled(value)))
    return _svg(figure, "Bytes per second afterwards, by number of nodes")


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    axes.set_axisbelow(True)
    figure.suptitle(title, x=0.02, ha="left", fontsize=12, fontweight="bold")
    return figure, axes


def _of_nodes(title: str, data: Any) -> tuple[Figure, Axes]:
    figure, axes = _figure(title)
    counts = sorted({row["nodes"] for rows in data["kinds"].values() for row in rows})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(count) for count in counts], fontsize=9)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid()
    axes.set_xlabel("nodes")
    return figure, axes


def _line(axes: Axes, kind: str, rows: list[Any], what: str) -> None:
    is_ours = kind == "torchrun_hpc"
    axes.plot(
        [row["nodes"] for row in rows],
        [row[what] for row in rows],
        label=kind,
        color=OURS if is_ours else STOCK,
        marker="o" if is_ours else "s",
    )
    axes.legend(loc="upper left")


def _scaled(value: float) -> str:
    for unit in ("B/s", "kB/s", "MB/s"):
        if value < 1000:  # noqa: PLR2004
            return f"{value:g} {unit}"
        value /= 1000
    return f"{value:g} GB/s"


def _svg(figure: Figure, title: str) -> str:
    """Write a figure, with variables of CSS in the place of colours."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Title": title})
    text = file.getvalue()
    names = {colour: f"--c{number}" for number, colour in enumerate(DARK)}
    for colour, name in names.items():
        text = text.replace(colour, f"var({name})")
    light, dark = (
        " ".join(f"{names[colour]}: {shown};" for colour, shown in shades)
        for shades in (((c, c) for c in DARK), DARK.items())
    )
    style = (
        f"<style>svg {{ {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>\n"
    )
    text = re.sub(r"<metadata>.*?</metadata>\n", style, text, flags=re.DOTALL)
    text = text[text.index("<svg") :]
    text = re.sub(r'((?:width|height)="[0-9.]+)pt"', r'\1"', text)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


PICTURES = {
    "start.svg": start,
    "nodes.svg": nodes_meet,
    "bytes.svg": bytes_afterwards,
}


def drawn() -> dict[str, str]:
    """Return all pictures, by the names of their files."""
    with mpl.rc_context(STYLE):
        return {name: draw() for name, draw in PICTURES.items()}


if __name__ == "__main__":
    for name, picture in drawn().items():
        (IMAGES / name).write_text(picture, encoding="utf-8")

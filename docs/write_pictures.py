"""Draw the pictures of the site: ``python docs/write_pictures.py``.

Each picture has its colours for light and dark, and follows the page that shows it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from torchrun_hpc.rendezvous.rounds import NEXT, Phase

FOLDER = Path(__file__).parent / "images"

# GitHub's colours for text, with a contrast of 4.5 at least.
STYLE = """
svg { --back: #f6f8fa; --edge: #d1d9e0; --text: #1f2328; --dim: #59636e;
      --ours: #0b5cad; --theirs: #a4370a; }
@media (prefers-color-scheme: dark) { svg { --back: #151b23; --edge: #3d444d;
      --text: #f0f6fc; --dim: #9198a1; --ours: #79b8ff; --theirs: #ffa366; } }
rect { fill: var(--back); stroke: var(--edge); }
path { fill: none; stroke: var(--dim); stroke-width: 1.5; }
text { fill: var(--text); font: 14px system-ui, sans-serif; }
.code { font: 12.5px ui-monospace, Menlo, Consolas, monospace; white-space: pre; }
.dim { fill: var(--dim); } .strong { font-weight: 600; }
.ours { fill: var(--ours); } .theirs { fill: var(--theirs); }
"""
LINE = 19  # from one line of text to the next
PAD = 18


class Line(NamedTuple):
    """A line of text, and how it looks."""

    text: str
    kind: str = ""


class Panel(NamedTuple):
    """A box with lines of text."""

    width: int
    lines: list[Line]

    @property
    def height(self) -> int:
        """The height that the lines need."""
        return LINE * len(self.lines) + 2 * PAD - 6

    def drawn(self, x: int, y: int, height: int | None = None) -> str:
        """Return it as SVG, with its upper left corner there."""
        box = (
            f'<rect x="{x}.5" y="{y}.5" width="{self.width - 1}" '
            f'height="{(height or self.height) - 1}" rx="8"/>\n'
        )
        return box + "".join(
            f'<text x="{x + PAD}" y="{y + PAD + 8 + LINE * number}" '
            f'class="{line.kind}">{escape(line.text)}</text>\n'
            for number, line in enumerate(self.lines)
            if line.text
        )


def picture(width: int, height: int, title: str, content: str) -> str:
    """Return a whole picture."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">\n<title>{title}</title>\n'
        f"<!-- Written by docs/write_pictures.py. -->\n<style>{STYLE}</style>\n"
        f"{content}</svg>\n"
    )


# --- the five stages ------------------------------------------------------------------

STAGES = {
    "1  preflight": (
        "reads environment, host name, node files",
        "→ the job: its nodes, ranks and launch id",
    ),
    "2  parse": (
        "reads the command line and PET_* variables",
        "→ what the user has set",
    ),
    "3  choose mode": (
        "one node, several nodes, direct mode,",
        "by hand; or refused, with the line to copy",
    ),
    "4  plan": (
        "a pure function of these inputs",
        "→ every value, with its source",
    ),
    "5  start": (
        "writes the environment, prints the start line",
        "→ torch's agent, in this process; or the script",
    ),
}


def pipeline() -> str:
    """Draw the five stages."""
    width, y, content = 402, 0, ""
    for name, lines in STAGES.items():
        if y:
            content += f'<path d="M201 {y}v18m-5 -6l5 6l5 -6"/>\n'
            y += 22
        panel = Panel(width, [Line(name, "strong ours"), *map(Line, lines)])
        content += panel.drawn(0, y)
        y += panel.height
    return picture(width, y, "A launch goes through five stages", content)


# --- the phases of a coordinator ------------------------------------------------------

PHASES = {
    Phase.STANDBY: "this node does not coordinate, but may take over",
    Phase.SEEK: "too few nodes are here; look for another coordinator",
    Phase.GATHER: "wait until enough nodes are ready",
    Phase.CONFIRM: "wait until the nodes have confirmed the round",
    Phase.RUN: "workers run",
    Phase.FINISHED: "all active nodes have finished",
    Phase.FAILED: "the job has failed",
}
SIDE = 84  # room for arrows on each side
STEP = 13  # between two of them


def phases() -> str:
    """Draw the phases, and which may follow which: on the right, what comes later."""
    order, content = list(PHASES), ""
    only_spares = (Phase.STANDBY, Phase.SEEK)
    height = 0
    for number, phase in enumerate(order):
        suffix = " (with spares)" if phase in only_spares else ""
        lines = [Line(phase.value + suffix, "strong ours"), Line(PHASES[phase])]
        panel = Panel(402, lines)
        content += panel.drawn(SIDE, number * (panel.height + 16))
        height = panel.height
    ways = [
        (number, order.index(to)) for number, at in enumerate(order) for to in NEXT[at]
    ]
    lanes: dict[tuple[int, int], list[range]] = {}
    for start, end in sorted(ways, key=lambda way: abs(way[1] - way[0])):
        side = 1 if end > start else -1
        rows = range(min(start, end), max(start, end))
        lane = 1
        while any({*rows} & {*other} for other in lanes.get((side, lane), [])):
            lane += 1
        lanes.setdefault((side, lane), []).append(rows)
        edge, out = (SIDE + 402 if side > 0 else SIDE), STEP * lane * side
        above, below = (
            number * (height + 16) + height // 2 + shift
            for number, shift in ((start, 5 * side), (end, -7 * side))
        )
        content += (
            f'<path d="M{edge} {above}h{out}V{below}h{-out}'
            f'm{6 * side} -4l{-6 * side} 4l{6 * side} 4"/>\n'
        )
    width, total = 402 + 2 * SIDE, len(order) * (height + 16) - 16
    return picture(width, total, "The phases of a coordinator", content)


PICTURES = {
    "phases.svg": phases(),
    "pipeline.svg": pipeline(),
}

if __name__ == "__main__":
    for name, drawn in PICTURES.items():
        (FOLDER / name).write_text(drawn, encoding="utf-8")

"""What a person reads on stdout: findings, the worst nodes, and summaries.

Here a table is its columns, by their titles; `torchrun_hpc.doctor.page` has the same.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from statistics import median, median_high, median_low
from typing import TYPE_CHECKING, Any

from torchrun_hpc.doctor.results import exclude, exit_code, suspects
from torchrun_hpc.errors import count
from torchrun_hpc.reporting import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrun_hpc.doctor.results import Collective, Finding, Link, Node, Report

Columns = dict[str, list[str]]

_WIDTH = 100
_NAMES, _FINDINGS, _NODES, _ROWS = 4, 12, 10, 10  # so many are shown
_UNKNOWN = "-"


def render(report: Report) -> str:
    """Write an examination for a terminal of 100 columns."""
    report = printable(report)
    blocks = [_findings(report), _nodes(report), _pairs(report), _collectives(report)]
    end = exclude(report) or verdict(report)
    return "\n\n".join([title(report), *filter(None, blocks), end]) + "\n"


def printable(value: Any) -> Any:
    """Return plain data without what a terminal would act on."""
    if isinstance(value, dict):
        return {printable(key): printable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [printable(part) for part in value]
    return console.printable(value, len(value)) if isinstance(value, str) else value


# --- in one line ----------------------------------------------------------------------


def title(report: Report) -> str:
    """Say what was examined."""
    came, every = len(report["nodes"]), len(ranks(report))
    some = f"{came} of " if came < every else ""
    site = f", site {report['site']}" if report["site"] else ""
    launch = f", launch {report['launch_id']}" if report["launch_id"] else ""
    seconds = f"{report['seconds']:.1f} s"
    return f"{some}{count(every, 'node')} examined in {seconds}{site}{launch}"


def verdict(report: Report) -> str:
    """Say which nodes are suspect."""
    blamed, every = suspects(report), len(ranks(report))
    if blamed:
        verb = "is" if len(blamed) == 1 else "are"
        is_most = 1 < every < 2 * len(blamed)
        why = "; it is likely something that they share" if is_most else ""
        who = f"{len(blamed)} of {count(every, 'node')} {verb} suspect"
        return f"{who}: {names(report, blamed)}{why}"
    if exit_code(report):
        return "no single node is to blame for what is suspect"
    return "no node is suspect"


def ranks(report: Report) -> list[int]:
    """Return the ranks of all nodes of the job."""
    came = (node["rank"] for node in report["nodes"])
    return sorted({*range(len(report["hosts"])), *came})


def name(report: Report, rank: int) -> str:
    """Return the name of a node, if a scheduler gave it one."""
    return dict(enumerate(report["hosts"])).get(rank) or f"node {rank}"


def names(report: Report, chosen: Sequence[int], limit: int = _NAMES) -> str:
    """Name some nodes, and count the others."""
    if limit < len(chosen) == len(ranks(report)):
        return "all nodes"
    more = f" and {len(chosen) - limit} more" if len(chosen) > limit else ""
    return ", ".join(name(report, rank) for rank in chosen[:limit]) + more


# --- as tables ------------------------------------------------------------------------


def findings(report: Report) -> list[Finding]:
    """Return what is suspect first, then advice."""
    return sorted(report["findings"], key=lambda finding: not finding["is_suspect"])


def measured(report: Report) -> list[Link]:
    """Return the pairs that have figures."""
    return [link for link in report["links"] if not link["problem"]]


def gbit(bandwidth: float) -> float:
    """Convert bytes per second to Gbit/s."""
    return bandwidth * 8 / 1e9


def node_columns(report: Report) -> Columns:
    """Describe each node, the worst first.

    A cell is ``-`` if that is not known, and empty if the node has not come.
    """
    nodes = {node["rank"]: node for node in report["nodes"]}
    codes = defaultdict[int, dict[str, None]](dict)
    for finding in findings(report):
        for rank in finding["nodes"]:
            codes[rank][finding["code"]] = None
    blamed, figures = suspects(report), _medians(report)

    def worst_first(rank: int) -> tuple[bool, bool, float, int]:
        bandwidth = sum(figures.get(rank, [])[1:])
        return rank not in blamed, rank not in codes, bandwidth, rank

    rows = [
        {"node": name(report, rank), "findings": " ".join(codes[rank]) or _UNKNOWN}
        | (_described(nodes[rank], figures.get(rank)) if rank in nodes else {})
        for rank in sorted(ranks(report), key=worst_first)
    ]
    titles = dict.fromkeys(title for row in rows for title in row)
    return {title: [row.get(title, "") for row in rows] for title in titles}


def _medians(report: Report) -> dict[int, list[float]]:
    """Return what is between each node and its partners: us, and Gbit/s each way."""
    figures = defaultdict[int, list[tuple[float, ...]]](list)
    for link in measured(report):
        latency = link["latency_s"] * 1e6
        forward, backward = gbit(link["forward"]), gbit(link["backward"])
        figures[link["first"]].append((latency, forward, backward))
        figures[link["second"]].append((latency, backward, forward))
    better = (median_low, median_high, median_high)  # of the middle two
    return {
        rank: [middle(row[i] for row in rows) for i, middle in enumerate(better)]
        for rank, rows in figures.items()
    }


def _described(node: Node, figures: Sequence[float] | None) -> dict[str, str]:
    """Write what matters of a node, by the titles of columns."""
    latency, sends, receives = figures or (None, None, None)
    models = Counter(gpu["model"] for gpu in node["gpus"])
    gpus = ", ".join(f"{number} x {model}" for model, number in models.items())
    torch = node["torch"]
    return {
        "latency (us)": _number(latency, 1),
        "sends (Gbit/s)": _number(sends, 2),
        "receives (Gbit/s)": _number(receives, 2),
        "import (s)": _number(torch["import_s"] if torch else None, 1),
        "torch": (torch["version"] or "fails") if torch else _UNKNOWN,
        "address": node["address"] or _UNKNOWN,
        "interface": _interface(node),
        "GPUs": gpus or str(torch["gpus"] if torch else 0),
        "CPUs": _cpus(node),
    }


def _interface(node: Node) -> str:
    """Write the interface of the job: ``ib0 (MTU 4092, 200 Gbit/s)``."""
    for interface in node["interfaces"]:
        if interface["name"] == node["interface"]:
            speed = interface["speed_mbit"] / 1000
            known = f", {speed:g} Gbit/s" if speed > 0 else ""
            return f"{interface['name']} (MTU {interface['mtu']}{known})"
    return node["interface"] or _UNKNOWN


def _cpus(node: Node) -> str:
    """Count the CPUs that the node may use, and those of the machine if it has more."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", node["cpus"])
    usable = sum(int(last or first) - int(first) + 1 for first, last in ranges)
    return str(usable) if usable == node["cores"] else f"{usable} of {node['cores']}"


def _number(value: float | None, digits: int) -> str:
    return _UNKNOWN if value is None else f"{value:.{digits}f}"


def pair_columns(report: Report) -> Columns:
    """Summarize the pairs that have figures; empty without any."""
    links, nodes = measured(report), len(ranks(report))
    if not links:
        return {}
    ways = [(link["forward"], link["first"], link["second"]) for link in links]
    ways += [(link["backward"], link["second"], link["first"]) for link in links]
    slowest, sender, receiver = min(ways)
    latest = max(links, key=lambda link: link["latency_s"])
    one, other = name(report, latest["first"]), name(report, latest["second"])
    latency = median(link["latency_s"] for link in links) * 1e6
    bandwidth = gbit(median(way[0] for way in ways))
    return {
        f"{len(links)} of {count(nodes * (nodes - 1) // 2, 'pair')}": [
            "latency (us)",
            "bandwidth (Gbit/s)",
        ],
        "median": [f"{latency:.1f}", f"{bandwidth:.2f}"],
        "worst": [f"{latest['latency_s'] * 1e6:.1f}", f"{gbit(slowest):.2f}"],
        "which": [
            f"{one} and {other}",
            f"{name(report, sender)} to {name(report, receiver)}",
        ],
    }


def collective_columns(rows: Sequence[Collective]) -> Columns:
    """Write collectives with the columns of nccl-tests."""
    return {
        "operation": [row["operation"] for row in rows],
        "workers": [row["scope"] or "all" for row in rows],
        "size (B)": [str(row["size"]) for row in rows],
        "count (elements)": [str(row["count"]) for row in rows],
        "type": ["float" for _ in rows],
        "redop": ["sum" if "reduce" in row["operation"] else "none" for row in rows],
        "time (us)": [f"{row['time_s'] * 1e6:.2f}" for row in rows],
        "algbw (GB/s)": [f"{row['algbw'] / 1e9:.2f}" for row in rows],
        "busbw (GB/s)": [f"{row['busbw'] / 1e9:.2f}" for row in rows],
        "#wrong": [str(row["wrong"]) if row["wrong"] >= 0 else "N/A" for row in rows],
    }


def is_numeric(cells: Sequence[str]) -> bool:
    """Tell whether a column is of numbers, which stand at its right side."""
    known = [cell for cell in cells if cell not in ("", _UNKNOWN)]
    return known != [] and all(re.fullmatch(r"\d+(\.\d+)?|N/A", x) for x in known)


# --- as blocks of lines ---------------------------------------------------------------


def _table(columns: Columns) -> str:
    """Align columns; units stand below their titles, as nccl-tests has them."""
    has_units, aligned = any(" (" in head for head in columns), []
    for head, cells in columns.items():
        word, bracket, unit = head.partition(" (")
        column = [word, *([bracket.strip() + unit] * has_units), *cells]
        width = max(map(len, column))
        align = str.rjust if is_numeric(cells) else str.ljust
        aligned.append([align(cell, width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def _more(number: int, text: str) -> list[str]:
    return [f"and {number} more{text}"] if number > 0 else []


def _findings(report: Report) -> str:
    lines, every = [], findings(report)
    for finding in every[:_FINDINGS]:
        kind = "suspect" if finding["is_suspect"] else "advice"
        who, what = names(report, finding["nodes"]), finding["text"]
        what = f"{who}: {what}" if who not in what else what
        lines += _wrapped(f"{finding['code']:6}  {kind:7}  {what}", " " * 17)
        lines += _wrapped(" " * 17 + f"remedy: {finding['remedy']}", " " * 25)
    return "\n".join(lines + _more(len(every) - _FINDINGS, " findings"))


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    """Break a text into lines, of which the first one is not indented."""
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _nodes(report: Report) -> str:
    """Write the worst nodes; what is the same on all is written once, above them."""
    columns, shared = node_columns(report), {}
    is_alone = len(columns["node"]) == 1
    for head, cells in columns.items():
        values = {*cells} - {""}
        if values == {_UNKNOWN} or (len(values) == 1 and (is_alone or head != "node")):
            shared[head] = values.pop()
    known = [f"{head} {value}" for head, value in shared.items() if value != _UNKNOWN]
    common = "" if is_alone else "all nodes: "
    lines = _wrapped(f"{common}{', '.join(known)}") if known else []
    shown = {h: cells[:_NODES] for h, cells in columns.items() if h not in shared}
    lines += [_table(shown)] if shown else []
    rest = columns["findings"][_NODES:]
    with_findings = sum(cell != _UNKNOWN for cell in rest)
    lines += _more(len(rest), f", {with_findings or 'none'} of them with findings")
    return "\n".join(lines)


def _pairs(report: Report) -> str:
    columns = pair_columns(report)
    lines = [_table(columns)] if columns else []
    silent = [link for link in report["links"] if link["problem"]]
    ways = [
        f"{name(report, link['first'])} and {name(report, link['second'])}"
        for link in silent
    ]
    if silent:
        first = ", ".join(ways[:_NAMES])
        more = "".join(_more(len(ways) - _NAMES, ""))
        lines += _wrapped(f"no figures between {first} {more}")
    return "\n".join(lines)


def _collectives(report: Report) -> str:
    """Write the largest size of each operation if there are many; the slowest node."""
    rows, chosen = report["collectives"], dict[tuple[str, bool], "Collective"]()
    for row in rows:
        key = row["operation"], bool(row["scope"])
        best = chosen.get(key, row)
        if (row["size"], -row["busbw"]) > (best["size"], -best["busbw"]):
            chosen[key] = row
        chosen.setdefault(key, row)
    if not rows:
        return ""
    workers = count(sum(node["workers"] for node in report["nodes"]), "worker")
    is_short = len(rows) <= _ROWS
    what = "" if is_short else ": the largest size, and of the nodes the slowest"
    table = _table(collective_columns(rows if is_short else [*chosen.values()]))
    return f"torch's collectives over {report['backend']}, {workers}{what}\n{table}"

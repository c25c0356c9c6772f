"""What the dry run prints: every value and its source, as tables or as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from torchrun_hpc.names import fold
from torchrun_hpc.options.values import DIRECT
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.description import shell_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torchrun_hpc.reporting.description import Description

# How many nodes' commands are shown.
_SHOWN = 4


def print_dry_run(
    form: str, nodes: Sequence[Description], missing: Sequence[str], limit: int
) -> None:
    """Print what would be done, as ``table`` or ``json``; see `render`."""
    if form == "json":
        answer = {"nodes": nodes, "missing": missing, "limit_s": limit}
        console.output(json.dumps(answer, indent=2) + "\n")
    else:
        console.output(render(nodes, missing, limit))


def render(nodes: Sequence[Description], missing: Sequence[str], limit: int) -> str:
    """Write what would be done, value by value.

    Args:
        nodes: Those that answered, in the order of their ranks. What is the same on all
            is taken from the first one.
        missing: Names of the nodes that did not answer.
        limit: Seconds that they had.
    """
    first, plan = nodes[0], nodes[0]["plan"]
    is_direct = plan["backend"] == DIRECT
    versions = f"torchrun_hpc {first['torchrun_hpc']}, torch {first['torch']}"
    parts = [
        f"{versions}, Python {first['python']}: a dry run, nothing is started",
        _table(("value", "is", "from"), _decisions(first)),
        _table(("rank", "node", "address", "interface", "workers"), _nodes(nodes)),
    ]
    if is_direct and plan["nodes"] > 1:
        parts.append(
            "Each task is a worker: only this one is shown, no other was asked"
        )
    if missing:
        parts.append(f"No answer within {limit} s from: {fold(missing)}")
    bound = [*_bound(nodes)]
    if bound:
        parts.append(_table(("worker", "CPUs", "where", "because"), bound))
    if any(node["exports"] for node in nodes):
        parts.append(_table(("variable", "is set to", "from"), _variables(nodes)))
    if not is_direct:  # torch is the script's affair
        patches = [(p["name"], p["state"], p["reason"]) for p in first["patches"]]
        parts.append(_table(("inside torch", "is", "because"), patches))
    messages = [f"{m['code']} {m['text']}" for m in [*plan["notes"], *plan["advice"]]]
    messages += [
        f"{m['code']} {_name(node)}: {m['text']}"
        for node in nodes
        for m in [*node["plan"]["warnings"], *node["plan"]["advice"]]
        if m not in plan["advice"]
    ]
    parts += ["\n".join(messages)] if messages else []
    for node in nodes[:_SHOWN]:
        where = f", on {_name(node)}" if len(nodes) > 1 else ""
        how = "by hand, for this task" if is_direct else "with plain torchrun"
        lines = "\n".join(shell_lines(node))
        parts.append(f"The same {how}{where}:\n\n{lines}")
    if len(nodes) > _SHOWN:
        parts.append(f"and {len(nodes) - _SHOWN} more: --hpc-dry-run=json")
    return "\n\n".join(parts) + "\n"


def _name(node: Description) -> str:
    """Return the name of a node, if a scheduler gave it one."""
    plan = node["plan"]
    names = plan["hosts"][plan["node_rank"] :][:1] if plan["hosts"] else []
    return (names and names[0]) or "this node"


def _decisions(node: Description) -> Iterator[Sequence[str]]:
    job, plan = node["job"], node["plan"]
    if job is not None:
        yield "scheduler", job["scheduler"], f"a {job['context']}"
        source = job["provenance"].get("node_rank", "")
        yield "node rank", str(plan["node_rank"]), source
    workers = node["options"].get("nproc_per_node")
    source = f"{workers['source']}={workers['value']}" if workers else "default"
    if job is not None and plan["backend"] == DIRECT:
        source = job["provenance"].get("tasks", "")
    yield "workers", str(plan["workers"]), source
    if plan["site"]:
        yield "site", plan["site"]["value"], plan["site"]["source"]
    if plan["binding"]:
        yield "CPUs", plan["binding"]["value"], plan["binding"]["source"]
    if plan["preload"]:
        yield "imports once", plan["preload"]["value"], plan["preload"]["source"]
    yield "rendezvous", f"{plan['backend']} at {plan['endpoint']}", ""
    if plan["listen"]:
        yield "listens on", plan["listen"], "this node is the host"
    for name, option in node["options"].items():
        yield f"--{name}", option["value"], option["source"]


def _nodes(nodes: Sequence[Description]) -> Iterator[Sequence[str]]:
    for node in nodes:
        plan = node["plan"]
        address, interface = plan["address"] or "unknown", plan["interface"] or "-"
        rank, workers = str(plan["node_rank"]), str(plan["workers"])
        yield rank, _name(node), address, interface, workers


def _bound(nodes: Sequence[Description]) -> Iterator[Sequence[str]]:
    """Yield the CPUs of node 0's workers, and of others where they differ from it."""
    first = nodes[0]["plan"]["cpus"]
    for node in nodes:
        task = node["job"]["task"]["local_rank"] if node["job"] else 0
        start = task if node["plan"]["backend"] == DIRECT else 0
        where = "" if node is nodes[0] else f" on {_name(node)}"
        if where and node["plan"]["cpus"] == first:
            continue
        for rank, share in enumerate(node["plan"]["cpus"], start):
            yield f"{rank}{where}", share["cpus"], share["domain"], share["reason"]


def _variables(nodes: Sequence[Description]) -> Iterator[Sequence[str]]:
    """Yield the variables of node 0, and those of others that differ from it."""
    for node in nodes:
        for name, variable in node["plan"]["environment"].items():
            if node is nodes[0]:
                yield name, variable["value"], variable["source"]
            elif nodes[0]["exports"].get(name) != variable["value"]:
                yield f"{name} on {_name(node)}", variable["value"], variable["source"]
        for name in sorted(nodes[0]["exports"].keys() - node["exports"].keys()):
            yield f"{name} on {_name(node)}", "(nothing)", ""


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align columns; the last one is as wide as it is."""
    lines = [titles, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles) - 1)]
    return "\n".join(
        "  ".join([*map(str.ljust, line, widths), line[-1]]).rstrip() for line in lines
    )

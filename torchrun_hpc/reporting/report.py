"""Everything that a person reads. It goes to stderr: stdout belongs to the script."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.planning.inputs import DIRECT
from torchrun_hpc.reporting import streams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torchrun_hpc.planning.launch_plan import LaunchPlan
    from torchrun_hpc.reporting.description import Description

PREFIX = "torchrun_hpc: "

# How many nodes' commands a dry run shows.
_SHOWN = 4


def line(message: Message, stream: TextIO | None, kind: str = "") -> None:
    """Write one line, in one piece: other nodes write to the same terminal.

    Nothing is raised if it cannot be written: a message never ends a launch.

    Args:
        message: What there is to say.
        stream: Where to; ``None`` if there is nothing to write to.
        kind: ``error``, ``warning``, or nothing.
    """
    label = f"{kind}: " if kind else ""
    streams.write(f"{PREFIX}{label}{message}\n", stream)


def output(text: str) -> None:
    """Write to stdout, where there is no script to have it.

    Raises:
        LaunchError: There is no stdout, or it is full.
    """
    if sys.stdout is None:
        raise LaunchError(
            "HPC101", "there is no standard output to print to: it is closed"
        )
    try:
        # Whatever its encoding: names of files and of centres may be in any script.
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # What is still buffered must not be tried again at the end.
        streams.discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):  # that is | head
            text = f"cannot print to standard output: {error.strerror}"
            raise LaunchError("HPC102", text) from None


def start_line(plan: LaunchPlan) -> Message:
    """Say in one line what is about to start."""
    where = plan.rendezvous
    parts = [_shape(plan), plan.messages.title]
    if where.endpoint:
        address = where.listen[0] if where.listen else ""
        number = f" ({address})" if address not in where.endpoint else ""
        is_direct = plan.mode.is_direct
        what = "each task a worker" if is_direct else f"{where.backend} rendezvous"
        parts.append(f"{what} at {where.endpoint}{number}")
    if plan.interface:
        parts.append(f"interface {plan.interface}")
    if plan.site:
        parts.append(f"site {plan.site.value}")
    notes = map(str, plan.messages.notes)
    return Message("HPC001", "; ".join([", ".join(parts), *notes]))


def _shape(plan: LaunchPlan) -> str:
    """Say how many nodes there are, and workers: on this one if no more is known."""
    world = plan.world
    nodes, workers = count(world.nodes, "node"), count(world.workers, "worker")
    if world.size:
        is_even = world.size == world.workers * world.nodes
        tasks = count(world.workers if is_even else world.size, "task")
        return f"{nodes} x {tasks}" if is_even else f"{nodes}, {tasks}"
    if 0 < world.fewest < world.nodes:
        nodes = f"{world.fewest} to {nodes}"
    return f"{nodes}, {workers}" + (" on this one" if world.nodes > 1 else "")


def print_dry_run(
    form: str, nodes: Sequence[Description], missing: Sequence[str], limit: int
) -> None:
    """Print what would be done, as a table or for machines.

    Args:
        form: ``table`` or ``json``.
        nodes: As for `dry_run`.
        missing: As for `dry_run`.
        limit: As for `dry_run`.
    """
    import json  # noqa: PLC0415 - no other launch needs it

    if form == "json":
        answer = {"nodes": nodes, "missing": missing, "limit_s": limit}
        output(json.dumps(answer, indent=2) + "\n")
    else:
        output(dry_run(nodes, missing, limit))


def dry_run(nodes: Sequence[Description], missing: Sequence[str], limit: int) -> str:
    """Write what would be done, value by value.

    Args:
        nodes: Those that answered, in the order of their ranks. The first one speaks
            for what is the same on all.
        missing: Names of the nodes that did not answer.
        limit: Seconds that they had.
    """
    from torchrun_hpc.reporting.description import shell_lines  # noqa: PLC0415 - slow to import

    first, plan = nodes[0], nodes[0]["plan"]
    is_direct = plan["backend"] == DIRECT
    versions = f"torchrun_hpc {first['torchrun_hpc']}, torch {first['torch']}"
    parts = [
        f"{versions}, Python {first['python']}: a dry run, nothing is started",
        _table(("value", "is", "from"), _values(first)),
        _table(("rank", "node", "address", "interface", "workers"), _nodes(nodes)),
    ]
    if is_direct and plan["nodes"] > 1:
        parts.append(
            "Each task is a worker: only this one is shown, no other was asked"
        )
    if missing:
        parts.append(f"No answer within {limit} s from: {', '.join(missing)}")
    if any(node["exports"] for node in nodes):
        head = ("variable", "is set to", "from")
        parts.append(_table(head, _variables(nodes)))
    patches = [[p["name"], p["state"], p["reason"]] for p in first["patches"]]
    if not is_direct:  # torch is the script's affair
        parts.append(_table(("inside torch", "is", "because"), patches))
    said = [f"{m['code']} {m['text']}" for m in [*plan["notes"], *plan["advice"]]]
    said += [
        f"{m['code']} {_name(node)}: {m['text']}"
        for node in nodes
        for m in [*node["plan"]["warnings"], *node["plan"]["advice"]]
        if m not in plan["advice"]
    ]
    parts += ["\n".join(said)] if said else []
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


def _values(node: Description) -> Iterator[Sequence[str]]:
    job, plan = node["job"], node["plan"]
    if job is not None:
        yield "scheduler", job["scheduler"], f"a {job['context']}"
        rank, source = str(plan["node_rank"]), job["provenance"].get("node_rank", "")
        yield "node rank", rank, source
    workers = node["options"].get("nproc_per_node")
    source = f"{workers['source']}={workers['value']}" if workers else "default"
    if job is not None and plan["backend"] == DIRECT:
        source = job["provenance"].get("tasks", "")
    yield "workers", str(plan["workers"]), source
    if plan["site"]:
        yield "site", plan["site"]["value"], plan["site"]["source"]
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


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align columns; the last one is as wide as it is."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    return "\n".join(
        "  ".join([*map(str.ljust, line, widths), line[-1]]).rstrip() for line in lines
    )

"""What the dry run prints: every value and its source, as tables or as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from torchrun_hpc import wire
from torchrun_hpc.host.network import join_endpoint
from torchrun_hpc.names import fold
from torchrun_hpc.options.values import DIRECT
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.description import shell_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torchrun_hpc.planning.workers import Binding, Share
    from torchrun_hpc.reporting.description import Description

# How many nodes' commands are shown.
_SHOWN = 4


def print_dry_run(
    form: str, nodes: Sequence[Description], missing: Sequence[str], limit: int
) -> None:
    """Print what would be done, as ``table`` or ``json``; see `render`."""
    if form == "json":
        found = [wire.encode(node) for node in nodes]
        answer = {"nodes": found, "missing": missing, "limit_s": limit}
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
    first = nodes[0]
    is_direct = first.meeting.backend == DIRECT
    versions = f"torchrun_hpc {first.torchrun_hpc}, torch {first.torch}"
    parts = [
        f"{versions}, Python {first.python}: a dry run, nothing is started",
        _table(("value", "is", "from"), _decisions(first)),
        _table(("rank", "node", "address", "interface", "workers"), _nodes(nodes)),
    ]
    if is_direct and first.meeting.nodes > 1:
        parts.append(
            "Each task is a worker: only this one is shown, no other was asked"
        )
    if missing:
        parts.append(f"No answer within {limit} s from: {fold(missing)}")
    bound = [*_bound(nodes)]
    if bound:
        parts.append(_table(("worker", "CPUs", "where", "because"), bound))
    if any(node.exports for node in nodes):
        parts.append(_table(("variable", "is set to", "from"), _variables(nodes)))
    if not is_direct:  # torch is the script's affair
        patches = [(p.name, p.state, p.reason) for p in first.patches]
        parts.append(_table(("inside torch", "is", "because"), patches))
    parts += filter(None, ["\n".join(_messages(nodes))])
    for node in nodes[:_SHOWN]:
        where = f", on {_name(node)}" if len(nodes) > 1 else ""
        how = "by hand, for this task" if is_direct else "with plain torchrun"
        lines = "\n".join(shell_lines(node.exports, node.command))
        parts.append(f"The same {how}{where}:\n\n{lines}")
    if len(nodes) > _SHOWN:
        parts.append(f"and {len(nodes) - _SHOWN} more: --hpc-dry-run=json")
    return "\n\n".join(parts) + "\n"


def _name(node: Description) -> str:
    """Return the name of a node, if a scheduler gave it one."""
    meeting = node.meeting
    names = meeting.hosts[meeting.node_rank :][:1] if meeting.hosts else ()
    return (names and names[0]) or "this node"


def _decisions(node: Description) -> Iterator[Sequence[str]]:
    job, meeting, workers = node.job, node.meeting, node.workers
    typed = node.options.get("nproc_per_node")
    source = str(typed) if typed else "default"
    if job is not None:
        yield "scheduler", job.scheduler, f"a {job.context.value}"
        known_by = job.provenance.get("node_rank", "")
        yield "node rank", str(meeting.node_rank), known_by
        if meeting.backend == DIRECT:
            source = job.provenance.get("tasks", "")
    yield "workers", str(workers.number), source
    if meeting.site:
        yield "site", str(meeting.site.value), meeting.site.source
    if workers.binding:
        yield _binding(workers.binding)
    if workers.preload and not workers.preload.problem:
        setting = workers.preload.setting
        yield "imports once", str(setting.value), setting.source
    yield "rendezvous", f"{meeting.backend} at {meeting.endpoint}", ""
    if meeting.listen:
        yield "listens on", join_endpoint(*meeting.listen), "this node is the host"
    for name, option in node.options.items():
        yield f"--{name}", str(option.value), option.source


def _binding(binding: Binding) -> Sequence[str]:
    setting, source = binding.setting, binding.setting.source
    if binding.problem:
        source += f"; binds nothing: {binding.problem}"
    elif binding.instead:
        source += f"; divided evenly: {binding.instead}"
    return "CPUs", str(setting.value), source


def _nodes(nodes: Sequence[Description]) -> Iterator[Sequence[str]]:
    for node in nodes:
        meeting = node.meeting
        address, interface = meeting.local_address, meeting.interface or "-"
        rank, workers = str(meeting.node_rank), str(node.workers.number)
        yield rank, _name(node), address or "unknown", interface, workers


def _bound(nodes: Sequence[Description]) -> Iterator[Sequence[str]]:
    """Yield the CPUs of node 0's workers, and of others where they differ from it."""
    first = _shares(nodes[0])
    for node in nodes:
        where = "" if node is nodes[0] else f" on {_name(node)}"
        if where and _shares(node) == first:
            continue
        for rank, share in enumerate(_shares(node)):
            yield f"{rank}{where}", share.cpu_list, share.domain, share.reason


def _shares(node: Description) -> Sequence[Share]:
    return node.workers.binding.shares if node.workers.binding else ()


def _variables(nodes: Sequence[Description]) -> Iterator[Sequence[str]]:
    """Yield the variables of node 0, and those of others that differ from it."""
    first = nodes[0]
    for node in nodes:
        for name, setting in node.environment.items():
            value = str(setting.value)
            if node is first:
                yield name, value, setting.source
            elif first.exports.get(name) != value:
                yield f"{name} on {_name(node)}", value, setting.source
        for name in sorted(first.exports.keys() - node.exports.keys()):
            yield f"{name} on {_name(node)}", "(nothing)", ""


def _messages(nodes: Sequence[Description]) -> Iterator[str]:
    """Yield what is said of all nodes, as node 0 has it, and what of one."""
    shared = nodes[0].messages
    yield from map(str, [*shared.notes, *shared.advice])
    for node in nodes:
        own = node.messages
        for message in (*own.warnings, *own.advice):
            if message not in shared.advice:
                yield f"{message.code} {_name(node)}: {message.text}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align columns; the last one is as wide as it is."""
    lines = [titles, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles) - 1)]
    return "\n".join(
        "  ".join([*map(str.ljust, line, widths), line[-1]]).rstrip() for line in lines
    )

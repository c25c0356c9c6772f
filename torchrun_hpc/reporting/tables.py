"""The output of the dry run: values with their sources, as tables or as JSON."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING

from torchrun_hpc import wire
from torchrun_hpc.errors import count
from torchrun_hpc.host.network import join_endpoint
from torchrun_hpc.names import fold
from torchrun_hpc.options.values import DIRECT
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.description import shell_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torchrun_hpc.planning.workers import Binding, Share
    from torchrun_hpc.reporting.description import DescribedPatch, Description

# How many nodes' commands are shown.
_SHOWN = 4

# Characters of a line, at which the last column of a table is wrapped; and of that
# column at least.
_WIDTH, _LEAST = 100, 30


def print_dry_run(
    form: str, nodes: Sequence[Description], missing: Sequence[str], limit: int
) -> None:
    """Print a dry run as ``table`` or ``json``; the other arguments are `render`'s."""
    if form == "json":
        encoded = [wire.encode(node) for node in nodes]
        answer = {"nodes": encoded, "missing": missing, "limit_s": limit}
        console.output(json.dumps(answer, indent=2) + "\n")
    else:
        console.output(render(nodes, missing, limit))


def render(nodes: Sequence[Description], missing: Sequence[str], limit: int) -> str:
    """Return the verdict and the tables.

    The ``missing`` nodes have not answered within ``limit`` seconds.
    """
    first = nodes[0]
    is_direct = first.meeting.backend == DIRECT
    versions = f"torchrun_hpc {first.torchrun_hpc}, torch {first.torch}"
    parts = [
        _verdict(nodes, missing, limit),
        f"Dry run by {versions}, Python {first.python}. Nothing was started.",
        _table(("value", "is", "from"), _decisions(first)),
        _table(("rank", "node", "address", "interface", "workers"), _nodes(nodes)),
    ]
    if is_direct and first.meeting.nodes > 1:
        parts.append(
            "Each task is a worker. Only this task is shown; no other was asked."
        )
    if bound := [*_bound(nodes)]:
        parts.append(_table(("worker", "CPUs", "where", "because"), bound))
    if any(node.exports for node in nodes):
        parts.append(_table(("variable", "is set to", "from"), _variables(nodes)))
    if "hpc_debug" in first.options and not is_direct:
        parts.append(of_patches(first.patches))
    if messages := "\n".join(_messages(nodes)):
        parts.append(messages)
    for node in nodes[:_SHOWN]:
        how = "by hand, for this task" if is_direct else "with plain torchrun"
        how += f", on {_name(node)}" if len(nodes) > 1 else ""
        lines = "\n".join(shell_lines(node.exports, node.command))
        parts.append(f"The same launch {how}:\n\n{lines}")
    if len(nodes) > _SHOWN:
        others = count(len(nodes) - _SHOWN, "other node")
        parts.append(f"--hpc-dry-run=json also shows the {others}.")
    return "\n\n".join(parts) + "\n"


def of_patches(patches: Iterable[DescribedPatch]) -> str:
    """Return the table of the changes inside torch."""
    rows = [(patch.name, patch.state, patch.reason) for patch in patches]
    return _table(("inside torch", "is", "because"), rows)


def _verdict(nodes: Sequence[Description], missing: Sequence[str], limit: int) -> str:
    if missing:
        absent = f"{count(len(missing), 'node')} did not answer within {limit} s"
        return f"NOT OK: {absent}: {fold(missing)}"
    meeting, size = nodes[0].meeting, nodes[0].workers.size
    every = size or sum(node.workers.number for node in nodes[: meeting.active])
    is_alone = len(nodes) < meeting.active and not size
    on = "this node" if is_alone else count(meeting.active, "node")
    spare = meeting.spares.number
    kept = f", and keep {count(spare, 'spare')} idle" if spare else ""
    return f"OK: would start {count(every, 'worker')} on {on}{kept}"


def _name(node: Description) -> str:
    hosts = dict(enumerate(node.meeting.hosts))
    return hosts.get(node.meeting.node_rank) or "this node"


def _decisions(node: Description) -> Iterator[Sequence[str]]:
    job, meeting, workers = node.job, node.meeting, node.workers
    explicit = node.options.get("nproc_per_node")
    source = str(explicit) if explicit else "default"
    if job is not None:
        yield "scheduler", job.scheduler, f"a {job.context.value}"
        yield "node rank", str(meeting.node_rank), job.provenance.get("node_rank", "")
        if meeting.backend == DIRECT:
            source = job.provenance.get("tasks", "")
    yield "workers", str(workers.number), source
    if meeting.site:
        yield "site", str(meeting.site.value), meeting.site.source
    if workers.binding:
        yield _binding(workers.binding)
    if preload := workers.preload:
        yield "preload", str(preload), preload.setting.source
    meets = f"{meeting.backend} at {meeting.endpoint}"
    within = "within the agent, without a port"
    silence = f"an agent may be silent for {meeting.silence_timeout} s"
    about = silence if meeting.is_ours else ""
    yield "rendezvous", within if meeting.in_process else meets, about
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
    first = _shares(nodes[0])
    for node in nodes:
        if node is not nodes[0] and _shares(node) == first:
            continue
        on = "" if node is nodes[0] else f" on {_name(node)}"
        for rank, share in enumerate(_shares(node)):
            yield f"{rank}{on}", share.cpu_list, share.domain, share.reason


def _shares(node: Description) -> Sequence[Share]:
    return node.workers.binding.shares if node.workers.binding else ()


def _variables(nodes: Sequence[Description]) -> Iterator[Sequence[str]]:
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
    shared = nodes[0].messages
    yield from map(str, [*shared.notes, *shared.advice])
    for node in nodes:
        for message in (*node.messages.warnings, *node.messages.advice):
            if message not in shared.advice:
                yield f"{message.code} {_name(node)}: {message.text}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles) - 1)]
    indent = sum(widths) + 2 * len(widths)
    width = max(_WIDTH - indent, _LEAST)
    written = []
    for line in lines:
        last = textwrap.wrap(
            line[-1], width, break_on_hyphens=False, break_long_words=False
        )
        first = ["  ".join([*map(str.ljust, line, widths), *last[:1]]).rstrip()]
        written += first + [" " * indent + rest for rest in last[1:]]
    return "\n".join(written)

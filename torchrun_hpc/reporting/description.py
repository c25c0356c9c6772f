"""What is known and decided about a launch, as plain data.

The dry run prints it, its nodes send it to each other, and other programs ask for it
by `torchrun_hpc.describe`.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import typing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torchrun_hpc
from torchrun_hpc.host.network import join_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torchrun_hpc.errors import Message
    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.schedulers.job import Job
    from torchrun_hpc.setting import Setting


class DescribedSetting(TypedDict):
    """A value, as text, and where it came from."""

    value: str
    source: str


class DescribedMessage(TypedDict):
    """A message, and the code under which the documentation lists it."""

    code: str
    text: str


class DescribedTask(TypedDict):
    """One of the processes that a launcher started together."""

    rank: int
    size: int
    local_rank: int
    local_size: int


class DescribedJob(TypedDict):
    """`torchrun_hpc.schedulers.job.Job`; each attribute is described there."""

    scheduler: str
    launch_id: str
    context: str
    nodes: list[str]
    node_rank: int | None
    task: DescribedTask
    allocated_nodes: int
    provenance: dict[str, str]


class DescribedShare(TypedDict):
    """`torchrun_hpc.planning.workers.Share`; the CPUs as Linux writes them."""

    cpus: str
    domain: str
    reason: str


class DescribedPlan(TypedDict):
    """`torchrun_hpc.planning.plan.LaunchPlan` and its parts, in one."""

    title: str
    nodes: int
    spares: int
    hosts: list[str]
    fast_hosts: list[str]
    node_rank: int
    workers: int
    backend: str
    endpoint: str
    site: DescribedSetting | None
    preload: DescribedSetting | None
    binding: DescribedSetting | None
    cpus: list[DescribedShare]
    address: str | None
    interface: str
    listen: str | None
    options: dict[str, DescribedSetting]
    environment: dict[str, DescribedSetting]
    notes: list[DescribedMessage]
    advice: list[DescribedMessage]
    warnings: list[DescribedMessage]


class DescribedPatch(TypedDict):
    """A change inside torch, and what became of it."""

    name: str
    target: str
    reason: str
    releases: str
    state: str


class Description(TypedDict):
    """A launch, as one of its nodes sees it.

    Attributes:
        torchrun_hpc: Version of this package.
        torch: Version of torch.
        python: Version of Python.
        job: What the scheduler knows; ``None`` without one.
        plan: What is decided.
        options: All options of torchrun that were typed, set by ``PET_*``, or derived,
            by their names in its parser.
        patches: The changes inside torch.
        exports: Variables to export for the same with plain torchrun.
        command: The same with plain torchrun, on this node.
    """

    torchrun_hpc: str
    torch: str
    python: str
    job: DescribedJob | None
    plan: DescribedPlan
    options: dict[str, DescribedSetting]
    patches: list[DescribedPatch]
    exports: dict[str, str]
    command: list[str]


def description(
    job: Job | None,
    plan: LaunchPlan,
    torch: str,
    patches: Iterable[DescribedPatch],
    command: Sequence[str],
) -> Description:
    """Describe a launch, with torch's version, the patches, and the plain command."""
    options = {**plan.asked.given, **plan.options}
    options.pop("hpc_dry_run", None)  # of that, not of the launch
    environment = plan.environment.items()
    return {
        "torchrun_hpc": torchrun_hpc.__version__,
        "torch": torch,
        "python": platform.python_version(),
        "job": _job(job) if job else None,
        "plan": _plan(plan),
        "options": _settings(options),
        "patches": list(patches),
        "exports": {name: str(setting.value) for name, setting in environment},
        "command": list(command),
    }


def _job(job: Job) -> DescribedJob:
    return {
        "scheduler": job.scheduler,
        "launch_id": job.launch_id,
        "context": job.context.value,
        "nodes": list(job.nodes),
        "node_rank": job.node_rank,
        "task": cast("DescribedTask", asdict(job.task)),
        "allocated_nodes": job.allocated_nodes,
        "provenance": dict(job.provenance),
    }


def _plan(plan: LaunchPlan) -> DescribedPlan:
    world, where = plan.meeting, plan.meeting
    return {
        "title": plan.messages.title,
        "nodes": world.nodes,
        "spares": world.spares.number,
        "hosts": list(world.hosts),
        "fast_hosts": list(world.fast_hosts),
        "node_rank": world.node_rank,
        "workers": plan.workers.number,
        "backend": where.backend,
        "endpoint": where.endpoint,
        "site": _settings({"site": plan.meeting.site})["site"]
        if plan.meeting.site
        else None,
        "preload": _preload(plan),
        "binding": _binding(plan),
        "cpus": _cpus(plan),
        "address": where.local_address,
        "interface": plan.meeting.interface,
        "listen": join_endpoint(*where.listen) if where.listen else None,
        "options": _settings(plan.options),
        "environment": _settings(plan.environment),
        "notes": as_data(plan.messages.notes),
        "advice": as_data(plan.messages.advice),
        "warnings": as_data(plan.messages.warnings),
    }


def _preload(plan: LaunchPlan) -> DescribedSetting | None:
    if plan.workers.preload is None or plan.workers.preload.problem:
        return None
    return _settings({"preload": plan.workers.preload.setting})["preload"]


def _binding(plan: LaunchPlan) -> DescribedSetting | None:
    if plan.workers.binding is None:
        return None
    described = _settings({"binding": plan.workers.binding.setting})["binding"]
    reason = plan.workers.binding.problem or plan.workers.binding.instead
    word = "binds nothing" if plan.workers.binding.problem else "divided evenly"
    if reason:
        described["source"] += f"; {word}: {reason}"
    return described


def _cpus(plan: LaunchPlan) -> list[DescribedShare]:
    if plan.workers.binding is None:
        return []
    return [
        {"cpus": share.cpu_list, "domain": share.domain, "reason": share.reason}
        for share in plan.workers.binding.shares
    ]


def _settings(settings: Mapping[str, Setting]) -> dict[str, DescribedSetting]:
    return {
        name: {"value": str(setting.value), "source": setting.source}
        for name, setting in settings.items()
    }


def as_data(messages: Iterable[Message]) -> list[DescribedMessage]:
    """Write messages as plain data."""
    return [{"code": message.code, "text": message.text} for message in messages]


def received(text: bytes, rank: int, plan: LaunchPlan) -> Description | None:
    """Read the description of another node; ``None`` if it is not valid.

    Whoever reaches the store can write into it, so it must have the form of a
    `Description`, with nothing in it that a terminal or a shell would act on.

    Args:
        text: The value in the store.
        rank: Rank of the node that it should be of.
        plan: The plan of this node.
    """
    try:
        found = json.loads(text)
        check_form(found, Description)
        is_valid = (
            found["plan"]["node_rank"] == rank
            and _agree(found["plan"]["hosts"], plan.meeting.hosts)
            and found["command"][:1] == ["torchrun"]
            and all(re.fullmatch("[A-Z_][A-Z0-9_]*", name) for name in found["exports"])
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return cast("Description", found) if is_valid else None


def _agree(one: Sequence[str], other: Sequence[str]) -> bool:
    """Compare names of nodes where both are known: some launchers give none."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a == b or not a or not b for a, b in pairs)


def check_form(value: Any, form: Any) -> None:
    """Compare a value of JSON with a type: a typed dictionary, or what it is made of.

    Raises:
        TypeError: It is of another type, or has unprintable characters.
        KeyError: A key is missing.
    """
    kinds = typing.get_args(form)
    if type(None) in kinds:  # ... | None
        if value is not None:
            check_form(value, kinds[0])
        return
    is_typed = typing.is_typeddict(form)
    plain = dict if is_typed else typing.get_origin(form) or form
    if type(value) is not plain or (plain is str and not str(value).isprintable()):
        raise TypeError
    if is_typed:
        for name, kind in typing.get_type_hints(form).items():
            check_form(value[name], kind)
    elif plain is dict:
        for name, part in value.items():
            check_form(name, kinds[0])
            check_form(part, kinds[1])
    elif plain is list:
        for part in value:
            check_form(part, kinds[0])


def shell_lines(described: Description) -> list[str]:
    """Write exports and command for a shell, ready to copy."""
    exports = described["exports"].items()
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exports]
    return [*lines, shlex.join(described["command"])]

"""The description of a launch: all facts and decisions, as one node sees them.

As JSON, it has the fields of its dataclasses by name (`torchrun_hpc.wire`).
"""

from __future__ import annotations

import contextlib
import platform
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torchrun_hpc
from torchrun_hpc import wire
from torchrun_hpc.errors import Setting, on_one_line
from torchrun_hpc.planning.meeting import Meeting
from torchrun_hpc.planning.plan import Messages
from torchrun_hpc.planning.workers import Workers
from torchrun_hpc.schedulers.job import Job
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchrun_hpc.planning.plan import LaunchPlan

_Part = TypeVar("_Part", Meeting, Messages)

VERSION = 1  # of the format


@dataclass(frozen=True)
class DescribedPatch:
    """A change inside torch, and whether it was made."""

    name: str
    target: str
    reason: str
    releases: str
    state: str


@dataclass(frozen=True)
class Description:
    """A launch, as one of its nodes sees it."""

    version: int  # of this format
    torchrun_hpc: str
    torch: str
    python: str
    job: Job | None  # ``None`` without a scheduler
    meeting: Meeting
    workers: Workers
    options: Mapping[str, Setting]  # of torchrun, explicit and derived
    environment: Mapping[str, Setting]  # variables to set
    messages: Messages  # each on one line
    patches: tuple[DescribedPatch, ...]
    exports: Mapping[str, str]  # for plain torchrun
    command: tuple[str, ...]  # the same launch with plain torchrun, on this node


def description(
    job: Job | None,
    plan: LaunchPlan,
    torch: str,
    patches: Iterable[DescribedPatch],
    command: Sequence[str],
) -> Description:
    """Describe a launch. ``command`` is the same launch with plain torchrun."""
    options = {**plan.asked.of_site, **plan.asked.given, **plan.options}
    options.pop("hpc_dry_run", None)  # not part of the launch
    return Description(
        version=VERSION,
        torchrun_hpc=torchrun_hpc.__version__,
        torch=torch,
        python=platform.python_version(),
        job=job,
        meeting=_on_one_line(plan.meeting),
        workers=plan.workers,
        options=options,
        environment=plan.environment,
        messages=_on_one_line(plan.messages),
        patches=tuple(patches),
        exports={name: str(value.value) for name, value in plan.environment.items()},
        command=tuple(command),
    )


def _on_one_line(part: _Part) -> _Part:
    """Put each message on one line: other nodes accept no line breaks."""
    notes, advice, warnings = (
        tuple(replace(each, text=on_one_line(each.text)) for each in messages)
        for messages in (part.notes, part.advice, part.warnings)
    )
    return replace(part, notes=notes, advice=advice, warnings=warnings)


def received(data: object, rank: int, meeting: Meeting) -> Description | None:
    """Return the description that another node has sent; ``None`` if it is not valid.

    It must have the format of a `Description`, without anything that a terminal or a
    shell would execute: without a key, anybody could have sent it.
    """
    with contextlib.suppress(WireError):
        sent = wire.decode(Description, data)
        if (
            sent.version == VERSION
            and sent.meeting.node_rank == rank
            and len(sent.meeting.hosts) == len(meeting.hosts)
            and sent.command[:1] == ("torchrun",)
            and all(re.fullmatch("[A-Z_][A-Z0-9_]*", name) for name in sent.exports)
        ):
            return sent
    return None


def shell_lines(exports: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """Return the lines with which a shell sets ``exports`` and runs ``command``."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    return [*lines, shlex.join(command)]

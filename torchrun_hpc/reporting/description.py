"""The facts and decisions of a launch, as one of its nodes sees it.

The dry run prints it, its nodes send it to each other, and other programs ask for it
by `torchrun_hpc.describe`. As plain data it has the form that `torchrun_hpc.wire` gives
to the dataclasses that it consists of: their fields, by their names.
"""

from __future__ import annotations

import contextlib
import platform
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torchrun_hpc
from torchrun_hpc import wire
from torchrun_hpc.planning.meeting import Meeting
from torchrun_hpc.planning.plan import Messages
from torchrun_hpc.planning.workers import Workers
from torchrun_hpc.schedulers.job import Job
from torchrun_hpc.setting import Setting
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchrun_hpc.planning.plan import LaunchPlan

VERSION = 1  # of the form


@dataclass(frozen=True)
class DescribedPatch:
    """A change inside torch, and what became of it."""

    name: str
    target: str
    reason: str
    releases: str
    state: str


@dataclass(frozen=True)
class Description:
    """A launch, as one of its nodes sees it.

    Attributes:
        version: Version of this form.
        torchrun_hpc: Version of this package.
        torch: Version of torch.
        python: Version of Python.
        job: What the scheduler knows; ``None`` without one.
        meeting: Who takes part, and where the nodes meet.
        workers: The workers of this node.
        options: All options of torchrun that are explicit or derived, by their names in
            its parser.
        environment: Environment variables to set.
        messages: What a person reads about it.
        patches: The changes inside torch.
        exports: Variables to export for the same with plain torchrun.
        command: The same with plain torchrun, on this node.
    """

    version: int
    torchrun_hpc: str
    torch: str
    python: str
    job: Job | None
    meeting: Meeting
    workers: Workers
    options: Mapping[str, Setting]
    environment: Mapping[str, Setting]
    messages: Messages
    patches: tuple[DescribedPatch, ...]
    exports: Mapping[str, str]
    command: tuple[str, ...]


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
    return Description(
        version=VERSION,
        torchrun_hpc=torchrun_hpc.__version__,
        torch=torch,
        python=platform.python_version(),
        job=job,
        meeting=plan.meeting,
        workers=plan.workers,
        options=options,
        environment=plan.environment,
        messages=plan.messages,
        patches=tuple(patches),
        exports={name: str(value.value) for name, value in plan.environment.items()},
        command=tuple(command),
    )


def received(data: object, rank: int, meeting: Meeting) -> Description | None:
    """Read the description of another node; return ``None`` if it is not valid.

    Whoever reaches the coordinator can send one. So it must have the form of a
    `Description`, with nothing in it that a terminal or a shell would act on.

    Args:
        data: What the node has sent.
        rank: Rank of the node that it should come from.
        meeting: Where this node meets the others.
    """
    with contextlib.suppress(WireError):
        found = wire.decode(Description, data)
        if (
            found.version == VERSION
            and found.meeting.node_rank == rank
            and _agree(found.meeting.hosts, meeting.hosts)
            and found.command[:1] == ("torchrun",)
            and all(re.fullmatch("[A-Z_][A-Z0-9_]*", name) for name in found.exports)
        ):
            return found
    return None


def _agree(one: Sequence[str], other: Sequence[str]) -> bool:
    """Compare names of nodes where both are known: some launchers give none."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a == b or not a or not b for a, b in pairs)


def shell_lines(exports: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """Write exports and command for a shell, ready to copy."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    return [*lines, shlex.join(command)]

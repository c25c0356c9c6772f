"""The patches, and what became of each.

A patch extends a class of torch, or wraps a function. If it does not fit, torch is left
as it is, and a message reports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from torchrun_hpc.agent.patches import restore
from torchrun_hpc.agent.patches.agent import (
    ActTogether,
    BindWorkers,
    DeferSignals,
    ForkWorkers,
    ForwardSignals,
    KeepOpenOnRestart,
    ParentDeathSignal,
    Part,
    WatchWorkers,
    extend,
)
from torchrun_hpc.agent.patches.bind_store import BindStore
from torchrun_hpc.agent.patches.c10d import (
    FreshStore,
    HostExitsLast,
    LocalAddr,
    NodeOrder,
    ReportMissingNodes,
)
from torchrun_hpc.agent.patches.state_as_json import StateAsJson
from torchrun_hpc.agent.patches.torchrun import HostName, MasterAddr
from torchrun_hpc.errors import LaunchError, Message, choices
from torchrun_hpc.reporting.description import DescribedPatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrun_hpc.agent.patches import Hooks, Patch
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.plan import LaunchPlan


# In this order. ``import torchrun_hpc.auto`` applies ALWAYS before there is a plan.
ALWAYS: tuple[type[Patch], ...] = (StateAsJson, FreshStore)
PATCHES: tuple[type[Patch], ...] = (
    *ALWAYS,
    *(NodeOrder, LocalAddr, BindStore, ReportMissingNodes, HostExitsLast),
    *(ActTogether, KeepOpenOnRestart, ForwardSignals),
    *(ParentDeathSignal, HostName, MasterAddr),
    *(ForkWorkers, BindWorkers, WatchWorkers),
    DeferSignals,  # around all that the others do when workers start or end
)


class PatchState(Enum):
    """The state of a patch."""

    APPLIED = "patched"
    NOT_NEEDED = "not needed by this torch"
    DOES_NOT_FIT = "left out: this torch has changed its target"
    LEFT_OUT = "left out: --hpc-without-patches"


@dataclass(frozen=True)
class Outcome:
    """A patch, and what became of it."""

    patch: type[Patch]
    state: PatchState


def check_names(options: Options) -> None:
    """Check the names of the patches that the user leaves out."""
    names = [patch.NAME for patch in PATCHES]
    for name in options.hpc_without_patches:
        if name not in names:
            raise LaunchError(
                "HPC088",
                f"{options['hpc_without_patches']}: there is no patch {name!r}. "
                f"{choices(name, names)}",
                everywhere=True,
            )


def apply_patches(
    plan: LaunchPlan | None = None,
    hooks: Hooks | None = None,
    without: Sequence[str] = (),
) -> tuple[Outcome, ...]:
    """Apply the patches that this torch needs and that fit it; return all outcomes.

    First undo an earlier launch's patches. Without a plan, apply only those that need
    none, except ``without``; a plan has its own.
    """
    restore()
    outcomes = examine(ALWAYS, without) if plan is None else planned(plan)
    applied = [o.patch for o in outcomes if o.state is PatchState.APPLIED]
    for patch in applied:
        if not issubclass(patch, Part):
            patch.apply(plan, hooks)
    if hooks is not None:  # a dry run has none
        extend([patch for patch in applied if issubclass(patch, Part)], plan, hooks)
    return outcomes


def planned(plan: LaunchPlan) -> tuple[Outcome, ...]:
    """Return what would become of a launch's patches: some belong to an option."""
    patches = [patch for patch in PATCHES if patch.is_wanted(plan)]
    return examine(patches, plan.asked.hpc_without_patches)


def examine(
    patches: Sequence[type[Patch]], without: Sequence[str] = ()
) -> tuple[Outcome, ...]:
    """Return what would become of patches with this torch, without applying any."""
    return tuple(Outcome(patch, _state(patch, without)) for patch in patches)


def described(outcome: Outcome) -> DescribedPatch:
    """Return what became of a patch as plain data."""
    return DescribedPatch(
        name=outcome.patch.NAME,
        target=outcome.patch.TARGET,
        reason=outcome.patch.REASON,
        releases=outcome.patch.IS_FOR.releases,
        state=outcome.state.value,
    )


def is_applied(outcomes: Sequence[Outcome], patch: type[Patch]) -> bool:
    """Return whether a patch was applied."""
    return any(o.patch is patch and o.state is PatchState.APPLIED for o in outcomes)


def incompatible() -> tuple[str, ...]:
    """Return the names of needed patches that do not fit."""
    needed = examine((ActTogether, WatchWorkers))
    return tuple(o.patch.NAME for o in needed if o.state is PatchState.DOES_NOT_FIT)


def left_out(outcomes: Sequence[Outcome]) -> list[Message]:
    """Return a message for each patch that does not fit."""
    return [
        Message(
            "HPC080",
            f"torch {torch.__version__} has changed {outcome.patch.TARGET}, which is "
            f"left as it is: {outcome.patch.REASON}",
        )
        for outcome in outcomes
        if outcome.state is PatchState.DOES_NOT_FIT
    ]


def _state(patch: type[Patch], without: Sequence[str]) -> PatchState:
    wanted = patch.IS_FOR
    if not wanted.present and (wanted.is_fault or not wanted.is_expected):
        return PatchState.NOT_NEEDED
    if patch.NAME in without:
        return PatchState.LEFT_OUT
    try:
        fits = wanted.present and patch.fits()
    except Exception:  # noqa: BLE001 - whatever a future torch does
        fits = False
    return PatchState.APPLIED if fits else PatchState.DOES_NOT_FIT

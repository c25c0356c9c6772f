"""The patches, and what became of each.

A patch extends a class of torch, or wraps a function. If it does not fit, torch is left
as it is, and a message reports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import torch

from torchrun_hpc.agent.patches import (
    agent,
    bind_store,
    bind_workers,
    defer_signals,
    fork_workers,
    forward_signals,
    fresh_store,
    host_exits_last,
    host_name,
    keep_open_on_restart,
    local_addr,
    master_addr,
    node_order,
    parent_death_signal,
    replacing,
    report_missing_nodes,
    state_as_json,
    watch_workers,
)
from torchrun_hpc.errors import LaunchError, Message, choices
from torchrun_hpc.reporting.description import DescribedPatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrun_hpc.agent.patches.hooks import Hooks
    from torchrun_hpc.host.capabilities import Capability
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.plan import LaunchPlan


class Patch(Protocol):
    """A module of this package.

    Attributes:
        TARGET: What is replaced, as a dotted name.
        REASON: What goes wrong without it, with the issue's number.
        IS_FOR: It is applied only if this is present in torch.
    """

    __name__: str
    TARGET: str
    REASON: str
    IS_FOR: Capability

    def fits(self) -> bool:
        """Return whether torch looks as the patch expects."""

    def apply(self, plan: Any, hooks: Any, /) -> None:
        """Replace the target as the plan says; see `apply_patches`."""


# In this order. ``import torchrun_hpc.auto`` applies ALWAYS before there is a plan.
ALWAYS: tuple[Patch, ...] = (state_as_json, fresh_store)
PATCHES: tuple[Patch, ...] = (
    *ALWAYS,
    *(node_order, local_addr, bind_store, report_missing_nodes, host_exits_last),
    *(agent, keep_open_on_restart, forward_signals),
    *(parent_death_signal, host_name, master_addr),
    *(fork_workers, bind_workers, watch_workers),
    defer_signals,  # around all that the others do when workers start or end
)


class State(Enum):
    """The state of a patch."""

    APPLIED = "patched"
    NOT_NEEDED = "not needed by this torch"
    DOES_NOT_FIT = "left out: this torch has changed its target"
    LEFT_OUT = "left out: --hpc-without-patches"


@dataclass(frozen=True)
class Outcome:
    """A patch, and what became of it; its name is its module's."""

    name: str
    patch: Patch
    state: State


def check_names(options: Options) -> None:
    """Check the names of the patches that the user leaves out."""
    known = [_name(patch) for patch in PATCHES]
    for name in options.hpc_without_patches:
        if name not in known:
            raise LaunchError(
                "HPC088",
                f"{options['hpc_without_patches']}: there is no patch {name!r}. "
                f"{choices(name, known)}",
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
    replacing.restore()
    outcomes = examine(ALWAYS, without) if plan is None else planned(plan)
    for outcome in outcomes:
        if outcome.state is State.APPLIED:
            outcome.patch.apply(plan, hooks)
    return outcomes


def planned(plan: LaunchPlan) -> tuple[Outcome, ...]:
    """Return what would become of a launch's patches: some belong to an option."""
    left_out = set()
    if plan.workers.preload is None:
        left_out.add(fork_workers)
    if plan.workers.binding is None or not plan.workers.binding.shares:
        left_out.add(bind_workers)
    patches = [patch for patch in PATCHES if patch not in left_out]
    return examine(patches, plan.asked.hpc_without_patches)


def examine(
    patches: Sequence[Patch], without: Sequence[str] = ()
) -> tuple[Outcome, ...]:
    """Return what would become of patches with this torch, without applying any."""
    return tuple(
        Outcome(_name(patch), patch, _state(patch, without)) for patch in patches
    )


def described(outcome: Outcome) -> DescribedPatch:
    """Return what became of a patch as plain data."""
    return DescribedPatch(
        name=outcome.name,
        target=outcome.patch.TARGET,
        reason=outcome.patch.REASON,
        releases=outcome.patch.IS_FOR.releases,
        state=outcome.state.value,
    )


def is_applied(outcomes: Sequence[Outcome], patch: Patch) -> bool:
    """Return whether a patch was applied."""
    return any(o.patch is patch and o.state is State.APPLIED for o in outcomes)


def incompatible() -> tuple[str, ...]:
    """Return the names of needed patches that do not fit."""
    needed = examine((agent, watch_workers))
    return tuple(o.name for o in needed if o.state is State.DOES_NOT_FIT)


def left_out(outcomes: Sequence[Outcome]) -> list[Message]:
    """Return a message for each patch that does not fit."""
    return [
        Message(
            "HPC080",
            f"torch {torch.__version__} has changed {outcome.patch.TARGET}, which is "
            f"left as it is: {outcome.patch.REASON}",
        )
        for outcome in outcomes
        if outcome.state is State.DOES_NOT_FIT
    ]


def _name(patch: Patch) -> str:
    return patch.__name__.rpartition(".")[2]


def _state(patch: Patch, without: Sequence[str]) -> State:
    wanted = patch.IS_FOR
    if not wanted.present and (wanted.is_fault or not wanted.is_expected):
        return State.NOT_NEEDED
    if _name(patch) in without:
        return State.LEFT_OUT
    try:
        fits = wanted.present and patch.fits()
    except Exception:  # noqa: BLE001 - whatever a future torch does
        fits = False
    return State.APPLIED if fits else State.DOES_NOT_FIT

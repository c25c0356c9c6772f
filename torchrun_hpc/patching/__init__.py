"""What is changed inside torch: one file per target, and no decision.

A patch wraps what it replaces and calls it. It names its target, the reason, the
releases that have the fault, and checks that it still fits; one that does not fit
leaves torch alone and says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from torchrun_hpc.patching import (
    fresh_store,
    leaving,
    listening,
    node_order,
    replacing,
    state_as_json,
    waiting,
)

if TYPE_CHECKING:
    from torchrun_hpc.plan import LaunchPlan


class Patch(Protocol):
    """A module of this package.

    Attributes:
        TARGET: What is replaced, as a dotted name.
        REASON: What goes wrong without it, with the issue's number.
        RELEASES: The releases of torch that it is for.
    """

    TARGET: str
    REASON: str
    RELEASES: str

    def fits(self) -> bool:
        """Say whether torch looks as the patch expects."""

    def apply(self, plan: Any) -> None:
        """Replace the target as the plan says."""


# What is right for any launch, and what follows a plan.
ALWAYS: tuple[Patch, ...] = (state_as_json, fresh_store)
PATCHES: tuple[Patch, ...] = (*ALWAYS, node_order, listening, waiting, leaving)


def apply_patches(plan: LaunchPlan | None = None) -> list[str]:
    """Apply the patches that this torch needs and that fit it.

    Those of an earlier launch of this process are taken back first.

    Args:
        plan: What will be launched; without it, only what needs no plan is applied.

    Returns:
        A sentence for each patch that does not fit.
    """
    replacing.restore()
    release = Version(Version(torch.__version__).base_version)
    left_out = []
    for patch in ALWAYS if plan is None else PATCHES:
        if release not in SpecifierSet(patch.RELEASES):
            continue
        try:
            fits = patch.fits()
        except Exception:  # noqa: BLE001 - whatever a future torch does
            fits = False
        if fits:
            patch.apply(plan)
        else:
            left_out.append(
                f"torch {torch.__version__} has changed {patch.TARGET}; it is left as "
                f"it is, and {patch.REASON}"
            )
    return left_out

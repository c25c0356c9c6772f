"""The one way in which tests wait: until something is so, for at most `PATIENCE`.

A test measures no time. "Soon" means: before what would end it otherwise. Set that
other limit to `NEVER_S`, and assert that the end came.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, TypeVar

from torchrun_hpc import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

# Seconds. The longest job takes 45 s on a quiet machine; after this time, it hangs.
PATIENCE = 400
# Seconds, for the limit that must not be what ends a job: more than a test may take.
NEVER_S = 900
_PAUSE_S = 0.02

# How the start line begins, and every line of the launcher.
START = f"torchrun_hpc {__version__}: "
OWN = re.compile(r"torchrun_hpc( \d[\w.]*)?: ")

# What the launcher prints only if something takes long: on a busy machine, any job may.
# And that all nodes have joined, which says how long that took.
_WAITS = re.compile(
    r"torchrun_hpc: (note|warning)\[HPC(083|084|100|113|114|120|131|167|170)\]: "
    r"|torchrun_hpc: note\[HPC177\]: .* of at most "
    r"|torchrun_hpc: (all \d+|\d+ of \d+) nodes joined "
)


def until(condition: Callable[[], T], seen: Callable[[], object] | None = None) -> T:
    """Wait until a condition holds.

    Args:
        condition: Called again and again, until what it returns is true.
        seen: Returns what a failure shows: the whole output of the job.

    Returns:
        What the condition returned.

    Raises:
        AssertionError: If it does not hold within `PATIENCE`, with what was seen.
    """
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        if time.monotonic() > end:
            shown = found if seen is None else seen()
            raise AssertionError(f"not within {PATIENCE} s: {condition}\n{shown}")
        time.sleep(_PAUSE_S)
    return found


def without_waits(lines: Iterable[str]) -> list[str]:
    """Leave out the lines that say who or what is waited for."""
    return [line for line in lines if not _WAITS.search(line)]

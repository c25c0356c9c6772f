"""The reporter: the lowest rank that can see a problem of all nodes.

Usually it is the head node, in direct mode rank 0.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


def is_reporter(rank: int, absent: Collection[int] = ()) -> bool:
    """Return whether a node or task reports for all; ``absent`` is who cannot."""
    return rank == next(r for r in itertools.count() if r not in absent)


def reports_wait_for(rank: int, node: int | None) -> bool:
    """Return whether this node reports its wait for another node.

    If not all nodes know it (``None``), the first two report.
    """
    return rank in (0, 1) if node is None else is_reporter(rank, {node})

"""Who reports: what concerns all is said by the first one that can see it.

The first one is that of rank 0: the node of an agent, the task in direct mode. Where
something is wrong with that one, it is the next.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


def is_reporter(rank: int, absent: Collection[int] = ()) -> bool:
    """Return whether who has a rank reports what concerns all.

    Args:
        rank: Rank of this node, or of this task.
        absent: Ranks of those that it is about, and which cannot see it.
    """
    return rank == next(r for r in itertools.count() if r not in absent)


def reports_wait_for(rank: int, node: int | None) -> bool:
    """Return whether this node reports that it waits for another one.

    Args:
        rank: Rank of this node.
        node: Rank of the one that is waited for; ``None`` where it is not known to
            all: one of the first two is another one.
    """
    return rank in (0, 1) if node is None else is_reporter(rank, {node})


def reports_failure(rank: int, nodes: int, unaware: Collection[int]) -> bool:
    """Return whether this node reports why the job has failed.

    Args:
        rank: Rank of this node.
        nodes: Number of nodes.
        unaware: Ranks of nodes that it is about, and that have not noticed it. If that
            is all nodes, the first one reports it.
    """
    absent = {node for node in unaware if 0 <= node < nodes}
    return is_reporter(rank, absent if len(absent) < nodes else ())


def told_to_report(coordinator: int, *, has_spares: bool) -> int:
    """Return the rank of the node that the coordinator tells to report.

    Args:
        coordinator: Rank of the coordinator's node.
        has_spares: Whether another node may take the place of the first one; then the
            coordinator's own node reports.
    """
    return coordinator if has_spares else 0

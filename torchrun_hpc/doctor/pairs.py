"""Which nodes measure what is between them, and when: a tournament."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    Pair = tuple[int, int]  # ranks of two nodes, the lower one first

# So many rounds at most: with 32 nodes each meets all others, and with more so many
# that one bad partner, or two, show nothing but their own fault.
MOST_ROUNDS = 31


def rounds(nodes: Sequence[int]) -> list[list[Pair]]:
    """Pair nodes so that none is in two pairs of a round, and no pair comes twice.

    By the circle method: one node stays, the others move on by one place each round.

    Args:
        nodes: Their ranks.
    """
    places = [*sorted(nodes), *([-1] if len(nodes) % 2 else [])]  # -1: a round off
    fixed, circle = places[:1], places[1:]
    found = []
    for turn in range(min(len(circle), MOST_ROUNDS)):
        order = fixed + circle[turn:] + circle[:turn]
        half = len(order) // 2
        facing = zip(order[:half], reversed(order[half:]), strict=True)
        pairs = [(min(pair), max(pair)) for pair in facing]
        found.append(sorted(pair for pair in pairs if pair[0] >= 0))
    return found


def disjoint(pairs: Collection[Pair]) -> list[list[Pair]]:
    """Put pairs into rounds in which no node is twice."""
    found: list[list[Pair]] = []
    for pair in sorted(pairs):
        free = (r for r in found if not any(set(pair) & set(other) for other in r))
        chosen = next(free, None)
        if chosen is None:
            found.append([pair])
        else:
            chosen.append(pair)
    return found


def blame(pairs: Collection[Pair]) -> tuple[list[int], list[Pair]]:
    """Say which nodes explain the bad pairs: a node that is in two of them, or more.

    The one that is in most of them first; a pair that has a node to blame says nothing
    against the other one.

    Args:
        pairs: The bad ones.

    Returns:
        The nodes; and the pairs that are left, of which nobody knows which node it is.
    """
    left, blamed = set(pairs), list[int]()
    while left:
        counts: dict[int, int] = {}
        for pair in left:
            for node in pair:
                counts[node] = counts.get(node, 0) + 1
        worst = max(counts, key=lambda node: (counts[node], node))
        if counts[worst] < 2:  # noqa: PLR2004 - one pair has two nodes
            break
        blamed.append(worst)
        left = {pair for pair in left if worst not in pair}
    return sorted(blamed), sorted(left)

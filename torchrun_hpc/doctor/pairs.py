"""Which nodes measure what is between them, and when: a tournament."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    Pair = tuple[int, int]  # ranks of two nodes, the lower one first

# So many rounds at most: with 32 nodes each meets all others, and with more so many
# that one bad partner, or two, show nothing but their own fault.
MOST_ROUNDS = 31

_SHARE = 2 / 3  # of the partners with whom a bad node is bad


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


def blame(bad: Collection[Pair], tried: Collection[Pair]) -> list[int]:
    """Say which nodes explain the bad pairs: as few as possible, the worst ones first.

    Each is bad with two nodes or more, and with two thirds of its partners. Nobody is
    to blame where that leaves bad pairs between most of the others, nor for what
    divides the nodes into two halves: then it is something else that all have.

    Args:
        bad: The bad pairs.
        tried: All pairs that were tried.
    """
    left, partners, blamed = {*bad}, Counter(itertools.chain(*tried)), list[int]()
    while left:
        counts = Counter(itertools.chain(*left))
        worst = max(counts, key=lambda node: (counts[node], node))
        if counts[worst] < max(2, partners[worst] * _SHARE):
            break
        blamed.append(worst)
        left = {pair for pair in left if worst not in pair}
    others = [pair for pair in tried if not set(pair) & set(blamed)]
    among = [pair for pair in tried if set(pair) <= set(blamed)]
    is_half = 2 * len(blamed) >= len(partners) and not {*among} <= {*bad}
    if 2 * len(blamed) > len(partners) or is_half or 2 * len(left) > len(others):
        return []
    return sorted(blamed)

"""The order in which pairs of nodes measure their link: a tournament."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    Pair = tuple[int, int]  # ranks of two nodes, the lower one first

# With 32 nodes, each meets all others. With more, each meets so many that one or two
# bad partners show only their own fault.
MOST_ROUNDS = 31

_SHARE = 2 / 3  # of the partners with whom a bad node is bad


def rounds(nodes: Sequence[int]) -> list[list[Pair]]:
    """Pair nodes so that none is in two pairs of a round, and no pair occurs twice.

    This is the circle method: one node stays, and the others move by one place.
    """
    places = sorted(nodes) + [-1] * (len(nodes) % 2)  # -1: a round off
    fixed, circle = places[:1], places[1:]
    found = []
    for turn in range(min(len(circle), MOST_ROUNDS) if len(nodes) > 1 else 0):
        order = fixed + circle[turn:] + circle[:turn]
        facing = zip(order, reversed(order), strict=True)  # each pair in both orders
        found.append(sorted((a, b) for a, b in facing if 0 <= a < b))
    return found


def disjoint(pairs: Collection[Pair]) -> list[list[Pair]]:
    """Put pairs into rounds in which no node occurs twice."""
    found: list[list[Pair]] = []
    for pair in sorted(pairs):
        free = (x for x in found if {*pair}.isdisjoint(itertools.chain(*x)))
        chosen = next(free, [])
        if not chosen:
            found.append(chosen)
        chosen.append(pair)
    return found


def blame(bad: Collection[Pair], tried: Collection[Pair]) -> list[int]:
    """Return as few nodes as possible that explain the bad pairs of those tried.

    Each is bad with at least two nodes, and with two thirds of its partners. No node is
    to blame if most pairs of the others are also bad, or if the bad pairs divide the
    nodes into two halves. Then all nodes share the cause.
    """
    left, partners, blamed = {*bad}, Counter(itertools.chain(*tried)), list[int]()
    while left:
        counts = Counter(itertools.chain(*left))
        worst = max(counts, key=lambda node: (counts[node], node))
        if counts[worst] < max(2, partners[worst] * _SHARE):
            break
        blamed.append(worst)
        left = {pair for pair in left if worst not in pair}
    others = [pair for pair in tried if not {*pair} & {*blamed}]
    among = {pair for pair in tried if {*pair} <= {*blamed}}
    # Of two halves, only a bad one has only bad pairs.
    most = len(partners) if among <= {*bad} else len(partners) - 1
    is_known = 2 * len(blamed) <= most and 2 * len(left) <= len(others)
    return sorted(blamed) if is_known else []

"""The pairs of nodes to measure, and the judgement of their links: pure functions.

No data sheet counts. A link is slow if it is much slower than most links of this
allocation, and if repeated measurements of one pair differ less than that. The usual
value is the median over the nodes, of which each counts with the median of its
partners. Up to four nodes, one bad node spoils half of the links, so its best partner
counts. The worst comes first: nodes that are much worse than most are named, and the
rest is judged without them.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import replace
from statistics import median, median_high, median_low
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrun_hpc.doctor.results import EXCLUDE, Finding, duration, rate
from torchrun_hpc.errors import count
from torchrun_hpc.names import host, listed

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Collection,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from torchrun_hpc.doctor.results import Link

    Pair = tuple[int, int]  # ranks of two nodes, the lower one first

# A link is slow below this share of the usual bandwidth. It is late above this multiple
# of the usual latency plus these seconds. It loses too much above this share of the
# segments and this multiple of the usual loss. Healthy links of the test cluster, which
# share two cores, stay within half of that.
_BANDWIDTH = 0.75
_LATENCY, _LATENCY_S = 3.0, 1e-4
_LOST, _LOST_TIMES = 0.001, 5.0
_LOST_BY_FEW = 0.002  # the usual loss of only one pair, or of few beside an outlier
_CLOCK_S = 1.0
_FEW = 4  # nodes
_MUCH, _MUCH_LOST = 3.0, 0.01  # of an outlier: times slower, share of the segments

_SINGLE = 3  # pairs in a text


class Usual(NamedTuple):
    """The usual values in this allocation, in the units of `Link`."""

    bandwidth: float
    latency: float
    lost: float
    steady: float = 1.0  # of the steadiest pair: all have noise, but not a fault


class Way(NamedTuple):
    """One direction of a pair: seconds, and bytes per second."""

    sender: int
    receiver: int
    latency: float
    bandwidth: float


def usual(links: Sequence[Link]) -> Usual:
    """Return the usual values without the `outliers`; zeros if nothing was measured."""
    worst, usable = outliers(links), [link for link in links if link.is_measured]
    measured = [link for link in usable if worst.isdisjoint(link.pair)] or usable
    of_node: dict[int, list[Link]] = defaultdict(list)
    for link in measured:
        for node in link.pair:
            of_node[node].append(link)
    is_few, is_one = len(of_node) <= _FEW, len(measured) == 1
    middle: Callable[[Iterable[float]], float] = min if is_few else median

    def of_nodes(value: Callable[[Link], float]) -> list[float]:
        return [middle(map(value, each)) for each in of_node.values()] or [0.0]

    # With two nodes, only the other direction can be compared.
    bandwidths = _bandwidths(measured, max if is_one and not worst else min)
    rates = [*bandwidths.values()] if is_few else of_nodes(lambda link: link.slower)
    is_unknown = is_one or (is_few and worst)
    return Usual(
        bandwidth=median_high(rates or [0.0]),
        latency=median_low(of_nodes(lambda link: link.latency_s)),
        lost=_LOST_BY_FEW if is_unknown else median_low(of_nodes(lambda x: x.lost)),
        steady=max((link.steady for link in measured), default=1.0),
    )


def outliers(links: Sequence[Link]) -> set[int]:
    """Return the nodes that are much worse than most with all of their partners.

    A node has two partners or more. A link that loses much has no reliable bandwidth.
    """
    partners = Counter(way.sender for way in ways(links))
    reliable = _bandwidths(link for link in links if link.lost <= _MUCH_LOST)
    rates = {node: reliable.get(node, 0.0) for node in partners}
    limit = median_high(rates.values() or [0.0]) / _MUCH
    return {n for n, rate in rates.items() if rate < limit and partners[n] > 1}


def _bandwidths(links: Iterable[Link], of_both: Any = min) -> dict[int, float]:
    """Return each node's bandwidth with its best partners, in its slower direction."""
    sends, receives = defaultdict[int, float](float), defaultdict[int, float](float)
    for sender, receiver, _, bandwidth in ways(links):
        sends[sender] = max(sends[sender], bandwidth)
        receives[receiver] = max(receives[receiver], bandwidth)
    return {node: of_both(most, receives[node]) for node, most in sends.items()}


def ways(links: Iterable[Link]) -> list[Way]:
    """Return both directions of the pairs that have figures."""
    both = []
    for link in links:
        if link.is_measured:
            one, other, latency = link.first, link.second, link.latency_s
            both.append(Way(one, other, latency, link.forward))
            both.append(Way(other, one, latency, link.backward))
    return both


def unusable(links: Sequence[Link]) -> list[int]:
    """Return nodes whose exclusion makes all links usable."""
    unused = [link.pair for link in links if not link.is_measured]
    blamed = blame(unused, [link.pair for link in links])
    left = [second for first, second in unused if not {first, second} & {*blamed}]
    return [*blamed, *left]


def doubtful(links: Sequence[Link]) -> list[Pair]:
    """Return the pairs to measure again: noise passes, but a fault stays.

    Up to four nodes, one bad pair makes all pairs doubtful: they show the noise.
    """
    than = usual(links)
    # A short pause of a process looks as if large packets were lost.
    bad = [link.pair for link in links if _is_bad(link, than) or link.lost_mtu]
    is_few = len({node for link in links for node in link.pair}) <= _FEW
    return [x.pair for x in links if not x.problem] if bad and is_few else bad


def best_of(*looks: Link) -> Link:
    """Return the best figures of several measurements of a pair."""
    good = [look for look in looks if look.is_measured] or looks
    rates = [look.slower for look in good]
    return replace(
        good[0],
        latency_s=min(look.latency_s for look in good),
        forward=max(look.forward for look in good),
        backward=max(look.backward for look in good),
        # The average, because a few hundred packets often lose none by chance.
        lost=sum(x.lost * x.looks for x in good) / sum(x.looks for x in good),
        looks=sum(look.looks for look in looks),
        steady=min(rates) / max(*rates, 1),
    )


def findings(links: Sequence[Link], hosts: Sequence[str]) -> Iterator[Finding]:
    """Yield findings about links, and the nodes that explain them."""
    than, worst = usual(links), outliers(links)
    tried = [link.pair for link in links]
    for code, (is_bad, text, remedy) in _KINDS.items():
        bad = {link.pair: link for link in links if is_bad(link, than)}
        is_noisy = is_bad is _is_bad  # noise can hit any direction
        rest = [pair for pair in tried if not is_noisy or worst.isdisjoint(pair)]
        blamed = blame(bad.keys() & {*rest}, rest)
        if is_noisy:
            blamed = [*sorted(worst), *blamed]
            blamed = [n for n in blamed if not _is_acquitted(n, links, bad, than)]
        for node in blamed:
            of_node = [bad.pop(pair) for pair in sorted(bad) if node in pair]
            partners = count(sum(node in pair for pair in tried), "node")
            who = f"{host(node, hosts)}, with {len(of_node)} of {partners}"
            what = text(of_node, hosts, node, than)
            yield Finding(code, f"{who}: {what}", remedy, (node,))
        if not bad:
            continue
        names = [" and ".join(host(node, hosts) for node in pair) for pair in bad]
        who = f"between {listed(names)}"
        if len(bad) > _SINGLE:
            who = f"{len(bad)} of {count(len(tried), 'pair')}"
        _, node = max(bad)
        what = text([*bad.values()], hosts, node, than)
        # Among many nodes, one or two slow pairs need no action.
        is_suspect = not is_noisy or 2 * len(bad) >= len(tried)
        to_do = _OF_PAIRS if is_noisy else remedy
        yield Finding(code, f"{who}: {what}", to_do, is_suspect=is_suspect)


def _is_acquitted(
    node: int, links: Sequence[Link], bad: Mapping[Pair, Link], than: Usual
) -> bool:
    of_node = [link for link in bad.values() if node in link.pair]
    is_only_slow = not any(_is_late(x, than) or _loses(x, than) for x in of_node)
    has_rate = _bandwidths(links)[node] >= _BANDWIDTH * than.bandwidth
    return not of_node or (is_only_slow and has_rate)


# --- what is wrong with one link ------------------------------------------------------


def _is_slow(link: Link, than: Usual) -> bool:
    return link.slower < min(_BANDWIDTH, than.steady) * than.bandwidth


def _is_late(link: Link, than: Usual) -> bool:
    return link.latency_s > _LATENCY * than.latency + _LATENCY_S


def _loses(link: Link, than: Usual) -> bool:
    return link.lost > max(_LOST, _LOST_TIMES * than.lost)


def _is_bad(link: Link, than: Usual) -> bool:
    is_bad = _is_slow(link, than) or _is_late(link, than) or _loses(link, than)
    return is_bad and link.is_measured


def _bad(links: Sequence[Link], _hosts: object, _node: object, than: Usual) -> str:
    texts = []
    if slow := [link.slower for link in links if _is_slow(link, than)]:
        texts.append(f"{rate(min(slow))} (usual here: {rate(than.bandwidth)})")
    if late := [link.latency_s for link in links if _is_late(link, than)]:
        usual_time = duration(than.latency)
        texts.append(f"{duration(max(late))} for a round trip (usual: {usual_time})")
    if lost := [link.lost for link in links if _loses(link, than)]:
        texts.append(f"{max(lost):.2%} of the segments are sent again")
    return "; ".join(texts)


def _blocked(links: Sequence[Link], hosts: Sequence[str], *_: object) -> str:
    closed = []
    for link in links:
        first, second = host(link.first, hosts), host(link.second, hosts)
        if link.first in link.blocked:
            closed.append(f"{first} cannot connect to {second}")
        if link.second in link.blocked:
            closed.append(f"{second} cannot connect to {first}")
    reasons = listed([*dict.fromkeys(link.problem for link in links)])
    return f"{listed(closed)}: {reasons}" if closed else reasons


def _clock(links: Sequence[Link], hosts: Sequence[str], node: int, *_: object) -> str:
    link = next(link for link in links if node in link.pair)
    ahead = link.clock_s if node == link.second else -link.clock_s
    side = "ahead" if ahead > 0 else "behind"
    return f"the clock of {host(node, hosts)} is {abs(ahead):.1f} s {side}"


_OF_PAIRS = "also examine other nodes, and check the cables and switches between these"

# By code: whether a link is bad, the text about such links of a node, and the remedy.
_KINDS: Mapping[str, tuple[Callable[[Link, Usual], bool], Callable[..., str], str]] = {
    "HPC190": (
        lambda link, _: bool(link.problem),
        _blocked,
        "open all ports between them in both directions, and check routes and cables",
    ),
    "HPC189": (
        lambda link, _: bool(link.lost_mtu),
        lambda links, *_: f"packets of {links[0].lost_mtu} bytes (the MTU) are lost",
        "set the same MTU on the interfaces and on all switches between them",
    ),
    "HPC191": (_is_bad, _bad, EXCLUDE),
    "HPC183": (
        lambda link, _: abs(link.clock_s) > _CLOCK_S,
        _clock,
        "start the node's time service (chrony, ntpd). Until then, log times are wrong",
    ),
}

# --- pairs ------------------------------------------------------------------------

# With 32 nodes, each meets all others. With more, each meets so many that one or two
# bad partners show only their own fault.
MOST_ROUNDS = 31

_SHARE = 2 / 3  # of the partners with whom a bad node is bad


def rounds(nodes: Sequence[int]) -> list[list[Pair]]:
    """Pair nodes so that none is in two pairs of a round, and no pair occurs twice.

    This is the circle method: one node stays, and the others move by one place.
    """
    if len(nodes) == 1:
        return []
    places = sorted(nodes)
    if len(places) % 2:
        places.append(-1)  # its partner has a round off
    turns = []
    for turn in range(min(len(places) - 1, MOST_ROUNDS)):
        fixed, *circle = places
        order = [fixed, *circle[turn:], *circle[:turn]]
        facing = zip(order, reversed(order), strict=True)  # each pair in both orders
        turns.append(sorted((a, b) for a, b in facing if 0 <= a < b))
    return turns


def disjoint(pairs: Collection[Pair]) -> list[list[Pair]]:
    """Put pairs into rounds in which no node occurs twice."""
    turns: list[list[Pair]] = []
    for pair in sorted(pairs):
        free = (turn for turn in turns if {*pair}.isdisjoint(itertools.chain(*turn)))
        chosen = next(free, [])
        if not chosen:
            turns.append(chosen)
        chosen.append(pair)
    return turns


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
    is_clear = 2 * len(blamed) <= most and 2 * len(left) <= len(others)
    return sorted(blamed) if is_clear else []

"""Which links, and which nodes, are suspect: a pure function of what was measured.

No data sheet counts. A link is slow if it is much slower than most links of this
allocation, and if repeated measurements of one pair differ less than that. The usual
value is the median over the nodes, of which each counts with the median of its
partners. Up to four nodes, one bad node spoils half of the links, so its best partner
counts. The worst comes first: nodes that are much worse than most are named, and the
rest is judged without them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from statistics import median, median_high, median_low
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrun_hpc.doctor.pairs import blame
from torchrun_hpc.doctor.results import EXCLUDE, Finding
from torchrun_hpc.doctor.units import duration, rate, size
from torchrun_hpc.errors import count
from torchrun_hpc.names import host, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torchrun_hpc.doctor.pairs import Pair
    from torchrun_hpc.doctor.results import Collective, Link

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

_SHOWN, _SINGLE = 10, 3  # findings; pairs in a text


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
    worst, usable = outliers(links), [*filter(is_measured, links)]
    measured = [link for link in usable if worst.isdisjoint(_pair(link))] or usable
    of_node: dict[int, list[Link]] = defaultdict(list)
    for link in measured:
        for node in _pair(link):
            of_node[node].append(link)
    is_few, is_one = len(of_node) <= _FEW, len(measured) == 1
    middle: Callable[[Iterable[float]], float] = min if is_few else median

    def of_nodes(value: Callable[[Link], float]) -> list[float]:
        return [middle(map(value, own)) for own in of_node.values()] or [0.0]

    # With two nodes, only the other direction can be compared.
    bandwidths = _bandwidths(measured, max if is_one and not worst else min)
    rates = [*bandwidths.values()] if is_few else of_nodes(_slowest)
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


def is_measured(link: Link) -> bool:
    """Return whether a link has figures: bytes arrive in both directions."""
    return not link.problem and not link.lost_mtu


def ways(links: Iterable[Link]) -> list[Way]:
    """Return both directions of the pairs that have figures."""
    found = []
    for link in filter(is_measured, links):
        one, other, latency = link.first, link.second, link.latency_s
        found.append(Way(one, other, latency, link.forward))
        found.append(Way(other, one, latency, link.backward))
    return found


def unusable(links: Sequence[Link]) -> list[int]:
    """Return nodes whose exclusion makes all links usable."""
    unused = [_pair(link) for link in links if not is_measured(link)]
    blamed = blame(unused, [_pair(link) for link in links])
    left = [second for first, second in unused if not {first, second} & {*blamed}]
    return [*blamed, *left]


def doubtful(links: Sequence[Link]) -> list[Pair]:
    """Return the pairs to measure again: noise passes, but a fault stays.

    Up to four nodes, one bad pair makes all pairs doubtful: they show the noise.
    """
    than = usual(links)
    # A short pause of a process looks as if large packets were lost.
    bad = [_pair(link) for link in links if _is_bad(link, than) or link.lost_mtu]
    is_few = len({node for link in links for node in _pair(link)}) <= _FEW
    return [_pair(x) for x in links if not x.problem] if bad and is_few else bad


def best_of(*looks: Link) -> Link:
    """Return the best figures of several measurements of a pair."""
    good = [look for look in looks if is_measured(look)] or looks
    rates = [*map(_slowest, good)]
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
    tried = [_pair(link) for link in links]
    for code, (is_bad, text, remedy) in _KINDS.items():
        bad = {_pair(link): link for link in links if is_bad(link, than)}
        is_noisy = is_bad is _is_bad  # noise can hit any direction
        rest = [pair for pair in tried if not is_noisy or worst.isdisjoint(pair)]
        blamed = blame(bad.keys() & {*rest}, rest)
        if is_noisy:
            blamed = [*sorted(worst), *blamed]
            blamed = [n for n in blamed if not _is_acquitted(n, links, bad, than)]
        for node in blamed:
            own = [bad.pop(pair) for pair in sorted(bad) if node in pair]
            partners = count(sum(node in pair for pair in tried), "node")
            where = f"{host(node, hosts)}, with {len(own)} of {partners}"
            what = text(own, hosts, node, than)
            yield Finding(code, f"{where}: {what}", remedy, (node,))
        if not bad:
            continue
        names = [" and ".join(host(node, hosts) for node in pair) for pair in bad]
        where = f"between {listed(names)}"
        if len(bad) > _SINGLE:
            where = f"{len(bad)} of {count(len(tried), 'pair')}"
        what = text([*bad.values()], hosts, max(max(bad)), than)
        # Among many nodes, one or two slow pairs need no action.
        is_suspect = not is_noisy or 2 * len(bad) >= len(tried)
        to_do = _OF_PAIRS if is_noisy else remedy
        yield Finding(code, f"{where}: {what}", to_do, is_suspect=is_suspect)


def _is_acquitted(
    node: int, links: Sequence[Link], bad: Mapping[Pair, Link], than: Usual
) -> bool:
    own = [link for link in bad.values() if node in _pair(link)]
    is_only_slow = not any(_is_late(link, than) or _loses(link, than) for link in own)
    has_rate = _bandwidths(links)[node] >= _BANDWIDTH * than.bandwidth
    return not own or (is_only_slow and has_rate)


def of_collectives(
    rows: Sequence[Collective], causes: Iterable[tuple[str, Sequence[int]]]
) -> Iterator[Finding]:
    """Yield findings about failed operations, wrong results, and early ends."""
    found = [*causes]
    for row in rows:
        if row.wrong > 0:
            wrong = count(row.wrong, "wrong element")
            what = f"{row.operation} of {size(row.size)} {row.scope}".rstrip()
            found.append((f"{what}: {wrong} of {row.count}", ()))
    remedy = "see the other findings, and add --hpc-debug to the job's launch line"
    for text, nodes in found[:_SHOWN]:
        yield Finding("HPC193", f"torch's collectives: {text}", remedy, tuple(nodes))


# --- what is wrong with one link ------------------------------------------------------


def _pair(link: Link) -> Pair:
    return link.first, link.second


def _slowest(link: Link) -> float:
    return min(link.forward, link.backward)


def _is_slow(link: Link, than: Usual) -> bool:
    return _slowest(link) < min(_BANDWIDTH, than.steady) * than.bandwidth


def _is_late(link: Link, than: Usual) -> bool:
    return link.latency_s > _LATENCY * than.latency + _LATENCY_S


def _loses(link: Link, than: Usual) -> bool:
    return link.lost > max(_LOST, _LOST_TIMES * than.lost)


def _is_bad(link: Link, than: Usual) -> bool:
    is_bad = _is_slow(link, than) or _is_late(link, than) or _loses(link, than)
    return is_bad and is_measured(link)


def _bad(links: Sequence[Link], _hosts: object, _node: object, than: Usual) -> str:
    texts = []
    if slow := [_slowest(link) for link in links if _is_slow(link, than)]:
        texts.append(f"{rate(min(slow))} (usual here: {rate(than.bandwidth)})")
    if late := [link.latency_s for link in links if _is_late(link, than)]:
        known = duration(than.latency)
        texts.append(f"{duration(max(late))} for a round trip (usual: {known})")
    if lost := [link.lost for link in links if _loses(link, than)]:
        texts.append(f"{max(lost):.2%} of the segments are sent again")
    return "; ".join(texts)


def _blocked(links: Sequence[Link], hosts: Sequence[str], *_: object) -> str:
    closed = [
        f"{host(rank, hosts)} cannot connect to {host(other, hosts)}"
        for link in links
        for rank, other in (_pair(link), _pair(link)[::-1])
        if rank in link.blocked
    ]
    reasons = dict.fromkeys(link.problem for link in links)
    return ": ".join(filter(None, map(listed, (closed, [*reasons]))))


def _clock(links: Sequence[Link], hosts: Sequence[str], node: int, *_: object) -> str:
    link = next(link for link in links if node in _pair(link))
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

"""Which links, and which nodes, are suspect: a pure function of what was measured.

Nothing is compared with a figure of a data sheet: a link is slow if it is much slower
than most of this allocation. What is usual is the median, over the nodes, of what each
has with its best partner. So one bad node of three does not make bad links usual.
"""

from __future__ import annotations

from statistics import median_high, median_low
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrun_hpc.doctor.pairs import blame
from torchrun_hpc.doctor.results import Finding
from torchrun_hpc.errors import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torchrun_hpc.doctor.pairs import Pair
    from torchrun_hpc.doctor.results import Collective, Link

# A link is slow below this share of the usual bandwidth; above so many times the usual
# latency and these seconds more; and loses too much above this share of all bytes and
# so many times what is usual. Healthy links of the test cluster, which share two cores,
# stay within half of that.
_BANDWIDTH = 0.75
_LATENCY, _LATENCY_S = 3.0, 1e-4
_LOST, _LOST_TIMES = 0.001, 5.0
_CLOCK_S = 1.0

_NAMES = 10  # of pairs in a text
_GIGA, _MILLI = 1e9, 1e-3


class Usual(NamedTuple):
    """What is usual in this allocation; see `Link` for the units."""

    bandwidth: float
    latency_s: float
    lost: float


def usual(links: Sequence[Link]) -> Usual | None:
    """Return what is usual; ``None`` where nothing was measured."""
    measured = [link for link in links if is_measured(link)]
    if not measured:
        return None

    def best(value: Callable[[Link], float], choose: Callable[..., float]) -> Any:
        found: dict[int, float] = {}
        for link in measured:
            for node in _pair(link):
                found[node] = choose(found.get(node, value(link)), value(link))
        return list(found.values())

    return Usual(
        median_high(best(lambda link: max(link["forward"], link["backward"]), max)),
        median_low(best(lambda link: link["latency_s"], min)),
        median_low(best(lambda link: link["lost"], min)) if len(measured) > 1 else 0.0,
    )


def is_measured(link: Link) -> bool:
    """Say whether there are figures of a link: bytes go through it, both ways."""
    return not link["problem"] and not link["lost_mtu"]


def unusable(links: Sequence[Link]) -> list[int]:
    """Return the nodes without which all links can be used, as few as possible."""
    blamed, left = blame([_pair(link) for link in links if not is_measured(link)])
    return [*blamed, *(second for _, second in left)]


def _pair(link: Link) -> Pair:
    return link["first"], link["second"]


# --- what is wrong with one link ------------------------------------------------------


def _is_slow(link: Link, than: Usual) -> bool:
    return min(link["forward"], link["backward"]) < _BANDWIDTH * than.bandwidth


def _is_late(link: Link, than: Usual) -> bool:
    return link["latency_s"] > _LATENCY * than.latency_s + _LATENCY_S


def _loses(link: Link, than: Usual) -> bool:
    return link["lost"] > max(_LOST, _LOST_TIMES * than.lost)


_CHECKS = {
    "bandwidth": (_is_slow, "{bandwidth}, and {usual.bandwidth} is usual here"),
    "latency": (_is_late, "{latency} there and back, and {usual.latency} is usual"),
    "loss": (_loses, "{lost} of the bytes are sent again"),
}


def doubtful(links: Sequence[Link]) -> list[Pair]:
    """Return the pairs that are to be looked at again: noise passes, a fault stays."""
    than = usual(links)
    return [
        _pair(link)
        for link in links
        if than
        and is_measured(link)
        and any(check(link, than) for check, _ in _CHECKS.values())
    ]


def best_of(one: Link, other: Link) -> Link:
    """Return the better figures of two looks at the same pair."""
    looks = one["looks"] + other["looks"]
    if one["problem"] or other["problem"]:
        return {**(other if one["problem"] else one), "looks": looks}
    return {
        **one,
        "latency_s": min(one["latency_s"], other["latency_s"]),
        "forward": max(one["forward"], other["forward"]),
        "backward": max(one["backward"], other["backward"]),
        "lost": min(one["lost"], other["lost"]),
        "lost_mtu": min(one["lost_mtu"], other["lost_mtu"]),
        "networks": {**other["networks"], **one["networks"]},
        "looks": looks,
    }


# --- what follows for the nodes -------------------------------------------------------


def findings(links: Sequence[Link], hosts: Sequence[str]) -> list[Finding]:
    """Say what is wrong with the links, and which nodes explain it."""
    by_pair = {_pair(link): link for link in links}
    than = usual(links)
    return [
        *_blocked(by_pair, hosts),
        *_too_large(by_pair, hosts),
        *(_slow(by_pair, hosts, than) if than else ()),
        *_clocks(by_pair, hosts),
        *_networks(by_pair, hosts),
    ]


def _blocked(links: Mapping[Pair, Link], hosts: Sequence[str]) -> list[Finding]:
    found = []
    for group in _grouped(pair for pair, link in links.items() if link["problem"]):
        problems = [links[pair]["problem"] for pair in group.pairs]
        ways = [
            f"{_name(rank, hosts)} cannot open a connection to {_name(other, hosts)}"
            for pair in group.pairs
            for rank, other in (pair, pair[::-1])
            if rank in links[pair]["blocked"]
        ]
        what = _list(ways) if ways else _between(group.pairs, hosts)
        found.append(
            Finding(
                code="HPC190",
                text=f"{what}: {_list(sorted(set(problems)))}",
                remedy="a job needs connections in both directions, on any port, on "
                "its network: look at the firewall, the routes and the cable",
                nodes=group.nodes,
                is_suspect=True,
            )
        )
    return found


def _too_large(links: Mapping[Pair, Link], hosts: Sequence[str]) -> list[Finding]:
    bad = [p for p, link in links.items() if link["lost_mtu"] and not link["problem"]]
    return [
        Finding(
            code="HPC189",
            text=f"{_between(group.pairs, hosts)}: packets of "
            f"{links[group.pairs[0]]['lost_mtu']} bytes, the MTU of the interface, do "
            "not arrive, and small ones do",
            remedy="set one MTU on the interfaces and on all switches between them",
            nodes=group.nodes,
            is_suspect=True,
        )
        for group in _grouped(bad)
    ]


def _slow(
    links: Mapping[Pair, Link], hosts: Sequence[str], than: Usual
) -> list[Finding]:
    measured = {pair: link for pair, link in links.items() if is_measured(link)}
    bad = {
        name: [pair for pair, link in measured.items() if check(link, than)]
        for name, (check, _) in _CHECKS.items()
    }
    found = []
    for group in _grouped({pair for pairs in bad.values() for pair in pairs}):
        texts = []
        for name, (_, text) in _CHECKS.items():
            pairs = [pair for pair in group.pairs if pair in bad[name]]
            if pairs:
                worst = _worst(name, [measured[pair] for pair in pairs])
                texts.append(text.format(**worst, usual=_Written(than)))
        what = "; ".join(texts)
        if group.nodes:
            (rank,) = group.nodes
            partners = sum(rank in pair for pair in measured)
            where = f"{_name(rank, hosts)}, with {len(group.pairs)} of {partners} nodes"
            found.append(_slow_finding(f"{where}: {what}", group.nodes))
        else:
            found.append(_slow_finding(f"{_between(group.pairs, hosts)}: {what}", []))
    return found


def _slow_finding(text: str, nodes: list[int]) -> Finding:
    remedy = "leave the node out, and tell the administrator"
    if not nodes:
        remedy = "a third node would show which of the two it is; look at the cable"
    return Finding(
        code="HPC191", text=text, remedy=remedy, nodes=nodes, is_suspect=True
    )


def _clocks(links: Mapping[Pair, Link], hosts: Sequence[str]) -> list[Finding]:
    bad = [
        pair
        for pair, link in links.items()
        if not link["problem"] and abs(link["clock_s"]) > _CLOCK_S
    ]
    found = []
    for group in _grouped(bad):
        first, second = group.pairs[0]
        ahead = links[first, second]["clock_s"]
        about, other = (second, first) if group.nodes != [first] else (first, second)
        ahead = ahead if about == second else -ahead
        side = "ahead of" if ahead > 0 else "behind"
        text = f"the clock of {_name(about, hosts)} is {abs(ahead):.1f} s {side} that "
        found.append(
            Finding(
                code="HPC183",
                text=f"{text}of {_name(other, hosts)}",
                remedy="the node's time service (chrony, ntpd) does not run: times in "
                "logs and checkpoints are wrong there",
                nodes=group.nodes,
                is_suspect=True,
            )
        )
    return found


def _networks(links: Mapping[Pair, Link], hosts: Sequence[str]) -> list[Finding]:
    """Say which other networks are closed between some nodes, and open between others.

    One that is closed between all is so by intention, and no job needs it.
    """
    names = dict.fromkeys(name for link in links.values() for name in link["networks"])
    found = []
    for name in names:
        tried = {
            p: x["networks"][name] for p, x in links.items() if name in x["networks"]
        }
        closed = [pair for pair, is_open in tried.items() if not is_open]
        if 0 < len(closed) < len(tried):
            found.append(
                Finding(
                    code="HPC192",
                    text=f"{name} is closed {_between(closed, hosts)}, and open "
                    "between others",
                    remedy="this job does not use it; one that does would not start",
                    nodes=[],
                    is_suspect=False,
                )
            )
    return found


def of_collectives(
    rows: Sequence[Collective], problems: Mapping[str, str]
) -> list[Finding]:
    """Say which of torch's operations failed, or gave wrong results.

    Args:
        rows: The operations.
        problems: What went wrong, by the name of the node.
    """
    wrong = [
        f"{row['operation']} of {row['size']} bytes"
        f"{' within ' + row['scope'] if row['scope'] else ''}: "
        f"{count(row['wrong'], 'wrong element')} of {row['count']}"
        for row in rows
        if row["wrong"] > 0
    ]
    texts = [*wrong, *(f"{host}: {text}" for host, text in problems.items())]
    return [
        Finding(
            code="HPC193",
            text=f"torch's collectives: {text}",
            remedy="the training would fail in the same way: see the findings of the "
            "nodes and the pairs, and type --hpc-debug in the job's own line",
            nodes=[],
            is_suspect=True,
        )
        for text in texts[:_NAMES]
    ]


# --- how it is written ----------------------------------------------------------------


class _Group(NamedTuple):
    """Bad pairs that one node explains, or that nobody does."""

    nodes: list[int]
    pairs: list[Pair]


def _grouped(pairs: Iterable[Pair]) -> list[_Group]:
    left = set(pairs)
    blamed, single = blame(left)
    groups = []
    for rank in blamed:
        own = sorted(pair for pair in left if rank in pair)
        groups.append(_Group([rank], own))
        left -= set(own)
    return groups + [_Group([], [pair]) for pair in single]


class _Written:
    """What is usual, in a person's units."""

    def __init__(self, than: Usual) -> None:
        self.bandwidth = rate(than.bandwidth)
        self.latency = duration(than.latency_s)


def _worst(name: str, links: Sequence[Link]) -> dict[str, str]:
    """Return the worst figure of some links, in a person's units."""
    if name == "bandwidth":
        return {name: rate(min(min(x["forward"], x["backward"]) for x in links))}
    if name == "latency":
        return {name: duration(max(link["latency_s"] for link in links))}
    return {"lost": f"{max(link['lost'] for link in links):.2%}"}


def rate(bandwidth: float) -> str:
    """Write bytes per second as bits."""
    bits = 8 * bandwidth
    return f"{bits / _GIGA:.2f} Gbit/s" if bits >= _GIGA else f"{bits / 1e6:.0f} Mbit/s"


def duration(seconds: float) -> str:
    """Write a short time."""
    is_long = seconds >= _MILLI
    return f"{seconds / _MILLI:.1f} ms" if is_long else f"{seconds * 1e6:.0f} us"


def _name(rank: int, hosts: Sequence[str]) -> str:
    return (hosts[rank] if rank < len(hosts) else "") or f"node {rank}"


def _list(texts: Sequence[str]) -> str:
    more = len(texts) - _NAMES
    return ", ".join(texts[:_NAMES]) + (f" and {more} more" if more > 0 else "")


def _between(pairs: Sequence[Pair], hosts: Sequence[str]) -> str:
    """Write between which nodes: one and others, or each pair."""
    if len(pairs) > 1 and (shared := set(pairs[0]).intersection(*pairs[1:])):
        rank = min(shared)
        others = [_name(n, hosts) for pair in pairs for n in pair if n != rank]
        return f"between {_name(rank, hosts)} and {_list(others)}"
    texts = [f"{_name(a, hosts)} and {_name(b, hosts)}" for a, b in pairs]
    return f"between {_list(texts)}"

"""Folded and shortened lists of ranks and hosts, for messages."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

_MOST = 12  # ranges, names or texts in a list
_NUMBERS = 2**16  # CPUs and ports are below; the text may come from another node
_IN_FULL = 2  # up to so many hosts are not folded

# A name in three parts: before the first label's last number, the number, the rest.
_NUMBERED = re.compile(
    r"([A-Za-z0-9_-]*[A-Za-z_-])([0-9]+)([A-Za-z_-]*(?:\.[A-Za-z0-9._-]*)?)"
)


def ranges(numbers: Iterable[int], most: int = _MOST) -> str:
    """Write at most ``most`` ranges of numbers, such as ranks or CPUs: ``0-3,5``."""
    runs = _runs(map(str, numbers))
    return _joined(runs[:most]) + _and_more(sum(map(len, runs[most:])))


def numbers_in(text: str) -> frozenset[int]:
    """Read ranges of numbers, as Linux writes CPUs and ports: ``0-3,8``.

    Return nothing if the text has another form.
    """
    found: set[int] = set()
    try:
        for part in filter(None, text.strip().split(",")):
            first, _, last = part.partition("-")
            end = min(int(last or first) + 1, _NUMBERS)
            found.update(range(int(first), end))
    except ValueError:
        return frozenset()
    return frozenset(found)


def rank_list(ranks: Collection[int]) -> str:
    """Write ranks: ``rank 5``, ``ranks 0-3,5``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def fold(hosts: Iterable[str]) -> str:
    """Write host names in Slurm's form: ``jwb[0001-0004,0007]``; one or two in full."""
    known = [*dict.fromkeys(hosts)]
    if len(known) <= _IN_FULL:
        return ", ".join(known)
    kinds: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    for host in known:
        match = _NUMBERED.fullmatch(host)
        kinds[(match[1], match[3]) if match else (host, None)].append(
            match[2] if match else ""
        )
    texts, room, more = [], _MOST, 0
    for (start, end), numbers in kinds.items():
        runs = _runs(numbers)
        if shown := runs[:room]:
            text = _joined(shown)
            text = f"[{text}]" if {"-", ","} & {*text} else text
            texts.append(f"{start}{text}{end or ''}")
        more += sum(map(len, runs[room:]))
        room -= len(shown)
    return ", ".join(texts) + _and_more(more)


def _runs(numbers: Iterable[str]) -> list[list[str]]:
    """Split numbers into runs without a gap and with equal padding."""
    runs: list[list[str]] = []
    for number in sorted(numbers, key=lambda text: (int(text or 0), len(text))):
        if runs and number == f"{int(runs[-1][-1]) + 1:0{len(runs[-1][0])}}":
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _joined(runs: Iterable[Sequence[str]]) -> str:
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else r[0] for r in runs)


def _and_more(number: int) -> str:
    return f" and {number} more" if number else ""


def host(rank: int, hosts: Sequence[str]) -> str:
    """Return the name of a node, or its rank if it has none."""
    return hosts[rank] or f"node {rank}"


def placed(hosts: Sequence[str], known: Mapping[int, str]) -> tuple[str, ...]:
    """Return names by rank: the known ones, and for all other ranks the guessed hosts.

    If a guess belongs to a known rank, a host without a rank takes its place.
    """
    names = {rank: name for rank, name in known.items() if name}
    taken = {*names.values()}
    guesses = [host for rank, host in enumerate(hosts) if rank in names]
    free = iter([host for host in guesses if host not in taken])
    return tuple(
        names.get(rank) or (next(free, "") if host in taken else host)
        for rank, host in enumerate(hosts)
    )


def fold_ranks(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """Write the names of nodes: ``n[9-14], node 20``."""
    return fold(host(rank, hosts) for rank in ranks)


def nodes(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Write nodes by name and rank: ``n9 (node 0)``, ``n[9-14] (nodes 0-5)``."""
    known = {rank: hosts[rank] if 0 <= rank < len(hosts) else "" for rank in ranks}
    if len(known) <= _IN_FULL:
        return ", ".join(
            f"{name} (node {rank})" if name else f"node {rank}"
            for rank, name in known.items()
        )
    text, names = f"nodes {ranges(known)}", fold(filter(None, known.values()))
    return f"{names} ({text})" if names else text


def listed(texts: Sequence[str]) -> str:
    """Write a list of texts; after the first 12, the rest is counted."""
    return ", ".join(texts[:_MOST]) + _and_more(len(texts[_MOST:]))


def ranks_by(values: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the node ranks of each value; the head node's value comes first."""
    found: dict[str, list[int]] = {}
    for rank in sorted(values):
        found.setdefault(values[rank], []).append(rank)
    return found

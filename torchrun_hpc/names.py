"""Folded and shortened lists of ranks and hosts, for messages."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

_MOST = 12  # ranges, names or texts in a list
_NUMBERS = 2**16  # CPUs and ports are smaller, but another node can send any text
_IN_FULL = 2  # up to this number, hosts are not folded

# A host name in three parts: before the last number of the first label, this number,
# and the rest.
_NUMBERED = re.compile(
    r"([A-Za-z0-9_-]*[A-Za-z_-])([0-9]+)([A-Za-z_-]*(?:\.[A-Za-z0-9._-]*)?)"
)


def ranges(numbers: Iterable[int], most: int = _MOST) -> str:
    """Write numbers, such as ranks or CPUs, as at most ``most`` ranges: ``0-3,5``."""
    runs = _runs(map(str, numbers))
    return _joined(runs[:most]) + _and_more(sum(map(len, runs[most:])))


def numbers_in(text: str) -> frozenset[int]:
    """Read ranges of numbers, as Linux writes CPUs and ports: ``0-3,8``.

    Return nothing if the text has another form.
    """
    numbers: set[int] = set()
    try:
        for part in filter(None, text.strip().split(",")):
            first, _, last = part.partition("-")
            end = min(int(last or first) + 1, _NUMBERS)
            numbers.update(range(int(first), end))
    except ValueError:
        return frozenset()
    return frozenset(numbers)


def rank_list(ranks: Collection[int]) -> str:
    """Write ranks: ``rank 5``, ``ranks 0-3,5``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def fold(hosts: Iterable[str]) -> str:
    """Write host names in Slurm's form: ``jwb[0001-0004,0007]``; one or two in full."""
    names = [*dict.fromkeys(hosts)]
    if len(names) <= _IN_FULL:
        return ", ".join(names)
    # The numbers of the hosts that differ only in the number.
    kinds: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    for name in names:
        match = _NUMBERED.fullmatch(name)
        start, number, end = match.groups() if match else (name, "", None)
        kinds[start, end].append(number)
    texts, room, more = [], _MOST, 0
    for (start, end), numbers in kinds.items():
        runs = _runs(numbers)
        shown = runs[:room]
        if shown:
            text = _joined(shown)
            is_one = "-" not in text and "," not in text
            texts.append(f"{start}{text if is_one else f'[{text}]'}{end or ''}")
        more += sum(map(len, runs[room:]))
        room -= len(shown)
    return ", ".join(texts) + _and_more(more)


def _runs(numbers: Iterable[str]) -> list[list[str]]:
    """Split numbers, which may be padded with zeros, into runs without a gap."""
    runs: list[list[str]] = []
    for number in sorted(numbers, key=lambda text: (int(text or 0), len(text))):
        run = runs[-1] if runs else []
        if run and number == str(int(run[-1]) + 1).zfill(len(run[0])):
            run.append(number)
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


def placed(guesses: Sequence[str], by_rank: Mapping[int, str]) -> tuple[str, ...]:
    """Return the hosts by rank: those of ``by_rank``, otherwise the guesses.

    An empty name counts as unknown. If a guessed host belongs to another rank, a guess
    that ``by_rank`` has replaced takes its place.
    """
    names = {rank: name for rank, name in by_rank.items() if name}
    taken = {*names.values()}
    replaced = [host for rank, host in enumerate(guesses) if rank in names]
    free = (host for host in replaced if host not in taken)
    hosts = []
    for rank, guess in enumerate(guesses):
        if rank in names:
            hosts.append(names[rank])
        else:
            hosts.append(next(free, "") if guess in taken else guess)
    return tuple(hosts)


def fold_ranks(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """Write the names of nodes: ``n[9-14], node 20``."""
    return fold(host(rank, hosts) for rank in ranks)


def nodes(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Write nodes by name and rank: ``n9 (node 0)``, ``n[9-14] (nodes 0-5)``."""
    names = {rank: hosts[rank] if 0 <= rank < len(hosts) else "" for rank in ranks}
    if len(names) <= _IN_FULL:
        return ", ".join(
            f"{name} (node {rank})" if name else f"node {rank}"
            for rank, name in names.items()
        )
    text, folded = f"nodes {ranges(names)}", fold(filter(None, names.values()))
    return f"{folded} ({text})" if folded else text


def listed(texts: Sequence[str]) -> str:
    """Write a list of texts; after the first 12, the rest is counted."""
    return ", ".join(texts[:_MOST]) + _and_more(len(texts[_MOST:]))


def ranks_by(values: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the node ranks of each value; the head node's value comes first."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(values):
        ranks.setdefault(values[rank], []).append(rank)
    return ranks

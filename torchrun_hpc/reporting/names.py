"""How nodes are named in messages: not too many of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchrun_hpc.planning.meeting import Meeting

_THINGS = 10


def nodes(ranks: Sequence[int], meeting: Meeting) -> str:
    """Write nodes by name: ``n9 (node 0), n10 (node 1)``."""
    hosts = dict(enumerate(meeting.hosts))
    return listed(
        f"{hosts[rank]} (node {rank})" if hosts.get(rank) else f"node {rank}"
        for rank in ranks
    )


def host(rank: int, hosts: Sequence[str]) -> str:
    """Return the name of a node, or its rank where it has none."""
    return hosts[rank] or f"node {rank}"


def listed_hosts(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """Write nodes by name, the first ten: ``n9, n10``."""
    return listed(host(rank, hosts) for rank in ranks)


def listed(texts: Iterable[str]) -> str:
    """Write the first ten of some texts."""
    known = [*texts]
    more = len(known) - _THINGS
    return ", ".join(known[:_THINGS]) + (f" and {more} more" if more > 0 else "")

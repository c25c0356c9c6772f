"""How many open files an agent needs: most of them are connections."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.host import procfs

if TYPE_CHECKING:
    from torchrun_hpc.planning.launch_plan import LaunchPlan

# As counted in /proc, of torch 2.13: an agent's loop and connection, and what it opens
# for a moment; the coordinator's loop; the store with its loop and its own client.
_AGENT, _COORDINATOR, _STORE = 8, 4, 12
_LOGS = 2  # of each worker, with --redirects or --tee


class Need(NamedTuple):
    """How many open files this process needs.

    Attributes:
        least: So many in any case.
        all: With a connection from each worker of the job to the store, if all nodes
            have as many as this one.
    """

    least: int
    all: int


def need(plan: LaunchPlan, *, has_store: bool) -> Need:
    """Count what a launch opens on this node, beside what is open already.

    Args:
        plan: What is planned on this node.
        has_store: Whether the workers' store is in the process of node 0's agent.
    """
    world, workers = plan.world, plan.world.workers
    own = len(procfs.open_files()) + _AGENT + _LOGS * workers
    own += workers if plan.preload else 0  # of each, the fork server's answers
    if plan.rendezvous.is_coordinator or world.spares:  # any may become it
        own += _COORDINATOR + world.nodes
    may_be_first = not world.node_rank or world.spares
    if not (has_store and may_be_first):
        return Need(own, own)
    return Need(own + _STORE + workers, own + _STORE + world.active * workers)


def raise_limit(wanted: int) -> int:
    """Allow this process as many open files as the system does; return that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft >= wanted:
        return soft
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def check_limit(limit: int, needed: Need, plan: LaunchPlan) -> Message | None:
    """Return a warning if the limit may be too low, because others start more workers.

    Raises:
        LaunchError: It is too low in any case.
    """
    if limit >= needed.all:
        return None
    nodes, workers = plan.world.nodes, count(plan.world.workers, "worker")
    error = LaunchError(
        "HPC122",
        f"this node may have {limit} open files (ulimit -Hn), and needs {needed.all} "
        f"for {count(nodes, 'node')} with {workers} each: ask for more",
    )
    if limit < needed.least:
        raise error
    return Message(error.code, str(error))

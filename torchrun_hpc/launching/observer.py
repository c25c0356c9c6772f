"""An agent's view of its workers: their stderr, their ends, their stacks."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

from torchrun_hpc.failures.relay import Relay
from torchrun_hpc.failures.watch import Watch
from torchrun_hpc.stacks import inspection
from torchrun_hpc.stacks.inspection import HANG, HangStacks, Inspection
from torchrun_hpc.stacks.stall import FORKS, FRAMES, STACKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrun_hpc.failures.failure import Failure
    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.rendezvous.client import Client

_REST_TIMEOUT = 1.0  # seconds to read the rest of the workers' stderr


def ask_for_stacks(client: Client, what: str, timeout: float) -> dict[int, Any]:
    """Ask all agents for stacks, up to ``timeout`` seconds; return replies by node.

    Lost nodes, and nodes without workers, are not missed.
    """
    active, every = {*client.active}, {*range(client.request.nodes)}
    spares = every - active
    # A spare may just have replaced a node of the hang. The thread that reports a hang
    # also passes on questions to this node.
    others = every - {client.request.rank} if what == HANG else active

    def wait(replies: Callable[[], Mapping[int, Any]]) -> None:
        client.wait_for(lambda: others <= replies().keys(), timeout)

    return {node: [] for node in spares} | client.ask_all(what, wait)


class Observer:
    """Observes the workers of this node.

    For `ask_all`, `is_first` and `meeting`, see `Inspection`.
    """

    def __init__(self) -> None:
        self.relay = Relay()
        self.watch = Watch(self.relay)
        kept = HangStacks(self.watch)
        self.watch.on_hang = kept.sample
        self.replies = {
            FORKS: lambda _: inspection.sample(self.watch, 0, with_calls=False),
            FRAMES: lambda _: inspection.sample(self.watch, with_calls=False),
            STACKS: lambda _: inspection.sample(self.watch),
            HANG: lambda _: kept.latest(),
        }
        self._inspected: Inspection | None = None
        self.ask_all: Callable[[str, float], Mapping[int, Any]] | None = None
        self.is_first: Callable[[], bool] = lambda: True
        self.meeting: Callable[[], Meeting] | None = None

    def explain(self, failure: Failure) -> tuple[Failure, Sequence[str]]:
        """Explain a failure if it is a hang; see `report.Explain`."""
        if self._inspected is None or not failure.is_hang:
            return failure, ()
        return self._inspected.explain(failure)

    def end_workers(self) -> None:
        """Kill the workers of this node at once, which counts as no failure."""
        self.watch.stopping(look=False)
        for worker, _ in self.watch.workers:
            if worker.exit_code() is None:  # now: torch may have reaped it meanwhile
                with contextlib.suppress(OSError):  # each leads a session
                    os.killpg(worker.pid, signal.SIGKILL)

    @contextlib.contextmanager
    def at_work(self, plan: LaunchPlan) -> Iterator[None]:
        """Observe them while torch's agent runs."""
        asked = self.ask_all, self.is_first, self.replies, self.meeting
        self._inspected = inspected = Inspection(plan, *asked)
        inspected.start()
        try:
            yield
        finally:
            inspected.close()
            self.watch.end()
            self.relay.close(_REST_TIMEOUT)

"""An agent's view of its workers: their stderr, their ends, their stacks."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

from torchrun_hpc.failures.relay import Relay
from torchrun_hpc.failures.watch import Watch
from torchrun_hpc.stacks import inspection
from torchrun_hpc.stacks.inspection import Inspection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.rendezvous.client import Client

_REST_TIMEOUT = 1.0  # seconds to read the rest of the workers' stderr


def ask_for_stacks(client: Client, timeout: float) -> dict[int, Any]:
    """Ask all agents for stacks, up to ``timeout`` seconds; return replies by node.

    Lost nodes, and nodes without workers, are not missed.
    """

    def wait(replies: Mapping[int, Any]) -> None:
        # The coordinator or the job may have ended.
        with contextlib.suppress(Exception):
            client.until(lambda: {*client.active} <= replies.keys(), timeout)

    spares = {*range(client.request.nodes)} - {*client.active}
    return {node: [] for node in spares} | client.questions.ask_all("stacks", wait)


class Observer:
    """Observes the workers of this node.

    `ask_all` returns the stacks by node; it is ``None`` if other nodes cannot be asked.
    `is_first` returns whether this node acts for all.
    """

    def __init__(self) -> None:
        self.relay = Relay()
        self.watch = Watch(self.relay)
        self.ask_all: Callable[[float], Mapping[int, Any]] | None = None
        self.is_first: Callable[[], bool] = lambda: True

    def sample(self) -> list[dict[str, Any]]:
        """Return the stacks of this node's workers as plain data."""
        return inspection.sample(self.watch)

    def end_workers(self) -> None:
        """Kill the workers of this node at once, which counts as no failure."""
        workers = self.watch.workers
        self.watch.stopping(look=False)
        for worker, runs in workers:
            if runs:
                with contextlib.suppress(OSError):  # each leads a session
                    os.killpg(worker.pid, signal.SIGKILL)

    @contextlib.contextmanager
    def at_work(self, plan: LaunchPlan) -> Iterator[None]:
        """Observe them while torch's agent runs."""
        inspected = Inspection(plan, self.watch, self.ask_all, self.is_first)
        inspected.start()
        try:
            yield
        finally:
            inspected.close()
            self.watch.end()
            self.relay.close(_REST_TIMEOUT)

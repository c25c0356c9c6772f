"""The stacks of running workers, on request or for a stall report."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc import names, wire
from torchrun_hpc.stacks import sampling
from torchrun_hpc.stacks.sampling import ENDED, WorkerStack
from torchrun_hpc.stacks.service import Service
from torchrun_hpc.stacks.stall import StallReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.failures.watch import Watch
    from torchrun_hpc.planning.plan import LaunchPlan

# Seconds: for one node, and for all of them.
_NODE_TIMEOUT = 3.0
_TIMEOUT = 4.5


def sample(watch: Watch) -> list[dict[str, Any]]:
    """Return the stacks of this node's workers as plain data."""
    workers = watch.workers
    running = [worker for worker, is_running in workers if is_running]
    ended = [
        WorkerStack(worker.rank, worker.node, problem=ENDED)
        for worker, is_running in workers
        if not is_running
    ]
    found = [*sampling.sample(running, _NODE_TIMEOUT), *ended]
    return [wire.encode(stack) for stack in found]


class Inspection:
    """Answers requests for stacks, and reports a stall if that is wanted.

    `ask_all` returns the stacks by node; it is ``None`` if other nodes cannot be asked.
    `is_first` returns whether this node reports a stall.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        watch: Watch,
        ask_all: Callable[[float], Mapping[int, Any]] | None,
        is_first: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._watch = watch
        self._ask_all = ask_all
        self._is_first = is_first
        self._hosts = dict(enumerate(plan.meeting.hosts))
        self._service = Service(plan.meeting.launch_id, self._answer)
        self._stall: StallReport | None = None
        if plan.asked.hpc_stall_report:
            self._stall = StallReport(
                plan.asked.hpc_stall_report, self._if_complete, self._hosts
            )

    def start(self) -> None:
        """Start answering."""
        self._service.start()
        if self._stall is not None:
            self._stall.start()

    def close(self) -> None:
        """Stop answering."""
        self._service.close()
        if self._stall is not None:
            self._stall.end()

    def _collect(self) -> tuple[list[WorkerStack], list[int]]:
        answers = {} if self._ask_all is None else {**self._ask_all(_TIMEOUT)}
        own = self._plan.meeting.node_rank
        if own not in answers:
            answers[own] = sample(self._watch)
        found = [
            replace(stack, node=node)  # do not trust its own claim
            for node, answer in answers.items()
            for stack in sampling.received(answer)
        ]
        nodes = range(self._plan.meeting.nodes)
        missing = [node for node in nodes if node not in answers]
        return sorted(found, key=lambda stack: stack.rank), missing

    def _if_complete(self) -> list[WorkerStack]:
        if not self._is_first():
            return []
        stacks, missing = self._collect()
        return [] if missing and self._ask_all is not None else stacks

    def _answer(self) -> dict[str, Any]:
        stacks, missing = self._collect()
        return {
            "launch": self._plan.meeting.launch_id,
            "missing": names.nodes(missing, self._plan.meeting.hosts),
            "workers": [
                {**wire.encode(stack), "host": self._hosts.get(stack.node, "")}
                for stack in stacks
            ],
        }

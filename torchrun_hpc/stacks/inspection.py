"""The stacks of running workers, on request or for a stall report."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc import names, waiting, wire
from torchrun_hpc.stacks import collectives, sampling
from torchrun_hpc.stacks.service import Service
from torchrun_hpc.stacks.stall import STACKS, StallReport, limit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.failures.failure import Failure
    from torchrun_hpc.failures.watch import Watch
    from torchrun_hpc.failures.worker import Worker
    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.stacks.sampling import WorkerStack

# Seconds: for one node, and for all of them.
_NODE_TIMEOUT = 3.0
_HANG_NODE_TIMEOUT = 2.0
_HANG_LIMIT = 2.9  # with the wait for workers that are at their end
_TIMEOUT = 4.5
_HANG_TIMEOUT = 3.0

# Lines about a hang.
_LINES = 6
_GROUPS = 2
_PLACES = 2

# A question to all nodes, beside those of `stall`: what their workers did in a hang.
HANG = "hang"


def sample(
    watch: Watch,
    timeout: float = _NODE_TIMEOUT,
    limit: float = 0.0,
    *,
    with_calls: bool = True,
) -> list[dict[str, Any]]:
    """Return the stacks of this node's workers as plain data.

    For ``timeout`` and ``with_calls``, see `sampling.sample`. Workers that fail
    together may be at their end, and have no stack of the script. Up to ``limit``
    seconds in all, wait until they have ended.
    """
    start = time.monotonic()
    stacks = sampling.sample(_running(watch), timeout, with_calls=with_calls)
    found = {stack.rank: stack for stack in stacks}
    ending = {stack.rank for stack in stacks if not stack.is_known}
    waiting.until(
        lambda: ending.isdisjoint(worker.rank for worker in _running(watch)),
        limit - (time.monotonic() - start),
    )
    for worker, is_running in watch.workers:
        if not is_running:
            failure = watch.failures.get(worker.rank)
            found[worker.rank] = sampling.ended(worker, failure)
    return [wire.encode(stack) for stack in found.values()]


def _running(watch: Watch) -> list[Worker]:
    watch.check()
    return [worker for worker, is_running in watch.workers if is_running]


class HangStacks:
    """The stacks of this node's workers in a hang, sampled before they are stopped."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._lock = threading.Lock()  # held while it samples
        self._sampled = 0  # the attempt
        self._stacks: list[dict[str, Any]] = []

    def sample(self) -> list[dict[str, Any]]:
        """Sample the stacks, once in each attempt, and return them as plain data."""
        with self._lock:
            number = self._watch.attempt.number
            if number != self._sampled:
                self._stacks = sample(self._watch, _HANG_NODE_TIMEOUT, _HANG_LIMIT)
                self._sampled = number
            return self._stacks

    def latest(self) -> list[dict[str, Any]]:
        """Return the stacks of the latest hang, even if the next attempt has begun."""
        if self._watch.is_hang:
            return self.sample()
        is_latest = self._sampled >= self._watch.attempt.number - 1
        return self._stacks if is_latest else []


class Inspection:
    """Answers requests for stacks, and reports a stall.

    `ask_all` returns the stacks by node, given a question and a limit in seconds; it is
    ``None`` if other nodes cannot be asked. `is_first` returns whether this node
    reports a stall. `replies` has this node's replies, by question. `meeting` returns
    the meeting with the names that are known by then.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        ask_all: Callable[[str, float], Mapping[int, Any]] | None,
        is_first: Callable[[], bool],
        replies: Mapping[str, Callable[[Any], Any]],
        meeting: Callable[[], Meeting] | None = None,
    ) -> None:
        self._meeting = meeting or (lambda: plan.meeting)
        self._ask_all = ask_all
        self._is_first = is_first
        self._replies = replies
        self._service = Service(plan.meeting.launch_id, self._answer)
        limit = limit_of(plan, hears_all=ask_all is not None or plan.meeting.nodes == 1)
        self._stall = StallReport(*limit, self._if_complete, lambda: self._hosts)

    @property
    def _hosts(self) -> Mapping[int, str]:
        """The names of the nodes by rank, if a line must name them."""
        meeting = self._meeting()
        return dict(enumerate(meeting.hosts)) if meeting.nodes > 1 else {}

    def start(self) -> None:
        """Start answering."""
        self._service.start()
        self._stall.start()

    def close(self) -> None:
        """Stop answering."""
        self._service.close()
        self._stall.end()

    def explain(self, failure: Failure) -> tuple[Failure, list[str]]:
        """Explain a hang: who did not come, and where the ranks are.

        Add why there are no stacks. See `report.Explain`.
        """
        stacks, missing = self._collect(HANG, _HANG_TIMEOUT)
        problems = [stack.problem for stack in stacks if stack.is_lasting]
        more = f"; where other ranks were is unknown: {problems[0]}" if problems else ""
        absent = collectives.absent(stacks, self._hosts, failure.rank)
        failure = replace(failure, absent=absent, text=failure.text + more)
        lines = [*collectives.compare(stacks, self._hosts)][:_GROUPS]
        if missing and self._ask_all is not None:
            lines.append(
                f"no answer from {names.nodes(missing, self._meeting().hosts)}"
            )
        return failure, [*lines, *collectives.summary(stacks, self._hosts, _PLACES)][
            :_LINES
        ]

    def _collect(
        self, what: str = STACKS, timeout: float = _TIMEOUT
    ) -> tuple[list[WorkerStack], list[int]]:
        answers: dict[int, Any] = {}
        if self._ask_all is not None:
            answers.update(self._ask_all(what, timeout))
        own = self._meeting().node_rank
        if what == HANG or own not in answers:
            answers[own] = self._replies[what](None)
        found = [
            replace(stack, node=node)  # do not trust its own claim
            for node, answer in answers.items()
            for stack in sampling.received(answer)
        ]
        missing = [node for node in range(self._meeting().nodes) if node not in answers]
        return sorted(found, key=lambda stack: stack.rank), missing

    def _if_complete(self, what: str) -> list[WorkerStack]:
        if not self._is_first():
            return []
        stacks, missing = self._collect(what)
        return [] if missing and self._ask_all is not None else stacks

    def _answer(self) -> dict[str, Any]:
        stacks, missing = self._collect()
        hosts = dict(enumerate(self._meeting().hosts))
        return {
            "launch": self._meeting().launch_id,
            "missing": names.nodes(missing, self._meeting().hosts),
            "workers": [
                {**wire.encode(stack), "host": hosts.get(stack.node, "")}
                for stack in stacks
            ],
        }

"""The stacks of a job's workers: on request, of a hang, and in a stall report."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc import limits, names, waiting, wire
from torchrun_hpc.errors import Message, count
from torchrun_hpc.reporting import console
from torchrun_hpc.stacks import collectives, sampling
from torchrun_hpc.stacks.service import Service

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrun_hpc.failures.failure import Failure
    from torchrun_hpc.failures.watch import Watch
    from torchrun_hpc.failures.worker import Worker
    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.stacks.sampling import WorkerStack

# Questions to all nodes: what their workers do now, or did in a hang. For `FRAMES` and
# `STACKS`, py-spy reads the stacks of workers that do not answer. Only `STACKS` and
# `HANG` include the collectives, which cost a fork some milliseconds.
FORKS, FRAMES, STACKS, HANG = "forks", "frames", "stacks", "hang"

# Lines about a hang.
_LINES = 6
_GROUPS = 2
_PLACES = 2


def sample(
    watch: Watch,
    timeout: float = limits.NODE_STACKS_TIMEOUT,
    limit: float = 0.0,
    *,
    with_calls: bool = True,
) -> list[dict[str, Any]]:
    """Return the stacks of this node's workers as plain data.

    For ``timeout`` and ``with_calls``, see `sampling.sample`. Workers that fail
    together may have no stack of the script, because they are just ending. Wait for
    their end, up to ``limit`` seconds in all.
    """
    start = time.monotonic()
    sampled = sampling.sample(_running(watch), timeout, with_calls=with_calls)
    ending = {stack.rank for stack in sampled if not stack.is_known}
    waiting.until(
        lambda: ending.isdisjoint(worker.rank for worker in _running(watch)),
        limit - (time.monotonic() - start),
    )
    stacks = {stack.rank: stack for stack in sampled}
    for worker, is_running in watch.workers:
        if not is_running:
            failure = watch.failures.get(worker.rank)
            stacks[worker.rank] = sampling.ended(worker, failure)
    return [wire.encode(stack) for stack in stacks.values()]


def _running(watch: Watch) -> list[Worker]:
    watch.check()
    return [worker for worker, is_running in watch.workers if is_running]


class NodeStacks:
    """The stacks of this node's workers; in a hang, sampled before they are stopped.

    `replies` has this node's reply to each question.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._lock = threading.Lock()  # held while it samples
        self._sampled = 0  # the attempt
        self._of_hang: list[dict[str, Any]] = []
        self.replies: Mapping[str, Callable[[Any], list[dict[str, Any]]]] = {
            FORKS: lambda _: sample(watch, 0, with_calls=False),
            FRAMES: lambda _: sample(watch, with_calls=False),
            STACKS: lambda _: sample(watch),
            HANG: lambda _: self.of_latest_hang(),
        }

    def sample_hang(self) -> list[dict[str, Any]]:
        """Sample the stacks, once in each attempt, and return them as plain data."""
        with self._lock:
            number = self._watch.attempt.number
            if number != self._sampled:
                self._of_hang = sample(
                    self._watch, limits.HANG_NODE_TIMEOUT, limits.HANG_END_TIMEOUT
                )
                self._sampled = number
            return self._of_hang

    def of_latest_hang(self) -> list[dict[str, Any]]:
        """Return the stacks of the latest hang, even if the next attempt has begun."""
        if self._watch.is_hang:
            return self.sample_hang()
        is_latest = self._sampled >= self._watch.attempt.number - 1
        return self._of_hang if is_latest else []


@dataclass(frozen=True)
class OtherNodes:
    """The way to the other nodes of a job.

    Attributes:
        ask_all: Returns replies by node, given a question and a limit in seconds.
        is_first: Returns whether this node reports a stall.
        meeting: Returns the meeting, with the names of all nodes that have joined.
    """

    ask_all: Callable[[str, float], Mapping[int, Any]]
    is_first: Callable[[], bool]
    meeting: Callable[[], Meeting]


class Inspection:
    """Answers requests for stacks, explains a hang, and reports a stall.

    Without `others`, it answers only for this node's own `stacks`.
    """

    def __init__(
        self, plan: LaunchPlan, stacks: NodeStacks, others: OtherNodes | None = None
    ) -> None:
        self._plan = plan
        self._own_stacks = stacks
        self._others = others
        self._service = Service(plan.meeting.launch_id, self._answer)
        limit = limit_of(plan, hears_all=others is not None or plan.meeting.nodes == 1)
        self._stall = StallReport(*limit, self._if_complete, lambda: self._hosts)

    @property
    def _meeting(self) -> Meeting:
        return self._others.meeting() if self._others else self._plan.meeting

    @property
    def _hosts(self) -> Mapping[int, str]:
        """The names of the nodes by rank, if a line must name them."""
        meeting = self._meeting
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

        If stacks are missing, the returned failure says why. See `report.Explain`.
        """
        stacks, missing = self._collect(HANG, limits.HANG_TIMEOUT)
        hosts, text = self._hosts, failure.text
        if problems := [stack.problem for stack in stacks if stack.is_lasting]:
            text += f"; where other ranks were is unknown: {problems[0]}"
        absent = collectives.absent(stacks, hosts, failure.rank)
        lines = collectives.compare(stacks, hosts)[:_GROUPS]
        if missing and self._others is not None:
            lines.append(f"no answer from {names.nodes(missing, self._meeting.hosts)}")
        lines += collectives.summary(stacks, hosts, _PLACES)
        return replace(failure, absent=absent, text=text), lines[:_LINES]

    def _collect(
        self, what: str = STACKS, timeout: float = limits.STACKS_TIMEOUT
    ) -> tuple[list[WorkerStack], list[int]]:
        """Return the stacks by rank, and the nodes without an answer."""
        meeting, answers = self._meeting, dict[int, Any]()
        if self._others is not None:
            answers.update(self._others.ask_all(what, timeout))
        if what == HANG or meeting.node_rank not in answers:
            answers[meeting.node_rank] = self._own_stacks.replies[what](None)
        stacks = [
            replace(stack, node=node)  # do not trust its own claim
            for node, answer in answers.items()
            for stack in sampling.received(answer)
        ]
        missing = [node for node in range(meeting.nodes) if node not in answers]
        return sorted(stacks, key=lambda stack: stack.rank), missing

    def _if_complete(self, what: str) -> list[WorkerStack]:
        if self._others is None:
            return self._collect(what)[0]
        if not self._others.is_first():
            return []
        stacks, missing = self._collect(what)
        return [] if missing else stacks

    def _answer(self) -> dict[str, Any]:
        stacks, missing = self._collect()
        meeting = self._meeting
        hosts = dict(enumerate(meeting.hosts))
        return {
            "launch": meeting.launch_id,
            "missing": names.nodes(missing, meeting.hosts),
            "workers": [
                {**wire.encode(stack), "host": hosts.get(stack.node, "")}
                for stack in stacks
            ],
        }


# --- a stall --------------------------------------------------------------------------

# Even a busy worker is often at the same line: it waits there in each step.
_SAMPLES = 60
_TREE_LINES = 30


def limit_of(plan: LaunchPlan, *, hears_all: bool) -> tuple[int, str]:
    """Return after how many seconds to report a stall, and what to ask until then.

    With 0 seconds, there is no report. By default, py-spy is not started before a
    stall, so the workers must be forks. All nodes must answer, because the others may
    make progress.
    """
    asked, preload = plan.asked.hpc_stall_report, plan.workers.preload
    if asked is not None:
        return asked, FRAMES
    is_default = preload and not preload.problem and hears_all
    return limits.STALL_TIMEOUT if is_default else 0, FORKS


class StallReport:
    """Compares the stacks of all workers, in its own thread, and reports a stall.

    ``collect`` asks all nodes a question. It returns no stacks if a node does not
    answer, or another node reports. With 0 ``seconds``, nothing is compared.
    """

    def __init__(
        self,
        seconds: float,
        question: str,
        collect: Callable[[str], Sequence[WorkerStack]],
        hosts: Callable[[], Mapping[int, str]],
    ) -> None:
        self._seconds = seconds
        self._question = question
        self._collect = collect
        self._hosts = hosts
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall", daemon=True)

    def start(self) -> None:
        """Start comparing."""
        if self._seconds:
            self._thread.start()

    def end(self) -> None:
        """Stop comparing."""
        self._ended.set()

    def _run(self) -> None:
        pause = self._seconds / _SAMPLES
        pause = max(pause, limits.SHORTEST_STALL_INTERVAL)
        pause = min(pause, limits.LONGEST_STALL_INTERVAL)
        before: Sequence[WorkerStack] = []
        since = looked = time.monotonic()
        while not self._ended.wait(pause):
            stacks = self._look(self._question)
            is_readable = any(not stack.problem for stack in stacks)
            if self._ended.is_set():
                return
            if not is_readable and any(stack.is_lasting for stack in stacks):
                self._give_up(stacks)
                return
            now = time.monotonic()
            if _have_progressed(stacks, before, now - looked):
                since = now
            elif is_readable and now - since >= self._seconds:
                self._report(self._look(STACKS) or stacks)
                return
            before, looked = stacks, now

    def _look(self, what: str) -> Sequence[WorkerStack]:
        try:
            return self._collect(what)
        except Exception:  # noqa: BLE001 - it may be the end of the job
            return []

    def _give_up(self, stacks: Sequence[WorkerStack]) -> None:
        why = "; ".join(collectives.render(stacks, self._hosts()))
        text = f"--hpc-stall-report cannot report a stall: {why}"
        console.write(Message("HPC175", text), "warning")

    def _report(self, stacks: Sequence[WorkerStack]) -> None:
        text = (
            f"the stacks of {count(len(stacks), 'worker')} have not changed for "
            f"{self._seconds:.0f} s (--hpc-stall-report). The job continues:"
        )
        lines = collectives.render(stacks, self._hosts())[:_TREE_LINES]
        lines += collectives.compare(stacks, self._hosts())
        console.write(Message("HPC171", text), "warning", [f"    {s}" for s in lines])


def _have_progressed(
    stacks: Sequence[WorkerStack], before: Sequence[WorkerStack], seconds: float
) -> bool:
    if [stack.rank for stack in stacks] != [stack.rank for stack in before]:
        return True
    pairs = zip(stacks, before, strict=True)
    return any(stack.has_progressed(then, seconds) for stack, then in pairs)

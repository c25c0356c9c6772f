"""``--hpc-stall-report``: one report when no worker makes progress any longer."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from torchrun_hpc.errors import Message, count
from torchrun_hpc.reporting import console
from torchrun_hpc.stacks import collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.stacks.sampling import WorkerStack

# Even a busy worker is often at the same line: it waits there in each step.
_SAMPLES = 60
_SHORTEST, _LONGEST = 0.5, 30.0  # seconds between two
_DEFAULT = 1800  # seconds without progress
_LINES = 30  # of the tree

# Questions to all nodes: what their workers do now. For `FRAMES` and `STACKS`, py-spy
# reads the stacks of workers that do not answer. Only `STACKS` includes the
# collectives, which cost a fork some milliseconds.
FORKS, FRAMES, STACKS = "forks", "frames", "stacks"


def limit_of(plan: LaunchPlan, *, hears_all: bool) -> tuple[int, str]:
    """Return after how many seconds to report a stall, and what to ask until then.

    With 0 seconds, there is no report. Before a stall, the default starts no py-spy, so
    the workers must be forks. It also needs to hear all nodes: the others may make
    progress.
    """
    asked, preload = plan.asked.hpc_stall_report, plan.workers.preload
    if asked is not None:
        return asked, FRAMES
    is_default = preload and not preload.problem and hears_all
    return _DEFAULT if is_default else 0, FORKS


class StallReport:
    """Compares the stacks of all workers, in its own thread, until they stay the same.

    ``collect`` asks all nodes a question. It returns none if a node does not answer, or
    another node reports. With 0 ``seconds``, nothing is compared.
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
        pause = min(max(self._seconds / _SAMPLES, _SHORTEST), _LONGEST)
        before: Sequence[WorkerStack] = []
        since = looked = time.monotonic()
        while not self._ended.wait(pause):
            stacks = self._look(self._question)
            is_seen = any(not stack.problem for stack in stacks)
            if self._ended.is_set():
                return
            if not is_seen and any(stack.is_lasting for stack in stacks):
                self._give_up(stacks)
                return
            now = time.monotonic()
            if _have_gone_on(stacks, before, now - looked):
                since = now
            elif is_seen and now - since >= self._seconds:
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
        lines = collectives.render(stacks, self._hosts())[:_LINES]
        lines += collectives.compare(stacks, self._hosts())
        console.write(Message("HPC171", text), "warning", [f"    {s}" for s in lines])


def _have_gone_on(
    stacks: Sequence[WorkerStack], before: Sequence[WorkerStack], seconds: float
) -> bool:
    if [stack.rank for stack in stacks] != [stack.rank for stack in before]:
        return True
    pairs = zip(stacks, before, strict=True)
    return any(stack.has_progressed(then, seconds) for stack, then in pairs)

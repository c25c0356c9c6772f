"""The end of a launch: report to the other nodes, outcome, last line, exit code.

The outcome file has what a job script needs to decide on a requeue. The exit code of
srun is the highest of all tasks, so a lost node hides a success.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from torchrun_hpc import files, limits, wire
from torchrun_hpc.agent import abort, signals
from torchrun_hpc.agent.signals import DeathSignals, die
from torchrun_hpc.errors import FAILED, KILLED, LaunchError, Message
from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Failure, Kind, WorkerPart
from torchrun_hpc.failures.report import sentence
from torchrun_hpc.options.values import NONE
from torchrun_hpc.rendezvous.errors import JobFailedError
from torchrun_hpc.rendezvous.handler import CoordinatorMissingError
from torchrun_hpc.rendezvous.messages import bad_nodes
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.console import is_reporter
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrun_hpc.agent.signals import Handler
    from torchrun_hpc.failures.report import LocalWorld
    from torchrun_hpc.failures.worker import Worker
    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.rendezvous.handler import SchedulerRendezvous

    World = SchedulerRendezvous | LocalWorld


_LOST = (Kind.LOST, Kind.SILENT)
_END_SCRIPT = "End the job script when the --hpc-outcome file has the final outcome"


class _EarlySignal(SignalException):
    """A signal before there are workers; torchrun would die of it."""


@contextlib.contextmanager
def together(
    plan: LaunchPlan, world: World, death_signals: DeathSignals, *, is_command: bool
) -> Iterator[None]:
    """End a launch in the same way as all other nodes, if they can be told.

    Raise `SystemExit` if the job failed, with its reason as ``__cause__``, or
    `ChildFailedError` if workers of this node failed.
    """
    handlers = _handle(plan, death_signals.handler(_raise))
    problem: BaseException | None = None
    try:
        try:
            yield
        finally:
            death_signals.end()
    except BaseException as error:  # noqa: BLE001 - raised again below
        problem = error
    death_signals.end()  # a signal may have interrupted the first call
    # It ignores them now, unlike torch's own handler without our patch.
    _handle(plan, death_signals.handler(_raise))
    try:
        if problem is not None and not isinstance(problem, JobFailedError):
            _give_up(plan, world, problem)
        world.leave(lambda: death_signals.is_repeated)
        if world.took_part:
            _report(plan, world, is_command=is_command)
    finally:
        if is_command and handlers:  # the process still writes its last lines
            signals_of_end = DeathSignals(limits.SIGNAL_TIMEOUT)
            handlers = dict.fromkeys(handlers, signals_of_end.handler(die))
            handlers.update(dict.fromkeys(signals.FORWARDED, signal.SIG_IGN))
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if plan.meeting.is_ours:
        owner = Owner.LAUNCHER
    else:
        owner = Owner.TORCH if is_command else Owner.PROGRAM
    if (ending := _ending(problem, world, owner)) is not None:
        raise ending


class Owner(Enum):
    """The owner of a launch's rendezvous, or the program that launches with torch's."""

    LAUNCHER = "launcher"
    TORCH = "torch"  # also on one node, where torch's rendezvous remains
    PROGRAM = "program"


# The ends about which the launcher writes the last line, in the worlds of these owners.
# The exit code is then `FAILED`. In all other cases, this process ends by the
# exception, of which torch or the program writes a traceback.
_ENDS: dict[type[BaseException], tuple[Owner, ...]] = {
    JobFailedError: tuple(Owner),  # the reporting node says it: HPC125
    SignalException: (Owner.LAUNCHER,),  # the same
    OSError: (Owner.LAUNCHER, Owner.TORCH),  # this node has said it: HPC127
}


def _ending(
    problem: BaseException | None, world: World, owner: Owner
) -> BaseException | None:
    """Return what ends this process, or a program's launch; ``None`` after success."""
    if isinstance(problem, _EarlySignal):
        return SystemExit(KILLED + problem.sigval)  # this also ends a program
    failure, cause = world.failure, problem
    if failure is not None and isinstance(problem, JobFailedError | None):
        problem = JobFailedError(failure)
        cause = RendezvousError(str(report.failed(failure, world.meeting)))
    if not any(isinstance(problem, k) and owner in _ENDS[k] for k in _ENDS):
        return problem
    ending = SystemExit(FAILED)
    ending.__cause__ = cause
    return ending


def _handle(plan: LaunchPlan, handler: Handler) -> dict[int, Any]:
    """Handle ``--signals-to-handle``; return the earlier handlers.

    Without a rendezvous of ours, torch alone handles them.
    """
    before: dict[int, Any] = {}
    is_main = threading.current_thread() is threading.main_thread()
    for name in plan.asked.signals_to_handle if is_main else ():
        # Torch itself reports a name that is no signal, or cannot be caught.
        with contextlib.suppress(AttributeError, OSError, TypeError, ValueError):
            number = getattr(signal, name)
            present = signal.getsignal(number)
            signal.signal(number, handler if plan.meeting.is_ours else present)
            before[number] = present
    return before


def _raise(number: int, _frame: Any) -> None:
    raise _EarlySignal(f"signal {number}", signal.Signals(number))


def _give_up(plan: LaunchPlan, world: World, problem: BaseException) -> None:
    failure, meeting = failure_of(problem), plan.meeting
    if isinstance(problem, OSError):
        names = dict(enumerate(meeting.hosts))
        host = names.get(meeting.node_rank) or socket.gethostname()
        console.write(Message("HPC127", failure.text), "error", host=host)
    if world.took_part:
        world.give_up(failure)
        if isinstance(problem, LaunchError):
            problem.others_know = meeting.is_ours
        return
    # `abort` sends a LaunchError when it prints the message. Without a coordinator,
    # nobody can be told.
    is_told = isinstance(problem, LaunchError | CoordinatorMissingError)
    if failure.kind is Kind.AGENT and not is_told:
        abort.tell(meeting, failure.text, limits.AGENT_REPORT_TIMEOUT)


def _report(plan: LaunchPlan, world: World, *, is_command: bool) -> None:
    """Write the outcome and the notes, and last why the job failed.

    A command writes them at its process's end. A program may continue, and gets an
    exception: so write them now, and the reason only without a report.
    """
    failure, meeting = world.failure, world.meeting
    plan = replace(plan, meeting=meeting)
    say: Any = partial(atexit.register, console.write) if is_command else console.write
    if not world.reports:
        if world.is_unreported and failure and failure.nodes == (meeting.node_rank,):
            failed = report.failed(failure, meeting)
            text = f"{failed.text}; the head node has not reported it"
            say(replace(failed, text=text), "error")
        return
    bad = world.out_at_end
    notes = [bad_nodes(bad, meeting)] if bad else []
    by = meeting.started_by
    # It sees itself that a connection has ended, but not that a node is silent.
    kinds = (Kind.SILENT,) if by and by.ends_others else _LOST
    is_lost = notes if failure is None else failure.kind in kinds
    if is_lost and by and by.may_wait:
        waits = f"{by.name} may wait forever for a lost node. {_END_SCRIPT}"
        notes.append(Message("HPC235", waits))
    for note in notes:
        # atexit runs in reverse order, so these are written after the reason.
        say(note, "warning")
    if world.is_certain:
        counts = world.restarts, world.takeovers
        write_outcome(outcome_of(failure, plan, bad, *counts), plan)
    # With torch's rendezvous, torch reports why it ended, unless a worker failed.
    if failure and (is_command if failure.worker else meeting.is_ours):
        say(report.failed(failure, meeting), "error")


# --- exceptions that end an agent -----------------------------------------------------


def failure_of(error: BaseException) -> Failure:
    """Return the failure of an agent that an exception ends; its node is not set."""
    if isinstance(error, ChildFailedError):
        rank, worker = error.get_first_failure()
        part, code = WorkerPart(rank), worker.exitcode
        return Failure(Kind.WORKER, code=code, time=time.time(), worker=part)
    failure = Failure(Kind.AGENT, time=time.time())
    if isinstance(error, SignalException):
        return replace(failure, kind=Kind.SIGNAL, code=int(error.sigval))
    if isinstance(error, OSError):
        file = f": {error.filename}" if error.filename else ""
        return replace(failure, text=f"{error.strerror or error}{file}")
    name = error.code if isinstance(error, LaunchError) else type(error).__name__
    return replace(failure, text=f"{name} {error}")


# --- the outcome, in a file -----------------------------------------------------------

DONE, SCRIPT, NODES = "done", "script failed", "nodes failed"
STOPPED, LAUNCHER = "stopped", "launcher failed"
RUNNING = "running"  # also after the end of a launch that was killed

_LARGEST = 2**22  # bytes of an outcome; a job of 10,000 nodes writes 0.5 MB
_INERT = str.maketrans({"$": r"\u0024", "`": r"\u0060"})  # JSON's own escapes

_OUTCOMES = {
    Kind.WORKER: SCRIPT,
    Kind.SIGNAL: STOPPED,
    **dict.fromkeys((Kind.LOST, Kind.SILENT, Kind.MISSING), NODES),
    **dict.fromkeys((Kind.EXCLUDED, Kind.COORDINATOR), NODES),
    **dict.fromkeys((Kind.AGENT, Kind.REFUSED), LAUNCHER),
}


def outcome_of(
    failure: Failure | None,
    plan: LaunchPlan,
    out: Sequence[int] = (),
    restarts: int = 0,
    takeovers: int = 0,
) -> dict[str, Any]:
    """Return how a job has ended, as plain data.

    `out` has the ranks of nodes lost or excluded meanwhile.

    Returns:
        ``outcome`` (a constant of this module), ``launch_id``, ``reason`` (a sentence),
        ``rank`` and ``code`` of the worker that failed first, or ``None``,
        ``nodes`` (names of the nodes that failed), ``exclude`` (these, and nodes
        lost before), ``restarts`` (of all workers), ``takeovers`` (of the
        coordinator), ``preload`` (what was imported once, or none and the reason), and
        ``by``, the name of a node that has only lost the coordinator.
    """
    kind, meeting = DONE if failure is None else _OUTCOMES[failure.kind], plan.meeting
    is_alone = failure is not None and failure.kind is Kind.COORDINATOR
    rank = meeting.node_rank
    about = set(failure.nodes) if failure else set()
    bad = {*out, *(about if kind == NODES else ())}
    return {
        "outcome": kind,
        "launch_id": meeting.launch_id,
        "reason": sentence(failure, meeting) if failure else "",
        "rank": failure.rank if failure and failure.worker else None,
        "code": failure.code if failure and failure.worker else None,
        "nodes": _hosts(about, plan),
        "exclude": _hosts(bad, plan),
        "restarts": restarts,
        "takeovers": takeovers,
        "preload": str(plan.workers.preload or NONE),
        "by": next(iter(_hosts({rank}, plan)), f"node {rank}") if is_alone else "",
    }


def _hosts(ranks: set[int], plan: LaunchPlan) -> list[str]:
    hosts = dict(enumerate(plan.meeting.hosts))
    return [hosts[rank] for rank in sorted(ranks) if hosts.get(rank)]


def write_outcome(outcome: dict[str, Any], plan: LaunchPlan) -> None:
    """Write the outcome, if it is wanted: the whole file, or none.

    The first final outcome of the coordinator with the most takeovers counts: a node
    that was cut off may come back later, and believe that all others were lost.
    """
    if not plan.asked.hpc_outcome:
        return
    file = Path(plan.asked.hpc_outcome)
    if _stands(file, outcome):
        return
    # The reason may have come over the network, and a shell script may source this.
    written = json.dumps(outcome, indent=2).translate(_INERT)
    try:
        files.write(file, f"{written}\n")
    except OSError as error:
        text = f"cannot write the outcome to {file}: {error.strerror}"
        console.write(Message("HPC215", text), "error")


def _stands(file: Path, other: Mapping[str, Any]) -> bool:
    """Return whether a file has a final outcome that the other must not replace.

    It may replace that of another launch, and one of lower weight.
    """
    try:
        present = wire.from_json(files.read(file, _LARGEST, os.O_NOFOLLOW))
    except (OSError, WireError):
        return False
    if not isinstance(present, dict) or present.get("outcome") == RUNNING:
        return False
    is_same = present.get("launch_id") == other["launch_id"]
    return is_same and _weight(present) >= _weight(other)


def _weight(outcome: Mapping[str, Any]) -> int:
    if outcome.get("by"):
        return -1
    takeovers = outcome.get("takeovers")
    return takeovers if type(takeovers) is int else 0


def forget_outcome(plan: LaunchPlan) -> None:
    """Remove an earlier launch's outcome, but not in a dry run.

    Raise `LaunchError` if there is no folder.
    """
    file = Path(plan.asked.hpc_outcome)
    if not plan.asked.hpc_outcome or not is_reporter(plan.meeting.report_rank):
        return
    if not os.path.isdir(file.parent):  # noqa: PTH112 - it raises nothing
        text = f"--hpc-outcome={file}: the folder {file.parent} does not exist"
        raise LaunchError("HPC234", f"{text}. Create it where all nodes see it")
    if plan.asked.hpc_dry_run:
        return
    with contextlib.suppress(OSError):
        if not files.is_of_system(file):
            file.unlink()


def write_running(plan: LaunchPlan, workers: Sequence[Worker]) -> None:
    """Write, on the node of rank 0, that a round has begun; skip files in /dev."""
    is_wanted = plan.asked.hpc_outcome and any(worker.node == 0 for worker in workers)
    if is_wanted and not files.is_of_system(Path(plan.asked.hpc_outcome)):
        write_outcome({**outcome_of(None, plan), "outcome": RUNNING}, plan)

"""How a launch ends: the report to the other nodes, the last line, the exit code."""

from __future__ import annotations

import atexit
import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.launching import abort, outcome
from torchrun_hpc.launching.start import FAILED
from torchrun_hpc.rendezvous import messages
from torchrun_hpc.rendezvous.client import JobFailedError
from torchrun_hpc.rendezvous.handler import CoordinatorMissingError
from torchrun_hpc.rendezvous.protocol import Kind
from torchrun_hpc.reporting import console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.rendezvous.handler import SchedulerRendezvous

# Seconds for which an agent tries to reach the others, to report that it gives up.
_REPORT_TIMEOUT = 10.0

_LOST = (Kind.LOST, Kind.SILENT)
_END_SCRIPT = "Let the job script end when --hpc-outcome says how the job has ended"

_KILLED = 128  # plus the number of the signal, as in a shell


class _EarlySignal(SignalException):
    """A signal that comes before there are workers; torchrun would die of it."""


@contextlib.contextmanager
def together(
    plan: LaunchPlan, rendezvous: SchedulerRendezvous, *, is_command: bool = True
) -> Iterator[None]:
    """End in the same way as all other nodes.

    Args:
        plan: What is planned on this node.
        rendezvous: Where it meets them.
        is_command: Whether the launch is all that this process does.

    Raises:
        SystemExit: 1 if the job failed, here or elsewhere; its cause says why.
        ChildFailedError: Workers of this node failed.
    """
    before = _handle(plan, _raise)
    problem: BaseException | None = None
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - raised again below
        # If it is repeated while this one is reported, the job is ending already.
        _handle(plan, lambda *_: None)
        problem = error
    try:
        if problem is not None and not isinstance(problem, JobFailedError):
            _give_up(plan, rendezvous, problem)
        _leave(plan, rendezvous, is_command=is_command)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    failure = rendezvous.failure
    if isinstance(problem, _EarlySignal):
        raise SystemExit(_KILLED + problem.sigval)  # it ends a program, too
    if failure is not None and isinstance(problem, JobFailedError | None):
        cause = RendezvousError(str(messages.failed(failure, plan.meeting)))
        raise SystemExit(FAILED) from cause
    if isinstance(problem, JobFailedError | SignalException | OSError):
        raise SystemExit(FAILED) from problem
    if problem is not None:
        raise problem


def _handle(plan: LaunchPlan, handler: Callable[..., None]) -> dict[int, Any]:
    """Handle ``--signals-to-handle``; return how they were handled before."""
    before: dict[int, Any] = {}
    if threading.current_thread() is not threading.main_thread():
        return before
    for name in plan.asked.signals_to_handle:
        # If it is no signal, or cannot be caught, torch reports that later.
        with contextlib.suppress(AttributeError, OSError, TypeError, ValueError):
            number = getattr(signal, name)
            before[number] = signal.signal(number, handler)
    return before


def _raise(number: int, _frame: Any) -> None:
    raise _EarlySignal(f"signal {number}", signal.Signals(number))


def _give_up(
    plan: LaunchPlan, rendezvous: SchedulerRendezvous, problem: BaseException
) -> None:
    """Report to the others that this node gives up: they would wait for it."""
    name = problem.code if isinstance(problem, LaunchError) else type(problem).__name__
    text = f"{name} {problem}"
    if isinstance(problem, OSError):
        text = str(problem.strerror or problem)
        text += f": {problem.filename}" if problem.filename else ""
        where = plan.meeting.hosts[plan.meeting.node_rank]
        console.write(Message("HPC127", f"on {where}: {text}"), "error")
    failure = outcome.failure_of(problem, text)
    if rendezvous.took_part:
        rendezvous.give_up(failure)
        if isinstance(problem, LaunchError):
            problem.others_know = True
    elif failure.kind is Kind.AGENT and not isinstance(
        # A LaunchError is sent to them where its message is written; without a
        # coordinator there is nobody to send it to.
        problem,
        LaunchError | CoordinatorMissingError,
    ):
        abort.tell(plan.meeting, failure.text, _REPORT_TIMEOUT)


def _leave(
    plan: LaunchPlan, rendezvous: SchedulerRendezvous, *, is_command: bool
) -> None:
    """Leave the rendezvous; the last line of a command says why the job failed.

    A program may go on, and has an exception. It gets the line now, if there is no
    report that has said it.
    """
    rendezvous.leave()
    if not rendezvous.took_part:
        return
    failure = rendezvous.failure
    if rendezvous.reports:
        _conclude(plan, rendezvous, is_command=is_command)
        if failure is not None and (is_command or failure.kind is not Kind.WORKER):
            message = messages.failed(failure, plan.meeting)
            write(message, "error", at_exit=is_command)
    elif (
        failure is not None
        and rendezvous.client.is_unreported
        and failure.nodes == (plan.meeting.node_rank,)
    ):
        message = messages.unreported(failure, plan.meeting)
        write(message, "error", at_exit=is_command)


def _conclude(
    plan: LaunchPlan, rendezvous: SchedulerRendezvous, *, is_command: bool
) -> None:
    """Name the nodes to do without, and what may wait for them; write the outcome."""
    failure, restarts = rendezvous.failure, rendezvous.restarts
    bad = rendezvous.out_at_end
    notes = [messages.bad_nodes(bad, plan.meeting)] if bad else []
    is_lost = notes if failure is None else failure.kind in _LOST
    by = plan.meeting.started_by
    if is_lost and by and by.may_wait and not (failure and by.ends_others):
        text = f"{by.name} may wait for a lost node forever. {_END_SCRIPT}"
        notes.append(Message("HPC235", text))
    for note in notes:
        # Registered first, written last: behind the reason.
        write(note, "warning", at_exit=is_command)
    if rendezvous.is_certain:
        outcome.write(outcome.outcome_of(failure, plan, bad, restarts), plan)


def write(message: Message, kind: str, *, at_exit: bool) -> None:
    """Write a message now, or among the last lines of this process."""
    if at_exit:
        atexit.register(console.write, message, kind)
    else:
        console.write(message, kind)

"""How a launch ends: what the other nodes hear, what the user reads, the exit code."""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.launching import abort
from torchrun_hpc.rendezvous import messages
from torchrun_hpc.rendezvous.client import JobFailedError
from torchrun_hpc.rendezvous.handler import CoordinatorMissingError
from torchrun_hpc.rendezvous.protocol import Failure, Kind
from torchrun_hpc.reporting import report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchrun_hpc.planning.launch_plan import LaunchPlan
    from torchrun_hpc.rendezvous.handler import Creator

# Seconds that an agent looks for the others only to say that it cannot go on.
_MOMENT = 10.0

FAILED = 1
_KILLED = 128  # and the signal's number, as a shell says it


class _EarlySignal(SignalException):
    """A signal before there are workers; torchrun would have died of it."""


@contextlib.contextmanager
def together(plan: LaunchPlan, creator: Creator, signals: str) -> Iterator[None]:
    """End as all other nodes do.

    Args:
        plan: What is planned on this node.
        creator: Knows the rendezvous handler, once there is one.
        signals: Names of the signals that end a job, as ``--signals-to-handle``.

    Raises:
        SystemExit: 1 if the job failed, here or elsewhere; its cause says why.
        ChildFailedError: Workers of this node failed.
    """
    before = _handle(signals, _raise)
    problem: BaseException | None = None
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - it goes on below
        _handle(signals, _ignore)  # again, while this one is being told
        problem = error
    try:
        code = _end(plan, creator, problem)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code is None and problem is not None:
        raise problem
    if code:
        raise SystemExit(code) from _reason(plan, creator, problem)


def _end(
    plan: LaunchPlan, creator: Creator, problem: BaseException | None
) -> int | None:
    """Tell the others, leave, and return the exit code; ``None`` to raise it again."""
    failure, code = (None, 0) if problem is None else _judge(plan, problem)
    if failure is not None:
        _give_up(plan, creator, failure, problem)
    _leave(plan, creator)
    if problem is None and creator.handler and creator.handler.failure:
        return FAILED
    return code


def _reason(
    plan: LaunchPlan, creator: Creator, problem: BaseException | None
) -> BaseException | None:
    """Return what a program that has called torch gets in the place of an exit code."""
    if isinstance(problem, _EarlySignal):
        return None  # it ends the program
    failure = creator.handler.failure if creator.handler else None
    if failure is not None and (problem is None or isinstance(problem, JobFailedError)):
        return RendezvousError(str(messages.failed(failure, plan)))
    return problem


def _judge(
    plan: LaunchPlan, problem: BaseException
) -> tuple[Failure | None, int | None]:
    """Return what the others are to hear, and the exit code; ``None`` to raise it."""
    if isinstance(problem, ChildFailedError):
        rank, worker = problem.get_first_failure()
        return Failure(Kind.WORKER, rank=rank, code=worker.exitcode), None
    if isinstance(problem, JobFailedError):
        return None, FAILED
    if isinstance(problem, SignalException):
        number = int(problem.sigval)
        early = isinstance(problem, _EarlySignal)
        return Failure(Kind.SIGNAL, code=number), _KILLED + number if early else FAILED
    if isinstance(problem, OSError):
        text = str(problem.strerror or problem)
        text += f": {problem.filename}" if problem.filename else ""
        said = f"on {plan.world.hosts[plan.world.node_rank]}: {text}"
        report.line(Message("HPC127", said), sys.stderr, "error")
        return Failure(Kind.AGENT, text=text), FAILED
    name = type(problem).__name__
    if isinstance(problem, LaunchError):
        name = problem.code
    return Failure(Kind.AGENT, text=f"{name} {problem}"), None


def _handle(signals: str, handler: Callable[..., None]) -> dict[int, Any]:
    """Handle signals that end a job; return how they were handled before."""
    before: dict[int, Any] = {}
    if threading.current_thread() is not threading.main_thread():
        return before
    for name in signals.split(","):
        # Of what is no signal, or cannot be caught, torch speaks later.
        with contextlib.suppress(AttributeError, OSError, TypeError, ValueError):
            number = getattr(signal, name.strip())
            before[number] = signal.signal(number, handler)
    return before


def _ignore(_number: int, _frame: Any) -> None:
    """Do nothing: all is being done."""


def _raise(number: int, _frame: Any) -> None:
    raise _EarlySignal(f"signal {number}", signal.Signals(number))


def _give_up(
    plan: LaunchPlan,
    creator: Creator,
    failure: Failure,
    problem: BaseException | None,
) -> None:
    """Tell the others, who would wait for this node."""
    handler = creator.handler
    if handler is not None and handler.took_part:
        handler.give_up(failure)
        if isinstance(problem, LaunchError):
            problem.others_know = True
    elif failure.kind is Kind.AGENT and not isinstance(
        problem,
        LaunchError
        | CoordinatorMissingError,  # told where it is reported; nobody to tell
    ):
        abort.tell(plan, failure.text, _MOMENT)


def _leave(plan: LaunchPlan, creator: Creator) -> None:
    """Leave the others, and let the last line say why the job failed."""
    handler = creator.handler
    if handler is None:
        return
    handler.leave()
    failure = handler.failure
    if (
        failure is not None
        and handler.took_part
        and messages.reports_failure(failure, plan)
    ):
        # Behind the report of torch's agent, which Python prints when it ends.
        atexit.register(
            report.line, messages.failed(failure, plan), sys.stderr, "error"
        )

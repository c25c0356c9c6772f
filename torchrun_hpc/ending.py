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

from torchrun_hpc import report
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.rendezvous import wording
from torchrun_hpc.rendezvous.handler import JobFailedError
from torchrun_hpc.rendezvous.protocol import Failure, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrun_hpc.plan import LaunchPlan
    from torchrun_hpc.rendezvous.handler import Creator

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
        SystemExit: 1 if the job failed, here or elsewhere.
        ChildFailedError: Workers of this node failed.
    """
    _catch(signals)
    try:
        yield
    except ChildFailedError as error:
        rank, worker = error.get_first_failure()
        _give_up(creator, Failure(Kind.WORKER, rank=rank, code=worker.exitcode))
        _leave(plan, creator)
        raise
    except JobFailedError:
        code = FAILED
    except SignalException as error:
        number = int(error.sigval)
        _give_up(creator, Failure(Kind.SIGNAL, code=number))
        code = _KILLED + number if isinstance(error, _EarlySignal) else FAILED
    except OSError as error:
        text = f"{error.strerror or error}" + (
            f": {error.filename}" if error.filename else ""
        )
        _give_up(creator, Failure(Kind.AGENT, text=text))
        host = plan.hosts[plan.node_rank]
        report.line(Message("HPC127", f"on {host}: {text}"), sys.stderr, "error")
        code = FAILED
    except BaseException as error:
        name = error.code if isinstance(error, LaunchError) else type(error).__name__
        if isinstance(error, LaunchError) and not error.everywhere:
            with contextlib.suppress(LaunchError, RendezvousError):
                creator.connect()  # or the others would wait for this node
        _give_up(creator, Failure(Kind.AGENT, text=f"{name} {error}"))
        _leave(plan, creator)
        raise
    else:
        code = 0
    _leave(plan, creator)
    if code or (creator.handler and creator.handler.failure):
        sys.exit(code or FAILED)


def _catch(signals: str) -> None:
    """Turn signals into exceptions until torch does, with its first workers."""
    if threading.current_thread() is not threading.main_thread():
        return
    for name in signals.split(","):
        # Of what is no signal, or cannot be caught, torch speaks later.
        with contextlib.suppress(AttributeError, OSError, TypeError, ValueError):
            signal.signal(getattr(signal, name.strip()), _raise)


def _raise(number: int, _frame: Any) -> None:
    raise _EarlySignal(f"signal {number}", signal.Signals(number))


def _give_up(creator: Creator, failure: Failure) -> None:
    if creator.handler is not None:
        creator.handler.give_up(failure)


def _leave(plan: LaunchPlan, creator: Creator) -> None:
    """Leave the others, and let the last line say why the job failed."""
    handler = creator.handler
    if handler is None:
        return
    handler.leave()
    failure = handler.failure
    if failure is not None and wording.speaks(failure, plan):
        # Behind the report of torch's agent, which Python prints when it ends.
        atexit.register(report.line, wording.failed(failure, plan), sys.stderr, "error")

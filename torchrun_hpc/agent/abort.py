"""Faults before the start: who reports them, and how the other nodes learn of them.

The others would wait for ``join_timeout``. So a node that gives up tells the rendezvous
coordinator; the coordinator itself accepts the others and tells them. This needs no
torch, which may be missing.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchrun_hpc import schedulers, wire
from torchrun_hpc.agent.inputs import inputs_of
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.host import sockets
from torchrun_hpc.options.command_line import CommandLine
from torchrun_hpc.options.options import Options
from torchrun_hpc.planning import messages, several_nodes
from torchrun_hpc.planning.mode import Mode, choose_mode
from torchrun_hpc.preflight import preflight
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.console import is_reporter
from torchrun_hpc.schedulers.job import LaunchContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.preflight import Preflight
    from torchrun_hpc.schedulers.job import Job

# Seconds to tell slow nodes. SHARED_LIMIT is for faults that all nodes may have.
SHARED_LIMIT = 30.0
LIMIT = 120.0

# Seconds by which the reporting task ends first: mpirun, and srun with
# --kill-on-bad-exit, end all tasks together with the first one.
_HEAD_START = 2.0

# Seconds without a coordinator until the message is printed in any case.
_SOON = 5

WRONG_USE = 2  # exit code


@dataclass
class LaunchState:
    """The state of a launch so far. A field is ``None`` until it is known."""

    preflight: Preflight | None = None
    options: Options = field(default_factory=Options)
    mode: Mode | None = None
    meeting: Meeting | None = None

    @property
    def job(self) -> Job | None:
        """The job; ``None`` without one, or before it is known."""
        return None if self.preflight is None else self.preflight.job


@contextlib.contextmanager
def faults_reported(known: LaunchState) -> Iterator[None]:
    """Turn a fault into one message and exit code 2, and tell the other nodes."""
    try:
        yield
    except (ImportError, LaunchError) as error:
        give_up(_refusal(error), known)
        sys.exit(WRONG_USE)


def _refusal(error: ImportError | LaunchError) -> LaunchError:
    """Return the refusal, also of a Python with a missing or broken package."""
    if isinstance(error, LaunchError):
        return error
    if (error.name or "").startswith("torch"):  # a fault of PyTorch's release, or ours
        raise error
    text = f"{sys.executable} cannot import what torchrun_hpc needs: {error}. Activate "
    text += "the environment that torchrun_hpc was installed into, in the job script "
    return LaunchError("HPC152", f"{text}before srun")


def give_up(fault: LaunchError, known: LaunchState, *, is_silent: bool = False) -> None:
    """Report a fault, unless ``is_silent``, and tell the other nodes.

    One node reports a fault that all nodes find. A node reports its own fault itself,
    with its name, unless another node has already failed in the same way.
    """
    seen = known.preflight or preflight("")
    is_first = is_reporter(seen.task_rank or 0)
    place = None if fault.others_know else meeting_place(known)
    advice = "" if fault.others_know else _advice(known.job)
    host = "" if fault.everywhere and is_first else _host(fault, seen, known.job)
    is_reported = is_silent

    def print_once(advice: str = "") -> None:
        nonlocal is_reported
        if not is_reported:
            is_reported = True
            text = f"on {host}: {fault}" if host else str(fault)
            details = [advice] if advice else ()
            console.write(Message(fault.code, text), "error", details)

    def wait(seconds: int) -> None:
        if seconds >= _SOON:
            print_once(advice)

    if place is None:
        if fault.everywhere and fault is seen.problem:
            number = schedulers.job_number(seen.environ)
            is_first = is_first and not _is_said(f"{number} {fault}")
        if is_first or not fault.everywhere:
            print_once("" if fault.everywhere else advice)
        else:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(_HEAD_START)
        return
    if is_first or place.is_coordinator:
        print_once()
    limit = SHARED_LIMIT if fault.everywhere else LIMIT
    if tell(place, str(Message(fault.code, str(fault))), limit, wait):
        print_once()


def _is_said(text: str) -> bool:
    """Return whether another task of this node has just reported the same.

    pbsdsh gives all tasks of a node the same number. The first one keeps a socket name
    for two seconds, until the others have tried.
    """
    with contextlib.suppress(BlockingIOError):
        threading.Timer(_HEAD_START, sockets.hold(text).close).start()
        return False
    return True


def meeting_place(known: LaunchState) -> Meeting | None:
    """Return where the nodes meet; ``None`` if nobody can be told there.

    If the explicit endpoint may be at fault, all nodes with that fault meet without it.
    """
    found, seen, job = known.meeting, known.preflight, known.job
    if found is None and seen and job and job.context is LaunchContext.STEP:
        found = _meeting(known, seen, job)
    if not (found and seen and found.uses_ours(known.options)):
        return None
    run_id = known.options.rdzv_id or found.launch_id
    return None if messages.nested(seen.environ, run_id) else found


def _meeting(known: LaunchState, seen: Preflight, job: Job) -> Meeting | None:
    options = known.options
    right = options.without(*options.wrong, *several_nodes.OF_ENDPOINT)
    try:
        mode = known.mode or choose_mode(seen, CommandLine(right), has_agent=True)
        if mode is not Mode.SEVERAL_NODES:
            return None
        return several_nodes.meeting_to_give_up(inputs_of(mode, seen, options), job)
    except (ImportError, LaunchError, OSError):
        return None


def tell(
    place: Meeting,
    reason: str,
    limit: float,
    wait: Callable[[int], None] = lambda _: None,
) -> bool:
    """Tell the other nodes why this one gives up; return whether to tell the user.

    The user already knows if another node has failed for the same reason. `limit` is in
    seconds: to look for the coordinator, or on its node, to stay for the others. `wait`
    is called each second of the search, with their number.
    """
    # Few launches need these, and direct mode must start fast.
    from torchrun_hpc.failures.failure import Failure, Kind  # noqa: PLC0415
    from torchrun_hpc.rendezvous import connection  # noqa: PLC0415
    from torchrun_hpc.rendezvous.messages import Looking, News  # noqa: PLC0415

    def hear(news: News) -> None:
        if isinstance(news, Looking):
            wait(news.seconds)

    own = (place.node_rank,)
    now = time.time()
    sent = wire.encode(Failure(Kind.AGENT, own, text=reason, time=now))
    failure = wire.decode(Failure, sent)
    heard = None
    # KeyboardInterrupt: the user ended the wait. OSError: no files are left.
    with contextlib.suppress(KeyboardInterrupt, OSError), _reported(limit):
        heard = connection.inform(place, failure, limit, hear)
    return heard is None or heard.nodes == own or heard.text != failure.text


@contextlib.contextmanager
def _reported(limit: float) -> Iterator[None]:
    text = (
        "telling the other nodes that this node cannot start, for up to "
        f"{limit:.0f} s. Press Ctrl-C to stop"
    )
    timer = threading.Timer(_SOON + 1, console.write, [Message("HPC167", text)])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _host(fault: LaunchError, seen: Preflight, job: Job | None) -> str:
    if fault is seen.problem and not fault.everywhere:  # the job is unclear here
        return seen.hostname
    if job is None or len(job.nodes) == 1 or job.node_rank is None:
        return ""
    return job.own_name or socket.gethostname()


def _advice(job: Job | None) -> str:
    if job is None or job.context is not LaunchContext.STEP or job.task.size == 1:
        return ""
    option = messages.fail_together(job.launcher)
    return f"{console.DETAIL}other tasks may wait: {option}" if option else ""

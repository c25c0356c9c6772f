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
from typing import TYPE_CHECKING

from torchrun_hpc import limits, schedulers, wire
from torchrun_hpc.agent.inputs import inputs_of
from torchrun_hpc.errors import WRONG_USE, LaunchError, Message
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
    from collections.abc import Callable, Iterator, Sequence

    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.preflight import Preflight
    from torchrun_hpc.schedulers.job import Job


class LaunchState:
    """The state of a launch so far. Each stage sets an attribute.

    Attributes:
        facts: This process and its job.
        options: The options, as far as they are known.
        mode: How the workers are started.
        meeting: Where the nodes meet.
    """

    facts: Preflight
    mode: Mode
    meeting: Meeting

    def __init__(self) -> None:
        self.options = Options()


@contextlib.contextmanager
def faults_reported(launch: LaunchState) -> Iterator[None]:
    """Turn a fault into one message and exit code 2, and tell the other nodes."""
    try:
        yield
    except (ImportError, LaunchError) as error:
        give_up(_refusal(error), launch)
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


def give_up(
    fault: LaunchError, launch: LaunchState, *, is_silent: bool = False
) -> None:
    """Report a fault, unless ``is_silent``, and tell the other nodes.

    One node reports a fault that all nodes find. A node reports its own fault itself,
    with its name, unless another node has already failed in the same way.
    """
    facts = getattr(launch, "facts", None)
    job = facts.job if facts else None
    report = _Report(fault, facts or preflight(""), job, is_silent=is_silent)
    meeting = None if fault.others_know else meeting_place(launch)
    if meeting is None:
        report.write_alone()
        return
    if report.is_first or meeting.is_coordinator:
        report.write()
    limit = limits.SHARED_FAULT_TIMEOUT if fault.everywhere else limits.FAULT_TIMEOUT
    if tell(meeting, str(Message(fault.code, str(fault))), limit, report.wait):
        report.write()


class _Report:
    """The message about a fault, which this node writes at most once.

    ``is_first`` is set on the node that reports for all.
    """

    def __init__(
        self, fault: LaunchError, facts: Preflight, job: Job | None, *, is_silent: bool
    ) -> None:
        self._fault, self._facts, self._job = fault, facts, job
        self._is_over = is_silent
        self.is_first = is_reporter(facts.task_rank or 0)

    def write(self, details: Sequence[str] = ()) -> None:
        """Write the message, unless it is written."""
        if not self._is_over:
            self._is_over, fault = True, self._fault
            message = Message(fault.code, str(fault))
            console.write(message, "error", details, self._host)

    def wait(self, seconds: int) -> None:
        """Write the message if the search for the coordinator takes long."""
        if seconds >= limits.FAULT_REPORT:
            self.write(self._advice)

    def write_alone(self) -> None:
        """Write the message if nobody can be told, or all know."""
        fault, facts, is_first = self._fault, self._facts, self.is_first
        if not fault.everywhere:
            self.write(self._advice)
            return
        if fault is facts.problem:
            number = schedulers.job_number(facts.environ)
            is_first = is_first and not _is_said(f"{number} {fault}")
        if is_first:
            self.write()
        else:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(limits.TASK_HEAD_START)

    @property
    def _host(self) -> str:
        """The node, if the fault is not that of all nodes."""
        fault, job = self._fault, self._job
        if fault.everywhere and self.is_first:
            return ""
        if fault is self._facts.problem and not fault.everywhere:
            return self._facts.hostname  # the job is unclear here
        if job is None or len(job.nodes) == 1 or job.node_rank is None:
            return ""
        return job.own_name or socket.gethostname()

    @property
    def _advice(self) -> Sequence[str]:
        """Advice about tasks that may wait for this one, unless they know."""
        job = self._job
        if self._fault.others_know or job is None or job.task.size == 1:
            return ()
        option = messages.fail_together(job.launcher)
        if job.context is not LaunchContext.STEP or not option:
            return ()
        return (f"{console.DETAIL}other tasks may wait: {option}",)


def _is_said(text: str) -> bool:
    """Return whether another task of this node has just reported the same.

    pbsdsh gives all tasks of a node the same number. The first one keeps a socket name
    for two seconds, until the others have tried.
    """
    with contextlib.suppress(BlockingIOError):
        threading.Timer(limits.TASK_HEAD_START, sockets.hold(text).close).start()
        return False
    return True


def meeting_place(launch: LaunchState) -> Meeting | None:
    """Return where the nodes meet; ``None`` if nobody can be told there."""
    if not hasattr(launch, "facts"):
        return None
    meeting = getattr(launch, "meeting", None) or _meeting(launch)
    if meeting is None or not meeting.uses_ours(launch.options):
        return None
    run_id = launch.options.rdzv_id or meeting.launch_id
    return None if messages.nested(launch.facts.environ, run_id) else meeting


def _meeting(launch: LaunchState) -> Meeting | None:
    """Return where the nodes of a step meet, as far as its options are right."""
    facts, options, job = launch.facts, launch.options, launch.facts.job
    if job is None or job.context is not LaunchContext.STEP:
        return None
    right = options.without(*options.wrong, *several_nodes.OF_ENDPOINT)
    try:
        mode = getattr(launch, "mode", None)
        mode = mode or choose_mode(facts, CommandLine(right), has_agent=True)
        if mode is not Mode.SEVERAL_NODES:
            return None
        return several_nodes.meeting_to_give_up(inputs_of(mode, facts, options), job)
    except (ImportError, LaunchError, OSError):
        return None


def tell(
    meeting: Meeting,
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

    this_node = (meeting.node_rank,)
    sent = wire.encode(Failure(Kind.AGENT, this_node, text=reason, time=time.time()))
    failure = wire.decode(Failure, sent)  # with a text that others accept
    heard = None
    # KeyboardInterrupt: the user ended the wait. OSError: no files are left.
    with contextlib.suppress(KeyboardInterrupt, OSError), _reported(limit):
        heard = connection.inform(meeting, failure, limit, hear)
    return heard is None or heard.nodes == this_node or heard.text != failure.text


@contextlib.contextmanager
def _reported(limit: float) -> Iterator[None]:
    text = (
        "telling the other nodes that this node cannot start, for up to "
        f"{limit:.0f} s. Press Ctrl-C to stop"
    )
    after = limits.FAULT_REPORT + 1
    timer = threading.Timer(after, console.write, [Message("HPC167", text)])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

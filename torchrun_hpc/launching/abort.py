"""A node that cannot start: who says why, and how the other nodes hear of it.

They would wait for it as long as ``join_timeout``. So it looks for the head of the
rendezvous, only to say that it gives up; where it is the head itself, it lets the
others in, and tells each. This needs no torch, which may be what is missing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrun_hpc import __version__, network, schedulers, sites
from torchrun_hpc.commandline import options as hpc_options
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.planning import endpoints, plan
from torchrun_hpc.planning.inputs import SCHEDULER, Inputs
from torchrun_hpc.reporting import report
from torchrun_hpc.schedulers.job import LaunchContext
from torchrun_hpc.schedulers.process import this_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.schedulers.job import Job
    from torchrun_hpc.setting import Setting

# Seconds to tell the others, who may be slow to start: a fault that probably all have,
# and one that is this node's own.
SHARED_LIMIT = 30.0
LIMIT = 120.0

# Seconds that the task that speaks has before the others end: mpirun, and srun with
# --kill-on-bad-exit, end all tasks with the first one.
_HEAD_START = 2.0

# Seconds without the head after which the user reads the message in any case.
_SOON = 5

# Of the options that say where the nodes meet, those that do not say how.
_MAY_BE_WRONG = ("nnodes", "rdzv_conf", "rdzv_endpoint")


@dataclass
class Known:
    """What a launch has found out so far: a fault may come at any time.

    Attributes:
        argv: The command line, without the program's name.
        job: What the scheduler says.
        options: What was typed, once it is parsed.
        plan: The plan, once it is made.
    """

    argv: Sequence[str] = ()
    job: Job | None = None
    options: Mapping[str, Setting] | None = None
    plan: LaunchPlan | None = None


@contextlib.contextmanager
def others_told(known: Known) -> Iterator[None]:
    """Tell the other nodes of a fault that this program itself is to deal with.

    Args:
        known: What the launch has found out, by then.
    """
    try:
        yield
    except LaunchError as fault:
        give_up(fault, known, is_reporter=False)
        raise


def give_up(fault: LaunchError, known: Known, *, is_reporter: bool = True) -> None:
    """Say what is wrong, and tell the other nodes.

    What all nodes find, one of them says; what only this node finds, it says itself,
    with its name. Which of the two it is, the others know: if the first failure that
    the head has heard of is the same, then its node has said it.

    Args:
        fault: What is wrong.
        known: What the launch has found out.
        is_reporter: Whether to say anything; the others are told in any case.
    """
    is_first = schedulers.is_reporter(this_process())
    place = None if fault.others_know else meeting_place(known)
    advice = "" if fault.others_know else _advice(known.job)
    host = "" if fault.everywhere and is_first else _host(known.job)
    has_said = not is_reporter

    def say(advice: str = "") -> None:
        nonlocal has_said
        if not has_said:
            has_said = True
            text = f"on {host}: {fault}" if host else str(fault)
            message = Message(fault.code, text + advice)
            report.line(message, sys.stderr, "error")

    def wait(event: Mapping[str, Any]) -> None:
        if event.get("looking", 0) >= _SOON:
            say(advice)

    if place is None:
        if is_first or not fault.everywhere:
            say("" if fault.everywhere else advice)
        else:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(_HEAD_START)
        return
    if is_first or place.is_coordinator:
        say()
    limit = SHARED_LIMIT if fault.everywhere else LIMIT
    if tell(place, f"{fault.code} {fault}", limit, wait):
        say()


def meeting_place(known: Known) -> LaunchPlan | None:
    """Return where the nodes meet, as a plan; ``None`` if nothing can be told there.

    Before there is a plan, one is made from the options that say where, and from
    nothing else: the fault may be in the rest.
    """
    found, job, explicit = known.plan, known.job, known.options
    if explicit is None:
        explicit = hpc_options.endpoint_options(known.argv)
    if found is None and job is not None and job.start is LaunchContext.STEP:
        options = {
            name: explicit[name] for name in hpc_options.ENDPOINT if name in explicit
        }
        # What is typed may be the fault: then all that have it meet without it.
        rest = {name: options[name] for name in options if name not in _MAY_BE_WRONG}
        found = _planned(job, options) or _planned(job, rest)
    if found is None or found.backend != SCHEDULER:
        return None
    run_id = (
        str(explicit["rdzv_id"].value) if "rdzv_id" in explicit else found.launch_id
    )
    return None if plan.nested(os.environ, run_id) else found


def _planned(job: Job, options: Mapping[str, Setting]) -> LaunchPlan | None:
    environ = schedulers.environment()
    try:
        return plan.meeting_place(
            Inputs(
                job=job,
                site=sites.find(environ, job.a_node, options.get("hpc_site")),
                network=network.this_node(),
                options=options,
                environ=environ,
                workers=1,
                cpus=1,
                gpus=0,
                command="",
                hostname=socket.gethostname(),
            )
        )
    except (LaunchError, OSError):
        return None


def tell(
    place: LaunchPlan,
    reason: str,
    limit: float,
    wait: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> bool:
    """Let the other nodes know that this one gives up.

    Args:
        place: Where they meet.
        reason: Why it gives up.
        limit: Seconds to look for the head; on the head's node, to stay for the others.
        wait: Called each second without the head, see `Client`.

    Returns:
        Whether the user has to hear it from this node: not if another one has failed
        for the same reason before.
    """
    # Most launches need none of these, and direct mode has no time for them.
    from torchrun_hpc.rendezvous import client, search, server  # noqa: PLC0415
    from torchrun_hpc.rendezvous.protocol import (  # noqa: PLC0415
        Failure,
        JoinRequest,
        Kind,
        packed,
        unpacked,
    )

    rank = place.node_rank
    failure = unpacked(packed(Failure(Kind.AGENT, (rank,), text=reason)))
    heard = None
    # Ctrl-C: the user has read enough. No more files: nobody can be told.
    with contextlib.suppress(KeyboardInterrupt, OSError), _reported(limit):
        if place.is_coordinator:
            server.serve_failure(place, failure, limit)
            return True
        where = search.CoordinatorAddress(
            host=place.connect_host,
            ports=place.ports,
            timeout=limit,
            silence_timeout=int(limit),
            notice_ports=endpoints.notice_ports(place.launch_id),
        )
        hello = JoinRequest(
            job=place.launch_id,
            run_id="",
            nodes=place.nodes,
            rank=rank,
            host=place.hosts[rank],
            pid=os.getpid(),
            release=__version__,
        )
        agent = client.Client(hello, where, wait, own_failure=failure)
        try:
            agent.connect()
            agent.fail(failure)  # if it was let in as one that had been there before
        except (
            client.JobFailedError,
            search.CoordinatorNotFoundError,
            search.RefusedError,
        ):
            pass
        finally:
            agent.leave()
        heard = agent.failure
    return heard is None or heard.nodes == (rank,) or heard.text != failure.text


@contextlib.contextmanager
def _reported(limit: float) -> Iterator[None]:
    """Say what is waited for, if that takes long."""
    text = (
        f"telling the other nodes that this one cannot start, for {limit:.0f} s at "
        "most; Ctrl-C ends it"
    )
    timer = threading.Timer(
        _SOON + 1, report.line, [Message("HPC167", text), sys.stderr]
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _host(job: Job | None) -> str:
    """Return the name of this node, if there are others."""
    if job is None or len(job.nodes) == 1 or job.node_rank is None:
        return ""
    return job.own_name or socket.gethostname()


def _advice(job: Job | None) -> str:
    """Say what ends all tasks where they cannot be told."""
    if job is None or job.start is not LaunchContext.STEP or job.task.size == 1:
        return ""
    option = job.launcher.fail_together
    return f". Other tasks may wait: {option} ends all when one fails" if option else ""

"""The socket of the coordinator: on the first port of the launch that is free."""

from __future__ import annotations

import errno
import resource
import sys
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.network import port_holder
from torchrun_hpc.planning.endpoints import join_endpoint
from torchrun_hpc.rendezvous import messages
from torchrun_hpc.rendezvous.client import Client, JobFailedError
from torchrun_hpc.rendezvous.protocol import Refusal
from torchrun_hpc.rendezvous.search import (
    CoordinatorAddress,
    CoordinatorNotFoundError,
    RefusedError,
)
from torchrun_hpc.rendezvous.server import listen
from torchrun_hpc.reporting import report

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.rendezvous.protocol import JoinRequest

# Seconds to find out which program has a port.
_CHECK_TIMEOUT = 2


def open_socket(
    plan: LaunchPlan, request: JoinRequest, environ: Mapping[str, str]
) -> socket.socket:
    """Listen on the first port that is free.

    Args:
        plan: What is planned on this node.
        request: Who this node's agent is.
        environ: Environment of this process.

    Raises:
        LaunchError: There is none, or the job has a coordinator already.
    """
    address = plan.listen[0] if plan.listen else None
    problems = {}
    opened = None
    for port in plan.ports:
        try:
            opened = listen(address, port)
            break
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # whichever the port
            problems[port] = error
    taken = [p for p, e in problems.items() if e.errno == errno.EADDRINUSE]
    if taken:
        _check_no_coordinator(taken, plan, request, environ)
    if opened is not None:
        return opened
    holder = f", taken by {port_holder(plan.ports[0])}" if len(plan.ports) == 1 else ""
    listed = "; ".join(f"port {p}: {e.strerror}" for p, e in problems.items())
    raise LaunchError(
        "HPC111",
        f"cannot listen on {address or 'any address'}: {listed}{holder}. Type another "
        f"port: --rdzv_endpoint={join_endpoint(plan.connect_host, 'PORT')}",
    )


def _check_no_coordinator(
    ports: Sequence[int],
    plan: LaunchPlan,
    request: JoinRequest,
    environ: Mapping[str, str],
) -> None:
    """Find out whether one of the ports is taken by the coordinator of this job.

    Raises:
        LaunchError: It is, and this agent is the second one of its node.
    """
    address = CoordinatorAddress(
        plan.connect_host, ports, _CHECK_TIMEOUT, _CHECK_TIMEOUT
    )
    client = Client(request, address, lambda _: None)
    try:
        client.connect()
    except RefusedError as refused:
        if refused.reason is not Refusal.UNKNOWN:
            raise messages.refusal(refused, plan, request, environ) from None
    except (CoordinatorNotFoundError, JobFailedError):
        pass
    finally:
        client.leave()


def report_problem(reason: str) -> None:
    """Report that a connection to the coordinator has to wait."""
    text = (
        f"cannot take a connection of another node: {reason} (ulimit -n is "
        f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}); trying on"
    )
    report.line(Message("HPC162", text), sys.stderr, "warning")

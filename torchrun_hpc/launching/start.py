"""The last stage: write the environment, check the port, announce, and start.

What is the same in all modes is here. How workers are started, a `Starter` knows.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc.errors import LaunchError, Message, to_copy
from torchrun_hpc.host.network import is_number, join_endpoint, port_problem
from torchrun_hpc.launching import environment
from torchrun_hpc.planning.endpoints import MASTER_PORT
from torchrun_hpc.planning.plan import make_plan
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.reporter import is_reporter
from torchrun_hpc.reporting.start_line import start_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.reporting.description import Description

FAILED = 1
INTERRUPTED = 130  # as a shell says it: 128 and SIGINT


class DryRunReplies(NamedTuple):
    """What the nodes of a dry run have answered.

    Attributes:
        nodes: The descriptions that came, in the order of the nodes' ranks.
        missing: Names of the nodes that did not answer.
        limit: Seconds that they had.
    """

    nodes: Sequence[Description]
    missing: Sequence[str] = ()
    limit: int = 0


class Starter:
    """Starts the workers in one way: by torch's agent, or by becoming one.

    Args:
        inputs: What is known without torch.

    Attributes:
        inputs: The same.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs

    def plan(self, meeting: Meeting) -> LaunchPlan:
        """Return the plan, which can be started as far as this process can tell.

        Raises:
            LaunchError: Something that the user typed, or set, cannot work.
        """
        return make_plan(self.inputs, meeting)

    def ready(self, _plan: LaunchPlan) -> AbstractContextManager[None]:
        """Return a context to start in; the environment has been written."""
        return contextlib.nullcontext()

    def findings(self, _plan: LaunchPlan) -> tuple[list[Message], list[Message]]:
        """Return what else is wrong: on this node, and on all."""
        return [], []

    def describe(self, _plan: LaunchPlan) -> Description:
        """Describe what this process would do."""
        raise NotImplementedError

    def answers(self, plan: LaunchPlan) -> DryRunReplies:
        """Return what all nodes would do, on the one that reports."""
        return DryRunReplies([self.describe(plan)])

    def run(self, plan: LaunchPlan) -> None:
        """Start the workers."""
        raise NotImplementedError


def start(plan: LaunchPlan, starter: Starter) -> None:
    """Start what is planned.

    Args:
        plan: The plan, which the starter has checked.
        starter: Starts the workers.

    Raises:
        LaunchError: Something on this node is in the way.
        SystemExit: It was a dry run; or the job has failed, and the cause says why.
    """
    check_port(plan)
    environment.write(plan)
    with starter.ready(plan):
        if plan.asked.hpc_dry_run:
            sys.exit(_dry_run(plan, starter))
        _announce(plan, *starter.findings(plan))
        starter.run(plan)


def check_port(plan: LaunchPlan) -> None:
    """Check that this process can listen on its port, unless there are other ports.

    Raises:
        LaunchError: It cannot.
    """
    where = plan.meeting
    if where.listen is None or where.may_join or len(where.ports) > 1:
        return
    address, port = where.listen
    problem = is_number(address) and port_problem(address, port)
    if problem and plan.mode.is_direct:
        raise LaunchError(
            "HPC132",
            f"rank 0 cannot use port {port} on {address}: {problem}. Export another "
            "port on all nodes:" + to_copy(f"export {MASTER_PORT}=PORT"),
        )
    if problem:
        raise LaunchError(
            "HPC055",
            f"port {port} on {address} cannot be used: {problem}. Pass another "
            f"port: --rdzv_endpoint={join_endpoint(address, 'PORT')}",
        )


def _dry_run(plan: LaunchPlan, starter: Starter) -> int:
    """Print what would be done, and return the exit code."""
    try:
        answers = starter.answers(plan)
    except KeyboardInterrupt:
        return INTERRUPTED
    if not is_reporter(plan.meeting.report_rank):
        return 0
    from torchrun_hpc.reporting import tables  # noqa: PLC0415 - slow to import

    tables.print_dry_run(plan.asked.hpc_dry_run, *answers)
    return FAILED if answers.missing else 0


def _announce(
    plan: LaunchPlan, own: Sequence[Message], shared: Sequence[Message]
) -> None:
    """Print the start line, and what is probably wrong."""
    is_first = is_reporter(plan.meeting.report_rank)
    warnings = [*plan.messages.warnings, *own]
    if is_first:
        console.write_lines(start_line(plan))
    if is_first or plan.mode.is_direct:  # there each task is advised on its own
        warnings += [*plan.messages.advice, *shared]
    for warning in warnings:
        console.write(warning, "warning")

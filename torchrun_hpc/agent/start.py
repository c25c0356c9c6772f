"""The last stage: write the environment, check the port, announce, and start."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc import environment
from torchrun_hpc.errors import FAILED, INTERRUPTED, LaunchError, Message, to_copy
from torchrun_hpc.host.network import is_number, join_endpoint, port_problem
from torchrun_hpc.planning.plan import make_plan
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.console import is_reporter
from torchrun_hpc.reporting.start_line import start_line
from torchrun_hpc.variables import AGENT_STORE, MASTER_PORT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.reporting.description import Description


class DryRunReplies(NamedTuple):
    """The nodes' replies in a dry run, by rank.

    ``missing`` names the nodes that did not answer within ``limit`` seconds.
    """

    nodes: Sequence[Description]
    missing: Sequence[str] = ()
    limit: int = 0


class Starter:
    """Starts the workers in one way: by torch's agent, or by becoming one."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs

    def plan(self, meeting: Meeting) -> LaunchPlan:
        """Return a plan that can be started here, or raise `LaunchError`."""
        return make_plan(self.inputs, meeting)

    def ready(self, plan: LaunchPlan) -> AbstractContextManager[LaunchPlan]:
        """Return a context to start in, with the plan that has become of this one.

        The environment is already written.
        """
        return contextlib.nullcontext(plan)

    def findings(self, _plan: LaunchPlan) -> tuple[list[Message], list[Message]]:
        """Return further problems: of this node, and of all nodes."""
        return [], []

    def describe(self, _plan: LaunchPlan) -> Description:
        """Describe what this process would do."""
        raise NotImplementedError

    def answers(self, plan: LaunchPlan) -> DryRunReplies:
        """Return, on the reporting node, what all nodes would do."""
        return DryRunReplies([self.describe(plan)])

    def run(self, plan: LaunchPlan) -> None:
        """Start the workers."""
        raise NotImplementedError


def start(plan: LaunchPlan, starter: Starter) -> None:
    """Start what is planned. Raise `LaunchError` if something on this node prevents it.

    Raise `SystemExit` after a dry run, or if the job has failed.
    """
    check_port(plan.meeting, is_direct=plan.mode.is_direct)
    write_environment(plan)
    with starter.ready(plan) as final:
        if plan.asked.hpc_dry_run:
            sys.exit(_dry_run(final, starter))
        _announce(final, *starter.findings(final))
        starter.run(final)


def write_environment(plan: LaunchPlan) -> None:
    """Set a plan's variables for torch and for the workers."""
    if plan.mode.is_direct:
        environment.remove(AGENT_STORE)
    environment.update(plan.environment)


def check_port(meeting: Meeting, *, is_direct: bool) -> None:
    """Check that this process can listen on its port, unless it has several ports."""
    if meeting.listen is None or meeting.may_join or len(meeting.ports) > 1:
        return
    address, port = meeting.listen
    problem = is_number(address) and port_problem(address, port)
    if problem and is_direct:
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
    plan: LaunchPlan, of_node: Sequence[Message], shared: Sequence[Message]
) -> None:
    is_first = is_reporter(plan.meeting.report_rank)
    warnings = [*plan.messages.warnings, *of_node]
    if is_first:
        console.write_text(start_line(plan))
    if is_first or plan.mode.is_direct:  # each task gets its own advice
        warnings += [*plan.messages.advice, *shared]
    for warning in warnings:
        console.write(warning, "warning")

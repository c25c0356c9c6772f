"""The options of a job that survives lost nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.planning.meeting import Spares
from torchrun_hpc.planning.mode import Mode

if TYPE_CHECKING:
    from torchrun_hpc.planning.inputs import Inputs

_OTHERS = ("hpc_spare_after", "hpc_health_check", "hpc_health_check_timeout")


def check(inputs: Inputs) -> None:
    """Check that the options fit this job."""
    options, wait = inputs.options, inputs.options.hpc_spares
    others = [options[name] for name in _OTHERS if name in options]
    if not wait and others:
        raise LaunchError(
            "HPC203",
            f"{others[0]} needs spare nodes. Set --hpc-spares=NUMBER, or remove this "
            "option",
            everywhere=True,
        )
    if not wait:
        return
    if inputs.mode is not Mode.SEVERAL_NODES:
        raise not_possible(inputs)
    nodes = len(inputs.the_job.nodes)
    if wait >= nodes - wait:
        raise LaunchError(
            "HPC202",
            f"{options['hpc_spares']} of {count(nodes, 'node')}: fewer nodes must wait "
            f"than train. Set {(nodes - 1) // 2} at most, or start on "
            f"{count(2 * wait + 1, 'node')} or more",
            everywhere=True,
        )


def plan(inputs: Inputs) -> Spares:
    """Return how the job survives lost nodes."""
    options = inputs.options
    if not options.hpc_spares:
        return Spares()
    return Spares(
        number=options.hpc_spares,
        after=options.hpc_spare_after,
        health_check=options.hpc_health_check,
        health_check_timeout=max(1, options.hpc_health_check_timeout),
        exclude=inputs.the_job.launcher.exclude,
    )


def advice(inputs: Inputs) -> tuple[Message, ...]:
    """Return advice if no restart is allowed: each replacement needs one."""
    if not inputs.options.hpc_spares or inputs.options.max_restarts:
        return ()
    text = (
        f"{inputs.options['hpc_spares']}, but no restart is allowed, so the job ends "
        "with the first lost node. Set --max-restarts=20"
    )
    return (Message("HPC216", text),)


def not_possible(inputs: Inputs) -> LaunchError:
    """Return the error that spares are impossible."""
    return LaunchError(
        "HPC201",
        f"{inputs.options['hpc_spares']} needs several nodes, a fixed number of them, "
        "one agent on each, and the scheduler rendezvous (docs/internals.md). Remove "
        "this option, or the one that conflicts with it",
        everywhere=True,
    )

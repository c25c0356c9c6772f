"""The options of a job that is to outlive its nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.planning.meeting import Spares
from torchrun_hpc.planning.mode import Mode

if TYPE_CHECKING:
    from torchrun_hpc.planning.inputs import Inputs

_OTHERS = ("hpc_spare_after", "hpc_health_check", "hpc_health_check_timeout")


def check(inputs: Inputs) -> None:
    """Check that the options can be used, for this job.

    Raises:
        LaunchError: They cannot.
    """
    options, wait = inputs.options, inputs.options.hpc_spares
    others = [options[name] for name in _OTHERS if name in options]
    if not wait and others:
        raise LaunchError(
            "HPC203",
            f"{others[0]} is for jobs with spare nodes: type --hpc-spares=NUMBER, too, "
            "or leave it out",
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
            f"than work. Type {(nodes - 1) // 2} at most, or start it on "
            f"{count(2 * wait + 1, 'node')} or more",
            everywhere=True,
        )


def plan(inputs: Inputs) -> Spares:
    """Return what is done so that the job outlives its nodes."""
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
    """Return advice if no restart is left, without which no node can be replaced."""
    if not inputs.options.hpc_spares or inputs.options.max_restarts:
        return ()
    text = (
        f"{inputs.options['hpc_spares']}, but no restart is allowed: the job ends with "
        "the first lost node. Type --max-restarts=20, too"
    )
    return (Message("HPC216", text),)


def not_possible(inputs: Inputs) -> LaunchError:
    """Return why there cannot be spares."""
    return LaunchError(
        "HPC201",
        f"{inputs.options['hpc_spares']} needs an agent on each of several nodes, "
        "whose number is fixed, and the scheduler rendezvous "
        "(docs/internals.md). Leave the option out, or the one that "
        "asks for something else",
        everywhere=True,
    )

"""The options of a job that is to outlive its nodes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.planning.launch_plan import Spares
from torchrun_hpc.planning.mode import Mode

if TYPE_CHECKING:
    from torchrun_hpc.planning.inputs import Inputs

SPARES = "hpc_spares"
_AFTER, _CHECK = "hpc_spare_after", "hpc_health_check"
_CHECK_TIMEOUT = "hpc_health_check_timeout"

_SECONDS = 60  # by default, of both


def number(inputs: Inputs) -> int:
    """Return how many nodes wait.

    Raises:
        LaunchError: What was typed, or set, is no number.
    """
    return _whole(inputs, SPARES, 0, "a number of nodes: --hpc-spares=2")


def plan(inputs: Inputs) -> Spares | None:
    """Return what is done so that the job outlives its nodes; ``None`` if nothing is.

    Raises:
        LaunchError: The options cannot be used, or not for this job.
    """
    wait = number(inputs)
    others = [
        inputs.options[n]
        for n in (_AFTER, _CHECK, _CHECK_TIMEOUT)
        if n in inputs.options
    ]
    if not wait:
        if others:
            raise LaunchError(
                "HPC203",
                f"{others[0]} is for jobs with spare nodes: type --hpc-spares=NUMBER, "
                "too, or leave it out",
                everywhere=True,
            )
        return None
    if inputs.mode is not Mode.SEVERAL_NODES:
        raise not_possible(inputs)
    nodes = len(inputs.the_job.nodes)
    if wait >= nodes - wait:
        raise LaunchError(
            "HPC202",
            f"{inputs.options[SPARES]} of {count(nodes, 'node')}: fewer nodes must "
            f"wait than work. Type {(nodes - 1) // 2} at most, or start it on "
            f"{count(2 * wait + 1, 'node')} or more",
            everywhere=True,
        )
    seconds = "whole seconds: --{}=60"
    return Spares(
        after=_whole(inputs, _AFTER, _SECONDS, seconds.format("hpc-spare-after")),
        health_check=str(inputs.explicit(_CHECK) or ""),
        health_check_timeout=max(
            1,
            _whole(
                inputs,
                _CHECK_TIMEOUT,
                _SECONDS,
                seconds.format("hpc-health-check-timeout"),
            ),
        ),
        exclude=inputs.the_job.launcher.exclude,
    )


def advice(inputs: Inputs) -> tuple[Message, ...]:
    """Say that a node can be replaced only if a restart is left."""
    if not number(inputs) or inputs.explicit("max_restarts"):
        return ()
    text = (
        f"{inputs.options[SPARES]}, but no restart is allowed: the job ends with the "
        "first node that is lost. Type --max-restarts=20, too"
    )
    return (Message("HPC216", text),)


def not_possible(inputs: Inputs) -> LaunchError:
    """Return why there cannot be spares."""
    return LaunchError(
        "HPC201",
        f"{inputs.options[SPARES]} needs an agent on each of several nodes, whose "
        "number is fixed, and the scheduler rendezvous "
        "(docs/rendezvous.md#when-it-is-used). Leave the option out, or the one that "
        "asks for something else",
        everywhere=True,
    )


def _whole(inputs: Inputs, name: str, default: int, what: str) -> int:
    setting = inputs.options.get(name)
    if setting is None:
        return default
    if not re.fullmatch(r"[0-9]{1,6}", str(setting.value)):
        raise LaunchError("HPC205", f"{setting}: type {what}", everywhere=True)
    return int(setting.value)

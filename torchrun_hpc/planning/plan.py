"""The plan: a pure function of job, site, network and what the user set.

Precedence for each value: command line, ``PET_*``, derived. Only what is unset is
filled in, with two exceptions: an endpoint host that is the plain name of one of the
job's nodes is rewritten to its name on the fast network, and a node rank that c10d
ignores is taken back.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.commandline import rdzv_conf
from torchrun_hpc.commandline.options import WITHOUT_PATCHES
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.planning import (
    as_typed,
    binding,
    direct,
    messages,
    network_env,
    one_node,
    preload,
    several_nodes,
    spares,
)
from torchrun_hpc.planning.inputs import C10D
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.planning.launch_plan import LaunchPlan

STALL_REPORT = "hpc_stall_report"
_OF_AGENTS = (STALL_REPORT, "hpc_outcome", WITHOUT_PATCHES)

_PLANS = {
    Mode.ONE_NODE: one_node.plan,
    Mode.SEVERAL_NODES: several_nodes.checked_plan,
    Mode.AS_TYPED: as_typed.plan,
    Mode.DIRECT: direct.several_nodes_plan,
    Mode.DIRECT_ONE_NODE: direct.one_node_plan,
}


def make_plan(inputs: Inputs) -> LaunchPlan:
    """Decide everything that can be decided before the nodes have met.

    Raises:
        LaunchError: Something that the user typed, or set, cannot work.
    """
    network_env.check_gloo(inputs.environ, inputs.network)
    if not inputs.mode.is_direct:
        several_nodes.check_rendezvous(inputs)
    waiting = spares.plan(inputs)
    inputs = replace(inputs, binding=binding.plan(inputs))
    plan = _PLANS[inputs.mode](inputs)
    rdzv_conf.check(inputs.options.get("rdzv_conf"), plan.rendezvous.backend)
    options, environment = {**plan.options}, {**plan.environment}
    if plan.rendezvous.backend == C10D:
        environment |= network_env.of_release(inputs)
    # An empty one is the user's, as Python reads it: off.
    if not (plan.mode.is_direct or preload.FAULT_HANDLER in inputs.environ):
        environment[preload.FAULT_HANDLER] = Setting("1", "for the report of a crash")
    environment |= network_env.of_resolver(inputs)
    if inputs.explicit("hpc_debug"):
        environment |= network_env.debugging(inputs.environ)
        has_logs = {"tee", "redirects"}.intersection(inputs.options)
        if not has_logs and not inputs.mode.is_direct:
            # The workers' stderr, with the rank on each line.
            options["tee"] = Setting("2", "--hpc-debug")
    about = replace(
        plan.messages,
        notes=(
            *plan.messages.notes,
            *preload.notes(inputs),
            *_unused(inputs),
            *_left_out(inputs),
        ),
        advice=(
            *plan.messages.advice,
            *preload.advice(inputs),
            *binding.advice(inputs),
        ),
    )
    return replace(
        plan,
        spares=waiting,
        outcome=str(inputs.explicit("hpc_outcome") or ""),
        without_patches=inputs.without_patches,
        options=options,
        environment=environment,
        messages=about,
        preload=inputs.preload,
        binding=inputs.binding,
        stall_report=_stall_report(inputs),
    )


def _stall_report(inputs: Inputs) -> float:
    """Return after how many seconds a stall is reported; 0 if it is not.

    Raises:
        LaunchError: What was typed, or set, is no number of seconds.
    """
    setting = inputs.options.get(STALL_REPORT)
    if setting is None or inputs.mode.is_direct:
        return 0
    if not re.fullmatch(r"[1-9]\d{0,6}", str(setting.value)):
        raise LaunchError(
            "HPC174",
            f"{setting}: type whole seconds, longer than any pause of the training: "
            "--hpc-stall-report=600",
            everywhere=True,
        )
    return float(setting.value)


def _unused(inputs: Inputs) -> tuple[Message, ...]:
    """Say which options need an agent, or to watch workers, where there is neither."""
    if inputs.mode.is_direct:
        return messages.unused(inputs, messages.DIRECT_MODE, _OF_AGENTS)
    if inputs.lacks("watch_workers"):
        where = "workers that are not watched"
        return messages.unused(inputs, where, (STALL_REPORT,))
    return ()


def _left_out(inputs: Inputs) -> tuple[Message, ...]:
    """Say that torch is not changed everywhere, so that nobody forgets it."""
    if inputs.mode.is_direct or not inputs.without_patches:
        return ()
    setting = inputs.options[WITHOUT_PATCHES]
    return (Message("HPC089", f"{setting} leaves torch as it is there"),)

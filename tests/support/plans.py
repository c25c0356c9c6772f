"""Inputs and plans for the tests, and what they expect of them.

A test passes what differs from three nodes at Jülich:
``planned(step(1), options={"nnodes": "3"}, node=replace(NODE, cpus=1))``.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

import pytest

from tests.support.juelich import COMMAND, JSC, STEP, job_at, juelich, tasks_at
from torchrun_hpc.errors import LaunchError, Setting, on_one_line
from torchrun_hpc.options.command_line import CommandLine
from torchrun_hpc.options.options import Options, read
from torchrun_hpc.planning import plan as planning
from torchrun_hpc.planning.inputs import Inputs, Node
from torchrun_hpc.planning.meeting import Meeting
from torchrun_hpc.planning.mode import Mode, choose_mode, direct_mode
from torchrun_hpc.planning.plan import LaunchPlan
from torchrun_hpc.planning.workers import Workers
from torchrun_hpc.preflight import Preflight
from torchrun_hpc.schedulers import pbs, slurm
from torchrun_hpc.sites.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import ParamSpec, Unpack

    from torchrun_hpc.host.network import Network
    from torchrun_hpc.schedulers.job import Job
    from torchrun_hpc.sites import Site

    P = ParamSpec("P")

# sha256("19.0") begins with 0xdccc79b9ce9e3780; mod 9000, and 20000 on top.
PORT = 25592

# --- inputs ---------------------------------------------------------------------------


class Given(TypedDict, total=False):
    """The inputs that a test names; the others are as at Jülich."""

    options: Mapping[str, object]  # explicit values, by the names of the options
    environ: Mapping[str, str]
    node: Node
    network: Network
    site: Site | None
    profile: Profile
    hostname: str
    command: str


NODE = Node(workers=2, cpus=8)
ONE_WORKER = replace(NODE, workers=1)


def explicit(options: Mapping[str, object]) -> dict[str, Setting]:
    """Return the settings of options as if they were on the command line."""
    return {name: Setting(value, f"--{name}") for name, value in options.items()}


def make_inputs(job: Job | None = STEP, **given: Unpack[Given]) -> Inputs:
    """Return the inputs of a plan, in the mode that the command chooses."""
    assert given.keys() <= Given.__annotations__.keys()
    site, environ = given.get("site", JSC), given.get("environ", {})
    options = read(explicit(given.get("options", {})), has_job=job is not None)
    if site is not None:
        options = options.with_site(site.name, site.options)
    inputs = Inputs(
        mode=Mode.SEVERAL_NODES,
        job=job,
        site=site,
        network=given.get("network") or juelich((job and job.node_rank) or 0),
        options=options,
        environ=environ,
        command=given.get("command", COMMAND),
        hostname=given.get("hostname", ""),
        promise=(pbs if environ.get("PBS_JOBID") else slurm).promise(environ),
        profile=given.get("profile", Profile()),
        node=given.get("node", NODE),
    )
    with suppress(LaunchError):  # a refused launch has no mode
        inputs = replace(inputs, mode=mode_of(inputs))
    return inputs


def mode_of(inputs: Inputs, *, has_agent: bool = False) -> Mode:
    """Choose the mode as the command does; with ``has_agent=True``, as `auto` does."""
    facts = Preflight(inputs.job, None, inputs.environ, "", inputs.command)
    line = CommandLine(replace(inputs.options, words=("train.py",)))

    def count(options: Options) -> int:
        return int(options.nproc_per_node)

    return choose_mode(facts, line, count, has_agent=has_agent)


# --- plans ----------------------------------------------------------------------------

# A plan with default parts. A test replaces those that it checks.
PLAN = LaunchPlan(Mode.SEVERAL_NODES, Options(), Meeting("c10d"), Workers())


def make_plan(inputs: Inputs) -> LaunchPlan:
    """Make a plan by both stages; refuse a wrong option before."""
    if inputs.options.problem is not None:
        raise inputs.options.problem
    return planning.make_plan(inputs, planning.meet(inputs))


def planned(job: Job | None = STEP, **given: Unpack[Given]) -> LaunchPlan:
    """Plan a launch by agents."""
    inputs = make_inputs(job, **given)
    return make_plan(replace(inputs, mode=mode_of(inputs, has_agent=True)))


def make_direct_plan(inputs: Inputs) -> LaunchPlan:
    """Return the plan of a task that is a worker."""
    return make_plan(replace(inputs, mode=direct_mode(inputs.job)))


def planned_task(job: Job, **given: Unpack[Given]) -> LaunchPlan:
    """Plan a task that is a worker."""
    given.setdefault("node", ONE_WORKER)
    return make_direct_plan(make_inputs(job, **given))


def planned_at(places: Sequence[int], rank: int, **given: Unpack[Given]) -> LaunchPlan:
    """Plan a task that is a worker; ``places`` has for each rank its node."""
    return planned_task(job_at(places, rank), **given)


def refused(
    code: str,
    message: str,
    by: Callable[P, object],
    *args: P.args,
    **kwargs: P.kwargs,
) -> LaunchError:
    """Expect a message of a code that contains a text; return the error.

    Args:
        code: Of the message.
        message: A part of the text.
        by: The function that refuses.
        args: Its arguments.
        kwargs: Its arguments by their names.
    """
    with pytest.raises(LaunchError) as caught:
        by(*args, **kwargs)
    text = on_one_line(str(caught.value))
    assert message in text, text
    assert caught.value.code == code
    assert text.isprintable()
    return caught.value


# --- parts of plans -------------------------------------------------------------------


def values(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the values of settings without their sources."""
    return {name: setting.value for name, setting in settings.items()}


def conf_of(plan: LaunchPlan) -> dict[str, str]:
    """Return the pairs of a plan's ``--rdzv-conf``."""
    pairs = plan.options["rdzv_conf"].value.split(",")
    return dict(pair.split("=") for pair in pairs)


def visible(**devices: str) -> dict[str, str]:
    """Return the variables that list GPUs, by the first words of their names."""
    return {f"{name}_VISIBLE_DEVICES": value for name, value in devices.items()}


# --- tasks that are workers, on Jülich's nodes ---------------------------------------

# For each rank its node.
BLOCK = [0, 0, 0, 0, 1, 1, 1, 1]
CYCLIC = [0, 1, 0, 1]
UNEVEN = [0, 0, 1]


def worker_environment(rank: int, places: Sequence[int]) -> dict[str, str]:
    """Return the variables that the launcher sets for a worker at Jülich."""
    task = tasks_at(places)[rank]
    return {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{task.local_rank}",
        "WORLD_SIZE": f"{len(places)}",
        "LOCAL_WORLD_SIZE": f"{task.local_size}",
        "GROUP_RANK": f"{places[rank]}",
        "GROUP_WORLD_SIZE": f"{max(places) + 1}",
        "ROLE_RANK": f"{rank}",
        "ROLE_WORLD_SIZE": f"{len(places)}",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "10.20.0.1",
        "MASTER_PORT": "25592",
        "TORCHELASTIC_RUN_ID": "19.0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "GLOO_SOCKET_IFNAME": "ib0",
    }

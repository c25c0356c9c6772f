"""Plans for the tests, and what they expect of them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import NamedTuple

import pytest

from tests.support.juelich import (
    INTERACTIVE,
    THREE,
    make_inputs,
    mode_of,
    outside_a_step,
    step,
    tasks_at,
)
from torchrun_hpc.errors import LaunchError, on_one_line
from torchrun_hpc.options.options import Options
from torchrun_hpc.planning import plan as planning
from torchrun_hpc.planning.meeting import Meeting, Spares
from torchrun_hpc.planning.mode import Mode, direct_mode
from torchrun_hpc.planning.plan import LaunchPlan, Messages
from torchrun_hpc.planning.workers import Workers
from torchrun_hpc.schedulers.job import LaunchContext

# sha256("19.0") begins with 0xdccc79b9ce9e3780; mod 9000, and 20000 on top.
PORT = 25592


class WantedEndpoint(NamedTuple):
    """What becomes of a typed endpoint."""

    endpoint: str  # for a person
    number: str  # for torch
    host: int | None  # the node that hosts it
    note: bool = False  # whether it was rewritten


ONE_NODE_JOBS = {
    "step": step(nodes=THREE[:1], allocated_nodes=3),
    "batch script": outside_a_step(LaunchContext.BATCH_SCRIPT, THREE[:1]),
    "interactive step": INTERACTIVE,
}

ENDPOINTS = {
    # names of node 0
    "jwb0001:29400": WantedEndpoint("jwb0001i:29400", "10.20.0.1:29400", 0, note=True),
    "jwb0001i:29400": WantedEndpoint("jwb0001i:29400", "10.20.0.1:29400", 0),
    "jwb0001.juwels:29400": WantedEndpoint(
        "jwb0001i.juwels:29400", "10.20.0.1:29400", 0, note=True
    ),
    "jwb0001i.juwels:29400": WantedEndpoint(
        "jwb0001i.juwels:29400", "10.20.0.1:29400", 0
    ),
    # without a port
    "jwb0001": WantedEndpoint(f"jwb0001i:{PORT}", f"10.20.0.1:{PORT}", 0, note=True),
    "jwb0001i": WantedEndpoint(f"jwb0001i:{PORT}", f"10.20.0.1:{PORT}", 0),
    "10.20.0.1": WantedEndpoint(f"10.20.0.1:{PORT}", f"10.20.0.1:{PORT}", 0),
    # an address stays what it is, also on the slow network
    "10.20.0.1:29400": WantedEndpoint("10.20.0.1:29400", "10.20.0.1:29400", 0),
    "10.10.0.1:29400": WantedEndpoint("10.10.0.1:29400", "10.10.0.1:29400", 0),
    "10.10.0.3:29400": WantedEndpoint("10.10.0.3:29400", "10.10.0.3:29400", 2),
    # another node hosts, when it is named
    "jwb0003:29400": WantedEndpoint("jwb0003i:29400", "10.20.0.3:29400", 2, note=True),
    "jwb0003i:29400": WantedEndpoint("jwb0003i:29400", "10.20.0.3:29400", 2),
    # names that are nobody's: the owner of the address
    "head:29400": WantedEndpoint("head:29400", "10.20.0.1:29400", 0),
    "second:29400": WantedEndpoint("second:29400", "10.20.0.2:29400", 1),
    "second-slow:29400": WantedEndpoint("second-slow:29400", "10.10.0.2:29400", 1),
    # nobody's address either
    "vip:29400": WantedEndpoint("vip:29400", "10.20.0.99:29400", 0),
    "10.20.0.99:1": WantedEndpoint("10.20.0.99:1", "10.20.0.99:1", 0),
    "10.20.0.99:65535": WantedEndpoint("10.20.0.99:65535", "10.20.0.99:65535", 0),
    " jwb0001i:29400 ": WantedEndpoint("jwb0001i:29400", "10.20.0.1:29400", 0),
}

ALIASES = {
    "head": "10.20.0.1",
    "second": "10.20.0.2",
    "second-slow": "10.10.0.2",
    "vip": "10.20.0.99",
    "vip6": "fd00::99",
    "jwb0001.juwels": "10.10.0.1",
    "jwb0001i.juwels": "10.20.0.1",
}


def make_plan(inputs):
    """Make a plan by both stages; what is typed wrong is refused before."""
    if inputs.options.problem is not None:
        raise inputs.options.problem
    return planning.make_plan(inputs, planning.meet(inputs))


def planned(rank=0, *, options=None, network=None, **changes):
    """Plan a launch; by default, Jülich's three nodes as seen from one of them."""
    inputs = make_inputs(rank, options=options, network=network, **changes)
    mode = mode_of(inputs, has_agent=True)  # these are about agents
    return make_plan(replace(inputs, mode=mode))


def refusal(job, **how):
    """Return why a job cannot be launched from here with nothing typed, if so."""
    try:
        mode_of(make_inputs(job=job), **how)
    except LaunchError as error:
        return error
    return None


def values(settings):
    return {name: setting.value for name, setting in settings.items()}


def visible(**devices):
    """Return the variables that list GPUs, by the first words of their names."""
    return {f"{name}_VISIBLE_DEVICES": value for name, value in devices.items()}


def conf_of(plan):
    pairs = plan.options["rdzv_conf"].value.split(",")
    return dict(pair.split("=") for pair in pairs)


def refused(code, message, *args, by=planned, **kwargs):
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


def make_direct_plan(inputs):
    """Return the plan of a task that is a worker."""
    return make_plan(replace(inputs, mode=direct_mode(inputs.job)))


_PARTS = {"messages": Messages, "meeting": Meeting, "asked": Options}
_OF_PLAN = {"options", "environment"}
_RENAMED = {
    name: f"hpc_{name}" for name in ("outcome", "stall_report", "without_patches")
}


def make_launch_plan(mode=Mode.SEVERAL_NODES, **changes):
    """Return a plan from the fields of its parts, whichever part they are in."""
    given = {_RENAMED.get(k, k): v for k, v in changes.items()}
    given = {"workers": 1, "backend": "c10d"} | given
    if isinstance(given.get("spares"), int):
        given["spares"] = Spares(given["spares"])
    own = {f.name: given.pop(f.name) for f in fields(Workers) if f.name in given}
    own["number"] = given.pop("workers")
    parts = {
        name: part(
            **{
                f.name: given.pop(f.name)
                for f in fields(part)
                if f.name in given and f.name not in _OF_PLAN
            }
        )
        for name, part in _PARTS.items()
    }
    return LaunchPlan(mode=mode, workers=Workers(**own), **parts, **given)


# --- tasks that are workers, on Jülich's nodes ---------------------------------------

# For each rank its node.
BLOCK = [0, 0, 0, 0, 1, 1, 1, 1]
CYCLIC = [0, 1, 0, 1]
UNEVEN = [0, 0, 1]


def job_at(places, rank, **changes):
    """Describe a task of a step; ``places`` has for each rank its node."""
    nodes = THREE[: max(places) + 1]
    return step(places[rank], nodes=nodes, task=tasks_at(places)[rank], **changes)


def planned_task(job, *, options=None, network=None, **changes):
    """Plan a task; by default, at Jülich."""
    rank = job.node_rank or 0
    inputs = make_inputs(
        rank, job=job, options=options, network=network, **{"workers": 1} | changes
    )
    return make_direct_plan(inputs)


def planned_at(places, rank, **changes):
    return planned_task(job_at(places, rank), **changes)


def worker_environment(rank, places):
    """Return what a worker has of the launcher, at Jülich."""
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

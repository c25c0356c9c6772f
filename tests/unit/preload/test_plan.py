"""The modules that are imported once, and the messages if they cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.juelich import JSC
from tests.support.plans import (
    BLOCK,
    NODE,
    ONE_WORKER,
    Given,
    explicit,
    make_inputs,
    make_plan,
    planned_at,
)
from torchrun_hpc.host.topology import Core, Topology
from torchrun_hpc.options.options import read
from torchrun_hpc.planning.resources import likely_workers
from torchrun_hpc.preload import plan
from torchrun_hpc.schedulers import slurm

if TYPE_CHECKING:
    from typing_extensions import Unpack


OPTION = "hpc_preload"
TORCH = {OPTION: "torch"}
SITE = replace(JSC, options={OPTION: "torch,numpy"})


def with_script(inputs, script="train.py"):
    return replace(inputs, options=replace(inputs.options, words=(script,)))


def planned(script="train.py", **given: Unpack[Given]):
    return plan.preload_of(with_script(make_inputs(**given), script))


def codes(messages):
    return [message.code for message in messages]


@pytest.mark.parametrize(
    ("asked", "modules"),
    [
        ("torch", ("torch",)),
        ("torch,torch.nn, numpy", ("torch", "torch.nn", "numpy")),
        ("größe", ("größe",)),
        ("none", None),
        (None, ("torch",)),
        ("auto", ("torch",)),
    ],
)
def test_modules(asked, modules):
    found = planned(options={OPTION: asked} if asked else {})
    assert (found.modules if found else None) == modules


def test_a_site_may_set_it():
    found = planned(site=SITE)
    assert found.modules == ("torch", "numpy")
    assert str(found.setting) == "site jsc: preload=torch,numpy"
    assert planned(site=SITE, options=TORCH).modules == ("torch",)
    assert planned(site=SITE, options={OPTION: "none"}) is None


def test_variables_that_are_read_at_import():
    site = replace(SITE, variables={"TORCH_X": "1", "UCX_Y": "2", "LD_Z": "3"})
    node = ONE_WORKER
    # The launch sets no variables on one node either.
    alone = planned(site=site, node=node, options={"standalone": True})
    assert alone.variables == {}
    assert planned(site=site, environ={"UCX_Y": "4"}).variables == {
        "TORCH_X": "1",
        "OMP_NUM_THREADS": "1",
    }
    explicit_threads = planned(site=site, node=node, environ={"OMP_NUM_THREADS": "8"})
    assert explicit_threads.variables == {"TORCH_X": "1", "UCX_Y": "2"}


@pytest.mark.parametrize("asked", [None, "auto", "torch"])
def test_nobody_is_warned_about_a_default(asked):
    """An obstacle to the default does not prevent an explicit preload."""
    options = {OPTION: asked} if asked else {}
    inputs = with_script(make_inputs(options=options | {"no_python": True}))
    preload = plan.preload_of(inputs)
    assert preload is not None
    assert preload.problem == "--no_python needs an exec"
    inputs = replace(inputs, preload=preload)
    found = make_plan(inputs).messages.advice
    assert ("HPC169" in codes(found)) == (asked == "torch")


def test_what_speaks_against_the_default():
    preload = plan.preload_of(with_script(make_inputs()), "LD_AUDIT is set")
    assert preload is not None
    assert preload.problem == "LD_AUDIT is set"


@pytest.mark.parametrize(
    ("bind", "cpus", "is_bound"),
    [("even", 2, True), ("even", 1, False), ("none", 2, False)],
)
def test_whether_forks_must_stay_on_their_cpus(bind, cpus, is_bound):
    topology = Topology(tuple(Core((cpu,)) for cpu in range(cpus)))
    found = planned(options={"hpc_bind": bind}, node=replace(NODE, topology=topology))
    assert found.is_bound == is_bound


IMPOSSIBLE: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "program": ({"no_python": True}, {}, "--no_python needs an exec"),
    "numa": ({"numa_binding": "node"}, {}, "--numa_binding needs an exec"),
    "patch": (
        {"hpc_without_patches": "agent,fork_workers"},
        {},
        "--hpc_without_patches=agent,fork_workers",
    ),
    "function": ({"run_path": True}, {}, "--run_path needs an exec"),
    "python": (
        {},
        {"PYTHON_EXEC": "/opt/python"},
        "PYTHON_EXEC=/opt/python is another interpreter",
    ),
}


@pytest.mark.parametrize(
    ("options", "environ", "reason"), IMPOSSIBLE.values(), ids=IMPOSSIBLE
)
@pytest.mark.parametrize("by_user", [True, False])
def test_what_needs_an_exec(options, environ, reason, by_user):
    """Only a user who has asked for modules learns why no fork has them."""
    site, asked = (JSC, TORCH) if by_user else (SITE, {})
    inputs = make_inputs(options=options | asked, environ=environ, site=site)
    preload = plan.preload_of(with_script(inputs))
    assert preload is not None
    assert preload.problem == reason
    found = codes(make_plan(replace(inputs, preload=preload)).messages.advice)
    assert found.count("HPC169") == by_user


@pytest.mark.parametrize("script", ["-", "-c", "-Xdev"])
def test_what_python_does_not_take_for_a_script(script):
    assert planned(script, options=TORCH).problem == (
        f"{script} is an option of Python, or standard input"
    )


@pytest.mark.parametrize(
    ("changes", "has_note"), [({}, True), ({OPTION: "none"}, False)]
)
@pytest.mark.parametrize("places", [BLOCK, [0, 0]])
def test_direct_mode_has_one_process_for_each_task(changes, has_note, places):
    plan = planned_at(places, 0, options={**TORCH, **changes})
    assert plan.workers.preload is None
    assert ("HPC077" in codes(plan.messages.notes)) is has_note


def test_a_program_that_calls_torch_has_imported_it():
    notes = make_plan(make_inputs(options=TORCH)).messages.notes
    assert "HPC077 --hpc_preload=torch has no effect" in " ".join(map(str, notes))
    assert "HPC077" not in codes(make_plan(make_inputs(site=SITE)).messages.notes)


@pytest.mark.parametrize(
    ("asked", "environ", "workers"),
    [
        (None, {}, 1),
        ("4", {}, 4),
        (3, {}, 3),
        ("cpu", {"CUDA_VISIBLE_DEVICES": "0"}, 8),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ("gpu", {}, 8),
        ("gpu", {"SLURM_GPUS_ON_NODE": "1"}, 1),
        ("auto", {"ROCR_VISIBLE_DEVICES": "3", "SLURM_GPUS_ON_NODE": "4"}, 1),
        ("auto", {"CUDA_VISIBLE_DEVICES": ""}, 8),
        ("many", {}, 8),
    ],
)
def test_workers_that_torch_has_not_counted(asked, environ, workers):
    options = {} if asked is None else {"nproc_per_node": asked}
    gpus = slurm.promise(environ).gpus_on_node.value
    assert likely_workers(read(explicit(options)), environ, 8, gpus) == workers


@pytest.mark.parametrize(
    ("asked", "environ", "gpus", "workers"),
    [
        ("gpu", {}, 1, 1),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "0,1"}, 4, 2),
        ("cpu", {}, 4, 8),
    ],
)
def test_gpus_that_no_variable_names(asked, environ, gpus, workers):
    options = read(explicit({"nproc_per_node": asked}))
    assert likely_workers(options, environ, 8, gpus) == workers

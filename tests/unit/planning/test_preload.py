"""What is imported once, and what is said where it cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from nodes import JSC, make_inputs
from plans import BLOCK, planned_at

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.planning import preload
from torchrun_hpc.planning.plan import make_plan
from torchrun_hpc.planning.resources import likely_workers
from torchrun_hpc.setting import Setting

OPTION = "hpc_preload"
TORCH = {OPTION: "torch"}
SITE = replace(JSC, preload=("torch", "numpy"))


def planned(script="train.py", **inputs):
    return preload.plan(make_inputs(**inputs), script)


def codes(messages):
    return [message.code for message in messages]


@pytest.mark.parametrize(
    ("typed", "modules"),
    [
        ("torch", ("torch",)),
        ("torch,torch.nn, numpy", ("torch", "torch.nn", "numpy")),
        ("größe", ("größe",)),
        ("none", None),
        (None, None),
    ],
)
def test_modules(typed, modules):
    found = planned(options={OPTION: typed} if typed else {})
    assert (found.modules if found else None) == modules


@pytest.mark.parametrize(
    "typed", ["torch,", "torch;numpy", "torch numpy", "1a", "a..b", "./train.py", ","]
)
def test_what_is_no_module(typed):
    with pytest.raises(LaunchError) as found:
        planned(options={OPTION: typed})
    assert (found.value.code, found.value.everywhere) == ("HPC168", True)
    assert str(found.value).startswith(f"--hpc_preload={typed}: ")


def test_a_site_may_set_it():
    found = planned(site=SITE)
    assert found.modules == ("torch", "numpy")
    assert str(found.setting) == "preload of site jsc=torch,numpy"
    assert planned(site=SITE, options=TORCH).modules == ("torch",)
    assert planned(site=SITE, options={OPTION: "none"}) is None


def test_variables_that_are_read_at_import():
    site = replace(SITE, variables={"TORCH_X": "1", "UCX_Y": "2", "LD_Z": "3"})
    alone = {"site": site, "workers": 1, "options": {"standalone": True}}
    assert planned(**alone).variables == {}  # where the launch sets none either
    assert planned(site=site, environ={"UCX_Y": "4"}).variables == {
        "TORCH_X": "1",
        "OMP_NUM_THREADS": "1",
    }
    assert planned(
        site=site, workers=1, environ={"OMP_NUM_THREADS": "8"}
    ).variables == {"TORCH_X": "1", "UCX_Y": "2"}


IMPOSSIBLE = {
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


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_needs_an_exec(case):
    options, environ, reason = IMPOSSIBLE[case]
    for site, explicit, expected in (
        (JSC, TORCH, ["HPC169"]),
        (SITE, {}, []),  # nobody has asked for it
    ):
        inputs = make_inputs(options=options | explicit, environ=environ, site=site)
        inputs = replace(inputs, preload=preload.plan(inputs, "train.py"))
        assert inputs.preload.problem == reason
        found = [m for m in make_plan(inputs).messages.advice if m.code == "HPC169"]
        assert codes(found) == expected


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
    ("typed", "environ", "workers"),
    [
        (None, {}, 1),
        ("4", {}, 4),
        (3, {}, 3),
        ("cpu", {"CUDA_VISIBLE_DEVICES": "0"}, 8),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ("gpu", {"SLURM_GPUS_ON_NODE": "1"}, 1),
        ("auto", {"ROCR_VISIBLE_DEVICES": "3", "SLURM_GPUS_ON_NODE": "4"}, 1),
        ("gpu", {}, 8),
        ("auto", {"CUDA_VISIBLE_DEVICES": ""}, 8),
        ("many", {}, 8),
    ],
)
def test_workers_that_torch_has_not_counted(typed, environ, workers):
    setting = None if typed is None else Setting(typed, "--nproc-per-node")
    assert likely_workers(setting, environ, 8, 0) == workers


def test_gpus_that_no_variable_names():
    setting = Setting("gpu", "--nproc-per-node")
    assert likely_workers(setting, {}, 8, 1) == 1
    assert likely_workers(setting, {"CUDA_VISIBLE_DEVICES": "0,1"}, 8, 4) == 2

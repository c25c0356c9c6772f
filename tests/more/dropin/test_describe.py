"""torchrun_hpc.describe, for programs that want to know what a launch would be."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import run as torch_run
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.rendezvous import (
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    static_tcp_rendezvous,
)
from torch.distributed.launcher import api

import torchrun_hpc
from tests.support.plans import PLAN
from tests.support.processes import run_launcher, run_python
from tests.support.recordings import recorded
from torchrun_hpc import main
from torchrun_hpc.agent.patches import registry
from torchrun_hpc.errors import Setting
from torchrun_hpc.host import capabilities, network
from torchrun_hpc.host.capabilities import Capability
from torchrun_hpc.planning.workers import Preload, Workers
from torchrun_hpc.reporting import description
from torchrun_hpc.variables import UNSHARED

ONE_NODE = {
    "SLURM_STEP_NODELIST": "jwb0001",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}


TWO_TASKS = {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.fixture
def environment(outside_of_jobs, monkeypatch):  # noqa: ARG001
    """Replace this environment by a recorded one."""

    def enter(name: str, task: int = 0, **changes: str) -> None:
        for variable, value in {**recorded(name)[task][0], **changes}.items():
            monkeypatch.setenv(variable, value)

    return enter


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("argv", [[], [[]], [()]])
def test_no_scheduler(argv):
    found = torchrun_hpc.describe(*argv)
    assert set(found) == set(description.Description.__annotations__)
    assert found["job"] is None
    assert found["messages"]["title"] == "no scheduler"
    assert (found["meeting"]["nodes"], found["workers"]["number"]) == (1, 1)
    assert found["command"][0] == "torchrun"
    assert "--standalone" in found["command"]
    assert found["command"][-1] == "SCRIPT"
    assert found["workers"]["preload"]["modules"] == ["torch"]
    preload = Preload(("torch",), Setting("torch", "default"))
    outcomes = registry.planned(replace(PLAN, workers=Workers(preload=preload)))
    for patch, outcome in zip(found["patches"], outcomes, strict=True):
        needed = outcome.patch.IS_FOR.is_expected
        expected = (
            registry.PatchState.APPLIED if needed else registry.PatchState.NOT_NEEDED
        )
        assert patch["state"] == expected.value, patch
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("needed", [True, False])
def test_one_node_of_a_job(environment, monkeypatch, needed):
    """With a torch whose c10d needs a variable to be right, and with another one."""
    release = Capability("==2.5.*", needed, is_fault=True)
    monkeypatch.setattr(capabilities, "SHARED_RENDEZVOUS_STORE", release)
    environment("slurm-srun-3-nodes", **ONE_NODE, PET_RDZV_ID="mine")
    found = torchrun_hpc.describe(["--nproc-per-node=2", "--max-restarts", "3"])
    assert found["job"] is not None
    assert found["job"]["launch_id"] == "19.0"
    assert found["messages"]["title"] == "Slurm 19.0 (1 of 3 nodes)"
    assert found["meeting"]["hosts"] == ["jwb0001"]
    assert found["options"]["nproc_per_node"] == {
        "value": "2",
        "source": "--nproc_per_node",
    }
    assert found["options"]["rdzv_id"] == {"value": "mine", "source": "PET_RDZV_ID"}
    assert found["options"]["rdzv_endpoint"]["value"] == "localhost:0"
    exports = {UNSHARED: "1"} if needed else {}
    own = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    assert found["exports"] == {**own, **exports}
    assert found["environment"].get(UNSHARED) == (
        {"value": "1", "source": f"torch {torch.__version__}"} if needed else None
    )
    for word in ("--nproc_per_node=2", "--max_restarts=3", "--rdzv_id=mine"):
        assert word in found["command"]


def own_address() -> Any:
    """Return an address of this machine that others could reach."""
    here = network.this_node()
    own = [str(a.ip) for i in here.interfaces if i.up for a in i.addresses]
    reachable = [address for text in own for address in here.addresses_of(text)]
    if not reachable:
        pytest.skip("this machine has no address that others could reach")
    return reachable[0]


def test_one_of_three_nodes(environment):
    """Names of recorded nodes do not resolve here: the endpoint is this machine's."""
    here, own = network.this_node(), own_address()
    address = str(own)
    environment("slurm-srun-3-nodes")
    shown = f"[{address}]" if ":" in address else address
    found = torchrun_hpc.describe([f"--rdzv-endpoint={shown}:29400", "--hpc-site=none"])
    meeting = found["meeting"]
    assert (meeting["nodes"], meeting["node_rank"]) == (3, 0)
    assert meeting["hosts"] == ["jwb0001", "jwb0002", "jwb0003"]
    assert (meeting["local_address"], meeting["listen"]) == (address, [address, 29400])
    owner = here.owner(own)
    assert owner is not None
    assert found["exports"]["GLOO_SOCKET_IFNAME"] == owner.name
    assert f"--rdzv_endpoint={shown}:29400" in found["command"]
    assert "--nnodes=3" in found["command"]


def test_direct_mode(environment):
    options = ["--hpc-site=none"]
    environment("slurm-srun-2-nodes-4-tasks-each", MASTER_ADDR="127.0.0.1")
    with pytest.raises(torchrun_hpc.LaunchError) as caught:
        torchrun_hpc.describe(options)  # jwb0001 is no host of this machine
    assert caught.value.code in {"HPC059", "HPC136"}
    environment("slurm-srun-uneven-tasks", **(ONE_NODE | TWO_TASKS))
    found = torchrun_hpc.describe(options)
    assert found["meeting"]["backend"] == "direct"
    assert found["exports"]["WORLD_SIZE"] == "2"
    assert found["exports"]["MASTER_ADDR"] == "127.0.0.1"
    assert found["command"][-1] == "SCRIPT"


# The recorded environment, variables, options; the code of the message.
REFUSED = [
    ("slurm-sbatch-script", {}, [], "HPC061"),
    ("slurm-sbatch-script", {}, ["--nnodes=3"], "HPC061"),
    ("slurm-salloc-shell", {}, [], "HPC060"),
    ("slurm-srun-2-nodes-4-tasks-each", {}, ["--nproc-per-node=4"], "HPC062"),
    ("slurm-srun-2-nodes-4-tasks-each", {}, ["--max-restarts=1"], "HPC134"),
    ("slurm-srun-3-nodes", {"SLURM_STEP_NODELIST": "jwb[0001-"}, [], "HPC021"),
    ("slurm-srun-3-nodes", {}, ["--nnodes=2"], "HPC070"),
    ("slurm-srun-3-nodes", ONE_NODE, ["--nnodes=3:2"], "HPC014"),
    ("slurm-srun-3-nodes", ONE_NODE, ["--bogus"], "HPC010"),
    ("slurm-srun-3-nodes", ONE_NODE, ["--nproc-per-node=x"], "HPC012"),
    ("slurm-srun-3-nodes", ONE_NODE, ["--monitor-interval=0"], "HPC014"),
    ("slurm-srun-3-nodes", ONE_NODE, ["--hpc-omp-threads=0"], "HPC014"),
    ("slurm-srun-3-nodes", ONE_NODE, ["--hpc-site=nonsense"], "HPC040"),
    ("slurm-srun-3-nodes", ONE_NODE | {"PET_STANDALONE": "yes"}, [], "HPC011"),
]


@pytest.mark.parametrize(("name", "changes", "argv", "code"), REFUSED)
def test_what_would_be_refused(name, changes, argv, code, environment, capfd):  # noqa: PLR0913, PLR0917
    environment(name, **changes)
    with pytest.raises(torchrun_hpc.LaunchError) as caught:
        torchrun_hpc.describe(argv)
    assert caught.value.code == code
    assert str(caught.value).startswith(f"{code} ")  # a traceback shows nothing else
    # The program that asked says it, or not.
    assert capfd.readouterr() == ("", "")


def _names_in_torch() -> list[dict[str, object]]:
    """Return what the modules and classes that may be patched have."""
    return [
        dict(vars(owner))
        for owner in (
            *(torch_run, api, local_elastic_agent),
            *(dynamic_rendezvous, c10d_rendezvous_backend, static_tcp_rendezvous),
            dynamic_rendezvous.DynamicRendezvousHandler,
            static_tcp_rendezvous.StaticTCPRendezvous,
        )
    ]


@pytest.mark.parametrize("argv", [[], ["--nproc-per-node=2", "--hpc-debug"], ["-x"]])
def test_nothing_is_changed(argv, environment, capfd):
    environment("slurm-srun-3-nodes", **ONE_NODE, PET_RDZV_ID="mine")
    names, environ = _names_in_torch(), dict(os.environ)
    arguments, folder = list(sys.argv), Path.cwd()
    refused = pytest.raises(torchrun_hpc.LaunchError)
    with refused if argv == ["-x"] else contextlib.nullcontext():
        torchrun_hpc.describe(argv)
    assert _names_in_torch() == names
    assert dict(os.environ) == environ
    assert (sys.argv, Path.cwd()) == (arguments, folder)
    assert capfd.readouterr() == ("", "")


def test_an_empty_variable_counts_as_unset_and_stays(environment):
    environment("slurm-srun-3-nodes", **ONE_NODE, PET_RDZV_ID="", PET_STANDALONE="")
    environ = dict(os.environ)
    found = torchrun_hpc.describe()
    assert found["options"]["rdzv_id"]["value"] == "19.0"
    assert dict(os.environ) == environ


def test_what_another_job_has_left_is_not_looked_at(environment, tmp_path):
    """In the warnings about GPUs: a job of PBS, submitted in one of Slurm."""
    file = tmp_path / "nodes"
    file.write_text(f"{socket.gethostname()}\n", encoding="utf-8")
    left = {"SLURM_GPUS_ON_NODE": "8"}
    own = {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(file)}
    environment("slurm-srun-3-nodes", 1, **left, **own, CUDA_VISIBLE_DEVICES="0")
    found = torchrun_hpc.describe()
    assert found["job"]["scheduler"] == "PBS"
    assert "HPC095" not in json.dumps(found)
    assert os.environ["SLURM_GPUS_ON_NODE"] == "8"


DESCRIBE = """
import sys
import torchrun_hpc
from torchrun_hpc import main
assert "torch" not in sys.modules
found = torchrun_hpc.describe(sys.argv[1:])
import json
print(json.dumps(found))
"""


def test_it_is_what_the_dry_run_prints(tmp_path):
    options = ["--nproc-per-node=2", "--hpc-omp-threads=1", "--role=trainer"]
    described = run_python("-c", DESCRIBE, *options, cwd=tmp_path)
    dry = run_launcher("--hpc-dry-run=json", *options, "x", cwd=tmp_path)
    assert (described.code, dry.code) == (0, 0), described.err + dry.err
    found, (node,) = json.loads(described.out), json.loads(dry.out)["nodes"]
    assert found.pop("command") == [*node.pop("command")[:-1], "SCRIPT"]
    assert found == node


def test_a_text_is_no_list_of_options():
    """Its letters would be."""
    with pytest.raises(TypeError, match=r"describe\(\['--nnodes=2'\]\)"):
        torchrun_hpc.describe("--nnodes=2")


def test_others_are_told_where_this_torch_can_meet(environment, monkeypatch):
    """If torch's agent has changed, the nodes meet by c10d, where nobody is told."""
    monkeypatch.setattr(registry, "incompatible", lambda: ("agent",))
    environment("slurm-srun-3-nodes")
    endpoint = f"--rdzv-endpoint=[{own_address()}]:29400"
    argv = [endpoint, "--hpc-site=none", "SCRIPT"]
    launch = main.CommandLaunch(argv, is_launch=False)
    launch.run(upto=main.Stage.PLAN)
    assert launch.meeting.backend == "c10d"
    assert launch.meeting == launch.plan.meeting

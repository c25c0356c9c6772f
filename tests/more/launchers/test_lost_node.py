"""All processes of a host are killed under mpirun and mpiexec, over ssh."""

from __future__ import annotations

import json
import subprocess

import pytest
from commands import ENVIRON, FORMS, HPC, own_lines, require
from launchers import MPICH_4, OPENMPI_4, missing, once
from testbed import Cluster
from waiting import PATIENCE, until

HOSTS = ("n9", "n10", "n11")

# Its ranks are connected, and say when they are at work.
SCRIPT = """\
import os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
Path(sys.argv[1], "ready." + os.environ["RANK"]).touch()
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def cluster(machine):  # noqa: ARG001
    """Hosts of their own: the server of a killed one is gone, too."""
    with Cluster(HOSTS, management="open", slurm=False) as cluster:
        yield cluster


def lose(cluster, mpi, hosts, folder):
    """Start a job, and kill the last host; return what it has printed, and outcomes.

    The outcomes are that of the running job, and that of the end.
    """
    require(missing(mpi))
    folder.chmod(0o777)
    (folder / "train.py").write_text(SCRIPT)
    file = folder / "outcome.json"
    slots = [f"{host}:1" for host in hosts] if mpi == OPENMPI_4 else hosts
    words = (*once(mpi, len(hosts)), *HPC, f"--hpc-outcome={file}", "train.py", folder)
    program = cluster.popen(
        [*mpi.command(cluster, *slots), *words],
        host=hosts[0],
        env=ENVIRON | FORMS["fork"],
        cwd=folder,
        stderr=subprocess.STDOUT,
    )
    try:
        until(lambda: len([*folder.glob("ready.*")]) == len(hosts))
        running = json.loads(file.read_text())
        cluster.run(["sh", "-c", "kill -9 -1"], host=hosts[-1])
        output, _ = program.communicate(timeout=PATIENCE)
    finally:
        cluster.end(program)
    print(output)
    return output, running, json.loads(file.read_text())


def test_mpirun_ends_all_others_by_sigterm(cluster, tmp_path):
    """The node was lost first, although mpirun's signal may be seen before."""
    output, running, ended = lose(cluster, OPENMPI_4, HOSTS, tmp_path)
    (failed,) = [line for line in own_lines(output) if "HPC125" in line]
    assert "the agent on node 2 is gone without a message" in failed
    assert (running["outcome"], ended["outcome"]) == ("running", "nodes failed")
    assert "HPC235" not in output  # it does not wait


def test_mpiexec_kills_all_others(cluster, tmp_path):
    output, _, ended = lose(cluster, MPICH_4, HOSTS[:2], tmp_path)
    assert "HPC125" not in output
    assert ended["outcome"] == "running"  # that it was killed

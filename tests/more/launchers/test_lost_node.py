"""A host is lost under mpirun and mpiexec, over ssh: killed, or without a network."""

from __future__ import annotations

import json

import pytest

from tests.support.cluster.commands import FORMS, NODES, require
from tests.support.cluster.mpi import MPICH_4, OPENMPI_4, missing, once
from tests.support.cluster.real_job import RealJob
from tests.support.cluster.testbed import MANAGEMENT, Cluster

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
    """Hosts of their own: the server of a killed one is also gone."""
    with Cluster(NODES, management="open", slurm=False) as cluster:
        yield cluster


def job(cluster, mpi, hosts, folder, *options, environ=()):
    """Return a job whose variables of the environ are passed to all hosts."""
    require(missing(mpi))
    folder.chmod(0o777)
    (folder / "train.py").write_text(SCRIPT)
    slots = [f"{host}:1" for host in hosts] if mpi == OPENMPI_4 else hosts
    passed = [word for name in environ for word in ("-x", name)]
    return RealJob(
        cluster,
        *(*options, f"--hpc-outcome={folder / 'outcome.json'}"),
        by=[
            *mpi.command(cluster, *slots),
            *once(mpi, len(hosts)),
            *(passed if mpi == OPENMPI_4 else ()),
        ],
        script=["train.py", folder],
        host=hosts[0],
        environ=FORMS["fork"] | dict(environ),
        cwd=folder,
    )


def wait_for_all(job, folder, hosts):
    """Wait until all workers are at work."""
    job.wait(lambda: len([*folder.glob("ready.*")]) == len(hosts))


def outcome_of(folder):
    return json.loads((folder / "outcome.json").read_text())


def lose(cluster, mpi, hosts, folder):
    """Start a job, and kill the last host.

    Returns:
        The launcher's lines, the outcome of the running job, and that of the end.
    """
    with job(cluster, mpi, hosts, folder) as running:
        wait_for_all(running, folder, hosts)
        before = outcome_of(folder)
        cluster.run(["sh", "-c", "kill -9 -1"], host=hosts[-1])
        running.end()
        return running.lines(), before, outcome_of(folder)


def test_mpirun_ends_all_others_by_sigterm(cluster, tmp_path):
    """The node was lost first, although mpirun's signal may be seen before."""
    lines, running, ended = lose(cluster, OPENMPI_4, NODES, tmp_path)
    (failed,) = [line for line in lines if "HPC125" in line]
    assert "the agent on n11 (node 2) is gone without a message" in failed
    assert (running["outcome"], ended["outcome"]) == ("running", "nodes failed")
    assert not any("HPC235" in line for line in lines)  # it does not wait


def test_mpiexec_kills_all_others(cluster, tmp_path):
    lines, _, ended = lose(cluster, MPICH_4, NODES[:2], tmp_path)
    assert not any("HPC125" in line for line in lines)
    assert ended["outcome"] == "running"  # that it was killed


@pytest.mark.parametrize("mpi", [OPENMPI_4, MPICH_4], ids=str)
def test_a_host_without_a_network(mpi, tmp_path, machine):  # noqa: ARG001
    """It still sees the outcome's file. In PBS, the launcher waits for it forever."""
    nodes = tmp_path / "nodes"
    nodes.write_text("".join(f"{host}\n" for host in NODES))
    environ = {"PBS_JOBID": "7.login", "PBS_NODEFILE": str(nodes)}
    brief = "--rdzv_conf=keep_alive_interval=5,keep_alive_max_attempt=1"
    with (
        Cluster(NODES, management="open", slurm=False) as cluster,
        job(cluster, mpi, NODES, tmp_path, brief, environ=environ) as lost,
    ):
        wait_for_all(lost, tmp_path, NODES)
        cluster.cut(NODES[1], MANAGEMENT, cluster.fast)
        lost.says("HPC235")
        assert not lost.has_ended()
    ended = outcome_of(tmp_path)
    reason = f"the agent on {NODES[1]} (node 1) did not answer for 5 s"
    assert (ended["outcome"], ended["reason"]) == ("nodes failed", reason)
    assert (ended["exclude"], ended["by"]) == ([NODES[1]], "")
    codes = [line.partition("[")[2][:6] for line in lost.lines()]
    assert codes[-2:] == ["HPC125", "HPC235"]

"""A host is lost under mpirun and mpiexec, over ssh: killed, or without a network."""

from __future__ import annotations

import json
import subprocess
from contextlib import contextmanager

import pytest

from tests.support.cluster.commands import ENVIRON, FORMS, HPC, own_lines, require
from tests.support.cluster.mpi import MPICH_4, OPENMPI_4, missing, once
from tests.support.cluster.testbed import MANAGEMENT, Cluster
from tests.support.patience import PATIENCE, until

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


@contextmanager
def job(cluster, mpi, hosts, folder, *options, environ=()):
    """Run a job, from when all are at work; end it at the end.

    Variables of the environ are passed to all hosts.
    """
    require(missing(mpi))
    folder.chmod(0o777)
    (folder / "train.py").write_text(SCRIPT)
    slots = [f"{host}:1" for host in hosts] if mpi == OPENMPI_4 else hosts
    ours = (*HPC, *options, f"--hpc-outcome={folder / 'outcome.json'}")
    passed = [word for name in environ for word in ("-x", name)]
    options = (*once(mpi, len(hosts)), *(passed if mpi == OPENMPI_4 else ()))
    words = (*options, *ours, "train.py", folder)
    with (folder / "output").open("w") as file:
        program = cluster.popen(
            [*mpi.command(cluster, *slots), *words],
            host=hosts[0],
            env=ENVIRON | FORMS["fork"] | dict(environ),
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: len([*folder.glob("ready.*")]) == len(hosts))
        yield program
    finally:
        cluster.end(program)
        print(output_of(folder))


def output_of(folder):
    return (folder / "output").read_text(errors="replace")


def outcome_of(folder):
    return json.loads((folder / "outcome.json").read_text())


def lose(cluster, mpi, hosts, folder):
    """Start a job, and kill the last host; return what it has printed, and outcomes.

    The outcomes are that of the running job, and that of the end.
    """
    with job(cluster, mpi, hosts, folder) as program:
        running = outcome_of(folder)
        cluster.run(["sh", "-c", "kill -9 -1"], host=hosts[-1])
        program.wait(PATIENCE)
    return output_of(folder), running, outcome_of(folder)


def test_mpirun_ends_all_others_by_sigterm(cluster, tmp_path):
    """The node was lost first, although mpirun's signal may be seen before."""
    output, running, ended = lose(cluster, OPENMPI_4, HOSTS, tmp_path)
    (failed,) = [line for line in own_lines(output) if "HPC125" in line]
    assert "the agent on n11 (node 2) is gone without a message" in failed
    assert (running["outcome"], ended["outcome"]) == ("running", "nodes failed")
    assert "HPC235" not in output  # it does not wait


def test_mpiexec_kills_all_others(cluster, tmp_path):
    output, _, ended = lose(cluster, MPICH_4, HOSTS[:2], tmp_path)
    assert "HPC125" not in output
    assert ended["outcome"] == "running"  # that it was killed


@pytest.mark.parametrize("mpi", [OPENMPI_4, MPICH_4], ids=str)
def test_a_host_without_a_network(mpi, tmp_path, machine):  # noqa: ARG001
    """It still sees the outcome's file. In PBS, the launcher waits for it forever."""
    nodes = tmp_path / "nodes"
    nodes.write_text("".join(f"{host}\n" for host in HOSTS))
    environ = {"PBS_JOBID": "7.login", "PBS_NODEFILE": str(nodes)}
    brief = "--rdzv_conf=keep_alive_interval=5,keep_alive_max_attempt=1"
    with (
        Cluster(HOSTS, management="open", slurm=False) as cluster,
        job(cluster, mpi, HOSTS, tmp_path, brief, environ=environ) as program,
    ):
        cluster.cut(HOSTS[1], MANAGEMENT, cluster.fast)
        until(lambda: "HPC235" in output_of(tmp_path), lambda: output_of(tmp_path))
        assert program.poll() is None
    ended = outcome_of(tmp_path)
    reason = f"the agent on {HOSTS[1]} (node 1) did not answer for 5 s"
    assert (ended["outcome"], ended["reason"]) == ("nodes failed", reason)
    assert (ended["exclude"], ended["by"]) == ([HOSTS[1]], "")
    codes = [line.partition("[")[2][:6] for line in own_lines(output_of(tmp_path))]
    assert codes[-2:] == ["HPC125", "HPC235"]

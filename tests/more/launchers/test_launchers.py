"""mpirun and mpiexec of five makers and releases, on three hosts, for real."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from commands import (
    ENVIRON,
    HPC,
    JUELICH,
    NODES,
    SCRIPTS,
    WORLD,
    column,
    own_lines,
    read_workers,
)
from launchers import (
    HYDRA,
    INTELMPI,
    MPICH_4,
    MPICH_5,
    OPENMPI,
    OPENMPI_4,
    OPENMPI_5,
    Launcher,
    once,
    run,
    unless_it_hangs,
)
from waiting import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster

MPI = str(SCRIPTS / "mpi.py")
HOSTS = NODES[:2]
# Open MPI 5 may hang where tasks end at once, whatever they are.
LASTING = (WORLD, "--sleep", "0.5")


@pytest.mark.parametrize(
    "mpi", [OPENMPI_5, MPICH_4, MPICH_5, INTELMPI], indirect=True, ids=str
)
def test_one_task_on_each_node(bare: Cluster, mpi: Launcher) -> None:
    """Open MPI 4 is in core/test_mpi.py; as text, n10 comes before n9."""
    done = run(bare, mpi, *once(mpi, 2), *HPC, WORLD, hosts=HOSTS)
    assert done.returncode == 0, done.stderr
    seen = read_workers(done)
    assert [worker["host"] for worker in seen] == list(HOSTS), done.stdout
    assert {w["MASTER_ADDR"] for w in seen} == {"10.10.0.1"}
    assert len({w["TORCHELASTIC_RUN_ID"] for w in seen}) == 1
    (line,) = own_lines(done.stderr)
    assert "HPC001 2 nodes, 1 worker on this one" in line


def test_each_task_a_worker(bare: Cluster, mpi: Launcher) -> None:
    """They end one after the other, and none takes another one with it."""
    by_node = [] if mpi in OPENMPI else ["-ppn", "2"]
    done = run(bare, mpi, "-n", "6", *by_node, *HPC, "--no-python", "sh", "-c",
               'python "$0"; sleep 0.$((4 + RANK))', WORLD)  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = read_workers(done)
    assert [worker["host"] for worker in seen] == [h for h in NODES for _ in range(2)]
    assert column(seen, "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE") == [
        (str(rank), str(rank % 2), str(rank // 2), "6") for rank in range(6)
    ]
    assert {w["MASTER_ADDR"] for w in seen} == {"10.10.0.1"}
    assert len({w["MASTER_PORT"] for w in seen}) == 1
    (line,) = own_lines(done.stderr)
    assert "HPC001 3 nodes x 2 tasks" in line


@pytest.mark.parametrize("mpi", [MPICH_5, INTELMPI], indirect=True, ids=str)
def test_the_script_uses_mpi(bare: Cluster, mpi: Launcher) -> None:
    """The same process manager tells the launcher where rank 0 is."""
    library = mpi.program.parents[1] / "lib" / "libmpi.so.12"
    environ = ENVIRON | {"UCX_TLS": "tcp"}  # or MPICH takes the hosts for one machine
    done = run(bare, mpi, "-n", "6", "-ppn", "2", *HPC, MPI, str(library),
               environ=environ)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the sum is 21"] * 6


@pytest.mark.parametrize(
    "mpi", [OPENMPI_4, MPICH_4, MPICH_5, INTELMPI], indirect=True, ids=str
)
def test_uneven_tasks(bare: Cluster, mpi: Launcher) -> None:
    """Two tasks on the first node, one on the second: all of them are workers."""
    words, hosts = ["-n", "3", "-ppn", "2"], HOSTS
    if mpi in OPENMPI:
        words = ["-np", "3"]
    done = run(bare, mpi, *words, *HPC, *LASTING, hosts=hosts)
    assert done.returncode == 0, done.stderr
    found = column(read_workers(done), "host", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert found == [("n9", "0", "2"), ("n9", "1", "2"), ("n10", "0", "1")]
    assert "2 nodes, 3 tasks" in own_lines(done.stderr)[0]


@pytest.mark.parametrize("mpi", HYDRA, indirect=True, ids=str)
def test_a_host_that_is_there_twice(bare: Cluster, mpi: Launcher) -> None:
    """As two chunks of PBS; MPICH takes that for two nodes, with a first task each."""
    words, hosts = ["-n", "3", "-ppn", "1"], ("n9", "n10", "n9")
    done = run(bare, mpi, *words, *HPC, *LASTING, hosts=hosts)
    assert done.returncode == 0, done.stderr
    found = column(read_workers(done), "host", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert found == [("n9", "0", "2"), ("n10", "0", "1"), ("n9", "1", "2")]
    assert "HPC001 2 nodes, 3 tasks" in done.stderr


def test_uneven_tasks_that_nobody_can_count(bare: Cluster) -> None:
    done = run(bare, OPENMPI_5, "-np", "3", *HPC, WORLD, hosts=HOSTS)
    assert done.returncode == 2, done.stderr
    assert "HPC034 Open MPI started 2 of 3 tasks on this node" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("mpi", [OPENMPI_5, MPICH_4], indirect=True, ids=str)
def test_tasks_in_turn(bare: Cluster, mpi: Launcher) -> None:
    words = ["-n", "4", "-ppn", "1"]
    if mpi in OPENMPI:
        words = ["-np", "4", "--map-by", "node"]
    done = run(bare, mpi, *words, *HPC, *LASTING, hosts=HOSTS)
    assert done.returncode == 0, done.stderr
    assert column(read_workers(done), "host", "LOCAL_RANK") == [
        ("n9", "0"),
        ("n10", "0"),
        ("n9", "1"),
        ("n10", "1"),
    ]
    seen = [line for line in own_lines(done.stderr) if "HPC079" in line]
    assert len(seen) == 1, done.stderr
    assert "the second one on this node is task 2" in seen[0]

    options = seen[0].partition(", type: ")[2].split()[1:-1]  # mpirun ... …
    words = ["-n", "4", *options]
    done = run(bare, mpi, *words, *HPC, *LASTING, hosts=HOSTS)
    assert done.returncode == 0, done.stderr
    hosts = [worker["host"] for worker in read_workers(done)]
    assert hosts == ["n9", "n9", "n10", "n10"], done.stderr
    assert "HPC079" not in done.stderr


@pytest.mark.parametrize("mpi", OPENMPI, indirect=True, ids=str)
def test_mpirun_on_a_login_node(bare: Cluster, mpi: Launcher) -> None:
    """Rank 0 is not there; both ways out that the message names are tried."""
    words = ["-np", "6", *HPC, *LASTING]
    done = run(bare, mpi, *words, on="login01")
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in own_lines(done.stderr) if "error" in line]
    assert "HPC039 on n9: rank 0 is on n9, but the other nodes will look for" in line
    assert "tell them: mpirun -x MASTER_ADDR=n9" in line
    assert "Traceback" not in done.stderr
    done = run(bare, mpi, "-x", "MASTER_ADDR=n9", *words, on="login01")
    assert done.returncode == 0, done.stderr
    seen = read_workers(done)
    assert column(seen, "MASTER_ADDR") == [("10.10.0.1",)] * 6, done.stderr


def test_mpirun_of_agents_on_a_login_node(bare: Cluster) -> None:
    words = [*once(OPENMPI_4, 2), *HPC]
    done = run(bare, OPENMPI_4, *words, WORLD, hosts=HOSTS, on="login01")
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in own_lines(done.stderr) if "error" in line]
    assert "mpirun -x MASTER_ADDR=n9" in line
    option = line.partition("(or ")[2].partition(")")[0]
    done = run(bare, OPENMPI_4, *words, option, WORLD, hosts=HOSTS, on="login01")
    assert done.returncode == 0, done.stderr
    assert [worker["host"] for worker in read_workers(done)] == list(HOSTS)


@pytest.mark.parametrize("mpi", HYDRA[:1], indirect=True, ids=str)
def test_mpiexec_on_a_login_node(bare: Cluster, mpi: Launcher) -> None:
    """The tasks tell each other where rank 0 is, wherever mpiexec runs."""
    done = run(bare, mpi, "-n", "6", "-ppn", "2", *HPC, WORLD, on="login01")
    assert done.returncode == 0, done.stderr
    seen = read_workers(done)
    assert column(seen, "MASTER_ADDR") == [("10.10.0.1",)] * 6, done.stderr


@pytest.mark.parametrize("mpi", [OPENMPI_4, MPICH_4], indirect=True, ids=str)
def test_two_at_once_do_not_meet(bare: Cluster, mpi: Launcher, tmp_path: Path) -> None:
    """The tasks of each wait until all of both are there."""
    tmp_path.chmod(0o777)
    script = (
        f'python "$0"; touch {tmp_path}/$TORCHELASTIC_RUN_ID.$RANK; '
        f"until test $(ls {tmp_path} | wc -l) = 8; do sleep 0.1; done"
    )
    hosts = tuple(f"{h}:2" if mpi in OPENMPI else h for h in HOSTS)
    by_node = [] if mpi in OPENMPI else ["-ppn", "2"]
    command = [*mpi.command(bare, *hosts), "-n", "4", *by_node, *HPC]
    command += ["--no-python", "sh", "-c", script, WORLD]
    programs = [bare.popen(command, host="n9", env=ENVIRON) for _ in range(2)]
    outputs = [program.communicate(timeout=PATIENCE) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], outputs
    for name in "TORCHELASTIC_RUN_ID", "MASTER_PORT":
        found = [column(read_workers(out), name) for out, _ in outputs]
        assert [len(of_one) for of_one in found] == [4, 4], outputs
        first, second = ({*of_one} for of_one in found)
        assert len(first) == len(second) == 1
        assert first != second, name


@pytest.mark.parametrize("mpi", [OPENMPI_5, MPICH_4], indirect=True, ids=str)
def test_exit_code_of_a_worker(bare: Cluster, mpi: Launcher) -> None:
    """As the launcher has it: the script is its own task."""
    words = ["-np" if mpi in OPENMPI else "-n", "4"]
    command = ["sh", "-c", "sleep 0.5; test $RANK != 1 || exit 7; sleep 0.5"]
    done = run(bare, mpi, *words, *HPC, "--no-python", *command, hosts=HOSTS)
    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr


# --- inside a job of Slurm: ranks from the launcher, nodes from Slurm -------------


@pytest.mark.parametrize("mpi", [OPENMPI_4, OPENMPI_5, MPICH_4, INTELMPI],
                         indirect=True, ids=str)  # fmt: skip
def test_in_a_job_of_slurm(unpadded: Cluster, mpi: Launcher) -> None:
    """At Jülich: the nodes' names are Slurm's, and get their name on the fast net."""
    command = [*mpi.in_job(unpadded), *once(mpi, 2), *HPC, WORLD]
    script = f"#!/bin/sh\n{' '.join(command)}\n"
    job = ("-N2", "--nodelist=n9,n10", "--ntasks-per-node=1")
    done = unless_it_hangs(
        mpi, lambda limit: unpadded.sbatch(script, *job, env=JUELICH, timeout=limit)
    )
    assert done.returncode == 0, done.output
    seen = read_workers(done.output)
    assert [worker["host"] for worker in seen] == list(HOSTS), done.output
    assert {worker["MASTER_ADDR"] for worker in seen} == {"10.20.0.1"}
    assert {worker["GLOO_SOCKET_IFNAME"] for worker in seen} == {"ib0"}
    (line,) = own_lines(done.output)
    assert " in Slurm " in line
    assert "n9i:" in line

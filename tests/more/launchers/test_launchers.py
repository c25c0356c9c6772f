"""mpirun and mpiexec of five makers and releases, on three hosts, for real."""

from __future__ import annotations

import pytest

from tests.support.cluster.commands import (
    ENVIRON,
    HOSTS,
    HPC,
    JUELICH,
    NODES,
    SCRIPTS,
    WORLD,
    column,
    errors,
    own_lines,
    read_workers,
)
from tests.support.cluster.mpi import (
    HYDRA,
    INTELMPI,
    MPICH_4,
    MPICH_5,
    OPENMPI,
    OPENMPI_4,
    OPENMPI_5,
    once,
    run,
    unless_it_hangs,
)
from tests.support.cluster.real_job import How, RealJob

MPI = str(SCRIPTS / "mpi.py")
# Open MPI 5 may hang where tasks end at once, whatever they are.
LASTING = (WORLD, "--sleep", "0.5")
UNEVEN = [("n9", "0", "2"), ("n9", "1", "2"), ("n10", "0", "1")]
PLACE = ("host", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def on(*launchers):
    """Run a test with some launchers."""
    return pytest.mark.parametrize("mpi", launchers, indirect=True, ids=str)


def tasks(mpi, number, each=2):
    """Return the options for so many tasks, so many on each node."""
    return ["-np", str(number)] + ([] if mpi in OPENMPI else ["-ppn", str(each)])


@on(OPENMPI_5, MPICH_4, MPICH_5, INTELMPI)
def test_one_task_on_each_node(bare, mpi):
    """Open MPI 4 is in core/test_mpi.py; as text, n10 comes before n9."""
    done = run(bare, mpi, *once(mpi, 2), *HPC, WORLD, hosts=HOSTS)
    seen = read_workers(done)
    assert column(seen, "host", "MASTER_ADDR") == [
        (host, "10.10.0.1") for host in HOSTS
    ], done.stdout
    assert len({w["TORCHELASTIC_RUN_ID"] for w in seen}) == 1
    (line,) = own_lines(done.stderr)
    assert "2 nodes, 1 worker here" in line


def test_each_task_a_worker(bare, mpi):
    """They end one after the other, and none takes another one with it."""
    script = ("--no-python", "sh", "-c", 'python "$0"; sleep 0.$((4 + RANK))', WORLD)
    done = run(bare, mpi, *tasks(mpi, 6), *HPC, *script)
    seen = read_workers(done)
    names = ("host", "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR")
    assert column(seen, *names) == [
        (NODES[k // 2], str(k), str(k % 2), str(k // 2), "6", "10.10.0.1")
        for k in range(6)
    ], done.stdout
    assert len({w["MASTER_PORT"] for w in seen}) == 1
    (line,) = own_lines(done.stderr)
    assert "3 nodes x 2 tasks" in line


@on(MPICH_5, INTELMPI)
def test_the_script_uses_mpi(bare, mpi):
    """The same process manager tells the launcher where rank 0 is."""
    library = mpi.program.parents[1] / "lib" / "libmpi.so.12"
    environ = ENVIRON | {"UCX_TLS": "tcp"}  # or MPICH takes the hosts for one machine
    script = (MPI, str(library))
    done = run(bare, mpi, *tasks(mpi, 6), *HPC, *script, environ=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the sum is 21"] * 6


@on(OPENMPI_4, MPICH_4, MPICH_5, INTELMPI)
def test_uneven_tasks(bare, mpi):
    """Two tasks on the first node, one on the second: all of them are workers."""
    done = run(bare, mpi, *tasks(mpi, 3), *HPC, *LASTING, hosts=HOSTS)
    assert column(done, *PLACE) == UNEVEN
    assert "2 nodes, 3 tasks" in own_lines(done.stderr)[0]


@on(*HYDRA)
def test_a_host_that_is_there_twice(bare, mpi):
    """As two chunks of PBS; MPICH takes that for two nodes, with a first task each."""
    words, hosts = tasks(mpi, 3, each=1), ("n9", "n10", "n9")
    done = run(bare, mpi, *words, *HPC, *LASTING, hosts=hosts)
    assert column(done, *PLACE) == [UNEVEN[0], UNEVEN[2], UNEVEN[1]]
    assert "2 nodes, 3 tasks" in done.stderr


@on(OPENMPI_5)
def test_uneven_tasks_that_nobody_can_count(bare, mpi):
    done = run(bare, mpi, "-np", "3", *HPC, WORLD, hosts=HOSTS)
    assert done.returncode == 2, done.stderr
    assert "HPC034]: on n9: Open MPI started 2 of 3 tasks on this node" in done.stderr
    assert "Traceback" not in done.stderr


@on(OPENMPI_5, MPICH_4)
def test_tasks_in_turn(bare, mpi):
    words = tasks(mpi, 4, each=1) + (["--map-by", "node"] if mpi in OPENMPI else [])
    done = run(bare, mpi, *words, *HPC, *LASTING, hosts=HOSTS)
    assert column(done, "host", "LOCAL_RANK") == [
        ("n9", "0"),
        ("n10", "0"),
        ("n9", "1"),
        ("n10", "1"),
    ]
    (seen,) = [line for line in own_lines(done.stderr) if "HPC079" in line]
    assert "the second one on this node is task 2" in seen

    options = seen.partition("add the option: ")[2].split()[1:-1]  # mpirun ... …
    done = run(bare, mpi, "-n", "4", *options, *HPC, *LASTING, hosts=HOSTS)
    hosts = [worker["host"] for worker in read_workers(done)]
    assert hosts == ["n9", "n9", "n10", "n10"], done.stderr
    assert "HPC079" not in done.stderr


@on(*OPENMPI)
def test_mpirun_on_a_login_node(bare, mpi):
    """Rank 0 is not there; both ways out that the message names are tried."""
    words = ["-np", "6", *HPC, *LASTING]
    done = run(bare, mpi, *words, on="login01")
    assert done.returncode == 2, done.stderr
    (line,) = errors(done.stderr)
    assert "HPC039]: on n9: rank 0 is on n9, but the other nodes will look for" in line
    assert "mpirun -x MASTER_ADDR=n9" in line
    assert "Traceback" not in done.stderr
    done = run(bare, mpi, "-x", "MASTER_ADDR=n9", *words, on="login01")
    assert column(done, "MASTER_ADDR") == [("10.10.0.1",)] * 6, done.stderr


def test_mpirun_of_agents_on_a_login_node(bare):
    words = [*once(OPENMPI_4, 2), *HPC]
    done = run(bare, OPENMPI_4, *words, WORLD, hosts=HOSTS, on="login01")
    assert done.returncode == 2, done.stderr
    (line,) = errors(done.stderr)
    assert "mpirun -x MASTER_ADDR=n9" in line
    option = line.partition("pass ")[2].partition(", or ")[0]
    done = run(bare, OPENMPI_4, *words, option, WORLD, hosts=HOSTS, on="login01")
    assert [worker["host"] for worker in read_workers(done)] == list(HOSTS)


@on(HYDRA[0])
def test_mpiexec_on_a_login_node(bare, mpi):
    """The tasks tell each other where rank 0 is, wherever mpiexec runs."""
    done = run(bare, mpi, *tasks(mpi, 6), *HPC, WORLD, on="login01")
    assert column(done, "MASTER_ADDR") == [("10.10.0.1",)] * 6, done.stderr


@on(OPENMPI_4, MPICH_4)
def test_two_at_once_do_not_meet(bare, mpi, tmp_path):
    """The tasks of each wait until all of both are there."""
    tmp_path.chmod(0o777)
    script = (
        f'python "$0"; touch {tmp_path}/$TORCHELASTIC_RUN_ID.$RANK; '
        f"until test $(ls {tmp_path} | wc -l) = 8; do sleep 0.1; done"
    )
    hosts = tuple(f"{h}:2" if mpi in OPENMPI else h for h in HOSTS)
    mpirun = [*mpi.command(bare, *hosts), *tasks(mpi, 4)]
    how: How = {"by": mpirun, "script": ["sh", "-c", script, WORLD], "host": "n9"}
    with (
        RealJob(bare, "--no-python", **how) as first,
        RealJob(bare, "--no-python", **how) as second,
    ):
        workers = [read_workers(job.done()) for job in (first, second)]
    assert [len(of_one) for of_one in workers] == [4, 4]
    for name in "TORCHELASTIC_RUN_ID", "MASTER_PORT":
        (one,), (other,) = ({*column(of_one, name)} for of_one in workers)
        assert one != other, name


@on(OPENMPI_5, MPICH_4)
def test_exit_code_of_a_worker(bare, mpi):
    """As the launcher has it: the script is its own task."""
    command = ["sh", "-c", "sleep 0.5; test $RANK != 1 || exit 7; sleep 0.5"]
    done = run(bare, mpi, "-np", "4", *HPC, "--no-python", *command, hosts=HOSTS)
    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr


# --- inside a job of Slurm: ranks from the launcher, nodes from Slurm -------------


@on(OPENMPI_4, OPENMPI_5, MPICH_4, INTELMPI)
def test_in_a_job_of_slurm(unpadded, mpi):
    """At Jülich: the nodes' names are Slurm's, and get their name on the fast net."""
    words = [*mpi.in_job(unpadded), *tasks(mpi, 4), *HPC, *LASTING]
    script = f"#!/bin/sh\n{' '.join(words)}\n"
    job = (script, "-N2", "--ntasks-per-node=2")
    done = unless_it_hangs(
        mpi, lambda limit: unpadded.sbatch(*job, env=JUELICH, timeout=limit)
    )
    assert column(done, "host", "MASTER_ADDR", "GLOO_SOCKET_IFNAME") == [
        (host, "10.20.0.1", "ib0") for host in HOSTS for _ in range(2)
    ], done.output
    (line,) = own_lines(done.output)
    assert " in Slurm " in line
    assert "n9i:" in line

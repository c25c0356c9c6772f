"""CPUs and GPUs as Slurm really gives them: warnings, and their remedies."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.cluster.commands import (
    ENVIRON,
    HPC,
    ONE_TASK,
    WORLD,
    column,
    read_workers,
    together,
    warnings,
)
from tests.support.cluster.mpi import MPICH_4, OPENMPI, OPENMPI_5, unless_it_hangs
from tests.support.cluster.real_job import launch
from tests.support.cluster.testbed import Cluster
from tests.support.patience import NEVER_S, PATIENCE, until
from torchrun_hpc.names import ranges

pytestmark = pytest.mark.usefixtures("machine")

GPUS = ["--gres=gpu:4"]
JUWELS = {"SYSTEMNAME": "juwels"}

# The default of many sites: a task is bound to the cores that it asked for.
SRUN = "srun --cpu-bind=cores"


@pytest.fixture(scope="module")
def bound():
    """Two nodes on which a task may use its own CPUs only."""
    with Cluster(("n1", "n2"), management="open", cpus=2, affinity=True) as cluster:
        yield cluster


def test_srun_forgets_the_cpus_of_sbatch(bound):
    """The line in the message fixes it."""
    command = f"{SRUN} {' '.join(HPC)} --nproc_per_node=2 {WORLD}"
    export = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"
    job = ("-N1", ONE_TASK, "--cpus-per-task=2")
    done = bound.sbatch(f"#!/bin/sh\n{command}", *job, env=ENVIRON)
    assert done.returncode == 0, done.output
    (seen,) = warnings(done.output)
    told = "HPC091]: SLURM_CPUS_PER_TASK=2, but this process can use only 1 CPU"
    assert seen.startswith(told)
    assert export in seen
    done = bound.sbatch(f"#!/bin/sh\n{export}; {command}", *job, env=ENVIRON)
    assert done.returncode == 0, done.output
    assert warnings(done.output) == []


@pytest.mark.parametrize("job", [["-N1", "-n2"], ["-N1", ONE_TASK]])
def test_more_workers_than_cpus(bound, job):
    """The remedy works as it stands: a line, or an option for sbatch."""
    command = f"{SRUN} -n1 {' '.join(HPC)} --nproc_per_node=2 {WORLD}"
    done = bound.sbatch(f"#!/bin/sh\n{command}", *job, env=ENVIRON)
    (seen,) = warnings(done.output)
    assert seen.startswith("HPC092]: 2 workers share 1 CPU")
    _, _, line = seen.partition("more CPUs: ")
    if not line:
        option = seen.partition(". Pass ")[2].partition(" to ")[0]
        job, line = [*job, option], command.replace("srun", f"srun {option}")
    mended = bound.sbatch(f"#!/bin/sh\n{line}", *job, env=ENVIRON)
    assert len(read_workers(mended)) == 2, mended.output
    assert warnings(mended.output) == []


def test_threads_from_the_mask(bound):
    done = launch(bound, "--hpc-omp-threads=auto", nodes=1, srun=["-c2"])
    assert column(done, "OMP_NUM_THREADS") == [("2",)]
    assert warnings(done.stderr) == []


def test_gpus(juelich):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.fail("two workers need two CPUs, or another warning comes first")
    for options, seen in (
        (["--nproc_per_node=2"], []),
        ([], ["HPC097]: one worker, the default, but CUDA_VISIBLE_DEVICES"]),
    ):
        done = launch(juelich, *options, nodes=1, srun=GPUS, environ=JUWELS)
        assert done.returncode == 0
        found = warnings(done.stderr)
        assert len(found) == len(seen)
        assert all(map(str.startswith, found, seen))


def test_one_of_four_gpus_is_visible(juelich):
    one = "export CUDA_VISIBLE_DEVICES=0"
    done = launch(juelich, nodes=1, srun=GPUS, first=one, environ=JUWELS)
    (seen,) = warnings(done.stderr)
    assert seen.startswith(
        "HPC095]: CUDA_VISIBLE_DEVICES=0 shows 1 of 4 GPUs (SLURM_GPUS_ON_NODE=4)"
    )
    assert "env -u CUDA_VISIBLE_DEVICES python -m torchrun_hpc" in seen


# --- --hpc-bind -----------------------------------------------------------------------

BIND = "--hpc-bind=even"


def cpus(ended):
    return [worker["cpus"] for worker in read_workers(ended)]


def both():
    """Return one CPU for each of two workers: all that a node has here."""
    return [[cpu] for cpu in sorted(os.sched_getaffinity(0))]


def test_workers_divide_what_slurm_gives(bound):
    done = launch(bound, "--nproc_per_node=2", BIND, nodes=1, srun=["-c2"])
    assert cpus(done) == both()
    assert warnings(done.stderr) == []


def test_openmp_that_binds_all_workers_of_a_node(bound):
    """Node 0 says so, and no worker starts with fewer CPUs than its node has."""
    environ = {"OMP_PROC_BIND": "close"}
    done = launch(bound, "--nproc_per_node=2", srun=["-c2"], environ=environ)
    assert cpus(done) == 4 * [sorted(os.sched_getaffinity(0))]
    (seen,) = warnings(done.stderr)
    assert seen.startswith("HPC227]: OpenMP binds the main threads of all 2 workers to")
    assert "(OMP_PROC_BIND=close)" in seen


def assert_refused(ended, line):
    """See that a launch says once how its tasks are bound."""
    (own,) = warnings(ended.stderr)
    assert own.startswith("HPC222]: --hpc_bind=even binds nothing: in direct mode")
    assert own.endswith(line)


def test_tasks_that_slurm_binds(bound):
    done = launch(bound, BIND, tasks=2, nodes=1, srun=["--cpu-bind=none"])
    assert cpus(done) == 2 * [sorted(os.sched_getaffinity(0))]
    assert_refused(done, "Use srun --cpus-per-task=N --cpu-bind=cores")
    options = ["--cpus-per-task=1", "--cpu-bind=cores"]
    done = launch(bound, nodes=1, tasks=2, srun=options)
    assert (cpus(done), warnings(done.stderr)) == (both(), [])


@pytest.mark.parametrize("launcher", [OPENMPI_5, MPICH_4], ids=str)
@pytest.mark.parametrize("is_bound", [False, True], ids=["unbound", "bound"])
def test_tasks_of_mpirun(bound, tmp_path, launcher, is_bound):
    """The options that the message names bind them, to a CPU each."""
    is_openmpi = launcher in OPENMPI
    line = "--map-by slot:PE=1 --bind-to core" if is_openmpi else "-bind-to core:1"
    unbound = ["--bind-to" if is_openmpi else "-bind-to", "none"]
    command = launcher.command(bound, "n1:2" if is_openmpi else "n1")
    command += ["-np", "2", *(line.split() if is_bound else unbound)]
    command += ["-x", "PATH"] if is_openmpi else []

    def start(limit):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        task = [*command, *HPC, *([] if is_bound else [BIND]), *together(folder, 2)]
        return bound.run(task, host="n1", env=ENVIRON, timeout=limit)

    done = unless_it_hangs(launcher, start)
    if is_bound:
        assert (cpus(done), warnings(done.stderr)) == (both(), []), done.stderr
    else:
        assert cpus(done) == 2 * [sorted(os.sched_getaffinity(0))], done.stderr
        assert_refused(done, line.replace("=1", "=N").replace(":1", ":N"))


@pytest.fixture
def cpuset():
    """A cgroup whose processes may use all CPUs of this machine, as yet."""
    root = Path("/sys/fs/cgroup/cpuset")
    if not root.is_dir():  # cgroups, version 2
        root = root.parent
        (root / "cgroup.subtree_control").write_text("+cpuset")
    folder = root / f"torchrun_hpc-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "cpuset.mems").write_text("0")
        (folder / "cpuset.cpus").write_text(ranges(os.sched_getaffinity(0)))
        yield folder
    finally:
        for process in (folder / "cgroup.procs").read_text().split():
            os.kill(int(process), signal.SIGKILL)
        until(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


def test_a_container_that_has_one_cpu(cpuset):
    """Its mask is narrower from the beginning."""
    _, last = both()
    (cpuset / "cpuset.cpus").write_text(str(last[0]))
    done = in_cpuset(cpuset, "--max-restarts=0")
    assert cpus(done) == [last, last]
    assert "HPC092]: 2 workers share 1 CPU" in done.stderr


def test_a_cpu_that_is_lost_while_the_job_runs(cpuset, tmp_path):
    """As one that goes offline: a worker that is restarted may use the others."""
    script = tmp_path / "lose.py"
    script.write_text(f"""
import os, pathlib, runpy, sys, time
there = pathlib.Path({str(tmp_path / "there")!r})
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        while not there.exists():  # or the other one has never had its CPU
            time.sleep(0.01)
        first = min(os.sched_getaffinity(0))
        pathlib.Path({str(cpuset)!r}, "cpuset.cpus").write_text(str(first))
        sys.exit(1)
    there.touch()
    time.sleep({NEVER_S})
runpy.run_path({WORLD!r})
""")
    done = in_cpuset(cpuset, "--max-restarts=1", script=str(script))
    first, last = both()
    assert cpus(done) == [first, first]
    (line,) = [line for line in warnings(done.stderr) if "HPC223" in line]
    assert "the worker of local rank 1 on " in line
    assert f"is not bound to CPUs {last[0]}: this job has none" in line


def in_cpuset(folder, *options, script=WORLD):
    enter = f'echo $$ > {folder}/cgroup.procs; exec "$@"'
    words = ("--nproc_per_node=2", BIND, *options, script)
    return subprocess.run(
        ["sh", "-c", enter, "sh", *HPC, *words],
        env=ENVIRON, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip

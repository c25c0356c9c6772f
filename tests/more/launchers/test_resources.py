"""CPUs and GPUs as Slurm really gives them: what is warned of, and what mends it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from commands import (
    ENVIRON,
    HPC,
    ONE_TASK,
    WORLD,
    column,
    own_lines,
    read_workers,
    together,
)
from launchers import MPICH_4, OPENMPI, OPENMPI_5, unless_it_hangs
from testbed import Cluster
from waiting import NEVER_S, PATIENCE, until

from torchrun_hpc.errors import ranges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from launchers import Launcher

pytestmark = pytest.mark.usefixtures("machine")

GPUS = "--gres=gpu:4"

# What many sites have as their default: a task is bound to the cores it asked for.
SRUN = "srun --cpu-bind=cores"


@pytest.fixture(scope="module")
def bound() -> Iterator[Cluster]:
    """Two nodes on which a task may use its own CPUs only."""
    with Cluster(("n1", "n2"), management="open", cpus=2, affinity=True) as cluster:
        yield cluster


def warnings(stderr: str) -> list[str]:
    return [
        line.partition("warning: ")[2] for line in own_lines(stderr) if "warn" in line
    ]


def test_srun_forgets_the_cpus_of_sbatch(bound: Cluster) -> None:
    """And what the message tells to type mends it."""
    command = f"{SRUN} {' '.join(HPC)} --nproc_per_node=2 {WORLD}"
    export = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"
    job = ("-N1", ONE_TASK, "--cpus-per-task=2")
    done = bound.sbatch(f"#!/bin/sh\n{command}", *job, env=ENVIRON)
    assert done.returncode == 0, done.output
    (seen,) = warnings(done.output)
    told = "HPC091 SLURM_CPUS_PER_TASK=2, but this process may use only 1 CPU"
    assert seen.startswith(told)
    assert export in seen
    done = bound.sbatch(f"#!/bin/sh\n{export}; {command}", *job, env=ENVIRON)
    assert done.returncode == 0, done.output
    assert warnings(done.output) == []


@pytest.mark.parametrize("job", [["-N1", "-n2"], ["-N1", ONE_TASK]])
def test_more_workers_than_cpus(bound: Cluster, job: list[str]) -> None:
    """What is proposed is tried as it stands: a line, or an option for sbatch."""
    command = f"{SRUN} -n1 {' '.join(HPC)} --nproc_per_node=2 {WORLD}"
    done = bound.sbatch(f"#!/bin/sh\n{command}", *job, env=ENVIRON)
    (seen,) = warnings(done.output)
    assert seen.startswith("HPC092 2 workers share 1 CPU")
    _, _, line = seen.partition("Type: ")
    if not line:
        option = seen.partition("made it, ")[2].partition(".")[0]
        job, line = [*job, option], command.replace("srun", f"srun {option}")
    mended = bound.sbatch(f"#!/bin/sh\n{line}", *job, env=ENVIRON)
    assert mended.returncode == 0, mended.output
    assert warnings(mended.output) == []
    assert len(read_workers(mended.output)) == 2, mended.output


def test_threads_from_the_mask(bound: Cluster) -> None:
    command = (*HPC, "--hpc-omp-threads=auto", WORLD)
    done = bound.srun("-N1", ONE_TASK, "-c2", *command, env=ENVIRON)
    assert column(read_workers(done), "OMP_NUM_THREADS") == [("2",)], done.stderr
    assert warnings(done.stderr) == []


def test_gpus(juelich: Cluster) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.fail("two workers need two CPUs, or another warning comes first")
    environ = ENVIRON | {"SYSTEMNAME": "juwels"}
    for options, seen in (
        (["--nproc_per_node=2"], []),
        ([], ["HPC097 one worker, the default, but CUDA_VISIBLE_DEVICES"]),
    ):
        done = juelich.srun("-N1", ONE_TASK, GPUS, *HPC, *options, WORLD,
                            env=environ)  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = warnings(done.stderr)
        assert len(found) == len(seen), done.stderr
        assert all(map(str.startswith, found, seen)), done.stderr


def test_one_of_four_gpus_is_visible(juelich: Cluster) -> None:
    shell = f"CUDA_VISIBLE_DEVICES=0 exec {' '.join(HPC)} {WORLD}"
    environ = ENVIRON | {"SYSTEMNAME": "juwels"}
    done = juelich.srun("-N1", ONE_TASK, GPUS, "sh", "-c", shell, env=environ)
    (seen,) = warnings(done.stderr)
    assert seen.startswith(
        "HPC095 CUDA_VISIBLE_DEVICES=0 shows 1 of 4 GPUs (SLURM_GPUS_ON_NODE=4)"
    )
    assert "env -u CUDA_VISIBLE_DEVICES python -m torchrun_hpc" in seen


# --- --hpc-bind -----------------------------------------------------------------------

BIND = "--hpc-bind=even"
TWO_TASKS = "--ntasks-per-node=2"


def cpus(seen: list[dict[str, Any]]) -> list[list[int]]:
    return [worker["cpus"] for worker in seen]


def both() -> list[list[int]]:
    """Return one CPU for each of two workers: all that a node has here."""
    return [[cpu] for cpu in sorted(os.sched_getaffinity(0))]


def test_workers_divide_what_slurm_gives(bound: Cluster) -> None:
    done = bound.srun(
        "-N1", ONE_TASK, "-c2", *HPC, "--nproc_per_node=2", BIND, WORLD, env=ENVIRON
    )
    assert cpus(read_workers(done)) == both(), done.stderr
    assert warnings(done.stderr) == []


@pytest.mark.parametrize(
    ("bind", "expected", "seen"),
    [
        ("--cpu-bind=none", 2, None),  # one mask for both tasks: each takes its part
        ("--cpu-bind=cores", 2, "HPC222 --hpc_bind=even binds nothing: the launcher"),
        ("--cpu-bind=mask_cpu:1,1", 1, "HPC222 --hpc_bind=even binds nothing: 2 wor"),
    ],
)
def test_tasks_that_slurm_has_bound(
    bound: Cluster, tmp_path: Path, bind: str, expected: int, seen: str | None
) -> None:
    task = (BIND, *together(tmp_path, 4))  # is there while the others look for it
    done = bound.srun("-N2", TWO_TASKS, bind, *HPC, *task, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    found = cpus(read_workers(done))
    assert found == 2 * (both() if expected == 2 else [both()[0]] * 2), done.stderr
    own = warnings(done.stderr)
    assert [warning.startswith(str(seen)) for warning in own] == [True] * bool(seen), (
        own
    )


@pytest.mark.parametrize("launcher", [OPENMPI_5, MPICH_4], ids=str)
@pytest.mark.parametrize("is_bound", [False, True], ids=["unbound", "bound"])
def test_tasks_of_mpirun(
    bound: Cluster, tmp_path: Path, launcher: Launcher, *, is_bound: bool
) -> None:
    option = "--bind-to" if launcher in OPENMPI else "-bind-to"
    words = [option, "core" if is_bound else "none"]
    command = launcher.command(bound, "n1:2" if launcher in OPENMPI else "n1")
    command += ["-np", "2", *words]
    command += ["-x", "PATH"] if launcher in OPENMPI else []

    def start(limit: float) -> subprocess.CompletedProcess[str]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        task = [*command, *HPC, BIND, *together(folder, 2)]
        return bound.run(task, host="n1", env=ENVIRON, timeout=limit)

    done = unless_it_hangs(launcher, start)
    assert done.returncode == 0, done.stderr
    assert cpus(read_workers(done)) == both(), done.stderr
    own = warnings(done.stderr)
    assert [warning[:7] for warning in own] == ["HPC222 "] * is_bound, own


def test_each_task_in_processes_of_its_own(bound: Cluster) -> None:
    """As in a container for each task: no other task is to be seen."""
    shell = f"exec unshare --pid --fork --mount-proc {' '.join(HPC)} {BIND} {WORLD}"
    done = bound.srun(
        "-N1", TWO_TASKS, "--cpu-bind=none", "sh", "-c", shell, env=ENVIRON
    )
    assert done.returncode == 0, done.stderr
    assert cpus(read_workers(done)) == [[*os.sched_getaffinity(0)]] * 2
    (own,) = warnings(done.stderr)
    assert "sees 0 other tasks of its node, which has 1" in own


@pytest.fixture
def cpuset() -> Iterator[Path]:
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


def test_a_container_that_has_one_cpu(cpuset: Path) -> None:
    """Its mask is narrower from the beginning."""
    _, last = both()
    (cpuset / "cpuset.cpus").write_text(str(last[0]))
    done = in_cpuset(cpuset, "--max-restarts=0")
    assert done.returncode == 0, done.stderr
    assert cpus(read_workers(done)) == [last, last]
    assert "HPC092 2 workers share 1 CPU" in done.stderr


def test_a_cpu_that_is_lost_while_the_job_runs(cpuset: Path, tmp_path: Path) -> None:
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
    assert done.returncode == 0, done.stderr
    assert cpus(read_workers(done)) == [first, first]
    (line,) = [line for line in own_lines(done.stderr) if "HPC223" in line]
    assert "the worker of local rank 1 on " in line
    assert f"is not bound to CPUs {last[0]}, of which none is left" in line


def in_cpuset(
    folder: Path, *options: str, script: str = WORLD
) -> subprocess.CompletedProcess[str]:
    enter = f'echo $$ > {folder}/cgroup.procs; exec "$@"'
    words = ("--nproc_per_node=2", BIND, *options, script)
    return subprocess.run(
        ["sh", "-c", enter, "sh", *HPC, *words],
        env=ENVIRON, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip

"""CPUs and GPUs as Slurm really gives them: what is warned of, and what mends it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from commands import ENVIRON, HPC, ONE_TASK, WORLD, column, own_lines, read_workers
from testbed import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        (SRUN, "HPC091 SLURM_CPUS_PER_TASK=2, but this process may use only 1 CPU"),
        (f"export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; {SRUN}", None),
        (f"{SRUN} --cpus-per-task=2", None),
    ],
)
def test_srun_forgets_the_cpus_of_sbatch(
    bound: Cluster, line: str, seen: str | None
) -> None:
    command = f"{line} {' '.join(HPC)} --nproc_per_node=2 {WORLD}"
    done = bound.sbatch(
        f"#!/bin/sh\n{command}", "-N2", ONE_TASK, "--cpus-per-task=2", env=ENVIRON
    )
    assert done.returncode == 0, done.output
    found = warnings(done.output)
    assert len(found) == (seen is not None), found
    assert not found or found[0].startswith(str(seen))
    if found:
        assert "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK" in found[0]


@pytest.mark.parametrize("job", [["-N2", "-n4"], ["-N2", ONE_TASK]])
def test_more_workers_than_cpus(bound: Cluster, job: list[str]) -> None:
    """What is proposed is tried as it stands: a line, or an option for sbatch."""
    command = f"{SRUN} -n2 {' '.join(HPC)} --nproc_per_node=2 {WORLD}"
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
    assert len(read_workers(mended.output)) == 4


def test_threads_from_the_mask(bound: Cluster) -> None:
    done = bound.srun("-N2", ONE_TASK, "-c2", *HPC, "--hpc-omp-threads=auto", WORLD,
                      env=ENVIRON)  # fmt: skip
    assert column(read_workers(done), "OMP_NUM_THREADS") == [("2",)] * 2
    assert warnings(done.stderr) == []


def test_threads_that_are_set(bound: Cluster) -> None:
    environ = ENVIRON | {"OMP_NUM_THREADS": "4"}
    done = bound.srun("-N2", ONE_TASK, "-c2", *HPC, WORLD, env=environ)
    assert column(read_workers(done), "OMP_NUM_THREADS") == [("4",)] * 2
    (seen,) = warnings(done.stderr)
    assert seen.startswith("HPC094 OMP_NUM_THREADS=4 times 1 worker is 4 threads on 2")


@pytest.mark.parametrize(
    ("srun", "environ", "options", "seen"),
    [
        ([GPUS], {}, ["--nproc_per_node=2"], None),
        ([GPUS], {}, [], "HPC097 one worker, the default, but CUDA_VISIBLE_DEVICES"),
        ([GPUS], {}, ["--nproc_per_node=1"], None),
        (["--gres=gpu:1"], {}, ["--nproc_per_node=2"], "HPC096 2 workers, but CUDA_VI"),
        ([], {}, [], None),
        ([], {"CUDA_VISIBLE_DEVICES": ""}, [], None),
    ],
)
def test_gpus(
    juelich: Cluster,
    srun: list[str],
    environ: dict[str, str],
    options: list[str],
    seen: str | None,
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.fail("two workers need two CPUs, or another warning comes first")
    done = juelich.srun("-N2", ONE_TASK, *srun, *HPC, *options, WORLD,
                        env=ENVIRON | {"SYSTEMNAME": "juwels"} | environ)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = warnings(done.stderr)
    assert len(found) == (seen is not None), found
    assert not found or found[0].startswith(str(seen))


def test_one_of_four_gpus_is_visible(juelich: Cluster) -> None:
    shell = f"CUDA_VISIBLE_DEVICES=0 exec {' '.join(HPC)} {WORLD}"
    environ = ENVIRON | {"SYSTEMNAME": "juwels"}
    done = juelich.srun("-N2", ONE_TASK, GPUS, "sh", "-c", shell, env=environ)
    (seen,) = warnings(done.stderr)
    assert seen.startswith(
        "HPC095 CUDA_VISIBLE_DEVICES=0 shows 1 of 4 GPUs (SLURM_GPUS_ON_NODE=4)"
    )
    assert "env -u CUDA_VISIBLE_DEVICES python -m torchrun_hpc" in seen

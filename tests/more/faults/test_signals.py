"""What Slurm sends reaches each worker once, whomever Slurm sends it to."""

from __future__ import annotations

import shlex
import signal
import time
from typing import TYPE_CHECKING

import pytest
from commands import ENVIRON, HPC, ONE_TASK, SCRIPTS, STOCK, column, read_workers
from launchers import MPICH_4, OPENMPI, OPENMPI_4, Launcher
from pages import block, replaced

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster

SCRIPT = str(SCRIPTS / "signals.py")
WORKERS = 4


def ready(folder: Path) -> list[list[str]]:
    """Return host, agent and job of each worker, when all are there."""
    files = [folder / f"{rank}.ready" for rank in range(WORKERS)]
    end = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < end
        time.sleep(0.05)
    return [file.read_text().split() for file in files]


def got(folder: Path) -> list[int]:
    """Return how many signals each worker got, after the time for one more."""
    time.sleep(1.5)
    files = [folder / f"{rank}.got" for rank in range(WORKERS)]
    return [len(f.read_text().split()) if f.exists() else 0 for f in files]


@pytest.mark.release("signals")
def test_signals_to_a_step(unpadded: Cluster, tmp_path: Path, form: str) -> None:
    # Up to torch 2.3 an agent looks after its workers every 5 s.
    options = ("--nproc_per_node=2", "--monitor-interval=0.1")
    command = [*HPC, *options, SCRIPT, str(tmp_path)]
    step = unpadded.popen(["srun", "-N2", ONE_TASK, *command], env=ENVIRON)
    try:
        first, *_ = ready(tmp_path)
        host, parent, job = first
        agent = parent
        if form == "fork":  # that is the fork server
            words = ["ps", "-o", "ppid=", "-p", parent]
            agent = unpadded.run(words, host=host, check=True).stdout.strip()
        # The agent alone, as Slurm does with cgroups.
        unpadded.run(["kill", "-USR1", agent], host=host, check=True)
        assert got(tmp_path) == [1, 1, 0, 0]
        # All that descends from it, as Slurm does without.
        unpadded.run(["scancel", "-s", "USR1", job], check=True)
        assert got(tmp_path) == [2, 2, 1, 1]
        step.send_signal(signal.SIGUSR1)  # srun passes it on
        assert got(tmp_path) == [3, 3, 2, 2]
        unpadded.run(["kill", "-USR2", agent], host=host, check=True)
        assert got(tmp_path) == [4, 4, 2, 2]
        (tmp_path / "end").touch()
        output, errors = step.communicate(timeout=30)
    finally:
        unpadded.end(step)
    assert step.returncode == 0, errors
    assert len(read_workers(output)) == WORKERS
    assert "warning" not in errors


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("mpi", [OPENMPI_4, MPICH_4], indirect=True, ids=str)
def test_a_signal_from_the_script_of_a_job_of_pbs(
    bare: Cluster, mpi: Launcher, tmp_path: Path
) -> None:
    """As in the documentation; mpirun and mpiexec pass it on."""
    by_node, hosts = "-n $nodes -ppn 1", ["n9", "n10"]
    if mpi in OPENMPI:
        by_node, hosts = "-np $nodes --map-by ppr:1:node", ["n9:2", "n10:2"]
    start = f"{shlex.join(mpi.command(bare, *hosts))} {by_node}"
    node_file = tmp_path / "nodes"
    node_file.write_text("n9\nn9\nn10\nn10\n")
    environ = ENVIRON | {
        "PBS_NODEFILE": str(node_file), "PBS_O_WORKDIR": str(tmp_path)
    }  # fmt: skip
    ready = (
        f"until test $(ls {tmp_path} | grep -c ready) = {WORKERS}; do sleep 0.1; done"
    )
    small = {
        "mpiexec -n $nodes --ppn 1 --cpu-bind none": start,
        "=gpu train.py": f"=2 {SCRIPT} {tmp_path} 1.5",
        "sleep 3480": ready,
    }
    script = replaced(block("docs/signals.md", "#PBS").text, small)
    tmp_path.chmod(0o777)
    done = bare.run(["bash", "-euc", script], host="n9", env=environ)
    assert done.returncode == 0, done.stderr
    assert column(read_workers(done), "got") == [(["SIGUSR1"],)] * WORKERS


def test_slurm_signals_the_workers_of_stock_torchrun_too(
    unpadded: Cluster, tmp_path: Path
) -> None:
    """That is what makes it a question, here, whether they have had it."""
    flags = ("--nnodes=2", "--rdzv_backend=c10d", "--rdzv_endpoint=n9:23457")
    command = [*STOCK, *flags, "--nproc_per_node=2", SCRIPT, str(tmp_path)]
    step = unpadded.popen(["srun", "-N2", ONE_TASK, *command], env=ENVIRON)
    try:
        _, _, job = ready(tmp_path)[0]
        unpadded.run(["scancel", "-s", "USR1", job], check=True)
        assert got(tmp_path) == [1] * WORKERS
        (tmp_path / "end").touch()
        assert step.wait(timeout=30) == 128 + signal.SIGUSR1
    finally:
        unpadded.end(step)


@pytest.mark.usefixtures("form")
def test_a_signal_ahead_of_the_end_of_the_job(
    unpadded: Cluster, tmp_path: Path
) -> None:
    """Slurm looks every 30 seconds, and sends up to a minute early."""
    small = {"USR1@120": "USR1@110", "=gpu train.py": f"=2 {SCRIPT} {tmp_path} 1.5"}
    script = replaced(block("docs/signals.md", "#SBATCH").text, small)
    done = unpadded.sbatch(script, "-N2", ONE_TASK, "--time=2", env=ENVIRON)
    assert done.returncode == 0, done.output
    assert column(read_workers(done.output), "got") == [(["SIGUSR1"],)] * WORKERS

"""Signals ahead of the end of a job, as the documentation has them."""

from __future__ import annotations

import shlex
import sys

import pytest

from tests.support.cluster.commands import ENVIRON, FORMS, SCRIPTS, column
from tests.support.cluster.mpi import MPICH_4, OPENMPI, OPENMPI_4
from tests.support.pages.blocks import block, replaced
from tests.support.patience import until

SCRIPT = str(SCRIPTS / "note_signals.py")
WORKERS = 4
SMALL = {
    " --partition=PARTITION": "",
    "--gres=gpu:4 --cpus-per-task=48": "--cpus-per-task=1",
}


@pytest.mark.parametrize(
    ("mpi", "form"),
    [(OPENMPI_4, "exec"), (MPICH_4, "fork")],
    indirect=["mpi"],
    ids=str,
)
def test_a_signal_from_the_script_of_a_job_of_pbs(bare, mpi, form, tmp_path):
    """As in the documentation; mpirun and mpiexec pass it on."""
    by_node, hosts = "-n $nodes -ppn 1", ["n9", "n10"]
    if mpi in OPENMPI:
        by_node, hosts = "-np $nodes --map-by ppr:1:node", ["n9:2", "n10:2"]
    start = f"{shlex.join(mpi.command(bare, *hosts))} {by_node}"
    node_file = tmp_path / "nodes"
    node_file.write_text("n9\nn9\nn10\nn10\n")
    environ = ENVIRON | FORMS[form] | {
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
    script = replaced(block("docs/checkpoints.md", "#PBS").text, small)
    tmp_path.chmod(0o777)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    done = bare.run(["bash", "-euc", script], host="n9", env=environ)
    assert done.returncode == 0, done.stderr
    assert column(done, "got") == [(["SIGUSR1"],)] * WORKERS, done.stdout


def test_a_signal_ahead_of_the_end_of_the_job(unpadded, tmp_path):
    """Slurm looks every 30 seconds, and sends up to a minute early.

    So the job has an hour, until all workers are ready.
    """
    small = SMALL | {"=gpu train.py": f"=2 {SCRIPT} {tmp_path} 1.5"}
    script = replaced(block("docs/checkpoints.md", "--signal=USR1").text, small)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    job = unpadded.submit(script, "-N2", "--time=60", env=ENVIRON, cwd=tmp_path)
    until(lambda: len([*tmp_path.glob("*.ready")]) == WORKERS, lambda: job.outputs)
    end = ["scontrol", "update", f"JobId={job.job}", "EndTime=now+120"]
    unpadded.run(end, check=True)
    done = unpadded.wait(job)
    assert column(done, "got") == [(["SIGUSR1"],)] * WORKERS, done.output

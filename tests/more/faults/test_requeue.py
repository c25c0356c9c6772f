"""A job that loses more nodes than it has spares is requeued: examples/requeue."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.support import ROOT
from tests.support.cluster.commands import FORMS, require
from tests.support.cluster.real_job import MARK, kill, processes_of
from tests.support.cluster.testbed import Cluster, missing
from tests.support.pages.blocks import block, replaced
from tests.support.patience import NEVER_S, until
from tests.support.stock.trainings import alone, loss_of

SCRIPT = "examples/requeue/checkpoint_ddp.py"
STEPS = 50
# After its first step, and checkpoint, the first run waits to be killed.
PAUSE = f"$(({NEVER_S} * !SLURM_RESTART_COUNT))"

# Three of five, so that there are three again without the two that are lost.
NODES = ("n1", "n2", "n3", "n4", "n5")
LOST = ["n2", "n3"]  # not the first node, where the job script runs
# What a centre's job script has, and this cluster has not.
ONE_CPU = {
    " --partition=PARTITION": "",
    "--gres=gpu:4 --cpus-per-task=48": "--cpus-per-task=1",
    "--nproc_per_node=gpu": "",
}
SMALL = ONE_CPU | {"--nodes=4": "--nodes=3"}

# Checkpoints after each step.
SOON = {
    "--checkpoint ": f"--steps {STEPS} --save-every 1 --pause {PAUSE} --checkpoint "
}
# One thread, for workers that share two cores; forks of one import.
ENV = {"OMP_NUM_THREADS": "1"} | FORMS["fork"]

pytestmark = pytest.mark.xdist_group("requeue")


@pytest.fixture(scope="module")
def cluster():
    require(missing())
    with Cluster(NODES, management="open") as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path):
    """Return a user's folder: the examples, and an environment."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def submit(cluster, folder, instead):
    """Submit the job script of the example, with some of its words replaced."""
    _, path = block("examples/README.md", "sbatch").text.split()
    script = replaced((ROOT / path).read_text(), instead)
    return cluster.submit(script, env=ENV | {MARK: str(folder)}, cwd=folder)


def ended(cluster, folder, job):
    """Return the end of a job, the outcome of each of its runs, and Slurm's fields."""
    batch = cluster.wait(job)
    files = sorted(folder.glob(f"outcome.{job.job}.*.json"))
    shown = cluster.run(["scontrol", "show", "job", job.job], check=True).stdout
    fields = dict(word.partition("=")[::2] for word in shown.split())
    return batch, [json.loads(file.read_text()) for file in files], fields


def test_a_job_that_has_lost_two_nodes_is_requeued(cluster, folder):
    job = submit(cluster, folder, SMALL | SOON)
    until((folder / f"checkpoint.{job.job}.pt").exists, lambda: job.outputs)
    kill(processes_of(str(folder), 1, 2))
    # While Slurm holds the job back.
    words = ("--checkpoint=alone.pt", f"--steps={STEPS}")
    reference = loss_of(alone("requeue/checkpoint_ddp.py", *words, cwd=folder))
    batch, outcomes, fields = ended(cluster, folder, job)
    shown = f"{outcomes}\n{batch.output}"
    assert batch.returncode == 0, shown
    assert [each["outcome"] for each in outcomes] == ["nodes failed", "done"], shown
    assert [each["exclude"] for each in outcomes] == [LOST, []], shown
    assert fields["Restarts"] == "1", shown
    assert outcomes[1]["launch_id"] == f"{batch.job_id}.0-r1", shown
    # Without these nodes, and from its checkpoint.
    assert fields["NodeList"] == "n[1,4-5]", shown
    begins = re.findall(r"^2 workers, from step (\d+) on$", batch.output, re.MULTILINE)
    assert begins[0] == "0", shown
    assert begins[-1] == "1", shown
    assert loss_of(batch.output) == pytest.approx(reference, rel=1e-4), shown


def test_a_job_whose_script_fails_is_not_requeued(cluster, folder):
    one = {"--nodes=4": "--nodes=1", "--hpc-spares=1": "", SCRIPT: "--no-python false"}
    job = submit(cluster, folder, SMALL | one | {"--max-restarts=20": ""})
    batch, outcomes, fields = ended(cluster, folder, job)
    assert batch.returncode == 1, batch.output
    assert [each["outcome"] for each in outcomes] == ["script failed"], batch.output
    assert fields["Restarts"] == "0", batch.output


def test_a_job_that_requeues_itself_before_its_time_limit(cluster, folder):
    """Without spares; Slurm's signal ahead of the end is sent by hand."""
    small = ONE_CPU | SOON | {"--nodes=4": "--nodes=2"}
    script = replaced(block("docs/checkpoints.md", "--signal=B:USR1").text, small)
    job = cluster.submit(script, env=ENV | {MARK: str(folder)}, cwd=folder)
    until((folder / f"checkpoint.{job.job}.pt").exists, lambda: job.outputs)
    cluster.run(["scancel", "--signal=USR1", "--batch", job.job], check=True)
    batch, _, fields = ended(cluster, folder, job)
    assert batch.returncode == 0, batch.output
    assert fields["Restarts"] == "1", batch.output
    begins = re.findall(r"^2 workers, from step (\d+) on$", batch.output, re.MULTILINE)
    assert [int(step) > 0 for step in begins] == [False, True], batch.output

"""A job that loses more nodes than it has spares is requeued: examples/requeue."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from commands import ENVIRON, FORMS, ROOT, require
from jobs import Job
from pages import block, replaced
from testbed import Batch, Cluster, Submitted, missing
from waiting import NEVER_S, PATIENCE, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCRIPT = "examples/requeue/checkpoint_ddp.py"
STEPS = 50
# After its first step, and checkpoint, the first run waits to be killed.
PAUSE = f"$(({NEVER_S} * !SLURM_RESTART_COUNT))"

# Three of five, so that there are three again without the two that are lost.
NODES = ("n1", "n2", "n3", "n4", "n5")
LOST = ["n2", "n3"]  # not the first node, where the job script runs
SMALL = {"--nodes=4": "--nodes=3", "--gres=gpu:4": "", "--nproc_per_node=gpu": ""}

# One thread, for workers that share two cores; forks of one import.
ENV = {"OMP_NUM_THREADS": "1"} | FORMS["fork"]

pytestmark = pytest.mark.xdist_group("requeue")


class Ended(NamedTuple):
    """A job that has ended.

    Attributes:
        batch: Its end.
        outcomes: How each run of it has ended, as the launcher says.
        fields: What Slurm says of it.
    """

    batch: Batch
    outcomes: list[dict[str, Any]]
    fields: dict[str, str]


class Jobs(NamedTuple):
    """Both jobs of this module.

    Attributes:
        requeued: Two of its nodes were lost.
        failed: Its script fails.
        reference: The loss of a training that nothing has interrupted.
    """

    requeued: Ended
    failed: Ended
    reference: float


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    require(missing())
    with Cluster(NODES, management="open") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Run both jobs; what can be done meanwhile is done while Slurm holds one back."""
    folder = tmp_path_factory.mktemp("requeue")
    # What a user has there: the examples, and an environment.
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / ".venv").symlink_to(sys.prefix)

    # With the folder, by which its processes are found.
    small = f"--steps {STEPS} --save-every 1 --pause {PAUSE} --checkpoint {folder}/"
    job = submit(cluster, folder, {"--checkpoint ": small})
    until((folder / f"checkpoint.{job.job}.pt").exists, lambda: job.outputs)
    Job(cluster, NODES[:3], folder, "fork").kill(1, 2)

    wrong = {SCRIPT: "--no-python false", "--max-restarts=20": "--max-restarts=1"}
    failed = submit(cluster, folder, wrong)
    reference = alone(folder)
    return Jobs(ended(cluster, folder, job), ended(cluster, folder, failed), reference)


def submit(cluster: Cluster, folder: Path, instead: dict[str, str]) -> Submitted:
    """Submit the job script of the example, with some of its words replaced."""
    _, path = block("examples/README.md", "sbatch").text.split()
    script = replaced((ROOT / path).read_text(), SMALL | instead)
    return cluster.submit(script, env=ENV, cwd=folder)


def ended(cluster: Cluster, folder: Path, job: Submitted) -> Ended:
    """Wait for the end of a job."""
    batch = cluster.wait(job)
    files = sorted(folder.glob(f"outcome.{job.job}.*.json"))
    shown = cluster.run(["scontrol", "show", "job", job.job], check=True).stdout
    fields = dict(word.partition("=")[::2] for word in shown.split())
    return Ended(batch, [json.loads(file.read_text()) for file in files], fields)


def alone(folder: Path) -> float:
    """Train in one process, and return the loss."""
    world = dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--checkpoint=alone.pt", f"--steps={STEPS}"],
        cwd=folder,
        env=ENVIRON | ENV | world | {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return loss(done.stdout)


def loss(output: str) -> float:
    """Return the loss that was printed, once."""
    (found,) = re.findall(r"^loss after \d+ steps: (\S+)$", output, re.MULTILINE)
    return float(found)


def test_a_job_that_has_lost_two_nodes_is_requeued(jobs: Jobs) -> None:
    batch, outcomes, fields = jobs.requeued
    assert batch.returncode == 0, batch.output
    shown = f"{outcomes}\n{batch.output}"
    assert [each["outcome"] for each in outcomes] == ["nodes failed", "done"], shown
    assert [each["exclude"] for each in outcomes] == [LOST, []], shown
    assert fields["Restarts"] == "1", shown
    assert outcomes[1]["launch_id"] == f"{batch.job_id}.0-r1", shown

    # Without these nodes.
    assert fields["NodeList"] == "n[1,4-5]", batch.output


def test_it_goes_on_from_its_checkpoint(jobs: Jobs) -> None:
    output = jobs.requeued.batch.output
    begins = re.findall(r"^2 workers, from step (\d+) on$", output, re.MULTILINE)
    assert begins[0] == "0", output
    assert begins[-1] == "1", output
    assert loss(output) == pytest.approx(jobs.reference, rel=1e-4)


def test_a_job_whose_script_fails_is_not_requeued(jobs: Jobs) -> None:
    batch, outcomes, fields = jobs.failed
    assert batch.returncode == 1, batch.output
    assert [each["outcome"] for each in outcomes] == ["script failed"], batch.output
    assert fields["Restarts"] == "0", batch.output

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


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    require(missing())
    with Cluster(NODES, management="open") as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a user has there: the examples, and an environment."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def submit(cluster: Cluster, folder: Path, instead: dict[str, str]) -> Submitted:
    """Submit the job script of the example, with some of its words replaced."""
    _, path = block("examples/README.md", "sbatch").text.split()
    script = replaced((ROOT / path).read_text(), instead)
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


def test_a_job_that_has_lost_two_nodes_is_requeued(
    cluster: Cluster, folder: Path
) -> None:
    # With the folder, by which its processes are found.
    small = f"--steps {STEPS} --save-every 1 --pause {PAUSE} --checkpoint {folder}/"
    job = submit(cluster, folder, SMALL | {"--checkpoint ": small})
    until((folder / f"checkpoint.{job.job}.pt").exists, lambda: job.outputs)
    Job(cluster, NODES[:3], folder, "fork").kill(1, 2)
    reference = alone(folder)  # while Slurm holds the job back
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
    assert loss(batch.output) == pytest.approx(reference, rel=1e-4), shown


def test_a_job_whose_script_fails_is_not_requeued(
    cluster: Cluster, folder: Path
) -> None:
    one = {"--nodes=4": "--nodes=1", "--hpc-spares=1": "", SCRIPT: "--no-python false"}
    job = submit(cluster, folder, SMALL | one | {"--max-restarts=20": ""})
    batch, outcomes, fields = ended(cluster, folder, job)
    assert batch.returncode == 1, batch.output
    assert [each["outcome"] for each in outcomes] == ["script failed"], batch.output
    assert fields["Restarts"] == "0", batch.output

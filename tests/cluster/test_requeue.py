"""A job that loses more nodes than it has spares is requeued: examples/requeue."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from commands import ENVIRON, FORMS, ROOT, require
from jobs import Job
from testbed import Cluster, Submitted, missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXAMPLE = ROOT / "examples" / "requeue"
SCRIPT = "examples/requeue/checkpoint_ddp.py"

# Four nodes of six, so that there are four again without the two that are lost.
NODES = tuple(f"n{number}" for number in range(1, 7))
LOST = ("n2", "n3")
STEPS = 50

# One thread, for workers that share two cores; forks of one import.
ENV = {"OMP_NUM_THREADS": "1"} | FORMS["fork"]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    require(missing())
    with Cluster(NODES, management="open") as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with what a user has in it: the examples, and an environment."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def submit(
    cluster: Cluster, folder: Path, *options: str, instead: dict[str, str]
) -> Submitted:
    """Submit the job script, for nodes without GPUs."""
    script = (EXAMPLE / "job.sh").read_text()
    for there, other in {"--nproc_per_node=gpu": "", **instead}.items():
        assert there in script
        script = script.replace(there, other)
    return cluster.submit(script, *options, env=ENV, cwd=folder)


def outcome(folder: Path, job: Submitted, restarts: int) -> dict[str, Any]:
    """Return how a run of a job has ended."""
    file = folder / f"outcome.{job.job}.{restarts}.json"
    return dict(json.loads(file.read_text()))


def shown(cluster: Cluster, job: Submitted) -> dict[str, str]:
    """Return what Slurm says of a job."""
    text = cluster.run(["scontrol", "show", "job", job.job], check=True).stdout
    return dict(word.partition("=")[::2] for word in text.split())


def alone(folder: Path) -> str:
    """Train in one process, and return the last line."""
    world = dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--checkpoint=alone.pt", f"--steps={STEPS}"],
        cwd=folder,
        env=ENVIRON | ENV | world | {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()[-1]


def test_a_job_that_lost_two_nodes_goes_on_without_them(
    cluster: Cluster, folder: Path
) -> None:
    small = {
        "--gres=gpu:4": "",
        # With the folder, by which its processes are found.
        "--checkpoint ": f"--steps {STEPS} --pause 0.05 --checkpoint {folder}/",
    }
    job = submit(cluster, folder, instead=small)
    checkpoint = folder / f"checkpoint.{job.job}.pt"
    end = time.monotonic() + 120
    while not checkpoint.exists():
        assert time.monotonic() < end, job.outputs
        time.sleep(0.05)
    nodes = Job(cluster, NODES[:4], folder, "fork")
    # Not the first node: there the script itself runs.
    processes = [process for node in (1, 2) for process in nodes.processes(node)]
    assert len(processes) >= 4  # agents, and their workers
    for process in processes:
        process.kill()
    expected = alone(folder)  # while Slurm holds the job back

    done = cluster.wait(job)
    assert done.returncode == 0, done.output
    first, second = (outcome(folder, job, run) for run in (0, 1))
    assert (first["outcome"], first["exclude"]) == ("nodes failed", [*LOST])
    assert (second["outcome"], second["exclude"]) == ("done", [])
    assert second["launch_id"] == f"{job.job}.0-r1"
    fields = shown(cluster, job)
    assert fields["Restarts"] == "1"
    assert fields["NodeList"] == "n[1,4-6]"

    begins = re.findall(r"^3 workers, from step (\d+) on$", done.output, re.MULTILINE)
    assert [begins[0], len(begins)] == ["0", 2], done.output
    assert 0 < int(begins[1]) < STEPS
    assert done.output.splitlines().count(expected) == 1, done.output


def test_a_job_whose_script_fails_is_not_requeued(
    cluster: Cluster, folder: Path
) -> None:
    wrong = {SCRIPT: "--no-python false", "--max-restarts=20": "--max-restarts=1"}
    job = submit(cluster, folder, "--nodes=3", instead=wrong)
    done = cluster.wait(job)
    assert done.returncode == 1
    assert outcome(folder, job, 0)["outcome"] == "script failed"
    assert shown(cluster, job)["Restarts"] == "0"

"""``--hpc-bind`` on this machine: what each of two workers may use."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes import run_launcher

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.processes import Result

ALL = sorted(os.sched_getaffinity(0))

needs_two_cpus = pytest.mark.skipif(len(ALL) < 2, reason="two workers need two CPUs")

# Writes what a worker has, and ends with the exit code of its attempt.
SCRIPT = """
import json, os, sys, time
import torch
from torch.utils.data import DataLoader

def affinity(_):
    return sorted(os.sched_getaffinity(0))

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
loader = DataLoader([0], num_workers=1, collate_fn=affinity, worker_init_fn=None)
found = {
    "cpus": sorted(os.sched_getaffinity(0)),
    "loader": list(loader)[0],
    "threads": torch.get_num_threads(),
    "variable": os.environ.get("OMP_NUM_THREADS"),
    # The agent, which has threads for the workers' stderr; or the fork server.
    "parent": [
        sorted(os.sched_getaffinity(int(thread)))
        for thread in os.listdir(f"/proc/{os.getppid()}/task")
    ],
}
files = [f"{sys.argv[1]}/{attempt}-{number}.json" for number in range(2)]
with open(files[int(rank)] + ".new", "w") as file:
    json.dump(found, file)
os.rename(file.name, files[int(rank)])
while not all(map(os.path.exists, files)):  # or the first to fail would end the other
    time.sleep(0.01)
sys.exit(sys.argv[2:3] == [attempt])
"""


def launch(*words: str, front: tuple[str, ...] = ()) -> Result:
    return run_launcher("--nproc_per_node=2", *words, before=front)


def seen(folder: Path, attempt: int = 0) -> list[dict[str, Any]]:
    return [
        json.loads((folder / f"{attempt}-{rank}.json").read_text()) for rank in (0, 1)
    ]


def assert_bound(folder: Path, *options: str) -> None:
    """See that each worker has CPUs of its own, also after a restart.

    The workers of its DataLoader have the same CPUs.
    """
    (folder / "script.py").write_text(SCRIPT)
    done = launch(
        *("--hpc-bind=even", "--hpc-omp-threads=auto", "--max-restarts=1", *options),
        *(str(folder / "script.py"), str(folder), "0"),
    )
    assert done.code == 0, done.err
    half = len(ALL) // 2
    for attempt in (0, 1):
        workers = seen(folder, attempt)
        masks = [worker["cpus"] for worker in workers]
        assert sorted(cpu for mask in masks for cpu in mask) == ALL
        for worker, mask in zip(workers, masks, strict=True):
            assert worker["loader"] == mask
            # Its main thread may be about to start the next worker.
            assert worker["parent"].count(ALL) >= len(worker["parent"]) - 1
            assert len(mask) in {half, half + 1}
            assert worker["threads"] == len(mask)
            assert worker["variable"] == str(len(mask))
    assert "HPC169" not in done.err

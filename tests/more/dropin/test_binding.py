"""``--hpc-bind`` with the installed torch: workers by exec, and as forks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from side_by_side import clean_environ

if TYPE_CHECKING:
    from pathlib import Path

ALL = sorted(os.sched_getaffinity(0))
FORMS = {"exec": [], "fork": ["--hpc-preload=torch"]}

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

pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="two workers need two CPUs")


def launch(*words: str, front: tuple[str, ...] = ()) -> tuple[str, int]:
    done = subprocess.run(
        [*front, sys.executable, "-m", "torchrun_hpc", "--nproc_per_node=2", *words],
        env={k: v for k, v in clean_environ().items() if k != "OMP_NUM_THREADS"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stderr, done.returncode


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return str(file)


def seen(folder: Path, attempt: int = 0) -> list[dict[str, Any]]:
    return [
        json.loads((folder / f"{attempt}-{rank}.json").read_text()) for rank in (0, 1)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_each_worker_has_cpus_of_its_own(
    form: str, script: str, tmp_path: Path
) -> None:
    """After a restart, too; and a DataLoader's workers have those of theirs."""
    stderr, code = launch(
        "--hpc-bind=even",
        "--hpc-omp-threads=auto",
        "--max-restarts=1",
        *FORMS[form],
        *(script, str(tmp_path), "0"),
    )
    assert code == 0, stderr
    half = len(ALL) // 2
    for attempt in (0, 1):
        workers = seen(tmp_path, attempt)
        masks = [worker["cpus"] for worker in workers]
        assert sorted(cpu for mask in masks for cpu in mask) == ALL
        for worker, mask in zip(workers, masks, strict=True):
            assert worker["loader"] == mask
            # Its main thread may be about to start the next worker.
            assert worker["parent"].count(ALL) >= len(worker["parent"]) - 1
            assert len(mask) in {half, half + 1}
            assert worker["threads"] == len(mask)
            assert worker["variable"] == str(len(mask))
    assert "HPC169" not in stderr


def test_too_few_cpus_are_shared(script: str, tmp_path: Path) -> None:
    front = ("taskset", "-c", str(ALL[-1]))
    words = ("--hpc-bind=gpu", "--hpc-preload=torch", script, str(tmp_path))
    stderr, code = launch(*words, front=front)
    assert code == 0, stderr
    assert [worker["cpus"] for worker in seen(tmp_path)] == [ALL[-1:]] * 2
    assert "HPC092 2 workers share 1 CPU" in stderr
    assert "--hpc_bind=gpu binds no worker: each needs a CPU" in stderr
    assert "HPC221" not in stderr


FORK = """
import os, sys
from torchrun_hpc.launching.preloading import Preloaded
from torchrun_hpc.planning.inputs import Preload
from torchrun_hpc.setting import Setting
from torchrun_hpc.worker import SplitOff

variables = {"OMP_NUM_THREADS": "1"}
preloaded = Preloaded(Preload(("torch",), Setting("torch", "--hpc-preload"), variables))
serve = None
try:
    preloaded.start(["threads.py"])
except SplitOff as split:
    serve = split.serve
if serve is not None:
    serve()
    sys.exit()
preloaded.check({**os.environ, **variables}, is_reporter=True)
for number in ("1", "3", "x"):
    command = [sys.executable, "-u", "threads.py"]
    environ = {**os.environ, "OMP_NUM_THREADS": number}
    preloaded.fork(command, environ, None, None).wait()
"""


def test_a_fork_has_its_own_number_of_threads(tmp_path: Path) -> None:
    """Torch has read the variable when it was imported, for all workers."""
    text = "import torch\nprint(torch.get_num_threads())\n"
    (tmp_path / "threads.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", FORK],
        cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["1", "3", "1"], done.stderr


def test_the_dry_run_shows_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchrun_hpc", "--nproc_per_node=2",
         "--hpc-bind=even", "--hpc-dry-run", "train.py"],
        env=clean_environ(), capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["CPUs", "even", "--hpc_bind"] in lines
    start = lines.index(["worker", "CPUs", "where", "because"])
    assert [line[0] for line in lines[start + 1 : start + 3]] == ["0", "1"]
    assert lines[start + 1][-4:] == ["part", "1", "of", "2"]
    assert any(line[:1] == ["bind_workers"] for line in lines)

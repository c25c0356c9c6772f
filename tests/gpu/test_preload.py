"""Workers that are forks use CUDA and NCCL. Needs a GPU; see CONTRIBUTING.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("all_reduce.py")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no GPU for CUDA"
)


def launch(
    *options: str, script: Path = SCRIPT, words: tuple[str, ...] = ()
) -> tuple[list[dict], str]:
    """Launch; return what the workers printed, and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "torchrun_hpc", *options, str(script), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if "Duplicate GPU" in done.stderr + done.stdout:
        pytest.skip("NCCL does not let two workers share a GPU")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda seen: seen["rank"]), done.stderr


def check(seen: list[dict], workers: int) -> None:
    total = workers * (workers + 1) / 2
    assert [worker["rank"] for worker in seen] == list(range(workers))
    assert {worker["sum"] for worker in seen} == {total}
    assert {worker["product"] for worker in seen} == {256**3 * total**2}


@pytest.mark.parametrize("form", [["--hpc-preload=none"], []], ids=["exec", "fork"])
@pytest.mark.parametrize("count", ["gpu", "1"])
def test_a_worker_for_each_gpu(form: list[str], count: str) -> None:
    seen, errors = launch(*form, f"--nproc-per-node={count}")
    check(seen, torch.cuda.device_count() if count == "gpu" else 1)
    assert "HPC169" not in errors


def test_two_workers_on_one_gpu() -> None:
    seen, errors = launch("--hpc-preload=torch", "--nproc-per-node=2")
    check(seen, 2)
    assert "HPC169" not in errors


def test_a_restart() -> None:
    seen, errors = launch(
        "--hpc-preload=torch", "--nproc-per-node=1", "--max-restarts=1", words=("fail",)
    )
    check(seen, 1)
    assert seen[0]["restarts"] == "1"
    assert "HPC169" not in errors


def test_a_module_that_asks_for_gpus_when_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "eager.py").write_text("import torch\ntorch.cuda.is_available()\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.read_text())
    preload = ("--hpc-preload=torch,eager", "--nproc-per-node=1")
    seen, errors = launch(*preload, script=script)
    check(seen, 1)
    assert "HPC169" in errors
    assert "the import initialised a device" in errors

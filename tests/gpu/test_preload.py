"""Workers that are forks use CUDA and NCCL. Needs a GPU; see CONTRIBUTING.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu import GPUS, forms, needs_gpu, run

SCRIPT = Path(__file__).with_name("all_reduce.py")

pytestmark = needs_gpu


def launch(
    *options: str, script: Path = SCRIPT, words: tuple[str, ...] = ()
) -> tuple[list[dict[str, Any]], str]:
    """Launch; return what the workers printed, and stderr."""
    done = run(*options, script, *words)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda seen: seen["rank"]), done.stderr


def check(seen: list[dict[str, Any]], workers: int) -> None:
    total = workers * (workers + 1) / 2
    assert [worker["rank"] for worker in seen] == list(range(workers))
    assert {worker["sum"] for worker in seen} == {total}
    assert {worker["product"] for worker in seen} == {256**3 * total**2}


@forms
@pytest.mark.parametrize("count", ["gpu", "1"])
def test_a_worker_for_each_gpu(form: list[str], count: str) -> None:
    seen, errors = launch(*form, f"--nproc-per-node={count}")
    check(seen, GPUS if count == "gpu" else 1)
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

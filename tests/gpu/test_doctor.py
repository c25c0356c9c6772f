"""The doctor's collectives on GPUs, over NCCL. Needs two GPUs; see CONTRIBUTING.md."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="this machine has no two GPUs for CUDA"
)


def test_collectives_over_nccl(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "torchrun_hpc.doctor", "--nproc_per_node=gpu"]
    done = subprocess.run(
        [*command, "--max-bytes=64M", f"--json={file}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["backend"] == "nccl"
    assert {row["wrong"] for row in report["collectives"]} == {0}
    workers = report["workers"]
    assert len(workers) == torch.cuda.device_count()
    assert {worker["dtype"] for worker in workers} == {"bfloat16"}
    assert all(worker["transport"] for worker in workers)
    assert all(worker["norm"] > 0 and worker["wrong"] == 0 for worker in workers)
    computed = {(w["device"], digest) for w in workers for digest in w["digests"]}
    assert len(computed) == len({worker["device"] for worker in workers})
    (node,) = report["nodes"]
    assert all(gpu["memory"] > 0 for gpu in node["gpus"])
    assert node["torch"]["gpus"] == len(node["gpus"]) == torch.cuda.device_count()

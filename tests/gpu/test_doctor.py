"""The doctor on GPUs, over NCCL if there are two; see CONTRIBUTING.md."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.support.gpu import GPUS, forms, needs_gpu, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs_gpu

HOLDS = """
import torch
taken = torch.empty(2**32, dtype=torch.uint8, device="cuda")
print("taken", flush=True)
input()
"""


def examine(folder: Path, *options: str, code: int) -> dict[str, Any]:
    """Examine this machine; return the report."""
    file = folder / "report.json"
    words = ("--nproc_per_node=gpu", *options, f"--json={file}")
    run(*words, module="torchrun_hpc.doctor", code=code)
    report: dict[str, Any] = json.loads(file.read_text())
    return report


@forms
def test_all_gpus(form: list[str], tmp_path: Path) -> None:
    report = examine(tmp_path, "--max-bytes=64M", *form, code=0)
    workers = report["workers"]
    assert (report["backend"], len(workers)) == ("nccl", GPUS)
    assert {worker["dtype"] for worker in workers} == {"bfloat16"}
    assert all(worker["norm"] > 0 and worker["wrong"] == 0 for worker in workers)
    computed = {(w["device"], digest) for w in workers for digest in w["digests"]}
    assert len(computed) == len({worker["device"] for worker in workers})
    is_group = GPUS > 1  # one worker has nobody to communicate with
    assert bool(report["collectives"]) is is_group
    assert not any(row["wrong"] for row in report["collectives"])
    assert all(bool(worker["transport"]) is is_group for worker in workers)
    (node,) = report["nodes"]
    assert all(gpu["memory"] > 0 for gpu in node["gpus"])
    assert node["torch"]["gpus"] == len(node["gpus"]) == GPUS


def test_a_gpu_that_another_program_uses(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout
        assert other.stdin
        other.stdout.readline()
        try:
            report = examine(tmp_path, "--max-bytes=8", code=1)
        finally:
            other.stdin.close()
    (finding,) = [each for each in report["findings"] if each["is_suspect"]]
    assert (finding["code"], finding["nodes"]) == ("HPC187", [0])
    assert f"pid {other.pid}" in finding["text"]

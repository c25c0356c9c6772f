"""NCCL's watchdog ends a worker, and the report says who did not come. Needs GPUs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.gpu import GPUS, forms, needs_gpu, run

SCRIPT = Path(__file__).with_name("hangs.py")
pytestmark = needs_gpu


@forms
def test_a_collective_that_times_out(form: list[str]) -> None:
    """Without a fork, torch's own dump has the collectives."""
    done = run(*form, f"--nproc-per-node={GPUS}", SCRIPT, code=1)
    report = done.stderr.partition("error[HPC125]")[2]
    assert "Watchdog caught collective operation timeout" in report, done.stderr
    assert re.search(r"rank.* at hangs.py:\d+", report), report
    if GPUS > 1:
        late = rf"1 rank \({GPUS - 1}\)"
        assert re.search(rf"{late} did not call it, its last was all_reduce", report)
        assert re.search(rf"{late}: late at hangs.py:\d+", report)

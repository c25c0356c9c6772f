"""Each worker is started on its own CPUs, and with as many threads."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.stock.inside_torch import (
    HANDLER_TAKES,
    NO_HOOKS,
    make_plan,
    start_worker,
)
from torchrun_hpc.agent.patches.agent import BindWorkers, extend
from torchrun_hpc.errors import Setting
from torchrun_hpc.planning.workers import Binding, Share, Workers

if TYPE_CHECKING:
    from pathlib import Path

ALL = sorted(os.sched_getaffinity(0))
PRINT = "import os; print(len(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"


def started(rank: int, file: Path, *, environ_rank: int) -> list[str]:
    """Start a worker, and return its number of CPUs, and of threads."""
    environ = {"LOCAL_RANK": str(environ_rank), "OMP_NUM_THREADS": "7"}
    given = {"env": environ, "stdout": str(file), "local_rank_id": rank}
    worker = start_worker(sys.executable, "-c", PRINT, **given)
    assert worker.proc.wait() == 0
    return file.read_text().split()


@pytest.mark.usefixtures("torch_again")
@pytest.mark.parametrize("sets_threads", [True, False])
@pytest.mark.parametrize("is_virtual", [True, False])
def test_cpus_and_threads(tmp_path, sets_threads, is_virtual):
    if is_virtual and "local_rank_id" not in HANDLER_TAKES:
        pytest.skip("this torch has no --virtual-local-rank")
    shares = tuple(Share(tuple(cpus), "", "") for cpus in (ALL[:1], ALL))
    binding = Binding(Setting("gpu", ""), shares, sets_threads=sets_threads)
    extend([BindWorkers], make_plan(workers=Workers(binding=binding)), NO_HOOKS)
    for rank, share in enumerate(shares):
        environ_rank = 0 if is_virtual else rank
        found = started(rank, tmp_path / f"{rank}", environ_rank=environ_rank)
        number = str(len(share.cpus))
        assert found == [number, number if sets_threads else "7"]
        assert sorted(os.sched_getaffinity(0)) == ALL

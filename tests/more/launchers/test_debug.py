"""--hpc-debug: what the user has set, and faults; see core/test_debug.py, too."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from commands import (
    ENVIRON,
    FIRST_TWO,
    HPC,
    ONE_TASK,
    ROOT,
    WORLD,
    column,
    lines,
    read_workers,
)

if TYPE_CHECKING:
    from testbed import Cluster

NODE = re.compile(r"n(9|10|11) node (0|1|2): (rank ([0-3]): )?")


def test_what_the_user_has_set_is_kept(unpadded: Cluster) -> None:
    environ = ENVIRON | {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_LOGS": "+dynamo"}
    done = unpadded.srun("-N1", *HPC, "--hpc-debug", "--tee=0", WORLD, env=environ)
    assert done.returncode == 0, done.stderr
    kept = column(
        *(read_workers(done), "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS", "PET_HPC_DEBUG"),
        "TORCH_DISTRIBUTED_DEBUG",
    )
    assert kept == [("ERROR", "+dynamo", "", "INFO")]
    assert "TCPStore" not in done.stderr
    assert all(NODE.match(line) for line in lines(done.stderr)), done.stderr


def test_a_fault_has_the_same_exit_code(unpadded: Cluster) -> None:
    done = unpadded.srun(*FIRST_TWO, ONE_TASK, *HPC, "--hpc-debug", "--nnodes=3", WORLD,
                         env=ENVIRON)  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in lines(done.stderr) if "hpc: error" in line]
    assert line.startswith("n9 node 0: torchrun_hpc: error: HPC070 ")


def test_a_failing_script(unpadded: Cluster) -> None:
    done = unpadded.srun("-N1", *HPC, "--hpc-debug", "--no-python", "python", "-c",
                         "1/0", env=ENVIRON, cwd=ROOT)  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "ChildFailedError" in done.stderr
    ours = [line for line in lines(done.stderr) if not line.startswith("srun: error")]
    assert all(line.startswith("n9 node 0: ") for line in ours), ours

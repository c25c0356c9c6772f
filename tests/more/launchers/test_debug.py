"""--hpc-debug with explicit values, and with faults; see also core/test_debug.py."""

from __future__ import annotations

import re

from tests.support.cluster.commands import column, lines
from tests.support.cluster.real_job import launch

NODE = re.compile(r"n(9|10|11) node (0|1|2): (rank ([0-3]): )?")


def test_what_the_user_has_set_is_kept(unpadded):
    environ = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_LOGS": "+dynamo"}
    done = launch(unpadded, "--hpc-debug", "--tee=0", nodes=1, environ=environ)
    names = ("TORCH_LOGS", "PET_HPC_DEBUG", "TORCH_DISTRIBUTED_DEBUG")
    assert column(done, "TORCH_CPP_LOG_LEVEL", *names) == [
        ("ERROR", "+dynamo", "", "INFO")
    ]
    assert "TCPStore" not in done.stderr
    assert all(NODE.match(line) for line in lines(done.stderr))


def test_a_fault_has_the_same_exit_code(unpadded):
    done = launch(unpadded, "--hpc-debug", "--nnodes=3")
    assert done.returncode == 2
    (line,) = [line for line in lines(done.stderr) if "hpc: error" in line]
    assert line.startswith("n9 node 0: torchrun_hpc: error[HPC070]: ")


def test_a_failing_script(unpadded):
    script = ("--no-python", "python", "-c", "1/0")
    done = launch(unpadded, "--hpc-debug", nodes=1, script=script)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "ChildFailedError" in done.stderr
    ours = [line for line in lines(done.stderr) if not line.startswith("srun: error")]
    assert all(line.startswith("n9 node 0: ") for line in ours), ours

"""--hpc-debug on real nodes: everything is logged, and each line says where."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from commands import (
    ALL_REDUCE,
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


def test_every_line_names_host_and_rank(unpadded: Cluster) -> None:
    environ = ENVIRON | {"PET_HPC_DEBUG": "1"}  # others type the option
    done = unpadded.srun(*FIRST_TWO, ONE_TASK, *HPC, "--nproc_per_node=2", ALL_REDUCE,
                         env=environ)  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = lines(done.stderr)
    found = [NODE.match(line) for line in seen]
    assert all(found), [x for x, m in zip(seen, found, strict=True) if not m]
    # Of all agents, the Python and the C++ side; of all workers.
    for rank, host in enumerate(("n9", "n10")):
        own = [line for line in seen if line.startswith(f"{host} node {rank}: ")]
        for part in (
            "launcher/api.py",
            "rendezvous/client.py",
            "TCPStore",
            "socket.cpp",
        ):
            assert any(part in line for line in own), (host, part)
    assert {match[4] for match in found if match and match[4]} == set("0123")
    assert "'trial'" not in done.stderr  # a patch's trial is no part of the job
    # The script's output stays the script's.
    assert len(done.stdout.splitlines()) == 4
    assert not NODE.search(done.stdout)


def test_workers_have_the_variables_too(unpadded: Cluster) -> None:
    done = unpadded.srun(*FIRST_TWO, ONE_TASK, *HPC, "--hpc-debug", WORLD, env=ENVIRON)
    names = ("TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "PET_HPC_DEBUG")
    assert column(read_workers(done), *names) == [("INFO", "INFO", "")] * 2


def test_what_the_user_has_set_is_kept(unpadded: Cluster) -> None:
    environ = ENVIRON | {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_LOGS": "+dynamo"}
    done = unpadded.srun(*FIRST_TWO, ONE_TASK, *HPC, "--hpc-debug", "--tee=0", WORLD,
                         env=environ)  # fmt: skip
    assert done.returncode == 0, done.stderr
    kept = column(
        read_workers(done), "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS", "PET_HPC_DEBUG"
    )
    assert kept == [("ERROR", "+dynamo", "")] * 2
    assert "TCPStore" not in done.stderr
    assert all(NODE.match(line) for line in lines(done.stderr))


def test_a_fault_has_the_same_exit_code(unpadded: Cluster) -> None:
    done = unpadded.srun(*FIRST_TWO, ONE_TASK, *HPC, "--hpc-debug", "--nnodes=3", WORLD,
                         env=ENVIRON)  # fmt: skip
    assert done.returncode == 2
    (line,) = [line for line in lines(done.stderr) if "hpc: error" in line]
    assert line.startswith("n9 node 0: torchrun_hpc: error: HPC070 ")


def test_a_failing_script(unpadded: Cluster) -> None:
    done = unpadded.srun("-N1", *HPC, "--hpc-debug", "--no-python", "python", "-c",
                         "1/0", env=ENVIRON, cwd=ROOT)  # fmt: skip
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "ChildFailedError" in done.stderr
    ours = [line for line in lines(done.stderr) if not line.startswith("srun: error")]
    assert all(line.startswith("n9 node 0: ") for line in ours), ours

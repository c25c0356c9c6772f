"""--hpc-debug on real nodes: everything is logged, and each line says where."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from commands import (
    ALL_REDUCE,
    ENVIRON,
    FIRST_TWO,
    FORMS,
    HPC,
    ONE_TASK,
    column,
    lines,
    read_workers,
)

if TYPE_CHECKING:
    from testbed import Cluster

NODE = re.compile(r"n(9|10) node (0|1): (rank ([0-3]): )?")


def test_every_line_names_host_and_rank(unpadded: Cluster) -> None:
    environ = ENVIRON | FORMS["fork"] | {"PET_HPC_DEBUG": "1"}  # or the option
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
    assert column(read_workers(done), "TORCH_CPP_LOG_LEVEL") == [("INFO",)] * 4
    assert not NODE.search(done.stdout)

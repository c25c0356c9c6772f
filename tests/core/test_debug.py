"""--hpc-debug on real nodes: everything is logged, and each line says where."""

from __future__ import annotations

import re

from tests.support.cluster.commands import (
    ALL_REDUCE,
    FORMS,
    column,
    lines,
    read_workers,
)
from tests.support.cluster.real_job import launch

NODE = re.compile(r"n(9|10) node (0|1): (rank ([0-3]): )?")
# Of all agents, the Python and the C++ side.
PARTS = ("launcher/api.py", "rendezvous/client.py", "TCPStore", "socket.cpp")


def test_every_line_names_host_and_rank(unpadded):
    debug = FORMS["fork"] | {"PET_HPC_DEBUG": "1"}  # or the option
    done = launch(unpadded, "--nproc_per_node=2", script=[ALL_REDUCE], environ=debug)
    workers = read_workers(done)
    seen = lines(done.stderr)
    assert [line for line in seen if not NODE.match(line)] == []
    for rank, host in enumerate(("n9", "n10")):
        own = [line for line in seen if line.startswith(f"{host} node {rank}: ")]
        for part in PARTS:
            assert any(part in line for line in own), (host, part)
    ranks = {match[4] for match in map(NODE.match, seen) if match}
    assert ranks == {None, *"0123"}
    assert "'trial'" not in done.stderr  # a patch's trial is no part of the job
    # The script's output stays the script's.
    assert len(done.stdout.splitlines()) == 4
    assert column(workers, "TORCH_CPP_LOG_LEVEL") == [("INFO",)] * 4
    assert not NODE.search(done.stdout)

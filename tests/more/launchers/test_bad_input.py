"""Wrong options: one message, exit code 2, no traceback."""

from __future__ import annotations

import pytest

from tests.support import ROOT
from tests.support.cluster.commands import (
    KILL,
    WORLD,
    column,
    errors,
    late,
    own_lines,
    read_workers,
    refused,
)
from tests.support.cluster.mpi import port_is_taken
from tests.support.cluster.real_job import RealJob, launch
from tests.support.patience import NEVER_S


def test_what_all_nodes_would_say_is_said_once(unpadded):
    (line,) = refused(launch(unpadded, "--rdzv_endpoint=nowhere:1"))
    assert "HPC059]: the head node's name nowhere" in line


def test_a_script_that_one_node_does_not_have(unpadded):
    """It says so, and nobody waits for it."""
    done = launch(
        unpadded,
        f"--rdzv-conf=join_timeout={NEVER_S}",
        script=["Makefile"],
        first="test $SLURM_NODEID = 1 && cd /",
        cwd=ROOT,
    )
    assert done.returncode in {1, 2}
    (line,) = [x for x in errors(done.stderr) if "error[HPC150]" in x]
    assert "on n10: Makefile cannot be run: No such file or directory in /." in line
    assert "Traceback" not in done.stderr


def test_a_wrong_node_rank_with_the_static_rendezvous(unpadded):
    """$SLURM_NODEID, expanded in the batch script: 0 on every node."""
    done = launch(unpadded, "--node_rank=0", srun=[KILL])
    assert "Exited with exit code 2" in done.stderr
    said = errors(done.stderr)
    assert said
    for line in said:
        assert "HPC071]: on n10: --node_rank=0, but this is node" in line
        assert "the batch script expanded $SLURM_NODEID" in line
    assert "Traceback" not in done.stderr


def test_the_static_rendezvous_still_works(unpadded):
    first = f'set -- "$@" --node_rank=$SLURM_NODEID {WORLD}'
    done = launch(unpadded, first=first, script=())
    assert column(done, "RANK", "host", "MASTER_ADDR") == [
        ("0", "n9", "10.10.0.1"),
        ("1", "n10", "10.10.0.1"),
    ]
    assert "static rendezvous" in own_lines(done.stderr)[0]


@pytest.mark.release
def test_a_port_that_is_taken_on_the_head_node(unpadded):
    """With torch's own rendezvous, the others do not hear of it."""
    port_is_taken(unpadded, "--hpc-rendezvous=c10d", srun=[KILL])


def test_a_missing_node_is_waited_for_with_a_message(unpadded, tmp_path):
    go = tmp_path / "go"
    with RealJob(unpadded, first=late(1, go)) as job:
        job.says(r"HPC114]: 1 of 2 nodes have joined after \d+ s\. Waiting for n10 \(")
        go.touch()
        job.ends(0)
    assert len(read_workers(job.stdout)) == 2

"""Jobs that cannot run: a message says why, and what it tells to type works."""

from __future__ import annotations

from tests.support.cluster.commands import (
    AS_SUGGESTED,
    ENVIRON,
    LINE,
    absent,
    errors,
    refused,
    see_one_world,
)
from tests.support.cluster.mpi import port_is_taken
from tests.support.cluster.real_job import launch


def test_what_is_told_to_type_in_a_batch_script_works(unpadded):
    """The job has more tasks than nodes, which srun would take over."""
    script = f"#!/bin/sh\n{AS_SUGGESTED} HPC061 {LINE}\n"
    done = unpadded.sbatch(script, "-N2", "-n4", env=ENVIRON)
    see_one_world(done)
    assert "srun: Warning" not in done.output


def test_a_port_that_is_taken_on_the_head_node(unpadded):
    """All hear of it, although only the head node can know."""
    port_is_taken(unpadded, "--rdzv_backend=c10d")


def test_a_node_that_does_not_come(unpadded, tmp_path):
    """Its shell waits for the end of the other node's launcher."""
    tmp_path.chmod(0o777)
    first = absent(1, tmp_path)
    done = launch(unpadded, "--rdzv_conf=join_timeout=3", first=first)
    refused(done, code=1)
    (line,) = errors(done.stderr)
    message = (
        "[HPC125]: the job has failed: 1 node did not join within 3 s (join_timeout)"
    )
    assert line.endswith(f"{message}: n10 (node 1)")

"""Jobs that cannot run: a message says why, and what it tells to type works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commands import (
    ENVIRON,
    FIRST_TWO,
    HPC,
    ONE_TASK,
    SCRIPTS,
    WORLD,
    column,
    own_lines,
    read_workers,
)
from launchers import taken

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster


def test_what_is_told_to_type_in_a_batch_script_works(unpadded: Cluster) -> None:
    """The job has more tasks than nodes, which srun would take over."""
    command = f"python {SCRIPTS / 'as_suggested.py'} HPC061 {' '.join([*HPC, WORLD])}"
    done = unpadded.sbatch(
        f"#!/bin/sh\n{command}\n", "-N2", "-n4", "--nodelist=n9,n10", env=ENVIRON
    )
    assert done.returncode == 0, done.output
    assert "srun: Warning" not in done.output
    assert column(read_workers(done.output), "host", "WORLD_SIZE") == [
        ("n9", "2"),
        ("n10", "2"),
    ], done.output


def test_a_port_that_is_taken_on_the_head_node(unpadded: Cluster) -> None:
    """All hear of it, although only the head node can know."""
    with taken(unpadded, "n9", 24321):
        done = unpadded.srun(
            *FIRST_TWO, ONE_TASK, *HPC, "--rdzv_backend=c10d",
            "--rdzv_endpoint=n9:24321", WORLD, env=ENVIRON,
        )  # fmt: skip
    assert "n9: task 0: Exited with exit code 2" in done.stderr
    (line,) = own_lines(done.stderr)
    assert "HPC055 on n9: port 24321 on 10.10.0.1 cannot be used" in line
    assert "it is taken by python3" in line
    assert "Traceback" not in done.stderr


def test_a_node_that_does_not_come(unpadded: Cluster, tmp_path: Path) -> None:
    """Its shell waits for the end of the other node's launcher."""
    tmp_path.chmod(0o777)
    shell = (
        f"if test $SLURM_NODEID = 1; then until test -e {tmp_path}/end; do sleep 0.1; "
        f'done; exit; fi; "$@"; code=$?; touch {tmp_path}/end; exit $code'
    )
    done = unpadded.srun(
        *FIRST_TWO, ONE_TASK, "sh", "-c", shell, "sh", *HPC,
        "--rdzv_conf=join_timeout=3", WORLD, env=ENVIRON,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    (line,) = [line for line in own_lines(done.stderr) if "error: " in line]
    message = "HPC125 the job has failed: 1 node did not come within 3 s (join_timeout)"
    assert line.endswith(f"{message}: n10 (node 1)"), done.stderr
    assert "Traceback" not in done.stderr

"""What the user typed and cannot work: one message, exit code 2, no traceback."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest
from commands import (
    ENVIRON,
    FIRST_TWO,
    HPC,
    KILL,
    ONE_TASK,
    ROOT,
    WORLD,
    column,
    own_lines,
    read_workers,
)
from launchers import taken
from steps import step
from waiting import NEVER_S

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster


def test_what_all_nodes_would_say_is_said_once(unpadded: Cluster) -> None:
    command = (*HPC, "--rdzv_endpoint=nowhere:1", WORLD)
    done = unpadded.srun(*FIRST_TWO, ONE_TASK, *command, env=ENVIRON)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = own_lines(done.stderr)
    assert "HPC059 the head node's name nowhere" in line
    assert "Traceback" not in done.stderr


def test_a_script_that_one_node_does_not_have(unpadded: Cluster) -> None:
    """It says so, and nobody waits for it."""
    shell = 'test $SLURM_NODEID = 1 && cd /; exec "$@"'
    done = unpadded.srun(
        *FIRST_TWO, ONE_TASK, "sh", "-c", shell, "sh", *HPC,
        f"--rdzv-conf=join_timeout={NEVER_S}", "Makefile", env=ENVIRON, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode in {1, 2}, done.stderr
    (line,) = [line for line in own_lines(done.stderr) if "error: HPC150" in line]
    assert "on n10: Makefile cannot be run: No such file or directory in /." in line
    assert "Traceback" not in done.stderr


def test_a_wrong_node_rank_with_the_static_rendezvous(unpadded: Cluster) -> None:
    """$SLURM_NODEID, expanded in the batch script: 0 on every node."""
    command = (*HPC, "--node_rank=0", WORLD)
    done = unpadded.srun(*FIRST_TWO, ONE_TASK, KILL, *command, env=ENVIRON)
    assert "Exited with exit code 2" in done.stderr
    errors = [line for line in own_lines(done.stderr) if "error" in line]
    assert errors, done.stderr
    for line in errors:
        assert "HPC071 on n10: --node_rank=0, but this is node" in line
        assert "expanded in the batch script" in line
    assert "Traceback" not in done.stderr


def test_the_static_rendezvous_still_works(unpadded: Cluster) -> None:
    script = f"python -m torchrun_hpc --node_rank=$SLURM_NODEID {WORLD}"
    done = unpadded.srun(*FIRST_TWO, ONE_TASK, "sh", "-c", script, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    assert column(read_workers(done), "RANK", "host", "MASTER_ADDR") == [
        ("0", "n9", "10.10.0.1"),
        ("1", "n10", "10.10.0.1"),
    ]


@pytest.mark.parametrize(
    "option",
    [
        "--rdzv_backend=static",
        pytest.param("--hpc-rendezvous=c10d", marks=pytest.mark.release),
    ],
)
def test_a_port_that_is_taken_on_the_head_node(unpadded: Cluster, option: str) -> None:
    """With torch's own rendezvous, the others do not hear of it."""
    with taken(unpadded, "n9", 24321):
        done = unpadded.srun(
            *FIRST_TWO, ONE_TASK, KILL, *HPC, option, "--rdzv_endpoint=n9:24321", WORLD,
            env=ENVIRON,
        )  # fmt: skip
    assert "n9: task 0: Exited with exit code 2" in done.stderr
    (line,) = own_lines(done.stderr)
    assert "HPC055 on n9: port 24321 on 10.10.0.1 cannot be used" in line
    assert "it is taken by python3" in line
    assert "Traceback" not in done.stderr


def test_what_the_environment_shows_is_said_before_torch_is_imported(
    unpadded: Cluster,
) -> None:
    """That alone takes seconds."""
    environ = ENVIRON | {
        "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[9-11]", "SLURM_NNODES": "3",
        "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURMD_NODENAME": "n9",
        "PYTHONPROFILEIMPORTTIME": "1",
    }  # fmt: skip
    command = [*HPC, "--nproc_per_node=gpu", WORLD]
    done = unpadded.run(command, host="n9", env=environ)
    assert done.returncode == 2
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "torchrun_hpc.main" in imported
    assert not {"torch", "numpy"} & imported


def test_a_missing_node_is_waited_for_with_a_message(
    unpadded: Cluster, tmp_path: Path
) -> None:
    late = (
        f"test $SLURM_NODEID = 2 && until test -e {tmp_path}/go; do sleep 0.1; done; "
        f"exec {shlex.join([*HPC, WORLD])}"
    )
    with step(unpadded, "sh", "-c", late) as job:
        job.says(r"HPC114 [12] of 3 nodes are there after \d+ s; waiting for .*n11 \(")
        (tmp_path / "go").touch()
        assert job.end() == 0, job.output
    assert len(read_workers(job.output)) == 3

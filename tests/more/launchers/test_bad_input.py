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
    ONE_TASK,
    ROOT,
    WORLD,
    column,
    lines,
    own_lines,
    read_workers,
)
from steps import step

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster

LISTEN = (
    "import socket, time; s = socket.socket(); s.bind(('', {port})); s.listen(); "
    "print(flush=True); time.sleep(1000)"
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes=3"], "HPC070 --nnodes=3, but this was started on 2 nodes"),
        (["--rdzv_endpoint=nowhere:1"], "HPC059 the head node's name nowhere"),
        (["--rdzv_endpoint=n9:99999"], "HPC053 --rdzv_endpoint=n9:99999 is not an"),
        (["--master_addr=n10"], "HPC072 --master_addr=n10 is node 1 of the step"),
    ],
)  # fmt: skip
def test_what_all_nodes_would_say_is_said_once(
    unpadded: Cluster, options: list[str], message: str
) -> None:
    done = unpadded.srun(*FIRST_TWO, ONE_TASK, *HPC, *options, WORLD, env=ENVIRON)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = own_lines(done.stderr)
    assert message in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("where", [0, 1])
def test_a_script_that_one_node_does_not_have(unpadded: Cluster, where: int) -> None:
    """It says so, and nobody waits for it."""
    shell = f'test $SLURM_NODEID = {where} && cd /; exec "$@"'
    done = unpadded.srun(
        *FIRST_TWO, ONE_TASK, "sh", "-c", shell, "sh", *HPC, "Makefile",
        env=ENVIRON, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode in {1, 2}
    (line,) = [line for line in own_lines(done.stderr) if "error: HPC150" in line]
    host = ("n9", "n10")[where]
    assert f"on {host}: Makefile cannot be run: No such file or directory in /." in line
    assert "Traceback" not in done.stderr


def test_a_wrong_node_rank_with_the_static_rendezvous(unpadded: Cluster) -> None:
    """$SLURM_NODEID, expanded in the batch script: 0 on every node."""
    kill = "--kill-on-bad-exit=1"
    done = unpadded.srun("-N3", ONE_TASK, kill, *HPC, "--node_rank=0", WORLD,
                         env=ENVIRON)  # fmt: skip
    assert "Exited with exit code 2" in done.stderr
    errors = [line for line in own_lines(done.stderr) if "error" in line]
    assert errors
    for line in errors:
        assert re.search("HPC071 on n1?[0-9]+: --node_rank=0, but this is node", line)
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


def test_a_node_rank_that_c10d_ignores_is_said_once(unpadded: Cluster) -> None:
    done = unpadded.srun(
        *FIRST_TWO, ONE_TASK, *HPC, "--node_rank=0", "--rdzv_backend=c10d", WORLD,
        env=ENVIRON,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = lines(done.stderr)
    assert "HPC075 --node_rank=0 is ignored" in line


@pytest.mark.release("port")
@pytest.mark.parametrize(
    ("rendezvous", "kill"),
    [
        ("--rdzv_backend=c10d", ()),  # ours in its place: all hear of it
        ("--rdzv_backend=static", ("--kill-on-bad-exit=1",)),
        ("--hpc-rendezvous=c10d", ("--kill-on-bad-exit=1",)),
    ],
)
def test_a_port_that_is_taken_on_the_head_node(
    unpadded: Cluster, rendezvous: str, kill: tuple[str, ...]
) -> None:
    holder = unpadded.popen(["python3", "-c", LISTEN.format(port=24321)],
                            host="n9")  # fmt: skip
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        done = unpadded.srun(
            "-N3", ONE_TASK, *kill, *HPC, rendezvous,
            "--rdzv_endpoint=n9:24321", WORLD, env=ENVIRON,
        )  # fmt: skip
    finally:
        unpadded.end(holder)
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


def test_a_late_head_is_waited_for_in_silence(unpadded: Cluster) -> None:
    late = f"test $SLURM_NODEID = 0 && sleep 5; exec {' '.join([*HPC, WORLD])}"
    done = unpadded.srun("-N3", ONE_TASK, "sh", "-c", late, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    assert len(read_workers(done)) == 3
    assert len(lines(done.stderr)) == 1, done.stderr


def test_a_missing_node_is_waited_for_with_a_message(
    unpadded: Cluster, tmp_path: Path
) -> None:
    late = (
        f"test $SLURM_NODEID = 2 && until test -e {tmp_path}/go; do sleep 0.1; done; "
        f"exec {shlex.join([*HPC, WORLD])}"
    )
    message = "HPC114 2 of 3 nodes are there after 10 s; waiting for n11 (node 2)"
    with step(unpadded, "sh", "-c", late) as job:
        job.says(re.escape(message))
        (tmp_path / "go").touch()
        assert job.end() == 0, job.output
    assert len(read_workers(job.output)) == 3

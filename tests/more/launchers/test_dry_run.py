"""--hpc-dry-run on real nodes: they meet, tell, and start nothing."""

from __future__ import annotations

import doctest
import json
import platform
import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest
from commands import (
    ENVIRON,
    HPC,
    JUELICH,
    ONE_TASK,
    WORLD,
    column,
    lines,
    own_lines,
    read_workers,
)
from pages import block

from torchrun_hpc.planning.endpoints import port_of

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from testbed import Cluster

DRY = (*HPC, "--hpc-dry-run", "--nproc_per_node=2")
JSON = (*HPC, "--hpc-dry-run=json", "--nproc_per_node=2")


def described(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_table(juelich: Cluster) -> None:
    """It is what the page shows, but for the number of the job, and what follows."""
    command = block("docs/dry-run.md", "srun").text
    done = juelich.run(["bash", "-c", command], env=JUELICH)
    assert done.returncode == 0, done.stderr
    assert lines(done.stderr) == []
    rows = [line.split() for line in done.stdout.splitlines()]
    (launch_id,) = (row[1] for row in rows if row[:1] == ["--rdzv_id"])
    printed = re.sub(rf"(?<![\d.]){re.escape(launch_id)}\b", "1.0", done.stdout)
    for here, there in (
        (str(port_of(launch_id)), str(port_of("1.0"))),
        (platform.python_version(), "3.11.7"),
    ):
        assert here in printed
        printed = printed.replace(here, there)
    shown = block("docs/dry-run.md", "nothing is started").text
    as_shown = doctest.OutputChecker().check_output(
        shown, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert as_shown, printed
    patched = [row for row in rows if row[:2] == ["node_order", "patched"]]
    assert len(patched) == 1, done.stdout
    assert sum(row[:1] == ["torchrun"] for row in rows) == 3
    assert all(row[-2:] == ["main.py", "--lr=1"]
               for row in rows if row[:1] == ["torchrun"])  # fmt: skip


def test_nothing_but_the_fast_network_is_used(juelich: Cluster) -> None:
    foreign = juelich.foreign_bytes("eth0")
    juelich.srun("-N3", ONE_TASK, *JSON, "main.py", env=JUELICH, check=True)
    assert juelich.foreign_bytes("eth0") == foreign


def test_json_is_what_plain_torchrun_needs(juelich: Cluster) -> None:
    """Each node's exports and command, copied: the world that ours would be."""
    planned = juelich.srun("-N3", ONE_TASK, *JSON, WORLD, env=JUELICH)
    assert planned.returncode == 0, planned.stderr
    nodes = described(planned)["nodes"]
    assert [node["plan"]["node_rank"] for node in nodes] == [0, 1, 2]
    cases = [
        f"{number}) export {' '.join(f'{k}={v}' for k, v in node['exports'].items())}; "
        f"exec {shlex.join(node['command'])};;"
        for number, node in enumerate(nodes)
    ]
    script = f"case $SLURM_NODEID in {' '.join(cases)} esac"
    stock = juelich.srun("-N3", ONE_TASK, "sh", "-c", script, env=JUELICH)
    assert stock.returncode == 0, stock.stderr
    ours = juelich.srun("-N3", ONE_TASK, *HPC, "--nproc_per_node=2", WORLD, env=JUELICH)
    names = (
        "RANK", "host", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
        "OMP_NUM_THREADS", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE",
    )  # fmt: skip
    assert column(read_workers(stock), *names) == column(read_workers(ours), *names)


@pytest.mark.parametrize(
    ("options", "name", "value", "source"),
    [
        (["--node_rank=$SLURM_NODEID"], "node_rank", "2", "SLURMD_NODENAME"),
        (
            ["--rdzv_endpoint=n10:24123"],
            "rdzv_endpoint",
            "10.10.0.2:24123",
            "--rdzv_endpoint=n10:24123, its address",
        ),
        (["--nnodes=2:3"], "nnodes", "2:3", "--nnodes"),
        (["--rdzv_backend=c10d", "--rdzv_id=mine"], "rdzv_id", "mine", "--rdzv_id"),
        pytest.param(
            *(["--hpc-rendezvous=c10d", "--rdzv_id=mine"], "rdzv_id"),
            *("mine", "--rdzv_id"),
            marks=pytest.mark.release("dry run"),
        ),
    ],
)
def test_what_is_typed(
    unpadded: Cluster, options: list[str], name: str, value: str, source: str
) -> None:
    line = "test $SLURM_NODEID = 2 && export NCAR_HOST=derecho; exec "
    line += " ".join([*JSON, *options, WORLD])
    done = unpadded.srun("-N3", ONE_TASK, "sh", "-c", line, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    answer = described(done)
    assert answer["missing"] == []
    assert [n["plan"]["hosts"][n["plan"]["node_rank"]] for n in answer["nodes"]] == [
        "n9", "n10", "n11",
    ]  # fmt: skip
    seen = answer["nodes"][2]["options"][name]
    assert seen == {"value": value, "source": source}
    (advice,) = answer["nodes"][0]["plan"]["advice"]
    assert advice["code"] == "HPC163"
    assert (
        "none on n9 (node 0), n10 (node 1); derecho on n11 (node 2)" in advice["text"]
    )


def test_a_store_that_is_a_file_is_left_alone(
    unpadded: Cluster, tmp_path: Path
) -> None:
    file = tmp_path / "store"
    options = (f"--rdzv_endpoint={file}", "--rdzv_conf=store_type=file")
    done = unpadded.srun("-N3", ONE_TASK, *JSON, "--rdzv_backend=c10d", *options,
                         WORLD, env=ENVIRON)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [node["plan"]["node_rank"] for node in described(done)["nodes"]] == [0]
    assert not file.exists()


def test_nodes_that_do_not_answer_are_named(unpadded: Cluster) -> None:
    late = "test $SLURM_NODEID = 1 && exec sleep 16; exec "
    dry = [*DRY, "--rdzv_conf=join_timeout=12", WORLD]
    done = unpadded.srun("-N3", ONE_TASK, "sh", "-c", late + " ".join(dry), env=ENVIRON)
    assert "No answer within 12 s from: n10" in done.stdout
    assert (
        "HPC100 2 of 3 nodes have answered after 10 s; the limit is 12 s" in done.stderr
    )
    assert "n9: task 0: Exited with exit code 1" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_head_that_does_not_answer(unpadded: Cluster) -> None:
    late = "test $SLURM_NODEID = 0 && exec sleep 12; exec "
    dry = [*DRY, "--rdzv_conf=join_timeout=5", WORLD]
    done = unpadded.srun("-N3", ONE_TASK, "sh", "-c", late + " ".join(dry), env=ENVIRON)
    assert done.returncode == 1
    errors = [line for line in own_lines(done.stderr) if "HPC112" in line]
    assert len(errors) == 2, done.stderr
    assert all("no head node at n9:" in line for line in errors)
    assert "Traceback" not in done.stderr


def test_the_batch_script_of_one_node(unpadded: Cluster) -> None:
    done = unpadded.sbatch(f"#!/bin/sh\n{' '.join([*JSON, WORLD])}", "-N1", env=ENVIRON)
    assert done.returncode == 0, done.output
    (node,) = json.loads(done.output)["nodes"]
    assert node["job"]["context"] == "batch script"
    assert node["plan"]["nodes"] == 1


def test_a_refusal_stays_one(unpadded: Cluster) -> None:
    done = unpadded.srun("-N1", "-n2", *DRY, WORLD, env=ENVIRON)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = own_lines(done.stderr)
    assert "error: HPC062 " in line

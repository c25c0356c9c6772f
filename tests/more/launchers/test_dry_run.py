"""--hpc-dry-run on real nodes; see core/test_dry_run.py, too."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING

import pytest

from tests.support.cluster.commands import (
    ENVIRON,
    HPC,
    JUELICH,
    ONE_TASK,
    WORLD,
    column,
    own_lines,
    read_workers,
)
from tests.support.patience import NEVER_S, PATIENCE, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster.testbed import Cluster

DRY = (*HPC, "--hpc-dry-run", "--nproc_per_node=2")
JSON = (*HPC, "--hpc-dry-run=json", "--nproc_per_node=2")

# The shell of one node, which waits for the end of the other node's launcher.
ABSENT = (
    "if test $SLURM_NODEID = {node}; then "
    'until test -e "$0"; do sleep 0.1; done; exit; fi; '
    '"$@"; code=$?; touch "$0"; exit $code'
)


def test_json_is_what_plain_torchrun_needs(juelich: Cluster, tmp_path: Path) -> None:
    """Each node's exports and command, copied, make the world that ours makes.

    One node is late, and the other says that it waits.
    """
    tmp_path.chmod(0o777)
    nodes_of_step = ("-N2", ONE_TASK)
    late = f"test $SLURM_NODEID = 0 || until test -e {tmp_path}/go; do sleep 0.1; done"
    told, written = tmp_path / "stderr", tmp_path / "stdout"
    with told.open("w") as stderr, written.open("w") as stdout:
        program = juelich.popen(
            ["srun", *nodes_of_step, "sh", "-c", f'{late}; exec "$@"', "sh", *JSON,
             f"--rdzv_conf=join_timeout={NEVER_S}", WORLD],
            env=JUELICH, stdout=stdout, stderr=stderr,
        )  # fmt: skip
        try:
            answered = r"HPC100]: 1 of 2 nodes have answered after \d+ s"
            message = rf"{answered}. The limit is {NEVER_S} s"
            until(
                lambda: (
                    program.poll() is not None or re.search(message, told.read_text())
                ),
                told.read_text,
            )
            (tmp_path / "go").touch()
            code = program.wait(PATIENCE)
        finally:
            juelich.end(program)
    assert code == 0, told.read_text()
    assert re.search(message, told.read_text()), told.read_text()
    nodes = json.loads(written.read_text())["nodes"]
    assert [node["meeting"]["node_rank"] for node in nodes] == [0, 1]
    cases = [
        f"{number}) export {' '.join(f'{k}={v}' for k, v in node['exports'].items())}; "
        f"exec {shlex.join(node['command'])};;"
        for number, node in enumerate(nodes)
    ]
    script = f"case $SLURM_NODEID in {' '.join(cases)} esac"
    stock = juelich.srun(*nodes_of_step, "sh", "-c", script, env=JUELICH)
    assert stock.returncode == 0, stock.stderr
    ours = juelich.srun(*nodes_of_step, *HPC, "--nproc_per_node=2", WORLD, env=JUELICH)
    assert ours.returncode == 0, ours.stderr
    names = (
        "RANK", "host", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
        "OMP_NUM_THREADS", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE",
    )  # fmt: skip
    assert len(read_workers(ours)) == 4
    found = [column(read_workers(done), *names) for done in (stock, ours)]
    assert found[0] == found[1], stock.stderr + ours.stderr


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (
            ["--node_rank=$SLURM_NODEID", "--rdzv_endpoint=n9:24123"],
            {
                "node_rank": {"value": "1", "source": "SLURMD_NODENAME"},
                "rdzv_endpoint": {
                    "value": "10.10.0.1:24123",
                    "source": "--rdzv_endpoint=n9:24123, its address",
                },
            },
        ),
        pytest.param(
            ["--hpc-rendezvous=c10d", "--rdzv_id=mine", "--nnodes=1:2"],
            {
                "rdzv_id": {"value": "mine", "source": "--rdzv_id"},
                "nnodes": {"value": "1:2", "source": "--nnodes"},
            },
            marks=pytest.mark.release,
        ),
    ],
    ids=["static", "c10d"],
)
def test_what_is_typed(
    unpadded: Cluster, options: list[str], names: dict[str, dict[str, str]]
) -> None:
    line = "test $SLURM_NODEID = 1 && export NCAR_HOST=derecho; exec "
    line += " ".join([*JSON, *options, WORLD])
    done = unpadded.srun("-N2", ONE_TASK, "sh", "-c", line, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["missing"] == []
    meetings = [node["meeting"] for node in answer["nodes"]]
    assert [m["hosts"][m["node_rank"]] for m in meetings] == [
        "n9", "n10",
    ]  # fmt: skip
    found = answer["nodes"][1]["options"]
    assert {name: found[name] for name in names} == names
    (advice,) = answer["nodes"][0]["messages"]["advice"]
    assert advice["code"] == "HPC163"
    assert "none on n9 (node 0); derecho on n10 (node 1)" in advice["text"]


def test_a_store_that_is_a_file_is_left_alone(
    unpadded: Cluster, tmp_path: Path
) -> None:
    file = tmp_path / "store"
    options = (f"--rdzv_endpoint={file}", "--rdzv_conf=store_type=file")
    done = unpadded.srun("-N2", ONE_TASK, *JSON, "--rdzv_backend=c10d", *options,
                         WORLD, env=ENVIRON)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [
        node["meeting"]["node_rank"] for node in json.loads(done.stdout)["nodes"]
    ] == [0]
    assert not file.exists()


def test_a_node_that_does_not_answer_is_named(
    unpadded: Cluster, tmp_path: Path
) -> None:
    """It is node 1, or node 0, which would be the host."""
    tmp_path.chmod(0o777)
    for node in range(2):
        shell = ["sh", "-c", ABSENT.format(node=node), tmp_path / f"end{node}"]
        done = unpadded.srun(
            "-N2", ONE_TASK, *shell, *DRY, "--rdzv_conf=join_timeout=3", WORLD,
            env=ENVIRON,
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        if node == 1:
            assert done.stdout.startswith("NOT OK: 1 node did not answer"), done.stdout
            assert "within 3 s: n10\n" in done.stdout
        else:
            (error,) = [line for line in own_lines(done.stderr) if "HPC112" in line]
            assert "no head node at n9:" in error

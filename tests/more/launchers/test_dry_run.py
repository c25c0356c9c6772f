"""--hpc-dry-run on real nodes; see also core/test_dry_run.py."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import pytest

from tests.support.cluster.commands import (
    JUELICH,
    WORLD,
    absent,
    column,
    late,
    on_node,
    own_lines,
    read_workers,
)
from tests.support.cluster.real_job import RealJob, launch
from tests.support.patience import NEVER_S

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster.testbed import Cluster

TWO = "--nproc_per_node=2"
JSON = ("--hpc-dry-run=json", TWO)


def test_json_is_what_plain_torchrun_needs(juelich: Cluster, tmp_path: Path) -> None:
    """Each node's exports and command, copied, make the world that ours makes.

    One node is late, and the other says that it waits.
    """
    go = tmp_path / "go"
    options = (*JSON, f"--rdzv_conf=join_timeout={NEVER_S}")
    message = (
        rf"HPC100]: 1 of 2 nodes have answered after \d+ s. The limit is {NEVER_S} s"
    )
    with RealJob(juelich, *options, first=late(1, go), environ=JUELICH) as job:
        job.says(message)
        go.touch()
        job.ends(0)
    nodes = json.loads(job.stdout)["nodes"]
    assert [node["meeting"]["node_rank"] for node in nodes] == [0, 1]
    cases = [
        f"{number}) export {' '.join(f'{k}={v}' for k, v in node['exports'].items())}; "
        f"exec {shlex.join(node['command'])};;"
        for number, node in enumerate(nodes)
    ]
    script = f"case $SLURM_NODEID in {' '.join(cases)} esac"
    stock = launch(juelich, first=script, environ=JUELICH)
    ours = launch(juelich, TWO, environ=JUELICH)
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
def test_explicit_options(
    unpadded: Cluster, options: list[str], names: dict[str, dict[str, str]]
) -> None:
    first = f"{on_node(1, 'export NCAR_HOST=derecho')}; "
    first += f'set -- "$@" {" ".join(options)} {WORLD}'
    done = launch(unpadded, *JSON, first=first, script=())
    assert done.returncode == 0
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
    options = ("--rdzv_backend=c10d", f"--rdzv_endpoint={file}")
    done = launch(unpadded, *JSON, *options, "--rdzv_conf=store_type=file")
    assert done.returncode == 0
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
        (tmp_path / "end").unlink(missing_ok=True)
        options = ("--hpc-dry-run", TWO, "--rdzv_conf=join_timeout=3")
        done = launch(unpadded, *options, first=absent(node, tmp_path))
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        if node == 1:
            assert done.stdout.startswith("NOT OK: 1 node did not answer"), done.stdout
            assert "within 3 s: n10\n" in done.stdout
        else:
            (error,) = [line for line in own_lines(done.stderr) if "HPC112" in line]
            assert "no head node at n9:" in error

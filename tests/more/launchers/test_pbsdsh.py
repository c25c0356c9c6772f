"""Tasks of pbsdsh, which tells two launches in one job apart by nothing.

The hosts have no PBS: each task has the variables that PBS sets.
"""

from __future__ import annotations

import json

import pytest

from tests.support.cluster.commands import ENVIRON, FORMS, HOSTS, HPC, WORLD, column
from tests.support.cluster.mpi import type_on_each
from tests.support.cluster.real_job import Program

LAUNCH = (*HPC, "--nproc_per_node=1")
DOCTOR = "python -m torchrun_hpc.doctor --max-bytes=8 --nproc_per_node=1"


@pytest.fixture
def environ(tmp_path):
    """Return the variables of a task on any of two hosts."""
    node_file = tmp_path / "7.server"
    node_file.write_text("".join(f"{host}\n" for host in HOSTS))
    return ENVIRON | {
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_JOBID": "7.server",
        "PBS_NODEFILE": str(node_file),
        "PBS_TASKNUM": "40000001",
    }


def test_each_node_has_paths_of_its_own(bare, environ, tmp_path):
    options = "--hpc-outcome=$HOSTNAME.json --log-dir=$HOSTNAME --local-addr=$HOSTNAME"
    line = f"{' '.join(LAUNCH)} {options} {WORLD}"
    printed, errors = type_on_each(bare, line, env=environ, cwd=tmp_path)
    assert column("".join(printed), "WORLD_SIZE") == [("2",), ("2",)], errors
    outcomes = [tmp_path / f"{host}.json" for host in HOSTS]
    written = [json.loads(each.read_text()) for each in outcomes if each.exists()]
    assert {each["outcome"] for each in written} == {"done"}, errors


def test_two_launches_do_not_mix(bare, environ, tmp_path):
    """The second one's task on the head node has not started yet."""
    second = [*LAUNCH, "--max-restarts=1", WORLD]
    with Program(bare, [*LAUNCH, WORLD], host=HOSTS[0], environ=environ, cwd=tmp_path):
        done = bare.run(second, host=HOSTS[1], env=environ, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    command = f"--nproc_per_node=1 --max_restarts=1 {WORLD}"
    assert f"HPC232]: on {HOSTS[1]}: this node runs {command} [" in done.stderr


def test_the_doctor_launches_its_collectives(bare, environ, tmp_path):
    # Links without a rate of their own can be suspect: whatever it says of them.
    line = f"{DOCTOR} --json=$HOSTNAME.json || test $? = 1"
    environ |= FORMS["fork"]
    _, errors = type_on_each(bare, line, env=environ, cwd=tmp_path)
    assert "HPC232" not in errors
    report = json.loads((tmp_path / f"{HOSTS[0]}.json").read_text())
    assert "all_reduce" in {row["operation"] for row in report["collectives"]}

"""Clients that do not belong to a job, and do to its ports whatever they can."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING

import pytest
from commands import ENVIRON, HPC, SCRIPTS
from steps import step

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster

# What they may cost the agent of the head node: a gigabyte of garbage, three hundred
# connections, and messages that are wrong.
MOST_CPU_S = 0.5


@pytest.mark.release
def test_hostile_clients_while_a_node_is_missing(
    unpadded: Cluster, tmp_path: Path
) -> None:
    """The job starts among them; nothing of theirs is run, and they cost little."""
    marker = tmp_path / "marker"
    late = f"until test -e {tmp_path}/go; do sleep 0.1; done"
    work = " ".join([*HPC, str(SCRIPTS / "steady.py"), str(tmp_path)])
    command = f"if test $SLURM_NODEID = 2; then {late}; fi; exec {work}"
    with step(unpadded, "sh", "-c", command) as job:
        said = job.says(r"rendezvous at n9:\d+")
        ((launch_id, port),) = re.findall(r"Slurm (\S+), .* at n9:(\d+)", said)
        job.joins("n10")
        before = float(job.agent("n9", "cpu"))
        hostile = unpadded.popen(
            [
                *(sys.executable, str(SCRIPTS / "hostile.py"), str(marker)),
                *(launch_id, f"10.10.0.1:{port}"),
            ],
            env=ENVIRON,
            stderr=None,
        )
        try:
            assert hostile.stdout is not None
            did = json.loads(hostile.stdout.readline())
            cost = float(job.agent("n9", "cpu")) - before
            print(f"{cost:.2f} CPU seconds")
            (tmp_path / "go").touch()  # while their connections are open
            job.wait(lambda: len([*tmp_path.glob("up*.0")]) == 3)
            (tmp_path / "stop").touch()
            assert job.end() == 0, job.output
        finally:
            unpadded.end(hostile)
    # What it must know to pretend is not disclosed.
    expected = {"held": 300, "pretended": 3, "disclosed": 0}
    assert did["garbage"] >= 11
    assert {name: did[name] for name in expected} == expected
    assert not marker.exists(), job.output
    assert "Traceback" not in job.output, job.output
    assert cost < MOST_CPU_S, job.output

"""Clients that do not belong to a job, and do to its ports whatever they can."""

from __future__ import annotations

import pytest

from tests.support.cluster.commands import HPC, SCRIPTS
from tests.support.cluster.steps import Step

# What they may cost the agent of the head node: a gigabyte of garbage, three hundred
# connections, and messages that are wrong.
MOST_CPU_S = 0.5


@pytest.mark.release
def test_hostile_clients_while_a_node_is_missing(unpadded, tmp_path):
    """The job starts among them; nothing of theirs is run, and they cost little."""
    late = f"until test -e {tmp_path}/go; do sleep 0.1; done"
    work = " ".join([*HPC, str(SCRIPTS / "steady.py"), str(tmp_path)])
    command = f"if test $SLURM_NODEID = 2; then {late}; fi; exec {work}"
    with Step(unpadded, "sh", "-c", command) as job:
        _, port = job.launch_id_and_port()
        job.joins("n10")
        before = float(job.agent("n9", "cpu"))
        with job.hostile(tmp_path, f"10.10.0.1:{port}"):
            cost = float(job.agent("n9", "cpu")) - before
            print(f"{cost:.2f} CPU seconds")
            (tmp_path / "go").touch()  # while their connections are open
            job.wait(lambda: len([*tmp_path.glob("up*.0")]) == 3)
            (tmp_path / "stop").touch()
            assert job.end() == 0, job.output
    assert cost < MOST_CPU_S, job.output

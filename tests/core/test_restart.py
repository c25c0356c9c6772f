"""Workers of a new attempt never meet the keys of the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commands import ENVIRON, FORMS, HPC, ONE_TASK, SCRIPTS

if TYPE_CHECKING:
    from testbed import Cluster

SCRIPT = str(SCRIPTS / "restarts.py")


def test_restarts_with_a_late_rank_0(unpadded: Cluster) -> None:
    done = unpadded.srun(
        *("-N3", ONE_TASK, *HPC, "--monitor-interval=0.1", "--max-restarts=2"),
        *(SCRIPT, "2"),
        env=ENVIRON | FORMS["fork"],
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "HPC169" not in done.stderr, done.stderr
    # Some releases of torch have gloo speak on stdout.
    told = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]
    assert sorted(told) == sorted(
        f"met: rank {rank}, attempt {attempt}"
        for attempt in range(3)
        for rank in range(3)
    ), done.stderr

"""Several nodes without ours of the agent; see more/agent/patches for the others."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.support.cluster.steady_job import SteadyJob

if TYPE_CHECKING:
    from pathlib import Path


def has_changed(file: Path, text: str) -> bool:
    return file.read_text() not in {text, ""}


def test_agents_of_torchs_own_meet_in_its_rendezvous(unpadded, tmp_path):
    """In ours each of them would take the end of another one for a failure."""
    options = ("--monitor-interval=0.1", "--hpc-without-patches=agent")
    with SteadyJob(unpadded, tmp_path, "--max-restarts=1", *options, nodes=3) as job:
        job.works()
        others = [tmp_path / f"up{rank}.0" for rank in (1, 2)]
        before = [file.read_text() for file in others]
        job.fail(0, 0)
        job.wait((tmp_path / "up0.1").exists)
        # On their nodes it does not count as a restart.
        for file, number in zip(others, before, strict=True):
            job.wait(partial(has_changed, file, number))
        job.stop()
        job.ends(0)
    assert "c10d rendezvous at n9" in job.output
    assert "=agent switches these patches off" in job.output
    assert job.output.count("steady: rank ") == 3, job.output

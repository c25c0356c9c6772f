"""Several nodes without ours of the agent; see more/agent/patches for the others."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.support.cluster.commands import HPC, SCRIPTS
from tests.support.cluster.steps import Step

if TYPE_CHECKING:
    from pathlib import Path


def has_changed(file: Path, text: str) -> bool:
    return file.read_text() not in {text, ""}


def test_agents_of_torchs_own_meet_in_its_rendezvous(unpadded, tmp_path):
    """In ours each of them would take the end of another one for a failure."""
    options = ("--monitor-interval=0.1", "--max-restarts=1")
    script = (str(SCRIPTS / "steady.py"), str(tmp_path))
    argv = (*HPC, *options, "--hpc-without-patches=agent", *script)
    with Step(unpadded, *argv) as job:
        others = [tmp_path / f"up{rank}.0" for rank in (1, 2)]
        job.wait(lambda: all(file.exists() for file in (tmp_path / "up0.0", *others)))
        before = [file.read_text() for file in others]
        (tmp_path / "fail0.0").touch()
        job.wait((tmp_path / "up0.1").exists)
        # On their nodes it does not count as a restart.
        for file, number in zip(others, before, strict=True):
            job.wait(partial(has_changed, file, number))
        (tmp_path / "stop").touch()
        assert job.end() == 0, job.output
    assert "c10d rendezvous at n9" in job.output
    assert "=agent switches these patches off" in job.output
    assert job.output.count("steady: rank ") == 3, job.output

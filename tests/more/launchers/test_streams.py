"""Nodes whose standard streams are broken: the job runs on all of them."""

from __future__ import annotations

import pytest

from tests.support.cluster.commands import own_lines
from tests.support.cluster.real_job import launch
from tests.support.patience import START

TRAIN = """
import os, pathlib, sys, time
folder, count = pathlib.Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
new = folder / f"{os.environ['RANK']}.new"
new.write_text(count)
new.rename(new.with_suffix(""))
while not all((folder / str(rank)).exists() for rank in range(2)):
    time.sleep(0.01)  # the first that fails ends the others
sys.exit(count == "0" and "fails" in sys.argv)
"""


@pytest.mark.parametrize(
    ("quiet", "closed", "restarts"),
    [
        (1, None, 1),  # the workers fail once, and all start again
        (0, 1, 0),  # the first node cannot say that they failed
    ],
)
def test_a_job_runs_whatever_is_wrong_with_streams(
    unpadded, tmp_path, quiet, closed, restarts
):
    """On each node another fault, and none where the launcher speaks for all."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = launch(
        unpadded,
        f"--max-restarts={restarts}",
        script=[script, tmp_path, "fails"],
        first=f"case $SLURM_NODEID in {quiet}) exec 2>/dev/full ;; "
        f"{closed}) exec <&- >&- 2>&- ;; esac",
    )
    assert done.returncode == (0 if restarts else 1)
    counts = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert counts == [str(restarts)] * 2
    seen = "".join(own_lines(done.stderr))
    assert (START in seen) is (quiet != 0)
    assert "Traceback" not in seen

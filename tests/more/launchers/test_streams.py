"""Nodes whose standard streams are broken: the job runs on all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from commands import ENVIRON, FIRST_TWO, HPC, ONE_TASK, own_lines

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster

# On each node another fault, and none where the launcher speaks for all.
BROKEN = """
case $SLURM_NODEID in
    {quiet}) exec "$@" 2>/dev/full ;;
    {closed}) exec "$@" <&- >&- 2>&- ;;
    *) exec "$@" ;;
esac
"""
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
    ("quiet", "closed", "restarts", "code"),
    [
        (1, None, 1, 0),  # the workers fail once, and all start again
        (0, 1, 0, 1),  # the first node cannot say that they failed
    ],
)
def test_a_job_runs_whatever_is_wrong_with_streams(  # noqa: PLR0913 - the table
    unpadded: Cluster,
    tmp_path: Path,
    *,
    quiet: int,
    closed: int | None,
    restarts: int,
    code: int,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    shell = BROKEN.format(quiet=quiet, closed=closed)
    option = f"--max-restarts={restarts}"
    done = unpadded.srun(
        *(*FIRST_TWO, ONE_TASK, "sh", "-c", shell, "sh"),
        *(*HPC, option, str(script), str(tmp_path), "fails"),
        env=ENVIRON,
    )
    assert done.returncode == code, done.stderr
    counts = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert counts == [str(restarts)] * 2
    seen = own_lines(done.stderr)
    assert ("HPC001" in "".join(seen)) is (quiet != 0)
    assert "Traceback" not in "".join(seen)

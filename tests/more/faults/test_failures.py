"""A job fails, and says why on one screen."""

from __future__ import annotations

import pytest
from commands import HPC, JUELICH, launch
from failures import EXAMPLES, check
from steps import Step
from waiting import NEVER_S


# The core has the first one.
@pytest.mark.parametrize("name", list(EXAMPLES)[1:])
def test_example(name, juelich, tmp_path):
    check(name, juelich, tmp_path)


STUBBORN = """\
import os, signal, sys, time
from pathlib import Path

rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(f"ready{rank}").touch()
while len(list(Path().glob("ready*"))) < 4:
    time.sleep(0.01)
if rank == "3":
    raise ValueError("bad batch 17")
while not Path("reported").exists():
    time.sleep(0.01)
sys.stderr.write("saved after SIGTERM\\n")
"""


def test_the_report_does_not_wait_for_the_workers(juelich, tmp_path):
    """They wait for it; in the end the last line says the cause once more."""
    (tmp_path / "train.py").write_text(STUBBORN)
    argv = (*HPC, f"--shutdown-timeout={NEVER_S}", "--nproc_per_node=2", "train.py")
    with Step(juelich, *argv, nodes=2, environ=JUELICH, cwd=tmp_path) as job:
        job.says(r"\(local rank 1, at ")
        (tmp_path / "reported").touch()
        job.end()
    texts = job.output.splitlines()
    assert texts.count("    ValueError: bad batch 17") == 1, job.output
    (saved, *_) = (i for i, text in enumerate(texts) if "saved after" in text)
    (last,) = (i for i, t in enumerate(texts) if "exit code 1: ValueError" in t)
    assert texts.index("    ValueError: bad batch 17") < saved < last, job.output


def test_direct_mode_has_no_agent(juelich, tmp_path):
    """What a worker writes is all there is."""
    (tmp_path / "train.py").write_text("raise ValueError('bad batch 17')\n")
    where = {"environ": JUELICH, "cwd": tmp_path}
    done = launch(juelich, script=["train.py"], tasks=2, **where)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: bad batch 17\n") == 4
    assert "HPC125" not in done.stderr

"""A job fails, and says why on one screen."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.cluster.commands import FORMS, JUELICH, SCRIPTS
from tests.support.cluster.failing_jobs import EXAMPLES, check
from tests.support.cluster.real_job import RealJob, launch
from tests.support.patience import NEVER_S


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
    """They wait for it. In the end the last line says the cause once more."""
    (tmp_path / "train.py").write_text(STUBBORN)
    options = (f"--shutdown-timeout={NEVER_S}", "--nproc_per_node=2")
    with RealJob(
        juelich, *options, script=["train.py"], environ=JUELICH, cwd=tmp_path
    ) as job:
        job.says(r"\(local rank 1, at ")
        (tmp_path / "reported").touch()
        job.end()
    texts = job.output.splitlines()
    assert texts.count("    ValueError: bad batch 17") == 1, job.output
    (saved, *_) = (i for i, text in enumerate(texts) if "saved after" in text)
    (last,) = (i for i, t in enumerate(texts) if "exit code 1: ValueError" in t)
    assert texts.index("    ValueError: bad batch 17") < saved < last, job.output


WHO = r"HPC125\]: the job has failed: (.*)"
UNREAD = "(its stderr was not read; the cause may be another rank)"


def last_line(cluster, folder, form):
    """Return why the launcher says that the job failed; it does not read stderr."""
    outcome = folder / "outcome.json"
    done = launch(
        cluster,
        *("--nproc_per_node=2", f"--hpc-outcome={outcome}"),
        script=[SCRIPTS / "slow_end.py", "3", folder],
        first="exec 1>&2",
        environ=JUELICH | FORMS[form],
    )
    assert done.returncode == 1
    *_, last = re.findall(WHO, done.stderr)
    assert json.loads(outcome.read_text())["reason"] == last
    return last


def test_a_cause_that_takes_longer_to_end(juelich, tmp_path):
    """A fork has told its exception."""
    assert last_line(juelich, tmp_path, "fork") == (
        "worker 3 on jwb0002 (node 1) ended with exit code 1: ValueError: bad batch 17"
    )


def test_a_cause_that_nobody_has_read(juelich, tmp_path):
    last = last_line(juelich, tmp_path, "exec")
    worker = r"worker [0-2] on jwb000\d \(node \d\)"
    assert re.fullmatch(
        rf"the first to end was {worker}, which ended with exit code 1 "
        + re.escape(UNREAD),
        last,
    )


def test_direct_mode_has_no_agent(juelich, tmp_path):
    """Nothing but the worker's own words says why."""
    (tmp_path / "train.py").write_text("raise ValueError('bad batch 17')\n")
    done = launch(juelich, script=["train.py"], tasks=2, environ=JUELICH, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: bad batch 17\n") == 4
    assert "HPC125" not in done.stderr

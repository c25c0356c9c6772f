"""Standard error may lose its reader: the training continues, and restarts."""

from __future__ import annotations

import subprocess

from tests.support.broken_streams import FAILS, SCRIPT, ran_in
from tests.support.patience import START, until
from tests.support.processes import RunningProgram, clean_environ
from tests.support.stock.side_by_side import COMMANDS, OURS


def test_the_reader_goes_while_it_runs(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    wait, ran = tmp_path / "wait", tmp_path / "ran"
    wait.touch()
    with RunningProgram(
        [*COMMANDS[OURS], "--max-restarts=1", "train.py", FAILS],
        environ={**clean_environ(), "RAN": str(ran), "WAIT": str(wait)},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    ) as launcher:
        assert START.encode() in launcher.stderr.readline()
        launcher.stderr.close()
        until(lambda: ran_in(ran) or not launcher.is_running)
        wait.unlink()
        assert launcher.wait() == 0
    assert [worker["try"] for worker in ran_in(ran)] == ["0", "1"]

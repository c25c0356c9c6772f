"""Standard error may lose its reader: the training continues, and restarts."""

from __future__ import annotations

import subprocess

from tests.support.broken_streams import FAILS, SCRIPT, ran_in
from tests.support.patience import PATIENCE, START, until
from tests.support.stock.side_by_side import COMMANDS, OURS, clean_environ, end_group


def test_the_reader_goes_while_it_runs(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    wait, ran = tmp_path / "wait", tmp_path / "ran"
    wait.touch()
    with subprocess.Popen(
        [*COMMANDS[OURS], "--max-restarts=1", "train.py", FAILS],
        env={**clean_environ(), "RAN": str(ran), "WAIT": str(wait)},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            assert START.encode() in process.stderr.readline()
            process.stderr.close()
            until(lambda: ran_in(ran) or process.poll() is not None)
            wait.unlink()
            assert process.wait(PATIENCE) == 0
        finally:
            end_group(process.pid)
    assert [worker["try"] for worker in ran_in(ran)] == ["0", "1"]

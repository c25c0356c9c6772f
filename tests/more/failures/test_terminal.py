"""The report if stderr is a terminal, which the launcher does not read."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess

import pytest

from tests.support.cluster.commands import FORMS
from tests.support.processes import RunningProgram, clean_environ
from tests.support.stock.side_by_side import COMMANDS, OURS

WHERE = "look for its stderr in the output: it is a terminal. Pass --tee=3"
ABORT = "import ctypes\nabort = ctypes.CDLL('libstdc++.so.6')._ZSt9terminatev\n"
ABORTS = f"{ABORT}abort()\n"
ABORTS_AT_ITS_END = f"""{ABORT}import atexit
atexit.register(abort)
raise ValueError("bad batch 17")
"""


def read(terminal):
    """Return what was written to a terminal that nobody has open any more."""
    written = b""
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 2**16):
            written += piece
    return written.decode()


@pytest.mark.parametrize(
    ("form", "script", "cause"),
    [
        ("exec", ABORTS, ""),
        ("fork", ABORTS, ""),
        ("fork", ABORTS_AT_ITS_END, ": ValueError: bad batch 17"),
    ],
    ids=["exec", "fork", "fork-at-its-end"],
)
def test_an_abort_in_cxx(tmp_path, form, script, cause):
    (tmp_path / "train.py").write_text(script)
    terminal, stderr = pty.openpty()
    with RunningProgram(
        [*COMMANDS[OURS], "train.py"],
        environ={**clean_environ(), **FORMS[form]},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
    ) as launcher:
        os.close(stderr)
        written = read(terminal)
        os.close(terminal)
        assert launcher.wait() == 1, written
    assert "terminate called without an active exception" in written
    assert WHERE in written
    assert written.rstrip().endswith(f"worker 0 was killed by SIGABRT (6){cause}")

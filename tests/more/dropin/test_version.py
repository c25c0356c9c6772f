"""``--version``, whatever else is wrong."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support import ROOT
from tests.support.processes import clean_environ, run, run_python
from torchrun_hpc import __version__

LINE = rf"torchrun_hpc {re.escape(__version__)}, torch \S+, Python 3\.\S+\n"

# A step of two nodes, whose other node must not hear of it.
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURMD_NODENAME": "n2",
}


def ask(text, **environ):
    """Run a line of a shell, in which ``LAUNCH`` is the launcher."""
    program = f"{sys.executable} -m torchrun_hpc"
    line = text.replace("LAUNCH", program)
    return run(["bash", "-c", line], environ=clean_environ() | environ, cwd=ROOT)


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        ("LAUNCH --version", {"PET_VERSION": "3", "PET_MAX_RESTARTS": "abc"}),
        ("LAUNCH --version --max-restarts=x --bogus script.py", STEP),
        ("LAUNCH --version --help", {}),
    ],
)
def test_one_line(text, environ):
    done = ask(text, **environ)
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(LINE, done.out)


@pytest.mark.parametrize("words", ["--version --hpc-debug", "--hpc-debug --version"])
def test_the_changes_that_fit(words):
    done = ask(f"LAUNCH {words}")
    assert (done.code, done.err) == (0, "")
    first, preload, _, title, *rows = done.out.splitlines()
    assert re.fullmatch(LINE, f"{first}\n")
    assert preload == "preload: torch"
    assert title.split("  ")[0] == "inside torch"
    assert any(row.startswith("watch_workers ") and " patched " in row for row in rows)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("LAUNCH --version > /dev/full", "HPC101"),
        ("LAUNCH --version >&-", "HPC101"),
        ("LAUNCH --version --hpc-debug --hpc-without-patches=zzz", "HPC088"),
    ],
)
def test_a_fault_is_only_this_process(text, code):
    """No other node is told, which could take minutes."""
    done = ask(text, **STEP)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert line.startswith(f"torchrun_hpc: error[{code}]: ")


def test_a_program_that_calls_torch(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torchrun_hpc.auto\nfrom torch.distributed.run import main\n"
        "main(['--version', 'script.py'])\n",
        encoding="utf-8",
    )
    done = run_python(program, cwd=ROOT)
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(LINE, done.out)

"""Exit codes of real processes."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.patience import NEVER_S
from torchrun_hpc.failures.worker import exit_code_of


def test_the_exit_code_of_a_child():
    for program, code in {
        "pass": 0,
        "raise SystemExit(3)": 3,
        "import os; os._exit(255)": 255,
        "import os; os.kill(os.getpid(), 9)": -9,
    }.items():
        child = subprocess.Popen([sys.executable, "-S", "-c", program])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert exit_code_of(child.pid) == exit_code_of(child.pid) == code, program
        assert child.wait() == code  # it was left to be collected
        assert exit_code_of(child.pid) is None


def test_a_child_that_still_runs():
    argv = [sys.executable, "-S", "-c", f"import time; time.sleep({NEVER_S})"]
    with subprocess.Popen(argv) as child:
        assert exit_code_of(child.pid) is None
        child.kill()


def test_a_process_that_is_no_child():
    assert exit_code_of(os.getppid()) is None

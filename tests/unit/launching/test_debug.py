from __future__ import annotations

import subprocess
import sys

import pytest

from torchrun_hpc.launching import debug


@pytest.mark.parametrize(
    ("environ", "is_wanted"),
    [({}, False), ({"PET_HPC_DEBUG": ""}, False), ({"PET_HPC_DEBUG": "0"}, False),
     ({"PET_HPC_DEBUG": "1"}, True), ({"PET_HPC_DEBUG": "2"}, True)],
)  # fmt: skip
def test_it_is_wanted(environ, is_wanted):
    assert debug.is_wanted(environ) is is_wanted


@pytest.mark.parametrize(("rank", "name"), [(3, "n1 node 3: "), (None, "n1: ")])
def test_each_line_of_stderr_has_a_name_and_the_users_variables_stay(rank, name):
    program = f"""
import os, subprocess
from torchrun_hpc.launching import debug
from torchrun_hpc.planning.debug_env import VARIABLES
environ = {{"PET_HPC_DEBUG": "2", "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_LOGS": ""}}
assert not debug.is_on()
debug.switch_on(environ, "n1.net", {rank})
assert debug.is_on()
assert environ == VARIABLES | {{"TORCH_CPP_LOG_LEVEL": "ERROR"}}
subprocess.run("echo one >&2; echo two >&2", shell=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"{name}one\n{name}two\n"

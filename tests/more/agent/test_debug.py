"""Debug output."""

from __future__ import annotations

import pytest

from tests.support.processes import clean_environ, run_python

PROGRAM = """
import os, subprocess
from torchrun_hpc.agent import output
from torchrun_hpc.planning.network_env import DEBUG_VARIABLES
output.switch_on_debug("n1.net", {rank})
output.switch_on_debug("n2.net", 9)  # has been done
expected = DEBUG_VARIABLES | {{"TORCH_CPP_LOG_LEVEL": "ERROR"}}
assert {{name: os.environ[name] for name in expected}} == expected
subprocess.run("echo one >&2; echo two >&2", shell=True)
"""


@pytest.mark.parametrize(("rank", "name"), [(3, "n1 node 3: "), (None, "n1: ")])
def test_each_line_of_stderr_has_a_name_and_the_users_variables_stay(rank, name):
    done = run_python(
        *("-c", PROGRAM.format(rank=rank)),
        cwd="/",
        environ=clean_environ() | {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_LOGS": ""},
    )
    assert (done.code, done.out) == (0, "")
    assert done.err == f"{name}one\n{name}two\n"

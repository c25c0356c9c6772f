"""``python -m torchrun_hpc.stacks`` as a program."""

from __future__ import annotations

import pytest

from tests.support.processes import run_python


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--help"], "srun --overlap --jobid=JOBID python -m torchrun_hpc.stacks"),
        (["--jsn"], "unrecognized arguments: --jsn"),
    ],
)
def test_as_a_program(tmp_path, args, words):
    done = run_python("-m", "torchrun_hpc.stacks", *args, cwd=tmp_path)
    assert done.code == (0 if args == ["--help"] else 2)
    assert words in " ".join((done.out + done.err).split())


def test_it_imports_no_torch(tmp_path):
    """It starts on a node that is busy."""
    program = "import sys, torchrun_hpc.stacks.__main__; print('torch' in sys.modules)"
    done = run_python("-c", program, cwd=tmp_path)
    assert (done.out, done.err) == ("False\n", "")

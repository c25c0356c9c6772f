"""``--hpc-preload``: workers are forks of one import, and no worse for it."""

from __future__ import annotations

from tests.support.cluster.commands import BIN
from tests.support.processes import clean_environ, run, run_python

SCRIPT = """
import os, sys
if "RANK" in os.environ:
    assert "torch" not in sys.modules
    assert "torchrun_hpc.preload" in sys.modules
import torch
sys.stdout.write(torch.__config__.parallel_info())
"""


def test_forks_have_the_threads_of_programs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = str(BIN / "torchrun_hpc")  # the console script
    options = ["--hpc-preload=torch", "--nproc-per-node=2", "--hpc-omp-threads=2"]
    done = run([command, *options, str(script)])
    environ = clean_environ() | {"OMP_NUM_THREADS": "2"}
    alone = run_python(script, environ=environ)
    assert (done.code, done.out) == (0, 2 * alone.out), done.err
    assert "HPC169" not in done.err

"""``--hpc-bind`` with the installed torch; as forks, workers are in tests/core."""

from __future__ import annotations

from tests.support.cluster.bound import (
    ALL,
    SCRIPT,
    assert_bound,
    launch,
    needs_two_cpus,
    seen,
)
from tests.support.processes import run_launcher, run_python

pytestmark = needs_two_cpus


def test_workers_by_exec_have_cpus_of_their_own(tmp_path):
    assert_bound(tmp_path, "--hpc-preload=none")


def test_too_few_cpus_are_shared(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    front = ("taskset", "-c", str(ALL[-1]))
    words = ("--hpc-bind=gpu", "--hpc-preload=torch", str(script))
    done = launch(*words, str(tmp_path), front=front)
    assert done.code == 0, done.err
    assert [worker["cpus"] for worker in seen(tmp_path)] == [ALL[-1:]] * 2
    assert "HPC092]: 2 workers share 1 CPU" in done.err
    assert "--hpc_bind=gpu binds none of them" in done.err
    assert "HPC221" not in done.err


FORK = """
import os, sys
from tests.support.both_forms import split_off
from torchrun_hpc.errors import Setting
from torchrun_hpc.planning.workers import Preload

variables = {"OMP_NUM_THREADS": "1"}
preload = Preload(("torch",), Setting("torch", "--hpc-preload"), variables)
preloaded = split_off(preload, ["threads.py"])
preloaded.check({**os.environ, **variables}, is_reporter=True)
for number in ("1", "3", "x"):
    command = [sys.executable, "-u", "threads.py"]
    environ = {**os.environ, "OMP_NUM_THREADS": number}
    preloaded.fork(command, environ, None, None).wait()
"""


def test_a_fork_has_its_own_number_of_threads(tmp_path):
    """Torch has read the variable when it was imported, for all workers."""
    text = "import torch\nprint(torch.get_num_threads())\n"
    (tmp_path / "threads.py").write_text(text)
    done = run_python("-c", FORK, cwd=tmp_path)
    most = str(min(3, len(ALL)))  # as MKL limits it
    assert done.out.split() == ["1", most, "1"], done.err


def test_the_dry_run_shows_it():
    dry_run = ("--hpc-bind=even", "--hpc-dry-run", "--hpc-debug")
    done = run_launcher("--nproc_per_node=2", *dry_run, "train.py")
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    assert ["CPUs", "even", "--hpc_bind"] in lines
    start = lines.index(["worker", "CPUs", "where", "because"])
    assert [line[0] for line in lines[start + 1 : start + 3]] == ["0", "1"]
    assert lines[start + 1][-4:] == ["part", "1", "of", "2"]
    assert any(line[:1] == ["bind_workers"] for line in lines)

"""The command as a program: what it does before torch is imported."""

from __future__ import annotations

import re
import signal
import sys

import pytest

from tests.support.processes import run_python
from tests.support.recordings import recorded

TORCH_IS_IMPORTED = 77


@pytest.fixture
def python(tmp_path):
    """Run Python with an environment of our own and a torch that cannot be imported."""
    package = tmp_path / "torch"
    package.mkdir()

    def run(*args, environ=None, torch=f"import os; os._exit({TORCH_IS_IMPORTED})"):
        (package / "__init__.py").write_text(f"{torch}\n", encoding="utf-8")
        variables = {"PYTHONUTF8": "1"} | (environ or {})
        return run_python(*args, cwd=tmp_path, environ=variables, path=[tmp_path])

    return run


# What pip writes.
CONSOLE_SCRIPT = "from torchrun_hpc.__main__ import run; run()"

BEFORE_TORCH = [
    *("main", "agent.direct", "schedulers", "sites", "host.network"),
    *("planning.plan", "reporting.tables"),
    *("rendezvous.server", "rendezvous.client", "rendezvous.messages"),
]


def test_what_runs_before_torch_imports_none_and_changes_nothing(python):
    program = f"""
import os, socket, sys
before, hook, path = dict(os.environ), sys.excepthook, list(sys.path)
import torchrun_hpc
assert torchrun_hpc.__version__
import {", ".join(f"torchrun_hpc.{name}" for name in BEFORE_TORCH)}
assert dict(os.environ) == before
assert sys.excepthook is hook and sys.path == path
assert "torch" not in sys.modules
"""
    done = python("-c", program)
    assert (done.code, done.out, done.err) == (0, "", "")


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "torchrun_hpc"],
        ["-c", CONSOLE_SCRIPT],
        ["-m", "torchrun_hpc.doctor"],
    ],
)
def test_a_python_without_what_it_needs(python, tmp_path, command, is_broken):
    """In a clone any Python finds the command; this one has no installed package."""
    problem = "No module named 'psutil'"
    if is_broken:  # it was built for another Python
        problem = "undefined symbol: PyModule"
        text = f"raise ImportError({problem!r})\n"
        (tmp_path / "psutil.py").write_text(text, encoding="utf-8")
    done = python("-S", *command, "train.py", torch="")
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    what = f"{sys.executable} cannot import what torchrun_hpc needs: {problem}. "
    assert line.startswith(f"torchrun_hpc: error[HPC152]: {what}Activate ")


INTERRUPTED = f"""
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
{CONSOLE_SCRIPT}
"""


@pytest.mark.parametrize(
    "name", ["torchrun_hpc.main", "dataclasses", "psutil", "torch", "torchrun_hpc.wire"]
)
def test_ctrl_c_during_the_imports(python, name):
    done = python("-c", INTERRUPTED, name, torch="")
    assert (done.code, done.out, done.err) == (-signal.SIGINT, "", "")


COMMAND = ["-m", "torchrun_hpc", "--nproc_per_node=2", "train.py", "--lr", "0.1"]


@pytest.mark.parametrize(
    ("name", "options", "variables"),
    [
        # only torch's parser can say what these mean
        ("slurm-sbatch-script", ["--standalone"], {}),
        ("slurm-sbatch-script", [], {"PET_STANDALONE": "1"}),
        ("slurm-sbatch-script", ["--nnodes=1"], {}),
        ("slurm-sbatch-script", [], {"PET_NNODES": "1"}),
        ("slurm-srun-2-nodes-4-tasks-each", ["--nnodes", "1"], {}),
        ("slurm-srun-2-nodes-4-tasks-each", ["--standalone"], {}),
        ("slurm-srun-uneven-tasks", ["-h"], {}),
        # only torch can count
        ("slurm-srun-2-nodes-4-tasks-each", ["--nproc_per_node=gpu"], {}),
        ("slurm-salloc-shell", ["--help"], {}),
    ],
)
def test_what_may_be_launched_goes_on_to_torch(python, name, options, variables):
    """Refusals are in core/test_import.py."""
    environ = recorded(name)[0][0] | variables
    done = python("-m", "torchrun_hpc", *options, "train.py", environ=environ)
    assert (done.code, done.err) == (TORCH_IS_IMPORTED, "")


def on_one_node(task):
    """Return the environment of one of four tasks on one node."""
    return recorded("slurm-srun-2-nodes-4-tasks-each")[task][0] | {
        "SLURM_STEP_NODELIST": "jwb0001",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4",
    }


@pytest.mark.parametrize("options", [[], ["--nproc-per-node=1"]])
@pytest.mark.parametrize("task", range(4))
def test_a_task_becomes_the_script_without_torch(python, tmp_path, task, options):
    program = "import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\nsys.exit(5)\n"
    (tmp_path / "script.py").write_text(program, encoding="utf-8")
    # Slow to import, and of no use on one node.
    (tmp_path / "psutil.py").write_text("import os; os._exit(78)\n", encoding="utf-8")
    done = python(
        *("-m", "torchrun_hpc", *options, "script.py", "--lr", "0.1"),
        environ=on_one_node(task),
    )
    assert (done.code, done.out) == (5, f"{task} ['--lr', '0.1']\n")
    assert bool(done.err) is (task == 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], r"\[HPC043\]: .*mine.toml"),  # it may bind its tasks to CPUs
        (["--hpc-site=none"], None),
        (["--hpc-site=jcs"], r"\[HPC043\]: .*mine.toml"),
    ],
)
def test_a_task_on_one_node_reads_its_site(python, tmp_path, options, message):
    folder = tmp_path / "torchrun_hpc" / "sites"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text("no site", encoding="utf-8")
    (tmp_path / "script.py").touch()
    environ = on_one_node(0) | {"XDG_CONFIG_HOME": str(tmp_path)}
    done = python("-m", "torchrun_hpc", *options, "script.py", environ=environ)
    if message is None:
        assert done.code == 0
        return
    assert done.code == 2
    assert re.match(f"torchrun_hpc: error{message}", done.err), done.err


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_a_torch_that_cannot_be_imported(python, error):
    torch = f"raise {error}('libtorch_cuda.so: cannot open shared object file')"
    done = python(*COMMAND, environ={}, torch=torch)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"torchrun_hpc: error[HPC018]: torch cannot be imported by {sys.executable}: "
        "libtorch_cuda.so: cannot open shared object file. Load the module or "
        "activate the environment that has torch\n"
    )


def test_sites_are_shown_without_torch_in_any_locale(python):
    environ = {"LC_ALL": "C", "PYTHONUTF8": ""}
    done = python("-m", "torchrun_hpc.sites", "show", "jsc", environ=environ)
    assert (done.code, done.err) == (0, "")
    assert "Jülich" in done.out

"""Wrong input is refused before torch is imported, and at once."""

from __future__ import annotations

import re
import resource
from typing import Any

from tests.support.detection import changed
from tests.support.processes import run_python
from tests.support.recordings import recorded

# CPU seconds. Torch alone takes more.
MOST_CPU_S = 0.6

TORCH_IS_IMPORTED = 77
NUMPY_IS_IMPORTED = 78

COMMAND = ("-m", "torchrun_hpc", "--nproc_per_node=2", "train.py", "--lr", "0.1")
SRUN = (
    "srun --nodes=3 --ntasks=3 --ntasks-per-node=1 "
    "python -m torchrun_hpc --nproc_per_node=2 train.py --lr 0.1"
)
STEP, TASKS = "slurm-srun-3-nodes", "slurm-srun-2-nodes-4-tasks-each"

# The recorded environment, the task, what is changed, and what is said, if anything.
REFUSED: dict[str, tuple[Any, ...]] = {
    "batch script": (
        *("slurm-sbatch-script", 0, {}),
        rf"HPC061\]: .*3 nodes.*\n    {SRUN}",
    ),
    "salloc": (
        *("slurm-salloc-shell", 0, {}),
        rf"HPC060\]: .*not on the job's 3 nodes.*\n    {SRUN}",
    ),
    "an option of the agent, four tasks on a node": (
        *(TASKS, 0, {"PET_MAX_RESTARTS": "3"}),
        r"HPC134\]: .*PET_MAX_RESTARTS=3 does not work with",
    ),
    "another of these tasks": (TASKS, 5, {"PET_MAX_RESTARTS": "3"}, None),
    "broken list": (
        *(STEP, 0, {"SLURM_STEP_NODELIST": "jwb[0001-"}),
        r"HPC021\]: .*SLURM_STEP_NODELIST='jwb\[0001-' is not a list of nodes",
    ),
    "broken list, second task": (STEP, 1, {"SLURM_STEP_NODELIST": "jwb[0001-"}, None),
    "no list": (
        *(STEP, 0, {"SLURM_STEP_NODELIST": None}),
        r"HPC020\]: .*SLURM_STEP_NODELIST is not set",
    ),
    "not in the list": (
        *(STEP, 2, {"SLURMD_NODENAME": "jwb0009"}),
        r"HPC025\]: .*SLURMD_NODENAME='jwb0009', is not among the step's nodes",
    ),
    "letters beyond ASCII": (
        *(STEP, 0, {"SLURM_STEP_NUM_NODES": "drei\n\u2028ü"}),
        r"HPC021\]: .*SLURM_STEP_NUM_NODES='drei\\n\\u2028ü' is not a whole number",
    ),
}


def test_bad_input_is_refused_before_torch_is_imported(tmp_path):
    for name, code in ("torch", TORCH_IS_IMPORTED), ("numpy", NUMPY_IS_IMPORTED):
        (tmp_path / f"{name}.py").write_text(f"import os; os._exit({code})\n")

    def run(environ):
        variables = {"PYTHONUTF8": "1"} | environ
        return run_python(*COMMAND, cwd=tmp_path, environ=variables, path=[tmp_path])

    for fault, (name, task, changes, message) in REFUSED.items():
        before = cpu_seconds_of_children()
        done = run(changed(recorded(name)[task][0], changes))
        took = cpu_seconds_of_children() - before
        assert (done.code, done.out) == (2, ""), (fault, done.err)
        if message is None:
            assert done.err == "", fault
        else:
            pattern = rf"torchrun_hpc: error\[{message}.*(\n    .*)?\n"
            assert re.fullmatch(pattern, done.err), (fault, done.err)
        assert took < MOST_CPU_S, fault
    # This shows that the above would notice torch.
    assert run({}).code == TORCH_IS_IMPORTED


def cpu_seconds_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


SHOW = """
import os, sys
rank, job = os.environ["RANK"], os.environ["TORCHELASTIC_RUN_ID"]
sys.stdout.write(f"{rank} {'torchrun_hpc' in sys.modules} {job}\\n")  # in one piece
"""


def test_workers_are_forks_of_one_import(tmp_path):
    (tmp_path / "script.py").write_text(SHOW)
    options = ("--nproc-per-node=2", "--rdzv-id=mine")
    done = run_python("-m", "torchrun_hpc", *options, "script.py", cwd=tmp_path)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == ["0 True mine", "1 True mine"], done

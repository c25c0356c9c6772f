"""Standard streams that are closed, full, or that nobody reads: the training runs."""

from __future__ import annotations

import signal
import sys

import pytest

from tests.support.broken_streams import FAILS, SCRIPT, ran_in
from tests.support.processes import clean_environ, run, run_launcher
from tests.support.stock.side_by_side import BROKEN, COMMANDS, OURS, Command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "train.py").write_text(SCRIPT)
    return folder


# --- launches ---------------------------------------------------------------------

# Which streams are broken: each way of standard error, and some of the others.
STREAMS = {
    **{f"stderr {kind}": {"2": kind} for kind in BROKEN},
    "stdout closed": {"1": "closed"},
    "stdout full": {"1": "full"},
    "both without reader": {"1": "without reader", "2": "without reader"},
    "all closed": {"0": "closed", "1": "closed", "2": "closed"},
}

# The arguments, the exit code, and how often the script runs.
PHASES: dict[str, tuple[list[str], int, int]] = {
    "runs, with a warning": (["--nproc-per-node=3", "train.py", "0"], 0, 3),
    "fails, printed by torch": (["--tee=3", "train.py", FAILS], 1, 1),
    "restarts": (["--max-restarts=1", "train.py", FAILS], 0, 2),
    "is refused": (["--nnodes=0", "train.py", "0"], 2, 0),
}


def _is_possible(streams: str, phase: str) -> bool:
    """Return whether torch itself waits for nobody, as stock torchrun would."""
    return not (streams == "stderr not read" and "runs" not in phase)


@pytest.mark.parametrize("phase", PHASES)
def test_the_exit_code_is_the_jobs(phase, launcher, folder, tmp_path):
    argv, code, workers = PHASES[phase]
    names = [name for name in STREAMS if _is_possible(name, phase)]
    commands = [
        Command(OURS, argv, {"RAN": str(tmp_path / name)}, STREAMS[name])
        for name in names
    ]
    results = launcher.launch_all(commands, cwd=folder, at_once=4)
    for name, result in zip(names, results, strict=True):
        ran = ran_in(tmp_path / name)
        assert (result.code, len(ran)) == (code, workers), (name, result.err)
        # If a stream was closed, nothing else has its number.
        assert [worker["wrong"] for worker in ran] == [[]] * workers, name
        if "2" not in STREAMS[name]:
            assert result.own_lines, name  # it reports what it can


DRY_RUNS: list[tuple[dict[str, str], int, str]] = [
    ({"1": "closed"}, 2, "HPC101]: "),
    ({"1": "full"}, 2, "HPC101]: "),
    ({"1": "terminal gone"}, 2, "HPC101]: "),
    ({"1": "without reader"}, 0, ""),  # | head
    ({"1": "full", "2": "full"}, 2, ""),
    ({"1": "closed", "2": "closed"}, 2, ""),
    ({"2": "closed"}, 0, ""),
    ({"2": "without reader"}, 0, ""),
]


def test_the_output_of_a_dry_run_is_its_purpose(launcher, folder):
    argv = ["--hpc-dry-run", "train.py"]
    commands = [Command(OURS, argv, streams=streams) for streams, *_ in DRY_RUNS]
    results = launcher.launch_all(commands, cwd=folder, at_once=4)
    for (streams, code, text), result in zip(DRY_RUNS, results, strict=True):
        assert result.code == code, (streams, result.err)
        assert text in "".join(result.own_lines)
        assert ("Dry run by" in result.out) is ("1" not in streams)


# --- in a shell -------------------------------------------------------------------

AUTO = """
import sys
import torchrun_hpc.auto
from torch.distributed.run import main
main(sys.argv[1:])
"""
SET_UP = """
import torchrun_hpc
torchrun_hpc.setup_environment()
import runpy
runpy.run_path("train.py", run_name="__main__")
"""
HPC = " ".join(COMMANDS[OURS])
EXPLICIT = [
    f"{HPC} train.py 0 2>&1 | true",
    f"{HPC} --hpc-debug train.py 0 <&- >&- 2>/dev/full",
    f"{sys.executable} auto.py train.py 0 <&- >&- 2>/dev/full",
    f"{sys.executable} set_up.py 0 <&- >&- 2>/dev/full",
]
# Two tasks of a step on this node: each of them becomes the script.
STEP = {
    "SLURM_JOB_ID": "19",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "localhost",
}
DIRECT = [
    f"{HPC} train.py 0 <&- >&- 2>&-",
    f"{HPC} --hpc-debug train.py 0 2>&1 | true",
]


@pytest.mark.parametrize(
    ("line", "environ"),
    [*((line, {}) for line in EXPLICIT), *((line, STEP) for line in DIRECT)],
)
def test_in_a_shell(line, environ, folder, tmp_path):
    (folder / "auto.py").write_text(AUTO)
    (folder / "set_up.py").write_text(SET_UP)
    done = run(
        ["bash", "-o", "pipefail", "-c", line],
        environ={**clean_environ(), **environ, "RAN": str(tmp_path / "ran")},
        cwd=folder,
    )
    assert done.code == 0, done.err
    assert [worker["wrong"] for worker in ran_in(tmp_path / "ran")] == [[]]


def test_a_pipe_ends_its_writers_in_direct_mode():
    """Python ignores SIGPIPE; the program that takes its place must not."""
    words = "--no-python", "sh", "-c", "yes | head -n1; kill -PIPE $$"
    done = run_launcher(*words, **STEP)
    assert (done.code, done.out) == (-signal.SIGPIPE, "y\n")
    assert "Broken pipe" not in done.err

"""Standard streams that are closed, full, or that nobody reads: the training runs."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from side_by_side import (
    BROKEN,
    COMMANDS,
    OURS,
    STOCK,
    bare,
    clean_environ,
    end_group,
)

if TYPE_CHECKING:
    from pathlib import Path

    from side_by_side import Launcher, Result

# It writes down what its streams are, prints nothing, and follows its arguments.
SCRIPT = """
import json, os, stat, sys, time
def kind(number):
    try:
        return stat.S_IFMT(os.fstat(number).st_mode)
    except OSError:
        return "closed"

kinds = map(kind, range(3))
wrong = [kind for kind in kinds if kind in (stat.S_IFSOCK, "closed")]
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
with open(os.environ["RAN"], "a") as file:
    file.write(json.dumps({"wrong": wrong, "try": attempt}) + "\\n")
while os.path.exists(os.environ.get("WAIT", "")):
    time.sleep(0.05)
sys.exit(int(sys.argv[1]) if attempt == "0" else 0)
"""
FAILS = "3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "train.py").write_text(SCRIPT)
    return folder


def _ran(file: Path) -> list[dict[str, Any]]:
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


# --- launches ---------------------------------------------------------------------

# Which streams are broken: each way of standard error, and some of the others.
STREAMS = {
    **{f"stderr {kind}": {"2": kind} for kind in BROKEN},
    "stdout closed": {"1": "closed"},
    "stdout full": {"1": "full"},
    "both without reader": {"1": "without reader", "2": "without reader"},
    "all closed": {"0": "closed", "1": "closed", "2": "closed"},
}

# What is launched, what it ends with, and how often the script runs.
PHASES: dict[str, tuple[list[str], int, int]] = {
    "runs, with a warning": (["--nproc-per-node=3", "train.py", "0"], 0, 3),
    "fails, printed by torch": (["--tee=3", "train.py", FAILS], 1, 1),
    "restarts": (["--max-restarts=1", "train.py", FAILS], 0, 2),
    "is refused": (["--nnodes=0", "train.py", "0"], 2, 0),
}


def _is_possible(streams: str, phase: str) -> bool:
    """Say whether torch itself waits for nobody, as stock torchrun would."""
    return not (streams == "stderr not read" and "runs" not in phase)


CASES = [case for case in itertools.product(STREAMS, PHASES) if _is_possible(*case)]


@pytest.fixture(scope="module")
def launches(
    launcher: Launcher, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], tuple[Result, list[dict[str, Any]]]]:
    """All phases with all streams, once."""
    base = tmp_path_factory.mktemp("ran")
    results = launcher.many(
        [(OURS, PHASES[phase][0]) for _, phase in CASES],
        environs=[{"RAN": str(base / "-".join(case))} for case in CASES],
        streams=[STREAMS[streams] for streams, _ in CASES],
        cwd=folder,
        limit=45,
        at_once=4,
    )
    ran = [_ran(base / "-".join(case)) for case in CASES]
    return dict(zip(CASES, zip(results, ran, strict=True), strict=True))


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_the_exit_code_is_the_jobs(
    case: tuple[str, str],
    launches: dict[tuple[str, str], tuple[Result, list[dict[str, Any]]]],
) -> None:
    streams, phase = case
    _, code, workers = PHASES[phase]
    result, ran = launches[case]
    assert result.code == code, result.err
    assert len(ran) == workers, result.err
    # Where a stream was closed, nothing else has its number.
    assert [worker["wrong"] for worker in ran] == [[]] * workers
    if "2" not in STREAMS[streams]:
        assert result.own_lines, result.err  # what can be said, is


def test_stock_runs_too(launcher: Launcher, folder: Path, tmp_path: Path) -> None:
    """What is asked of us is what torchrun does."""
    kinds = list(BROKEN)
    results = launcher.many(
        [(STOCK, [*bare(STOCK), "train.py", "0"])] * len(kinds),
        environs=[{"RAN": str(tmp_path / kind)} for kind in kinds],
        streams=[{"2": kind} for kind in kinds],
        cwd=folder,
        at_once=4,
    )
    assert [result.code for result in results] == [0] * len(kinds)
    assert [len(_ran(tmp_path / kind)) for kind in kinds] == [1] * len(kinds)


DRY_RUNS: list[tuple[dict[str, str], int, str]] = [
    ({"1": "closed"}, 2, "HPC101 "),
    ({"1": "full"}, 2, "HPC102 "),
    ({"1": "terminal gone"}, 2, "HPC102 "),
    ({"1": "without reader"}, 0, ""),  # | head
    ({"1": "full", "2": "full"}, 2, ""),
    ({"1": "closed", "2": "closed"}, 2, ""),
    ({"2": "closed"}, 0, ""),
    ({"2": "without reader"}, 0, ""),
]


def test_the_output_of_a_dry_run_is_its_purpose(
    launcher: Launcher, folder: Path
) -> None:
    results = launcher.many(
        [(OURS, ["--hpc-dry-run", "train.py"])] * len(DRY_RUNS),
        streams=[streams for streams, *_ in DRY_RUNS],
        cwd=folder,
        at_once=4,
    )
    for (streams, code, text), result in zip(DRY_RUNS, results, strict=True):
        assert result.code == code, (streams, result.err)
        assert text in "".join(result.own_lines)
        assert ("a dry run" in result.out) is ("1" not in streams)


# --- as they are typed ------------------------------------------------------------

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
    f"{HPC} train.py 0 2>&-",
    f"{HPC} train.py 0 2>/dev/full",
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
def test_typed(
    line: str, environ: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    (folder / "auto.py").write_text(AUTO)
    (folder / "set_up.py").write_text(SET_UP)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        env={**clean_environ(), **environ, "RAN": str(tmp_path / "ran")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [worker["wrong"] for worker in _ran(tmp_path / "ran")] == [[]]


@pytest.mark.parametrize(("restarts", "code"), [(0, 1), (1, 0)])
def test_the_reader_goes_while_it_runs(
    restarts: int, code: int, folder: Path, tmp_path: Path
) -> None:
    wait, ran = tmp_path / "wait", tmp_path / "ran"
    wait.touch()
    with subprocess.Popen(
        [*COMMANDS[OURS], f"--max-restarts={restarts}", "train.py", FAILS],
        env={**clean_environ(), "RAN": str(ran), "WAIT": str(wait)},
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            assert process.stderr is not None
            assert b"HPC001" in process.stderr.readline()
            process.stderr.close()
            end = time.monotonic() + 60
            while not _ran(ran) and time.monotonic() < end:
                time.sleep(0.05)
            wait.unlink()
            assert process.wait(timeout=60) == code
        finally:
            end_group(process.pid)
    assert [worker["try"] for worker in _ran(ran)] == ["0", "1"][: restarts + 1]


def test_a_pipe_ends_its_writers_in_direct_mode(tmp_path: Path) -> None:
    """Python ignores SIGPIPE; the program that takes its place is not to."""
    done = subprocess.run(
        [*COMMANDS[OURS], "--no-python", "sh", "-c", "yes | head -n1; kill -PIPE $$"],
        env={**clean_environ(), **STEP},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "y\n"
    assert "Broken pipe" not in done.stderr
    assert done.returncode == -13

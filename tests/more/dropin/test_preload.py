"""Workers that are forks of one import, with the installed torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from side_by_side import clean_environ
from waiting import PATIENCE

ROOT = Path(__file__).parents[3]
USES_PROCESSES = str(ROOT / "tests" / "harness" / "uses_processes.py")
PRELOAD = "--hpc-preload=torch"


def environ_with(changes: dict[str, str]) -> dict[str, str]:
    kept = {k: v for k, v in clean_environ().items() if k != "OMP_NUM_THREADS"}
    return kept | changes


def launch(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchrun_hpc", *words],
        env=environ_with(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def seen_by(folder: Path, *options: str, words: tuple[str, ...] = ()) -> list[Any]:
    folder.mkdir()
    done = launch(*options, "--nproc-per-node=2", USES_PROCESSES, str(folder), *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_what_starts_processes_and_draws_numbers(tmp_path: Path) -> None:
    by_exec = seen_by(tmp_path / "exec")
    by_fork = seen_by(tmp_path / "fork", PRELOAD, words=("compiled",))
    drawn = [[*worker.pop("random"), worker.pop("key")] for worker in by_exec + by_fork]
    for numbers in zip(*drawn, strict=True):
        assert len({*numbers}) == len(drawn)  # each worker has its own
    assert by_fork[0]["started"].pop("compiled") is True
    assert by_exec[0]["started"].pop("compiled") is None
    assert by_fork == by_exec


@pytest.mark.parametrize("threads", [None, 1])
def test_threads(tmp_path: Path, threads: int | None) -> None:
    """As of the same script without a launcher; two workers are in tests/core."""
    environ = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    script = tmp_path / "script.py"
    script.write_text("import torch\nprint(torch.__config__.parallel_info())\n")
    done = launch(PRELOAD, "--nproc-per-node=1", str(script), **environ)
    alone = subprocess.run(
        [sys.executable, str(script)],
        env=environ_with(environ), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == alone.stdout, done.stderr
    assert "HPC169" not in done.stderr


def test_a_guess_that_was_wrong(tmp_path: Path) -> None:
    """With "cpu" for the number, and one CPU: alone, a worker may have all threads."""
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(os.environ.get('OMP_NUM_THREADS'))\n")
    done = launch(
        PRELOAD, "--nproc-per-node=auto", str(script), CUDA_VISIBLE_DEVICES="0"
    )
    workers = len(os.sched_getaffinity(0))
    assert done.stdout.split() == ["1"] * workers, done.stderr
    (warning,) = re.findall("warning: (HPC169.*)", done.stderr)
    assert "OMP_NUM_THREADS was not set when they were imported, and is 1" in warning


def test_where_it_is_not_used_nothing_is_lost(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('torch' in sys.modules)\n")
    done = launch("--hpc-preload=torch,nothing.there", str(script))
    assert (done.returncode, done.stdout) == (0, "False\n")
    assert "nothing.there cannot be imported (ModuleNotFoundError" in done.stderr
    done = launch(PRELOAD, str(script))
    assert (done.returncode, done.stdout, "warning" in done.stderr) == (
        0, "True\n", False
    )  # fmt: skip


def test_a_dry_run_preloads_nothing_and_shows_it() -> None:
    done = launch(PRELOAD, "--hpc-dry-run", "--hpc-site=none", "train.py")
    assert re.search(r"^imports once +torch +--hpc_preload$", done.stdout, re.MULTILINE)
    assert re.search(r"^fork_workers +patched", done.stdout, re.MULTILINE)
    assert "fork_workers" not in launch("--hpc-dry-run", "train.py").stdout

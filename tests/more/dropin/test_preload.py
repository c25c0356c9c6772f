"""Workers that are forks of one import, with the installed torch."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import ROOT
from tests.support.processes import clean_environ, run_launcher, run_python

if TYPE_CHECKING:
    from pathlib import Path

USES_PROCESSES = ROOT / "tests" / "support" / "stock" / "uses_processes.py"
PRELOAD = "--hpc-preload=torch"


def seen_by(folder: Path, *options: str, words: tuple[str, ...] = ()) -> list[Any]:
    folder.mkdir()
    done = run_launcher(*options, "--nproc-per-node=2", USES_PROCESSES, folder, *words)
    assert done.code == 0, done.err
    assert done.err.count("\n") == 1, done.err
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_what_starts_processes_and_draws_numbers(tmp_path):
    by_exec = seen_by(tmp_path / "exec", "--hpc-preload=none")
    by_fork = seen_by(tmp_path / "fork", PRELOAD, words=("compiled",))
    drawn = [[*worker.pop("random"), worker.pop("key")] for worker in by_exec + by_fork]
    for numbers in zip(*drawn, strict=True):
        assert len({*numbers}) == len(drawn)  # each worker has its own
    assert by_fork[0]["started"].pop("compiled") is True
    assert by_exec[0]["started"].pop("compiled") is None
    assert by_fork == by_exec


@pytest.mark.parametrize("threads", [None, 1])
def test_threads(tmp_path, threads):
    """As of the same script without a launcher; two workers are in tests/core."""
    environ = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    script = tmp_path / "script.py"
    script.write_text("import torch\nprint(torch.__config__.parallel_info())\n")
    done = run_launcher(PRELOAD, "--nproc-per-node=1", script, **environ)
    alone = run_python(script, environ=clean_environ() | environ)
    assert done.out == alone.out != "", done.err
    assert "HPC169" not in done.err


# As if the command line had needed torch, for an option that only torch knows.
IMPORTED = ["-c", "import torch; from torchrun_hpc.main import main; main()"]


@pytest.mark.parametrize("command", [["-m", "torchrun_hpc"], IMPORTED])
def test_torch_was_imported_without_the_number_of_threads(tmp_path, command):
    """The number of workers was a guess, or torch was imported too early."""
    script = tmp_path / "script.py"
    # In one piece: the workers share a pipe.
    shown = "os.environ['OMP_NUM_THREADS'], torch.get_num_threads(), torch.rand(1)"
    script.write_text(f"import os\nimport torch\nprint(str(({shown})) + '\\n', end='')")
    environ = clean_environ() | {"CUDA_VISIBLE_DEVICES": "0"}
    done = run_python(*command, "--nproc-per-node=auto", script, environ=environ)
    workers = len(os.sched_getaffinity(0))
    lines = done.out.splitlines()
    assert len({*lines}) == workers, done.err
    assert all(line.startswith("('1', 1, tensor") for line in lines), lines
    assert "HPC169" not in done.err


def test_where_it_is_not_used_nothing_is_lost(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('torchrun_hpc' in sys.modules)\n")
    done = run_launcher("--hpc-preload=torch,nothing.there", script)
    assert (done.code, done.out) == (0, "False\n")
    assert "nothing.there cannot be imported (ModuleNotFoundError" in done.err
    (tmp_path / "psutil.py").write_text("")
    for options in ([], [PRELOAD]):
        done = run_launcher(*options, script)
        assert (done.code, done.out) == (0, "False\n")
        assert ("psutil.py has the name of a module" in done.err) == bool(options)
    (tmp_path / "psutil.py").unlink()
    for option in ("--hpc-preload=none", "--hpc-preload=auto", PRELOAD):
        done = run_launcher(option, script)
        assert (done.code, done.out) == (0, f"{option[-4:] != 'none'}\n")
        assert "warning" not in done.err


def test_a_dry_run_preloads_nothing_and_shows_it():
    dry_run = ("--hpc-dry-run", "--hpc-debug", "--hpc-site=none", "train.py")
    done = run_launcher(PRELOAD, *dry_run)
    assert re.search(r"^preload +torch +--hpc_preload$", done.out, re.MULTILINE)
    assert re.search(r"^fork_workers +patched", done.out, re.MULTILINE)
    done = run_launcher(*dry_run)
    assert re.search(r"^preload +torch +default$", done.out, re.MULTILINE)
    done = run_launcher(*dry_run, KINETO_USE_DAEMON="1")
    value = r"none \(KINETO_USE_DAEMON is set\)"
    assert re.search(rf"^preload +{value} +default$", done.out, re.MULTILINE)
    assert "fork_workers" not in run_launcher("--hpc-preload=none", *dry_run).out

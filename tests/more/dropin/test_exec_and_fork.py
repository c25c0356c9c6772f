"""A script started by exec and by a fork: the differences that it can see."""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any

from tests.support import ROOT
from tests.support.cluster.commands import SCRIPTS
from tests.support.processes import run_launcher

if TYPE_CHECKING:
    from pathlib import Path

# The first cells of rows in docs/speed.md.
ATEXIT = "`atexit`, `weakref.finalize`, `copyreg`, `linecache`"
ENVIRON = "`/proc/PID/environ`, which other programs can read"
FILTERS = "`warnings.filters`"
FRAMES = "frames below the script (faulthandler, pdb, py-spy)"
FREEZE = "`gc.get_freeze_count()`"
LOGGERS = "loggers of Python's modules, such as `asyncio`"
MODULES = "`sys.modules` and loaded libraries"
PARENT = "`os.getppid()`"
SEED = "`sitecustomize`, `PYTHONHASHSEED`, addresses"
SIGNALS = "`signal.getsignal()` of SIGSEGV, SIGFPE, SIGABRT, SIGBUS, SIGILL"
THREADS = "threads and open files"

# Each difference, and the row that documents it.
PERMITTED = {
    "after torch: modules of Python": MODULES,
    "after torch: modules of the launcher": MODULES,
    "after torch: names of the launcher": MODULES,
    "after torch: sys.meta_path": MODULES,
    "after torch: order of warnings.filters": FILTERS,
    "frames: below": FRAMES,
    "frames: possible calls": FRAMES,
    "frames: warning from below": FRAMES,
    "handler of SIGABRT": SIGNALS,
    "handler of SIGBUS": SIGNALS,
    "handler of SIGFPE": SIGNALS,
    "handler of SIGILL": SIGNALS,
    "handler of SIGSEGV": SIGNALS,
    "library: copyreg": ATEXIT,
    "library: warnings.filters": FILTERS,
    "memory: atexit": ATEXIT,
    "memory: finalizers": ATEXIT,
    "memory: get_freeze_count": FREEZE,
    "memory: linecache": ATEXIT,
    "open file sockets": THREADS,
    "own address": SEED,
    "own hash": SEED,
    "process environ": ENVIRON,
    "process libraries": MODULES,
    "process parent": PARENT,
    "process status SigCgt": THREADS,
    "process tasks": THREADS,
    "sys.meta_path": MODULES,
    "sys.modules of Python": MODULES,
    "sys.modules of the launcher": MODULES,
    "sys.path_importer_cache": MODULES,
}

# It configures logging before it imports torch, as many scripts do.
CONFIGURES = """
import json, logging, logging.config, pathlib, sys
loggers = [
    logging.getLogger(name)
    for name in ("torch", "torch.distributed", "torch.distributed.device_mesh")
]
logging.getLogger("of_the_script")
kept = {logger.name: {} for logger in loggers}
logging.config.dictConfig({"version": 1, "loggers": kept})
for logger in loggers:
    logger.setLevel(logging.ERROR)
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
known = logging.root.manager.loggerDict.items()
disabled = [name for name, logger in known if getattr(logger, "disabled", False)]
import torch
loggers = [logging.getLogger(logger.name) for logger in loggers]
seen = {
    "disabled": sorted(disabled),
    "levels": [logger.level for logger in loggers],
    "handlers": [sorted(map(str, logger.handlers)) for logger in loggers],
    "propagate": [logger.propagate for logger in loggers],
    "is disabled": [logger.disabled for logger in loggers],
}
pathlib.Path(sys.argv[1], "0.json").write_text(json.dumps(seen))
"""

# The loggers that a script also disables if a fork started it.
DISABLED = {
    "asyncio": LOGGERS,
    "concurrent": LOGGERS,
    "concurrent.futures": LOGGERS,
}


def in_both_forms(
    folder: Path, script: Path, warnings: str, workers: int
) -> list[list[Any]]:
    """Launch a script by exec and by fork; return what its workers wrote, by rank."""
    launches = []
    for form in ("none", "torch"):
        options = f"--hpc-preload={form}", f"--nproc-per-node={workers}"
        done = run_launcher(*options, script, folder, PYTHONWARNINGS=warnings)
        assert done.code == 0, done.err
        assert done.err.count("\n") == 1, done.err  # no warning is shown
        files = [folder / f"{rank}.json" for rank in range(workers)]
        launches.append([json.loads(file.read_text()) for file in files])
    return launches


def observations(workers: list[Any]) -> list[dict[str, Any]]:
    """Return what each rank sees, and which of its values the ranks have in common."""
    first, second = (worker["own"] for worker in workers)
    common = {f"own {name}": first[name] == second[name] for name in first}
    return [{**worker["seen"], **common} for worker in workers]


def test_what_a_script_sees(tmp_path):
    launches = in_both_forms(tmp_path, SCRIPTS / "introspection.py", "default", 2)
    by_exec, by_fork = map(observations, launches)
    differing = {
        name: values
        for seen in zip(by_exec, by_fork, strict=True)
        for name in {*seen[0], *seen[1]}
        if len({*(values := tuple(str(each.get(name)) for each in seen))}) > 1
    }
    assert len(by_exec[0]) > 300
    names = sorted(differing.keys() - PERMITTED.keys())
    assert not names, "\n".join(f"{name}: {differing[name]}" for name in names)
    assert PERMITTED.keys() <= differing.keys()


def test_the_page_names_what_differs():
    page = (ROOT / "docs" / "speed.md").read_text()
    table = page.partition("### What your script notices")[2].partition("###")[0]
    rows = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    assert {*PERMITTED.values(), *DISABLED.values()} <= {*rows}


def test_logging_that_is_configured_before_torch(tmp_path):
    script = tmp_path / "configures.py"
    script.write_text(CONFIGURES)
    (by_exec,), (by_fork,) = in_both_forms(tmp_path, script, "error", 1)
    assert by_exec["disabled"] == ["of_the_script"]
    assert all("<NullHandler (NOTSET)>" in names for names in by_exec["handlers"])
    assert not any(by_exec["propagate"] + by_exec["is disabled"])
    # Torch's import sets levels, but not the last one.
    levels = by_exec.pop("levels")
    assert levels[-1] == logging.ERROR
    for of_exec, of_fork in zip(levels, by_fork.pop("levels"), strict=True):
        assert of_fork in {of_exec, logging.ERROR}
    disabled = {*by_fork["disabled"]}
    assert disabled >= DISABLED.keys()
    assert by_fork | {"disabled": sorted(disabled - DISABLED.keys())} == by_exec

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

# The rows of docs/speed.md, by their first cells, and the differences of each.
ROWS = {
    "`/proc/PID/environ`, which other programs can read": ["process environ"],
    "`atexit`, `weakref.finalize`, `copyreg`, `linecache`": [
        *("library: copyreg", "memory: atexit", "memory: finalizers"),
        "memory: linecache",
    ],
    "`gc.get_freeze_count()`": ["memory: get_freeze_count"],
    "`os.getppid()`": ["process parent"],
    "`signal.getsignal()` of SIGSEGV, SIGFPE, SIGABRT, SIGBUS, SIGILL": [
        *("handler of SIGABRT", "handler of SIGBUS", "handler of SIGFPE"),
        *("handler of SIGILL", "handler of SIGSEGV"),
    ],
    "`sitecustomize`, `PYTHONHASHSEED`, addresses": ["own address", "own hash"],
    "`sys.modules` and loaded libraries": [
        *("after torch: modules of Python", "after torch: modules of the launcher"),
        *("after torch: names of the launcher", "after torch: sys.meta_path"),
        *("process libraries", "sys.meta_path", "sys.modules of Python"),
        *("sys.modules of the launcher", "sys.path_importer_cache"),
    ],
    "`warnings.filters`": [
        *("after torch: order of warnings.filters", "library: warnings.filters"),
    ],
    "frames below the script (faulthandler, pdb, py-spy)": [
        *("frames: below", "frames: possible calls", "frames: warning from below"),
    ],
    "threads and open files": [
        *("open file sockets", "process status SigCgt", "process tasks"),
    ],
}
PERMITTED = {name for names in ROWS.values() for name in names}

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

# The loggers that a script also disables if a fork started it, and their row.
DISABLED = {"asyncio", "concurrent", "concurrent.futures"}
LOGGERS = "loggers of Python's modules, such as `asyncio`"


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
    names = sorted(differing.keys() - PERMITTED)
    assert not names, "\n".join(f"{name}: {differing[name]}" for name in names)
    assert differing.keys() >= PERMITTED


def test_the_page_names_what_differs():
    page = (ROOT / "docs" / "speed.md").read_text()
    table = page.partition("### What your script notices")[2].partition("###")[0]
    rows = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    assert {*ROWS, LOGGERS} <= {*rows}


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
    assert disabled >= DISABLED
    assert by_fork | {"disabled": sorted(disabled - DISABLED)} == by_exec

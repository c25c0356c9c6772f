"""OpenMP's own binding on this machine: where all threads of two workers may run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support.cluster.bound import ALL
from tests.support.cluster.mpi import FOLDER
from tests.support.processes import run_launcher
from torchrun_hpc.host.topology import this_node

if TYPE_CHECKING:
    from collections.abc import Mapping

# LLVM's library under its names of LLVM and of Intel, by install.sh.
_LIBRARIES = FOLDER / "cmeel-libomp"

# Writes the CPUs of each thread: at the start, after the import and after an operation
# with two threads. A DataLoader's process must not compute: a library for GCC hangs in
# a fork after its parent has computed.
SCRIPT = """
import json, os, sys

def masks(_=None):
    threads = sorted(map(int, os.listdir("/proc/self/task")))
    return [sorted(os.sched_getaffinity(thread)) for thread in threads]

report = {"rank": int(os.environ["RANK"]), "start": masks()}
import torch
from torch.utils.data import DataLoader

report["import"] = masks()
torch.set_num_threads(2)
torch.ones(2**16).add_(1)
report["operation"] = masks()
(report["loader"],) = DataLoader([0], num_workers=1, collate_fn=masks)
sys.stdout.write(json.dumps(report) + "\\n")
"""


@dataclass(frozen=True)
class Case:
    """Variables for OpenMP.

    Attributes:
        variables: Their values.
        binds_at_import: Whether the import of torch binds the thread that imports it.
        moves_forks: Whether threads of a bound fork would leave its CPUs.
        library: The name of a library that is loaded first, if any.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    binds_at_import: bool = False
    moves_forks: bool = False
    library: str = ""

    @property
    def environ(self) -> dict[str, str]:
        """The variables of a launch."""
        environ = {**self.variables}
        if self.library:
            (path,) = _LIBRARIES.glob(f"lib/python*/site-packages/*/lib/{self.library}")
            environ["LD_PRELOAD"] = str(path)
        return environ


CASES = {
    "none": Case(),
    "off": Case({"OMP_PROC_BIND": "false"}),
    "close": Case({"OMP_PROC_BIND": "close"}, binds_at_import=True, moves_forks=True),
    "spread": Case(
        {"OMP_PROC_BIND": "spread", "OMP_PLACES": "cores"},
        binds_at_import=this_node().cores[0].cpus != tuple(ALL),
        moves_forks=True,
    ),
    "list": Case(
        {"GOMP_CPU_AFFINITY": f"{ALL[0]},{ALL[-1]}"},
        binds_at_import=True,
        moves_forks=True,
    ),
    "one place": Case(
        {"OMP_PROC_BIND": "true", "OMP_PLACES": f"{{{','.join(map(str, ALL))}}}"},
        moves_forks=True,
    ),
    "LLVM": Case(moves_forks=True, library="libomp.so"),
    "KMP": Case(
        {"KMP_AFFINITY": "granularity=fine,compact,1,0"},
        binds_at_import=True,
        moves_forks=True,
        library="libiomp5.so",
    ),
}


def is_installed() -> bool:
    """Return whether there is LLVM's library."""
    return _LIBRARIES.exists()


def launch(case: Case, *options: str, script: str) -> tuple[list[dict[str, Any]], str]:
    """Launch two workers; return their reports by rank, and the launcher's messages."""
    done = run_launcher("--nproc_per_node=2", *options, script, **case.environ)
    assert done.code == 0, done.err
    reports = map(json.loads, done.out.splitlines())
    return sorted(reports, key=lambda report: report["rank"]), done.err

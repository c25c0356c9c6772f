"""Run a tier of the tests, and say what it cost: tier.py NAME COMMAND...

Daemons of test clusters leave their parents, so that a shell's `time` misses most of
what they use. A control group counts all of it, if this user may make one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ROOT = Path("/sys/fs/cgroup")


def _usage_v1(group: Path) -> float:
    return int((group / "cpuacct.usage").read_text()) / 1e9


def _usage_v2(group: Path) -> float:
    (usage,) = (
        line.split()[1]
        for line in (group / "cpu.stat").read_text().splitlines()
        if line.startswith("usage_usec")
    )
    return int(usage) / 1e6


def _usage_of_children(_: Path) -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def counted() -> Iterator[Callable[[], float]]:
    """Let what this process starts be counted; give a function for its CPU seconds."""
    versions = (_ROOT / "cpuacct", _usage_v1), (_ROOT, _usage_v2)
    parent, usage = next(
        (each for each in versions if (each[0] / "cgroup.procs").exists()),
        (_ROOT, _usage_of_children),
    )
    group = parent / f"torchrun_hpc-tests-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        yield lambda: _usage_of_children(group)
        return
    try:
        yield lambda: usage(group)
    finally:
        with contextlib.suppress(OSError):  # something else is still in it
            (parent / "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()


def main() -> int:
    """Run it."""
    name, *command = sys.argv[1:]
    start = time.monotonic()
    with counted() as usage:
        program = subprocess.Popen(command)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends by itself, and says how
        code = program.wait()
        used = usage()
    seconds = time.monotonic() - start
    sys.stdout.write(f"{name}: {seconds:.0f} s, {used:.0f} CPU seconds\n")
    return code


if __name__ == "__main__":
    sys.exit(main())

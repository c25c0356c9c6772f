"""Run a tier of the tests, and say what it cost: tier.py NAME COMMAND...

Daemons of test clusters leave their parents, so a shell's `time` misses most of what
they use. A control group counts all of it, if this user can make one.
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

_ROOT = Path("/sys/fs/cgroup")


def new_group() -> Path | None:
    """Make a control group below that of this process; None if that is impossible."""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "cpuacct" in controllers.split(","):
            version = "" if number == "0" else "cpuacct"
            parent = _ROOT / version / path[1:]
            group = parent / f"torchrun_hpc-tests-{os.getpid()}"
            if (parent / "cgroup.procs").exists():
                with contextlib.suppress(OSError):
                    group.mkdir()
                    return group
    return None


def enter(group: Path) -> None:
    """Put this process into a group, and all that it starts."""
    with contextlib.suppress(OSError):
        (group / "cgroup.procs").write_text("0", encoding="ascii")


def usage_of(group: Path) -> float:
    """Return the CPU seconds of a group, as version 1 or 2 writes them."""
    first = group / "cpuacct.usage"
    if first.exists():
        return int(first.read_text(encoding="ascii")) / 1e9
    _, microseconds = (group / "cpu.stat").read_text(encoding="ascii").split()[:2]
    return int(microseconds) / 1e6


def main() -> int:
    """Run it."""
    name, *command = sys.argv[1:]
    start = time.monotonic()
    group = new_group()
    into = None if group is None else lambda: enter(group)
    program = subprocess.Popen(command, preexec_fn=into)  # noqa: PLW1509 - no threads
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends by itself, and says how
    code = program.wait()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = children.ru_utime + children.ru_stime
    if group is not None:
        used = max(used, usage_of(group))
        with contextlib.suppress(OSError):  # something else is still in it
            group.rmdir()
    seconds = time.monotonic() - start
    sys.stdout.write(f"{name}: {seconds:.0f} s, {used:.0f} CPU seconds\n")
    return code


if __name__ == "__main__":
    sys.exit(main())

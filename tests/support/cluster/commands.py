"""How tests start a launcher on a cluster, and read its workers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import ROOT
from tests.support.cluster.testbed import Batch
from tests.support.patience import NEVER_S, OWN, without_waits

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

    from tests.support.cluster.testbed import Cluster

    # An output, or the end of a job, which must have ended well.
    Ended = str | subprocess.CompletedProcess[str] | Batch

SCRIPTS = Path(__file__).parent / "scripts"
WORLD = str(SCRIPTS / "world.py")
ALL_REDUCE = str(SCRIPTS / "all_reduce.py")
DDP = str(ROOT / "examples" / "ddp.py")

# On the hosts as a user has it: the virtual environment in front.
BIN = Path(sys.executable).parent
ENVIRON = {"PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin"}
JUELICH = ENVIRON | {"SYSTEMNAME": "juwelsbooster"}

HPC = ("python", "-m", "torchrun_hpc")
STOCK = ("python", "-m", "torch.distributed.run")

# As it stands in a script.
LINE = " ".join([*HPC, WORLD])

# Runs a command that is refused, and then the line that its message tells to type.
AS_SUGGESTED = f"python {SCRIPTS / 'as_suggested.py'}"

# What shows a script of a job of PBS, with a node file in its folder.
PBS = {
    "PBS_JOBID": "7.pbs", "PBS_NODEFILE": "HOSTFILE", "PBS_ENVIRONMENT": "PBS_BATCH"
}  # fmt: skip

# A stand-in for Apptainer, pyxis and enroot: namespaces that have their properties.
CONTAINER = ("sh", str(SCRIPTS / "container.sh"))

# How an agent starts its workers: by exec, or as forks of one import.
FORMS = {
    "exec": {"PET_HPC_PRELOAD": "none"},
    "fork": {"PET_HPC_PRELOAD": "torch"},
}

ONE_TASK = "--ntasks-per-node=1"
KILL = "--kill-on-bad-exit=1"

# The nodes of the clusters `unpadded` and `bare`.
NODES = ("n9", "n10", "n11")
HOSTS = NODES[:2]  # a job of two nodes gets these


def require(reason: str | None) -> None:
    """Skip if something is missing; in CI, fail."""
    if reason is None:
        return
    if os.environ.get("CI", "").lower() in {"1", "true", "yes"}:
        pytest.fail(f"CI must run this test: {reason}")
    pytest.skip(reason)


def require_package(name: str) -> None:
    """Skip if a package that only tests need is missing; in CI, fail."""
    is_there = importlib.util.find_spec(name) is not None
    require(None if is_there else f"{name} is not installed (make test-all)")


def together(folder: Path, workers: int) -> tuple[str, str]:
    """Return the words for a script as world.py, which ends when so many have begun.

    Args:
        folder: For this script, and for no other.
        workers: Of all jobs that run it.
    """
    folder.chmod(0o777)
    script, there = folder / "world_together.sh", folder / "there"
    there.mkdir()
    there.chmod(0o777)
    script.write_text(
        f"#!/bin/sh\npython {WORLD}\nmktemp -p {there} > /dev/null\n"
        f"until test $(ls {there} | wc -l) = {workers}; do sleep 0.1; done\n",
        encoding="utf-8",
    )
    script.chmod(0o755)
    return "--no-python", str(script)


def until_there(file: Path | str) -> str:
    """Return the shell command that waits for a file."""
    return f"until test -e {file}; do sleep 0.1; done"


def on_node(node: int, command: str) -> str:
    """Return the shell command that runs a command on one node only."""
    return f"if test $SLURM_NODEID = {node}; then\n{command}\nfi"


def late(node: int, file: Path | None = None) -> str:
    """Return the shell command by which a node starts late: with a file, or never."""
    return on_node(node, until_there(file) if file else f"exec sleep {NEVER_S}")


def absent(node: int, folder: Path) -> str:
    """Return the shell command by which a node only waits for the others' end.

    The folder belongs to this launch of two nodes, and every user may write there.
    """
    end = folder / "end"
    wait = on_node(node, f"{until_there(end)}; exit")
    return f'{wait}; "$@"; code=$?; touch {end}; exit $code'


def in_terminal(cluster: Cluster, command: str, keys: str = "") -> str:
    """Run a command in a terminal where a user types keys; return what it shows."""
    done = cluster.run(
        ["script", "-qec", command, "/dev/null"],
        input=keys or None,
        env=ENVIRON | {"SHELL": "/bin/sh"},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.replace("\r\n", "\n")


def refused(done: subprocess.CompletedProcess[str], code: int = 2) -> list[str]:
    """Return the errors of a job that was refused before any worker."""
    assert done.returncode == code, done.stderr
    assert done.stdout == "", done
    assert "Traceback" not in done.stderr, done.stderr
    return errors(done.stderr)


def read_workers(ended: Ended) -> list[dict[str, Any]]:
    """Return what the workers of scripts/world.py printed, by rank."""
    if isinstance(ended, str):
        text = ended
    else:
        text = ended.output if isinstance(ended, Batch) else ended.stdout
        assert ended.returncode == 0, (text, getattr(ended, "stderr", ""))
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda worker: int(worker["RANK"]))


def column(seen: list[dict[str, Any]] | Ended, *names: str) -> list[tuple[Any, ...]]:
    """Return some values of each worker, an empty text for one that is not set."""
    workers = seen if isinstance(seen, list) else read_workers(seen)
    return [tuple(worker.get(name, "") for name in names) for worker in workers]


def see_one_world(ended: Ended, hosts: Sequence[str] = HOSTS, each: int = 1) -> None:
    """See that there was one world, with so many workers on each of these hosts."""
    seen = read_workers(ended)
    assert column(seen, "host", "WORLD_SIZE") == [
        (host, str(len(hosts) * each)) for host in hosts for _ in range(each)
    ], ended
    assert len({worker["TORCHELASTIC_RUN_ID"] for worker in seen}) == 1, ended


def own_lines(stderr: str) -> list[str]:
    """Return the lines that the launcher itself wrote, also after a prompt.

    Reports of waits are left out, because they depend on the machine's load.
    """
    return [line for line in lines(stderr) if OWN.search(line)]


def errors(stderr: str) -> list[str]:
    """Return the launcher's error lines."""
    return [line for line in own_lines(stderr) if "error[" in line]


def warnings(stderr: str) -> list[str]:
    """Return the launcher's warnings, from their codes on."""
    return [
        line.partition("warning[")[2]
        for line in own_lines(stderr)
        if "warning[" in line
    ]


def lines(stderr: str) -> list[str]:
    """Return all lines but those that depend on load: srun's queue, and who is late.

    A message and its first line to copy are one line.
    """
    whole = re.sub(rf"({OWN.pattern}.*:)\n    (?=\S)", r"\1 ", stderr)
    own = (line for line in whole.splitlines() if not line.startswith("srun: job "))
    return without_waits(own)

"""What a launch takes of a node: memory, open files, threads."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

NAME = "SLURMD_NODENAME"  # of each task
MIB = 1024  # kB


@dataclass(frozen=True)
class Usage:
    """What the processes of a launch take of one node.

    Attributes:
        private: Memory in MiB that only these processes have: of all of them, and each
            page once, even if several have it.
        shared: Memory in MiB of the files that they map, libraries above all. A page is
            in memory once, whoever maps it.
        files: Open files of the agent.
        threads: Threads of the agent.
    """

    private: float
    shared: float
    files: int
    threads: int


def agents(nodes: Collection[str]) -> Iterator[tuple[str, psutil.Process]]:
    """Find the agents on these nodes: of each, the node's name and the process.

    A fork server has the agent's command line, and is a child of it.
    """
    for process in psutil.process_iter():
        # It may have ended.
        with contextlib.suppress(psutil.Error):
            name = process.environ().get(NAME, "")
            if name in nodes and _is_launcher(process):
                parent = process.parent()
                if parent is None or not _is_launcher(parent):
                    yield name, process


def _is_launcher(process: psutil.Process) -> bool:
    return " -m torchrun_hpc " in " ".join(process.cmdline())


def usage(agent: psutil.Process) -> Usage:
    """Return what an agent and all its children take of their node."""
    parts = [_memory(process) for process in (agent, *agent.children(recursive=True))]
    return Usage(
        private=sum(private for private, _ in parts) / MIB,
        shared=max(shared for _, shared in parts) / MIB,
        files=agent.num_fds(),
        threads=agent.num_threads(),
    )


def _memory(process: psutil.Process) -> tuple[int, int]:
    """Return a process's part of the private memory, and its mapped files, in kB."""
    proc = Path(f"/proc/{process.pid}")
    parts = (proc / "smaps_rollup").read_text(encoding="ascii")
    status = (proc / "status").read_text(encoding="utf-8", errors="replace")
    return _number("Pss_Anon", parts), _number("RssFile", status)


def _number(name: str, text: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"no {name}")
    return int(found[1])

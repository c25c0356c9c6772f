"""Read-ahead: reads the files of an import before the import needs them.

    launcher ──names of modules──► programs/read_ahead.py ──► the kernel's cache

An import asks for one file after the other. On a shared file system, with an empty
cache, it waits minutes for the answers. The program asks for many files at a time. It
runs only once for each user of a node.
"""

from __future__ import annotations

import contextlib
import sys
import time
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from torchrun_hpc import limits, programs

_readers: list[Any] = []  # the process; none if the files are fast


def start(module: str) -> None:
    """Start the program if torch's files are slow, and let it read a module."""
    pipe: dict[str, Any] = {"stdin": programs.PIPE, "bufsize": 0}
    # If there is no torch, another launch reads, or no more processes are possible.
    with contextlib.suppress(Exception):
        if _is_slow():
            from torchrun_hpc.host import sockets  # noqa: PLC0415 - slow to import

            with sockets.hold("read-ahead") as lock:  # then the program holds it
                pipe["pass_fds"] = [lock.fileno()]
                _readers.append(programs.start("read_ahead", *sys.path, **pipe))
    ask(module)


def ask(*modules: str) -> None:
    """Ask the program to read more modules."""
    for reader in _readers:
        with contextlib.suppress(OSError):  # it has ended
            reader.stdin.write("".join(f"{name}\n" for name in modules).encode())


def end() -> None:
    """End the program. A fork, which is not its parent, only closes the pipe."""
    while _readers:
        with contextlib.suppress(OSError), _readers.pop() as reader:
            reader.kill()


def _is_slow() -> bool:
    """Return whether it takes long to read the first page of each library.

    Raise something if there is no torch.
    """
    torch: Any = PathFinder.find_spec("torch")
    for name in ("libtorch_cpu.so", "libtorch_python.so"):  # of each release
        with Path(torch.origin).with_name("lib").joinpath(name).open("rb", 0) as file:
            begin = time.perf_counter()
            file.read(1)  # the kernel reads at least a page
            if time.perf_counter() - begin < limits.PAGE_TIMEOUT:
                return False
    return True

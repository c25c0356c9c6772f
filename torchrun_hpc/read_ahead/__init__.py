"""Read-ahead: the files of an import, before the import needs them.

    launcher ──fork──► reader ──► many requests at a time ──► the kernel's cache

An import asks for one file after the other. On a shared file system, with an empty
cache, it waits minutes for answers. The reader finds the same files without running the
modules. Here is the launcher's side; `modules` and `libraries` are the reader's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from importlib.machinery import PathFinder

_SLOW = 0.0005  # seconds for a page: neither in the cache nor on a fast local disk
_PAGE = 4096  # bytes
_LIBRARIES = ("libtorch_cpu.so", "libtorch_python.so")  # of each release

_readers: dict[int, int] = {}  # the end of the pipe to it, by process number


def start(module: str) -> None:
    """Start to read a module ahead, if torch's files are slow. Change nothing else."""
    if not _is_slow():
        return
    names, requests = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        reader = os.fork()
        if reader == 0:
            os.close(requests)
            _serve(names)
        _readers[reader] = requests
    except OSError:  # no more processes: the launch goes on without it
        os.close(requests)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(names)
    ask(module)


def ask(*modules: str) -> None:
    """Let the reader read more modules, if there is one."""
    for requests in _readers.values():
        with contextlib.suppress(OSError):  # it has ended
            os.write(requests, "".join(f"{name}\n" for name in modules).encode())


def end() -> None:
    """End the reader. In another fork, only forget it."""
    while _readers:
        reader, requests = _readers.popitem()
        os.close(requests)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(reader, 0)


def _is_slow() -> bool:
    torch = PathFinder.find_spec("torch")
    folder = os.path.dirname(torch.origin or "") if torch is not None else ""
    try:
        return all(_seconds(f"{folder}/lib/{name}") > _SLOW for name in _LIBRARIES)
    except OSError:
        return False


def _seconds(file: str) -> float:
    """Return how long it takes to read the first page."""
    number = os.open(file, os.O_RDONLY)
    begin = time.perf_counter()
    os.pread(number, _PAGE, 0)
    end = time.perf_counter()
    os.close(number)
    return end - begin


def _serve(names: int) -> None:
    """Read the modules that arrive until the launcher ends; then end this process."""
    try:
        from torchrun_hpc.read_ahead import modules  # noqa: PLC0415 - only here

        modules.serve(names)
    finally:
        os._exit(0)

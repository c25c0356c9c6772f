"""The change of a fork into a worker: it sets all that an exec would set."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrun_hpc.host import procfs
from torchrun_hpc.preload.affinity import set_cpus
from torchrun_hpc.variables import FAULT_HANDLER, LD_PRELOAD

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torchrun_hpc.preload.requests import Request

_STREAMS = {"stdin": "rb", "stdout": "wb", "stderr": "wb"}  # by descriptor: 0, 1, 2
_UNBUFFERED = 2  # stdio.h: _IONBF
_NAME = Path("/proc/self/comm")
_AUTHKEY = 32  # bytes, as in multiprocessing.process


def take_over(request: Request, files: Sequence[int], kept: Collection[int]) -> None:
    """Make this process what an exec would make it, but ``kept`` files stay open."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    for number in procfs.open_files() - {0, 1, 2, *kept}:
        os.close(number)
    for number, soft, hard in request.limits:
        if resource.getrlimit(number) != (soft, hard):
            resource.setrlimit(number, (soft, hard))
    set_cpus(request.cpus)
    os.environ.clear()
    set_variables(request.environ)
    set_title(" ".join(request.command))
    sys.orig_argv[:] = request.command
    _renew_streams()
    if request.environ.get(FAULT_HANDLER):
        faulthandler.enable(2)  # an import may have taken sys.stderr away
    _renew_identity()
    gc.enable()
    _set_signals(request)


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables of this process."""
    os.environ.update(variables)


def set_title(title: str) -> None:
    """Set the title in ``ps`` and ``top``, if there is a library for it."""
    with contextlib.suppress(ImportError):
        import setproctitle  # noqa: PLC0415 - an extra: torchrun_hpc[preload]

        # It moves the program's name, after which Darshan names its logs.
        if not os.environ.get(LD_PRELOAD):
            setproctitle.setproctitle(title)
    with contextlib.suppress(OSError):  # its short name, as an exec would set it
        _NAME.write_text(Path(sys.executable).name, encoding="utf-8")


def _set_signals(request: Request) -> None:
    """Set the signal actions as Python's start does, but keep those of modules.

    Pending signals arrive now.
    """
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        handler = signal.getsignal(number)
        if number in request.ignored:
            wanted: Any = signal.SIG_IGN
        elif handler != signal.SIG_IGN:
            continue
        elif number == signal.SIGINT:
            wanted = signal.default_int_handler
        else:
            wanted = signal.SIG_DFL
        if handler != wanted:
            signal.signal(number, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)


def _renew_streams() -> None:
    """Make the standard streams those of ``python -u``, and unbuffered in C.

    Keep the objects, because log handlers refer to them.
    """
    libc = ctypes.CDLL(None)
    present = [each for each in (sys.__stdin__, sys.__stdout__) if each is not None]
    for number, (name, mode) in enumerate(_STREAMS.items()):
        raw: Any = io.FileIO(number, mode, closefd=False)
        raw.name = f"<{name}>"
        stream: Any = getattr(sys, f"__{name}__")
        if stream is None:  # it was closed
            stream = io.TextIOWrapper(raw)
            stream.mode = mode[0]
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        alike = stream if name == "stderr" else (present or [stream])[0]
        stream.__init__(
            io.BufferedReader(raw) if mode == "rb" else raw,
            alike.encoding,
            "backslashreplace" if name == "stderr" else alike.errors,
            newline="\n",
            write_through=True,
        )
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, _UNBUFFERED, 0)


def _renew_identity() -> None:
    """Renew multiprocessing's key, and the number of the main thread."""
    modules: dict[str, Any] = sys.modules
    if "multiprocessing.process" in modules:
        process = modules["multiprocessing.process"].current_process()
        process.authkey = os.urandom(_AUTHKEY)
    main: Any = threading.main_thread()
    main._set_native_id()  # noqa: SLF001

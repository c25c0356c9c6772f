"""The process of a worker: its CPUs, its parent, its script.

`take_over` sets all that an exec would set, and `run_script` does what the interpreter
would do.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import pkgutil
import resource
import runpy
import signal
import socket
import sys
import threading
import types
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrun_hpc.errors import Message
from torchrun_hpc.failures.last_words import LAUNCHER
from torchrun_hpc.host import procfs
from torchrun_hpc.reporting import console
from torchrun_hpc.variables import FAULT_HANDLER, LD_PRELOAD

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Collection,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from torchrun_hpc.planning.workers import Share
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


# --- its CPUs -------------------------------------------------------------------------

# The CPUs to which an import has bound a thread of this process.
chosen_by_import: set[int] = set()


def set_cpus(cpus: Iterable[int]) -> None:
    """Give this thread these CPUs, unless the kernel has taken them away."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)


@contextlib.contextmanager
def restored_after_import() -> Iterator[None]:
    """Give this thread its CPUs again after a successful import.

    OpenMP libraries can bind the thread that loads them: see ``gomp_init_affinity`` in
    GCC's ``libgomp/config/linux/affinity.c``.
    """
    before = os.sched_getaffinity(0)
    yield
    if (after := os.sched_getaffinity(0)) != before:
        chosen_by_import.update(after)
        set_cpus(before)


@contextlib.contextmanager
def bound(share: Share, worker: str) -> Iterator[None]:
    """Bind this thread for a moment: processes that it starts then remain bound."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, share.cpus)
    except OSError as error:  # all are offline, or no longer this job's
        text = f"{worker} on {socket.gethostname()} is not bound to CPUs "
        text += f"{share.cpu_list}: this job has none of them now ({error.strerror})"
        console.write(Message("HPC223", text), "warning")
    try:
        yield
    finally:
        set_cpus(before)


# --- its parent -----------------------------------------------------------------------

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_PTRACER = 0x59616D61  # for a process and its children, under Yama's mode 1


def end_with_parent(parent: int, agent: int = 0) -> Callable[[], None]:
    """Return a function that lets the calling process end with its parent.

    The function loads no library, so it can be called between fork and exec. ``agent``
    is 0 if the parent is the agent. The process gets the CPUs of this thread again: in
    a fork, Intel's and LLVM's OpenMP libraries change them (``__kmp_atfork_child``).
    """
    prctl, cpus = ctypes.CDLL(None).prctl, os.sched_getaffinity(0)

    def end_with_it() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(_PR_SET_PTRACER, agent or parent, 0, 0, 0)
        set_cpus(cpus)
        if os.getppid() != parent:  # it has ended before this
            os._exit(1)

    return end_with_it


# --- its script -----------------------------------------------------------------------

_MODULE = "-m"
_NO_SUCH_FILE = 2  # exit code


def _search_path(words: Sequence[str]) -> list[str]:
    """Return what Python puts first in ``sys.path`` for a script or ``-m MODULE``."""
    has_main = words[0] != _MODULE and _has_main(words[0])
    return [script_folder(words)] if has_main or not _is_safe_path() else []


def script_folder(words: Sequence[str]) -> str:
    """Return the folder, or archive, of a script's own modules."""
    if words[0] == _MODULE:
        return os.getcwd()  # noqa: PTH109
    if _has_main(words[0]):
        return _absolute(words[0])
    return os.path.dirname(os.path.realpath(words[0]))  # noqa: PTH120


def _is_safe_path() -> bool:
    """Return whether Python adds only archives to ``sys.path``; since Python 3.11."""
    return bool(getattr(sys.flags, "safe_path", False))


def prepare_script(words: Sequence[str]) -> None:
    """Set ``sys.path`` and ``sys.argv`` for the imports and for `run_script`."""
    sys.path[: 0 if _is_safe_path() else 1] = _search_path(words)
    sys.argv = list(words[1:] if words[0] == _MODULE else words)


def run_script(words: Sequence[str]) -> None:
    """Run the script in ``words``; return, or raise what ends the interpreter."""
    main = _new_main()
    # The interpreter calls the same function, so it is in tracebacks.
    run_module: Any = runpy._run_module_as_main  # type: ignore[attr-defined] # noqa: SLF001
    try:
        if words[0] == _MODULE:
            sys.argv[0] = _MODULE
            run_module(words[1])
        elif _has_main(words[0]):
            run_module("__main__", alter_argv=False)
        else:
            exec(_code_of(words[0], main), vars(main))  # noqa: S102
    except SystemExit:
        raise
    except BaseException as error:
        _hide_own_frames(error)
        raise


def _has_main(name: str) -> bool:
    """Return whether Python can import from this path: a folder or an archive."""
    return pkgutil.get_importer(_absolute(name)) is not None


def _absolute(name: str) -> str:
    """Return an absolute path as Python builds it, otherwise unchanged."""
    return os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118


def _new_main() -> Any:
    """Replace ``__main__`` by a new module, like the one at Python's start."""
    main: Any = types.ModuleType("__main__")
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    main.__builtins__ = builtins
    # The second name is multiprocessing's, by which its processes send objects.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    return main


def _code_of(name: str, main: Any) -> types.CodeType:
    """Return the code of a file, and set its attributes in ``__main__``."""
    path = _absolute(name)
    main.__file__ = path
    if sys.version_info < (3, 15):
        main.__cached__ = None
    if path.endswith(".pyc"):
        main.__loader__ = SourcelessFileLoader("__main__", path)
        code: types.CodeType = main.__loader__.get_code("__main__")
        return code
    main.__loader__ = SourceFileLoader("__main__", path)
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            source = file.read()
    except OSError as error:
        text = f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: {text}\n")
        sys.exit(_NO_SUCH_FILE)
    return compile(source, path, "exec", dont_inherit=True)


def traceback_of(error: BaseException) -> types.TracebackType | None:
    """Return an exception's traceback without the launcher's frames."""
    shown = error.__traceback__
    while shown is not None and LAUNCHER in shown.tb_frame.f_code.co_filename:
        shown = shown.tb_next
    return shown


def _hide_own_frames(error: BaseException) -> None:
    """Let the interpreter show an exception without the launcher's frames."""
    hook, shown = sys.excepthook, traceback_of(error)

    def show(kind: Any, value: BaseException, _traceback: Any) -> None:
        hook(kind, value.with_traceback(shown), shown)

    sys.excepthook = show

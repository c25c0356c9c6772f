# As a user writes a script.
# ruff: noqa: PTH109, PTH110, PTH123, PTH208, SIM115
"""Print, as JSON, what a program can see of its process, of Python, and of itself."""

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import threading


def stream(name):
    found = getattr(sys, name)
    names = "encoding errors line_buffering write_through newlines mode"
    inner = found.buffer
    return {
        **{n: getattr(found, n) for n in names.split()},
        "name": found.name,
        "number": found.fileno(),
        "terminal": found.isatty(),
        "buffer": [type(inner).__name__, inner.mode, inner.name],
        "raw": repr(getattr(inner, "raw", inner)),
        "is the first": found is getattr(sys, f"__{name}__"),
    }


def status():
    with open("/proc/self/status") as file:
        pairs = dict(line.rstrip("\n").split(":\t", 1) for line in file)
    names = "Name Umask Threads SigBlk SigIgn SigCgt SigPnd Seccomp CapEff"
    return {name: pairs[name] for name in [*names.split(), "Cpus_allowed_list"]}


def main_module():
    return {
        name: repr(value).partition(" at 0x")[0]
        for name, value in vars(sys.modules["__main__"]).items()
    }


def open_files():
    numbers = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    numbers = [n for n in numbers if os.path.exists(f"/proc/self/fd/{n}")]
    return {n: (os.get_inheritable(n), os.fstat(n).st_mode) for n in numbers}


def parent_death_signal():
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value


def handlers():
    return {
        number: repr(signal.getsignal(number)).partition(" at 0x")[0]
        for number in sorted(signal.valid_signals())
    }


GETENV = ctypes.CDLL(None).getenv
GETENV.restype = ctypes.c_char_p
seen = {
    "__main__": main_module(),
    "argv": [sys.argv, sys.orig_argv],
    "path": sys.path,
    "flags": [str(sys.flags), sys.warnoptions, sys._xoptions],
    "streams": [stream(name) for name in ("stdin", "stdout", "stderr")],
    "input": input(),
    "files": open_files(),
    "folder": os.getcwd(),
    "limits": [
        resource.getrlimit(getattr(resource, name))
        for name in sorted(dir(resource))
        if name.startswith("RLIMIT")
    ],
    "status": status(),
    "handlers": handlers(),
    "leads": [number == os.getpid() for number in (os.getsid(0), os.getpgid(0))],
    "parent-death signal": parent_death_signal(),
    "environ": dict(os.environ),
    "variable of C": str(GETENV(b"ONLY_IN_C")),
    "threads": [repr(thread).split(",")[0] for thread in threading.enumerate()],
    "is the main thread": threading.current_thread() is threading.main_thread(),
    "hooks": [
        str(sys.excepthook),
        str(sys.unraisablehook),
        str(threading.excepthook)[:40],
    ],
    "exception": repr(sys.exc_info()),
    "collector": [gc.isenabled(), gc.get_threshold()],
    "recursion": sys.getrecursionlimit(),
    "executable": [sys.executable, sys.prefix, sys.dont_write_bytecode],
    "nice": os.nice(0),
    "command line": open("/proc/self/cmdline").read().replace("\0", " ").strip(),
}
print(json.dumps(seen, indent=1))
# C has a buffer of its own; what is left in it is lost here.
ctypes.CDLL(None).printf(b"written by C")
os._exit(0)

"""A worker ends as Python ends: with the same exit code, traceback and last words."""

from __future__ import annotations

import py_compile
import signal

import pytest

A_THREAD_GOES_ON = """
import threading, time
def work():
    time.sleep(0.2)
    print("worked")
threading.Thread(target=work).start()
raise ValueError
"""
AT_EXIT = """
import atexit, sys
atexit.register(print, "end")
atexit.register(lambda: 1 / 0)
sys.exit(3)
"""
ITS_OWN_HOOK = """
import sys, traceback
def show(kind, value, trace):
    frames = traceback.extract_tb(trace)
    print(kind, value, len(frames), trace is value.__traceback__)
sys.excepthook = show
raise ValueError(1)
"""
A_CLASS_OF_THE_SCRIPT = """
import pickle
class Sample:
    pass
print(pickle.loads(pickle.dumps(Sample)) is Sample)
"""
ITS_SOURCE = """
import inspect
def f():
    return 1
print(inspect.getsource(f), __file__)
"""
A_FINALIZER = """
class A:
    def __del__(self):
        1 / 0
a = A()
a = None
"""
A_CAUSE = """
try:
    1 / 0
except Exception as error:
    raise KeyError(1) from error
"""
A_THREAD_FAILS = """
import threading
threading.Thread(target=lambda: 1 / 0).start()
"""
A_FAILING_HOOK = "import sys\nsys.excepthook = lambda *_: print(1)\nraise ValueError"

# A script, and its exit code.
SCRIPTS = {
    "it returns": ("print(input(), input())", 0),
    "it raises": ("def f():\n    raise ValueError('bad batch 17')\n\nf()", 1),
    "with a cause": (A_CAUSE, 1),
    "with a context": ("try:\n    1 / 0\nexcept Exception:\n    [][0]", 1),
    "with a note": ("e = ValueError()\ne.__notes__ = ['on rank 3']\nraise e", 1),
    "no Python": ("if True:\nprint(1)", 1),
    "latin-1": ("# coding: latin-1\nprint(ascii('\xff'))", 0),
    "it exits": ("import sys\nsys.exit(17)", 17),
    "with a text": ("import sys\nsys.exit('no data')", 1),
    "with nothing": ("import sys\nsys.exit()", 0),
    "at once": ("import os\nprint('a')\nos._exit(7)", 7),
    "interrupted": ("raise KeyboardInterrupt", -signal.SIGINT),
    "by a signal": ("import os\nos.kill(os.getpid(), 2)", -signal.SIGINT),
    "killed": ("import os\nos.kill(os.getpid(), 9)", -signal.SIGKILL),
    "terminated": ("import os\nos.kill(os.getpid(), 15)", -signal.SIGTERM),
    "aborted": ("import os\nos.abort()", -signal.SIGABRT),
    "at exit": (AT_EXIT, 3),
    "a thread goes on": (A_THREAD_GOES_ON, 1),
    "a thread fails": (A_THREAD_FAILS, 0),
    "a hook of its own": (ITS_OWN_HOOK, 1),
    "a hook that fails": (A_FAILING_HOOK, 1),
    "a finalizer": (A_FINALIZER, 0),
    "a warning": ("import warnings\nwarnings.warn('old', DeprecationWarning)", 0),
    "a log": ("import logging\nlogging.warning('from %s', __name__)", 0),
    "a class of the script": (A_CLASS_OF_THE_SCRIPT, 0),
    "its source": (ITS_SOURCE, 0),
}


def test_how_a_script_ends(in_both_forms):
    texts = tuple(f"{text}\n" for text, _ in SCRIPTS.values())
    forms = in_both_forms("script.py", scripts=texts)
    for name, (by_exec, by_fork) in zip(SCRIPTS, forms, strict=True):
        assert by_exec[0] == SCRIPTS[name][1], (name, by_exec)
        assert by_fork == by_exec, name


def test_a_fault_in_c(in_both_forms):
    text = "import ctypes, faulthandler\nfaulthandler.enable()\nctypes.string_at(0)\n"
    ((by_exec, by_fork),) = in_both_forms("script.py", scripts=(text,))
    assert by_exec[0] == by_fork[0] == -signal.SIGSEGV
    # That remains: the launcher is below the script.
    assert by_fork[2].splitlines()[:5] == by_exec[2].splitlines()[:5]


@pytest.mark.parametrize(
    ("words", "preparation", "error"),
    [
        ("no.py", "", "can't open file"),
        ("-m no", "", "No module named no"),
        ("-m no.more", "", "No module named 'no'"),
        ("empty", "", "can't find '__main__' module"),
        ("-m script", "", "runpy"),
        ("script.pyc", "", "ValueError: False"),
        ("script.py", "stdout = '/dev/full'", "No space left"),
    ],
)
def test_what_fails(in_both_forms, tmp_path, words, preparation, error):
    """A missing script, a module, a compiled script, a full disk."""
    (tmp_path / "empty").mkdir()
    script = tmp_path / "script.py"
    script.write_text("print(__file__)\nraise ValueError(__loader__ is None)\n")
    py_compile.compile(str(script), str(tmp_path / "script.pyc"))
    by_exec, by_fork = in_both_forms(*words.split(), preparation=preparation)
    assert by_exec[0] in {1, 2}
    assert error in by_exec[2]
    assert by_fork == by_exec

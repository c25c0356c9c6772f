"""The last words of programs that end in C."""

from __future__ import annotations

from tests.support.processes import run_python
from torchrun_hpc.failures.last_words import last_words

CRASH = """
import ctypes, faulthandler, sys
faulthandler.enable()
def deep(level):
    if level:
        deep(level - 1)
    ctypes.string_at(0)
deep(20)
"""
ABORT = """
import faulthandler, os, sys
faulthandler.enable()
sys.stderr.write("terminate called after throwing an instance of 'c10::Error'\\n")
sys.stderr.write("  what():  the device is gone\\n")
os.abort()
"""
RAISES = """
import threading
class Noisy:
    def __del__(self):
        raise OSError("in a finalizer")
noisy = Noisy()
def run():
    raise KeyError("in a thread")
thread = threading.Thread(target=run)
thread.start()
thread.join()
raise ValueError("bad batch 17")
"""


def words_of(program: str):
    done = run_python("-c", program)
    return last_words(done.err.encode(), done.code)


def test_an_exception():
    """Between one of a thread, and one that Python ignores."""
    words = words_of(RAISES)
    assert words.is_traceback
    assert words.cause == "ValueError: bad batch 17"
    assert words.lines[0] == "Traceback (most recent call last):"


def test_a_crash_has_its_innermost_frames():
    words = words_of(CRASH)
    assert words.cause == "Fatal Python error: Segmentation fault"
    assert words.lines[0] == words.cause
    assert words.lines[1].startswith("Current thread")
    assert len(words.lines) == 12
    assert "string_at" in words.lines[2]


def test_an_abort_in_cxx():
    words = words_of(ABORT)
    assert words.cause == "the device is gone"
    assert words.lines[0].startswith("terminate called")
    assert words.lines[2] == "Fatal Python error: Aborted"
    assert 'File "<string>", line 6' in words.lines[4]

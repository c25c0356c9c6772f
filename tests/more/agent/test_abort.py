"""A node that cannot start, and cannot tell the others either."""

from __future__ import annotations

from tests.support.patience import NEVER_S
from tests.support.processes import run_python

# A thread that ends loads libgcc_s, which takes a file, unless it is there.
WITHOUT_FILES = f"""
import contextlib, ctypes, resource
with contextlib.suppress(OSError):
    ctypes.CDLL("libgcc_s.so.1")
from torchrun_hpc.agent import abort
from torchrun_hpc.planning.meeting import Meeting

resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))
for is_coordinator in (True, False):
    meeting = Meeting(
        "scheduler",
        nodes=2,
        hosts=("n9", "n10"),
        ports=(1,),
        is_coordinator=is_coordinator,
        launch_id="19.0",
    )
    assert abort.tell(meeting, "x", {NEVER_S})
"""


def test_no_file_is_left_to_tell_by():
    done = run_python("-c", WITHOUT_FILES, cwd="/")
    assert done.code == 0, done.err

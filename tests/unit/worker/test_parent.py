"""A process asks the kernel for its end, and may be too late for that."""

from __future__ import annotations

import os

import pytest

from torchrun_hpc.worker.parent import end_with_parent


@pytest.mark.parametrize(("parent", "code"), [(os.getpid, 0), (os.getppid, 1)])
def test_a_parent_that_has_ended_before_the_process_could_ask(parent, code):
    end_with_it = end_with_parent(parent())
    child = os.fork()
    if child == 0:
        end_with_it()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code

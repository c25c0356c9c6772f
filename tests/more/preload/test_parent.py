"""A process asks the kernel for its end, and may be too late for that."""

from __future__ import annotations

import os
import re
import shutil

import pytest

from tests.support.processes import run_python
from torchrun_hpc.preload.worker import end_with_parent


@pytest.mark.parametrize(("parent", "code"), [(os.getpid, 0), (os.getppid, 1)])
def test_a_parent_that_has_ended_before_the_process_could_ask(parent, code):
    end_with_it = end_with_parent(parent())
    child = os.fork()
    if child == 0:
        end_with_it()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


MOVED_BY_A_HOOK = """\
import os, subprocess, sys
from torchrun_hpc.preload.worker import end_with_parent
every = os.sched_getaffinity(0)
os.register_at_fork(after_in_child=lambda: os.sched_setaffinity(0, {min(every)}))
cpus = {max(every)}
os.sched_setaffinity(0, cpus)
end_with_it = end_with_parent(os.getpid())
os.sched_setaffinity(0, every)
code = "import os; print(os.sched_getaffinity(0))"
options = {"preexec_fn": end_with_it, "stdout": subprocess.PIPE, "text": True}
child = subprocess.run([sys.executable, "-S", "-c", code], check=True, **options)
print(eval(child.stdout) == cpus)
"""


def test_a_program_has_the_cpus_that_it_was_given(tmp_path):
    """OpenMP libraries have hooks for forks that give a child other CPUs."""
    done = run_python("-c", MOVED_BY_A_HOOK, cwd=tmp_path)
    assert done.out == "True\n", done.err


FORKS = """\
import os, sys
from torchrun_hpc.preload.worker import end_with_parent
end_with_it = end_with_parent(os.getpid(), *map(int, sys.argv[1:]))
child = os.fork()
if child == 0:
    end_with_it()
    os.execlp("true", "true")
print(os.getpid(), child, os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("agent", [None, 4711])
def test_the_agent_may_look_at_it(agent, tmp_path):
    """Its parent, or another process, of which it is no descendant."""
    if shutil.which("strace") is None:
        pytest.skip("strace shows what the kernel is asked for, and is not installed")
    trace = tmp_path / "trace"
    options = ("-f", "-e", "trace=prctl", "-e", "signal=none", "-o", trace)
    done = run_python(
        *("-c", FORKS, *([] if agent is None else [str(agent)])),
        cwd=tmp_path,
        before=("strace", *options),
    )
    assert done.code == 0, done.err
    parent, child, status = map(int, done.out.split())
    assert status == 0  # also without Yama, where there is nothing to ask for
    asked = re.findall(rf"{child} +prctl\((\w+), (\w+)", trace.read_text())
    assert asked == [
        ("PR_SET_PDEATHSIG", "SIGKILL"),
        ("PR_SET_PTRACER", str(agent or parent)),
    ]

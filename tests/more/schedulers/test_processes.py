"""Facts about this process, which only a real process has."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import psutil
import pytest

from tests.support.launch_examples import launch
from tests.support.patience import PATIENCE, until
from torchrun_hpc.schedulers.process import this_process


def test_the_processes_above_this_one():
    code = "from torchrun_hpc.schedulers.process import this_process as p; print(p())"
    done = subprocess.run(
        ["sh", "-c", f'{sys.executable} -c "$0"; true', code],
        capture_output=True,
        text=True,
        check=True,
    )
    above = this_process().ancestors
    with open(f"/proc/{os.getpid()}/comm", encoding="utf-8") as file:  # noqa: PTH123
        own = file.read().strip()
    assert f"ancestors={('sh', own, *above)}" in done.stdout
    pids = this_process().ancestor_pids
    assert pids[0] == os.getppid()
    assert f", {(os.getpid(), *pids)}"[3:] in done.stdout


# --- the end of the exchange with a process manager ---------------------------------

ENDS = {
    "exits": "sys.stdin.read(1)",
    "becomes another program": (
        "os.execvp(sys.executable, [sys.executable, '-c', 'input()'])"
    ),
    "is killed": "sys.stdin.read(1); os.kill(os.getpid(), 9)",
}


@pytest.fixture
def task():
    """Run a program that is a task, until a line is written to it."""
    started = []

    def start(program):
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE)
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", f"import os, sys\n{program}"],
                env=os.environ | {"PMI_FD": f"{theirs.fileno()}"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        theirs.close()
        return started[-1], ours

    yield start
    for one in started:
        one.kill()
        one.communicate()


AT_END = """
from torchrun_hpc.schedulers import pmi
pmi.finalize_at_end(os.environ)
print("ready", flush=True)
"""


@pytest.mark.parametrize("how", ENDS)
def test_the_exchange_ends_with_the_script(task, how):
    process, ours = task(AT_END + ENDS[how])
    with ours:
        assert process.stdout.readline() == "ready\n"
        ours.settimeout(0.5)
        with pytest.raises(TimeoutError):
            ours.recv(100)
        ours.settimeout(PATIENCE)
        process.communicate("\n", timeout=PATIENCE)
        assert ours.recv(100) == b"cmd=finalize\n"
        ours.sendall(b"cmd=finalize_ack\n")
        assert ours.recv(100) == b""


def test_a_script_that_has_ended_the_exchange_itself(task):
    """As MPI_Finalize does: the process manager hangs up."""
    process, ours = task(AT_END + ENDS["exits"])
    assert process.stdout.readline() == "ready\n"
    (waiting,) = psutil.Process(process.pid).children()
    ours.close()
    until(lambda: waiting.status() == psutil.STATUS_ZOMBIE, waiting.status)
    assert process.poll() is None


# --- what nobody says -----------------------------------------------------------------

# Of the memory, a gigabyte, and of the time of the processor, five seconds.
LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
"""


def run(program):
    """Run a program within these limits."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED + program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# No process manager says this: it must not cost the launch either.
LONG = {
    "many nodes without a task": "'(vector,(0,99999999999,0),(0,1,1))'",
    "more digits than an integer may have": "'(vector,' + '9' * 5000 + ')'",
    "very often": "'(vector,' + '[1]x1,' * 9999 + '0)'",
    "all very often": "'(vector,[' + '1,' * 9999 + '1]x999999)'",
    "never ending": "'(vector,' + '[' * 30_000 + ')'",
    "always beginning": "'(vector,' + '[1]' * 10_000 + ')'",
}
PARSE = """
from torchrun_hpc.schedulers import pmi
assert len(pmi.parse_mapping({}, 3)) in (0, 3)
"""


@pytest.mark.parametrize("case", LONG)
def test_what_nobody_says_takes_no_time_and_no_memory(case):
    run(PARSE.format(LONG[case]))


MANY = "999999999"
LARGE = {
    "Open MPI 5": {"OMPI_COMM_WORLD_SIZE": MANY},
    "Flux alone": {"FLUX_JOB_SIZE": MANY, "FLUX_JOB_NNODES": MANY},
}
DETECT = """
from torchrun_hpc import schedulers
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.schedulers.process import Process
try:
    schedulers.detect(schedulers.weigh(Process({!r}, "jwb0001")))
except LaunchError:
    pass
"""


@pytest.mark.parametrize("kind", LARGE)
def test_a_number_of_nodes_that_nobody_has_takes_no_memory(kind):
    run(DETECT.format({**launch(kind, [0])[0].environ, **LARGE[kind]}))

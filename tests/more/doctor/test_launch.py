"""The doctor's launch on this machine: how it ends, and what is left of it."""

from __future__ import annotations

import os
import signal
import sys

import psutil
import pytest

from tests.support import ROOT
from tests.support.cluster.bound import ALL, needs_two_cpus
from tests.support.cluster.real_job import ended
from tests.support.patience import NEVER_S, PATIENCE, until
from tests.support.processes import RunningProgram
from torchrun_hpc import waiting
from torchrun_hpc.doctor import launch
from torchrun_hpc.doctor.launch import LaunchPart, LaunchProcess
from torchrun_hpc.doctor.place import ExaminedLaunch, Wishes, find_place
from torchrun_hpc.failures.failure import Kind

TWO = ("--nproc_per_node=2",)
FAILS = "import os; assert os.environ['RANK'] == '0', 'bad batch 17'"
# It shows that it has come so far, and hangs.
HANGS = """\
import os, pathlib, time
pathlib.Path(os.environ["STARTED"], str(os.getpid())).touch()
while True:
    time.sleep(1)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return what starts a launch, also of another script, and with variables."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def start(*options, script="", **variables):
        if script:
            (tmp_path / "of_the_test.py").write_text(script)
            monkeypatch.setattr(launch, "SCRIPT", "of_the_test")
        place = find_place(ExaminedLaunch(options), Wishes(16, PATIENCE))
        part = LaunchPart(0, {0: 0}, (place.host,), place.address)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return LaunchProcess(place, part)

    return start


@pytest.fixture
def workers(tmp_path, monkeypatch):
    """Return what returns the numbers of the processes of `HANGS` that have started."""
    folder = tmp_path / "started"
    folder.mkdir()
    monkeypatch.setenv("STARTED", str(folder))
    return lambda: {int(each.name) for each in folder.iterdir()}


def test_it_ends_well(start):
    """Torch is imported once, for both."""
    files = psutil.Process().num_fds()
    end = start(*TWO, "--hpc-preload=torch").run(NEVER_S)
    assert (end.code, end.cause, end.failure, end.messages) == (0, "", None, ())
    assert {worker.rank for worker in end.workers} == {*end.at} == {0, 1}
    assert {(row.scope, row.wrong) for row in end.rows} == {("", 0)}
    assert end.backend == "gloo"
    assert all(torch.version for torch in end.imports)
    assert psutil.Process().num_fds() == files


def test_a_worker_that_fails(start):
    """Its launcher passes on why, and writes nothing itself."""
    end = start(*TWO, script=FAILS).run(NEVER_S)
    assert end.code == 1, end
    assert (end.failure.kind, end.failure.rank) == (Kind.WORKER, 1)
    assert end.reason == (
        "worker 1 ended with exit code 1: AssertionError: bad batch 17"
    )
    assert "torchrun_hpc" not in end.cause
    text, _ = launch.cause_of({0: end}, {0: 0}, ["n0"])
    assert text == end.reason


def test_a_launcher_that_refuses(start, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no libcudart.so')")
    end = start(*TWO).run(NEVER_S)
    assert (end.code, end.is_refusal, end.cause) == (2, True, ""), end
    (message,) = end.messages
    assert message.code == "HPC018"
    assert message.text.startswith("torch cannot be imported by ")


@needs_two_cpus
def test_its_import_takes_no_cpus_from_the_workers(start):
    script = f"import os; assert sorted(os.sched_getaffinity(0)) == {ALL}"
    options = (*TWO, "--hpc-preload=none")  # each worker imports it, too
    end = start(*options, script=script, OMP_PROC_BIND="close").run(NEVER_S)
    assert (end.code, end.cause) == (0, "")
    assert [message.code for message in end.messages] == ["HPC227"]


@pytest.mark.parametrize("options", [(), ("--hpc-preload=torch",)])
@pytest.mark.parametrize(
    ("line", "ending"),
    [
        ("os._exit(3)", "ended with exit code 3"),
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), 4)", "was killed by SIGILL (4)"),
    ],
)
def test_an_import_of_torch_that_ends_the_launch(
    start, tmp_path, options, line, ending
):
    """Without a word, as a library that has no code for this CPU."""
    (tmp_path / "torch.py").write_text(f"import os; {line}")
    end = start(*options).run(NEVER_S)
    text = f"n0: the task {ending}: the import of torch did not finish"
    assert launch.cause_of({0: end}, {0: 0}, ["n0"]) == (text, (0,)), end


def test_its_limit(start, workers, monkeypatch):
    """Which has passed when all workers have come."""

    def until_both_have_come(*_):
        until(lambda: len(workers()) == 2)
        return False

    monkeypatch.setattr(waiting, "until", until_both_have_come)
    end = start(*TWO, script=HANGS).run(99)
    assert end.cause == "the launch did not end within 219 s"
    assert (end.is_stopped, end.failure) == (True, None)
    assert not any(map(psutil.pid_exists, workers()))


def test_a_launcher_that_does_not_end(start, workers, monkeypatch):
    """As one whose workers the kernel does not end: it is killed, and reported."""

    def stop(*_):
        until(lambda: len(workers()) == 1)
        launcher.suspend()
        return False

    started = start(script=HANGS)
    launcher = psutil.Process(started._process.pid)
    monkeypatch.setattr(waiting, "until", stop)
    monkeypatch.setattr(LaunchProcess.end, "__defaults__", (0.1,))
    end = started.run(99)
    assert end.code == -signal.SIGKILL
    assert end.cause == "the launch did not end within 219 s"
    until(lambda: not any(map(psutil.pid_exists, workers())))


ALONE = """\
import sys
from torchrun_hpc import waiting
from torchrun_hpc.doctor import launch
from torchrun_hpc.doctor.place import ExaminedLaunch, Wishes, find_place
launch.SCRIPT = "of_the_test"
place = find_place(ExaminedLaunch(sys.argv[1:]), Wishes())
part = launch.LaunchPart(0, {0: 0}, (place.host,), place.address)
launch.LaunchProcess(place, part).run(900)
"""


@pytest.mark.usefixtures("start")
def test_the_doctor_is_killed(workers, tmp_path):
    (tmp_path / "of_the_test.py").write_text(HANGS)
    command = [sys.executable, "-c", ALONE, *TWO]
    with RunningProgram(command, environ=os.environ) as doctor:
        until(lambda: len(workers()) == 2)
        below = psutil.Process(doctor.pid).children(recursive=True)
        assert workers() < {process.pid for process in below}
        doctor.send(signal.SIGKILL)
        doctor.wait()
        until(lambda: ended(*below))

"""The doctor's launch on this machine: how it ends, and what is left of it."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest
from bound import ALL, needs_two_cpus
from jobs import ended
from programs import ROOT
from waiting import NEVER_S, PATIENCE, until

from torchrun_hpc.agent.abort import LaunchState
from torchrun_hpc.doctor import causes, launch, place
from torchrun_hpc.doctor.launch import Launch, Part
from torchrun_hpc.preflight import preflight

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
        here = place.find(preflight(""), options, LaunchState())
        part = Part(0, {0: 0}, (here.host,), here.address)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return Launch(here, part, ["16", str(PATIENCE)])

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
    assert (end.code, end.cause, end.reason, end.said) == (0, "", "", ())
    assert {worker.rank for worker in end.workers} == {*end.at} == {0, 1}
    assert {worker.node for worker in end.workers} == {0}
    assert {(row.scope, row.wrong) for row in end.rows} == {("", 0)}
    assert (end.backend, bool(end.torch.version)) == ("gloo", True)
    assert psutil.Process().num_fds() == files


@needs_two_cpus
def test_its_import_takes_no_cpus_from_the_workers(start):
    script = f"import os; assert sorted(os.sched_getaffinity(0)) == {ALL}"
    options = (*TWO, "--hpc-preload=none")  # each worker imports it, too
    end = start(*options, script=script, OMP_PROC_BIND="close").run(NEVER_S)
    assert (end.code, end.cause) == (0, "")
    assert [code for code, *_ in end.said] == ["HPC227"]


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
    assert causes.cause({0: end}, {0: 0}, ["n0"]) == (text, (0,)), end


def test_its_limit(start, workers, monkeypatch):
    """Which has passed when all workers have come."""

    def until_both_have_come(*_):
        until(lambda: len(workers()) == 2)
        return False

    monkeypatch.setattr(launch.waiting, "until", until_both_have_come)
    end = start(*TWO, script=HANGS).run(99)
    assert (end.cause, end.reason) == ("the launch did not end within 219 s", "")
    assert not any(map(psutil.pid_exists, workers()))


def test_a_launcher_that_does_not_end(start, workers, monkeypatch):
    """As one whose workers the kernel does not end: it is killed, and reported."""

    def stop(*_):
        until(lambda: len(workers()) == 1)
        launcher.suspend()
        return False

    started = start(script=HANGS)
    launcher = psutil.Process(started._process.pid)
    monkeypatch.setattr(launch.waiting, "until", stop)
    monkeypatch.setattr(Launch.end, "__defaults__", (0.1,))
    end = started.run(99)
    assert end.code == -signal.SIGKILL
    assert end.cause == "the launch did not end within 219 s"
    until(lambda: not any(map(psutil.pid_exists, workers())))


ALONE = """\
import sys
from torchrun_hpc.doctor import launch, place
from torchrun_hpc.agent.abort import LaunchState
from torchrun_hpc.preflight import preflight
launch.SCRIPT = "of_the_test"
here = place.find(preflight(""), sys.argv[1:], LaunchState())
part = launch.Part(0, {0: 0}, (here.host,), here.address)
launch.Launch(here, part, []).run(900)
"""


@pytest.mark.usefixtures("start")
def test_the_doctor_is_killed(workers, tmp_path):
    (tmp_path / "of_the_test.py").write_text(HANGS)
    doctor = subprocess.Popen([sys.executable, "-c", ALONE, *TWO])
    until(lambda: len(workers()) == 2)
    below = psutil.Process(doctor.pid).children(recursive=True)
    assert workers() < {process.pid for process in below}
    doctor.send_signal(signal.SIGKILL)
    doctor.wait(PATIENCE)
    until(lambda: ended(*below))

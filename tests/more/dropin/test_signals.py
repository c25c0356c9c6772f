"""Signals to a running agent: what they do to it, and to its workers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from tests.support.patience import NEVER_S, until
from tests.support.processes import RunningProgram, clean_environ
from tests.support.stock.compared import C10D
from tests.support.stock.side_by_side import COMMANDS, OURS, STOCK, bare

USR1, USR2, TERM = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM

PARSER = get_args_parser()
# An agent waits for its workers as long as they want, if it can be told to.
HAS_TIMEOUT = "--shutdown-timeout" in PARSER._option_string_actions
PATIENT = [f"--shutdown-timeout={NEVER_S}"] if HAS_TIMEOUT else []

takes_signals = pytest.mark.skipif(
    "--signals-to-handle" not in PARSER._option_string_actions,
    reason="this torchrun has no --signals-to-handle",
)

# A worker: it writes down what happens to it, and runs until a signal ends it.
SCRIPT = """
import os, signal, sys, time

folder, rank = os.environ["FOLDER"], os.environ["RANK"]
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]

def write(word):
    with open(f"{folder}/worker{rank}", "a") as file:
        file.write(f"{word}\\n")

def take(number, _):
    write(signal.Signals(number).name)

def stop(number, _):
    take(number, _)
    while "CHECKPOINT" in os.environ and not os.path.exists(f"{folder}/checkpoint"):
        time.sleep(0.02)
    write("checkpoint")
    sys.exit(0)

write(f"pid {os.getpid()}")
write(f"attempt {attempt}")
time.sleep(float(os.environ.get("LATE", "0")))
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGUSR1, take)
signal.signal(signal.SIGUSR2, take)
write("ready")
end = time.monotonic() + NEVER_S
while not os.path.exists(f"{folder}/end") and time.monotonic() < end:
    if os.path.exists(f"{folder}/fail{rank}"):
        sys.exit(5)
    time.sleep(0.02)
write("end")
"""


class LaunchOfTwo(RunningProgram):
    """A running agent with two workers; both streams are one file."""

    def __init__(
        self,
        folder: Path,
        which: str = OURS,
        *options: str,
        command: list[str] | None = None,
        **environ: str,
    ) -> None:
        self.folder = folder / which
        self.folder.mkdir()
        script = self.folder / "train.py"
        script.write_text(SCRIPT.replace("NEVER_S", str(NEVER_S)))
        command = command or COMMANDS[which]
        with (self.folder / "output").open("wb") as output:
            super().__init__(
                [*command, "--nproc-per-node=2", *bare(which), *options, script],
                environ={**clean_environ(), "FOLDER": str(self.folder), **environ},
                cwd=self.folder,
                stdout=output,
                stderr=output,
            )

    def written(self) -> list[list[str]]:
        """Return what each worker has written."""
        files = (self.folder / f"worker{rank}" for rank in range(2))
        return [f.read_text().splitlines() if f.exists() else [] for f in files]

    def got(self, number: signal.Signals = USR1) -> list[int]:
        """Return how often each worker got a signal."""
        return [lines.count(number.name) for lines in self.written()]

    def pids(self) -> list[int]:
        """Return the numbers of all workers that have been there."""
        lines = (line for lines in self.written() for line in lines)
        return [int(line[4:]) for line in lines if line.startswith("pid ")]

    def alive(self) -> list[int]:
        return [pid for pid in self.pids() if _alive(pid)]

    def until(self, *words: str) -> None:
        """Wait until both workers have written these words."""
        until(
            lambda: all(set(words) <= set(lines) for lines in self.written()),
            lambda: (self.written(), self.output()),
        )

    def until_all_got(self, *numbers: int, signal: signal.Signals = USR1) -> None:
        """Wait until each worker got a signal so often."""
        until(lambda: self.got(signal) == [*numbers], self.output)

    def deliver(self, number: signal.Signals) -> None:
        """Send the agent a signal; wait until it is delivered, or the agent ends."""
        self.send(number)
        status = Path(f"/proc/{self.pid}/status")
        until(
            lambda: (
                not self.is_running
                or re.search("^ShdPnd:\t0+$", status.read_text(), re.MULTILINE)
            ),
            self.output,
        )

    def tell(self, word: str) -> None:
        (self.folder / word).touch()

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def finish(self) -> int:
        """Let the workers end by themselves; return the agent's exit code."""
        self.tell("end")
        return self.wait()

    def end(self) -> None:
        """Kill the agent, and its workers if they outlive it."""
        super().end()
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.fixture
def launch(tmp_path):
    with contextlib.ExitStack() as ending:

        def start(*args: Any, **options: Any) -> LaunchOfTwo:
            return ending.enter_context(LaunchOfTwo(tmp_path, *args, **options))

        yield start


@pytest.fixture
def site_path(tmp_path):
    """Return what writes a sitecustomize; it returns the PYTHONPATH that finds it."""

    def write(text: str) -> str:
        (tmp_path / "sitecustomize.py").write_text(text)
        return os.pathsep.join([str(tmp_path), clean_environ()["PYTHONPATH"]])

    return write


# --- SIGUSR1 and SIGUSR2 --------------------------------------------------------------


def test_each_reaches_every_worker_once(launch):
    """The next one shows it: it comes later than all of those before."""
    ours = launch()
    ours.until("ready")
    for number, *times in ((USR1, 1, 0), (USR1, 2, 0), (USR2, 2, 1), (USR2, 2, 2)):
        ours.send(number)
        for each, often in zip((USR1, USR2), times, strict=True):
            ours.until_all_got(often, often, signal=each)
    assert ours.finish() == 0
    assert [ours.got(USR1), ours.got(USR2)] == [[2, 2], [2, 2]]
    assert [lines[-1] for lines in ours.written()] == ["end", "end"]
    assert len(ours.output().splitlines()) == 1, ours.output()


# The signal comes as soon as it may, before torch is imported.
EARLY = """
import os, signal
from torchrun_hpc import main
from torchrun_hpc.agent import signals

install = signals.install
signals.install = lambda: install() or os.kill(os.getpid(), signal.SIGUSR1)
main.main()
"""


def test_one_that_comes_before_the_workers(launch):
    """And before their handlers."""
    ours = launch(command=[sys.executable, "-c", EARLY], LATE="1")
    ours.until("ready", "SIGUSR1")
    assert ours.finish() == 0
    assert ours.got() == [1, 1]


@takes_signals
def test_what_torch_is_to_handle_comes_before_it_can(launch):
    """It ends the launcher at once, as it ends torchrun."""
    command = [sys.executable, "-c", EARLY]
    ours = launch(OURS, "--signals-to-handle=SIGTERM,SIGUSR1", command=command)
    assert ours.wait() == -USR1
    assert ours.pids() == []


@takes_signals
def test_what_torch_is_to_handle_ends_the_job(launch):
    option = "--signals-to-handle=SIGTERM,SIGUSR1"
    both = [launch(which, option) for which in (OURS, STOCK)]
    for one in both:
        one.until("ready")
        one.send(USR1)
    codes = []
    for one in both:
        one.until_all_got(1, 1)
        codes.append(one.finish())
        assert one.got() == [1, 1]
        # Ours says how the job has ended.
        assert ("death signal, shutting down" in one.output()) is (one is both[1])
    assert codes == [1, 1]


PROGRAM = """
import os, signal, sys
import torchrun_hpc.auto
from torch.distributed import run

run.main(sys.argv[1:])
assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
print("went on", flush=True)
"""


def test_a_program_of_its_own(tmp_path, launch):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ours = launch(command=[sys.executable, str(program)])
    ours.until("ready")
    ours.send(USR1)
    ours.until_all_got(1, 1)
    assert ours.finish() == 0, ours.output()
    assert "went on" in ours.output()


# --- SIGTERM, and more of them --------------------------------------------------------


def test_ctrl_c_ends_agent_and_workers(launch):
    both = [launch(which) for which in (OURS, STOCK)]
    for one in both:
        one.until("ready")
        one.send(signal.SIGINT)
    ours, stock = (one.wait() for one in both)
    assert ours == stock != 0
    assert both[0].alive() == []


def test_checkpoints_are_written_after_sigterm(launch):
    """With more signals the agent of stock torchrun is gone before its workers."""
    one = launch(OURS, *PATIENT, CHECKPOINT="1")
    one.until("ready")
    one.send(TERM)
    one.until_all_got(1, 1, signal=TERM)
    for number in (TERM, signal.SIGINT, signal.SIGHUP):
        one.deliver(number)
    one.tell("checkpoint")
    assert one.wait() == 1
    assert one.alive() == []
    assert [lines[3:] for lines in one.written()] == [["SIGTERM", "checkpoint"]] * 2
    assert one.output().count("SignalException: ") == 1
    assert "death signal, shutting down" not in one.output()


def test_sigterm_while_workers_are_stopped_for_a_restart(launch):
    """It is the first one, so the agent ends of it, as soon as they have ended."""
    ours = launch(OURS, "--max-restarts=1", *PATIENT, CHECKPOINT="1")
    ours.until("ready")
    ours.tell("fail0")
    ours.until_all_got(0, 1, signal=TERM)
    ours.deliver(TERM)
    ours.tell("checkpoint")
    assert ours.wait() == 1
    assert ours.written()[1][3:] == ["SIGTERM", "checkpoint"]
    assert len(ours.pids()) == 2
    assert "death signal, shutting down" not in ours.output()


# Python calls it before it forks a worker, and ignores its exceptions.
AT_FORK = """
import os, signal

def strike():
    if not os.path.exists("signalled"):
        open("signalled", "x").close()
        os.kill(os.getpid(), signal.SIGTERM)

if "RANK" not in os.environ:
    os.register_at_fork(before=strike)
"""


@pytest.mark.parametrize("options", [[], C10D.split()], ids=["", "c10d"])
def test_sigterm_while_a_worker_is_started(options, launch, site_path):
    # The first fork is a worker's.
    ours = launch(OURS, "--hpc-preload=none", *options, PYTHONPATH=site_path(AT_FORK))
    assert ours.wait() == 1, ours.output()
    assert (ours.folder / "signalled").exists()
    assert "Exception ignored" not in ours.output()
    assert ours.alive() == []


# So does C++ code that an import of torch runs.
AT_IMPORT = """
import contextlib, os, signal, sys

class Finder:
    @staticmethod
    def find_spec(name, *_):
        if name == "torch._C" and "RANK" not in os.environ:
            with contextlib.suppress(BaseException):
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize("options", [[], ["--hpc-preload=none"]])
def test_ctrl_c_while_torch_is_imported(options, launch, site_path):
    ours = launch(OURS, *options, PYTHONPATH=site_path(AT_IMPORT))
    assert ours.wait() == -signal.SIGINT, ours.output()
    assert ours.output() == ""


# The job has ended well, and the process ends.
AT_EXIT = """
import atexit, os, signal

if "RANK" not in os.environ:
    atexit.register(os.kill, os.getpid(), signal.{name})
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("options", [[], C10D.split()], ids=["", "c10d"])
def test_a_signal_after_the_job(options, name, launch, site_path):
    path = site_path(AT_EXIT.format(name=name))
    # Forks would also call this at their end.
    ours = launch(OURS, "--hpc-preload=none", *options, PYTHONPATH=path)
    ours.until("ready")
    assert ours.finish() == 0, ours.output()
    assert "Traceback" not in ours.output()


# --- SIGKILL --------------------------------------------------------------------------


def test_an_agent_that_is_killed(launch):
    """With stock torchrun its workers would live on."""
    ours = launch()
    ours.until("ready")
    ours.send(signal.SIGKILL)
    ours.wait()
    until(lambda: ours.alive() == [], ours.written)
    assert not any("end" in lines for lines in ours.written())

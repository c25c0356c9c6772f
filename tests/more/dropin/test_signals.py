"""Signals to a running agent: what they do to it, and to its workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.run import get_args_parser

from tests.support.patience import NEVER_S, PATIENCE, until
from tests.support.stock.side_by_side import (
    COMMANDS,
    OURS,
    STOCK,
    bare,
    clean_environ,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

USR1, USR2, TERM = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM

PARSER = get_args_parser()
# An agent waits for its workers as long as they want, if it can be told to.
HAS_TIMEOUT = "--shutdown-timeout" in PARSER._option_string_actions
PATIENT = [f"--shutdown-timeout={NEVER_S}"] if HAS_TIMEOUT else []

takes_signals = pytest.mark.skipif(
    "--signals-to-handle" not in PARSER._option_string_actions,
    reason="this torchrun has no --signals-to-handle",
)

# A worker: it writes down what happens to it, and goes on until a signal ends it.
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


class Launch:
    """A running agent with two workers."""

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
        with (self.folder / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                [
                    *(command or COMMANDS[which]),
                    *("--nproc-per-node=2", *bare(which), *options, str(script)),
                ],
                env={**clean_environ(), "FOLDER": str(self.folder), **environ},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,
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
            lambda: (self.written(), self.stderr()),
        )

    def send(self, number: signal.Signals) -> None:
        """Send the agent a signal; wait until it is delivered, or the agent ends."""
        self.process.send_signal(number)
        status = Path(f"/proc/{self.process.pid}/status")
        until(
            lambda: (
                self.process.poll() is not None
                or re.search("^ShdPnd:\t0+$", status.read_text(), re.MULTILINE)
            ),
            self.stderr,
        )

    def tell(self, word: str) -> None:
        (self.folder / word).touch()

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def end(self) -> int:
        """Let the workers end by themselves; return the agent's exit code."""
        self.tell("end")
        return self.process.wait(PATIENCE)


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    started: list[Launch] = []

    def start(*args: Any, **options: Any) -> Launch:
        started.append(Launch(tmp_path, *args, **options))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        for pid in one.alive():
            os.kill(pid, signal.SIGKILL)


# --- SIGUSR1 and SIGUSR2 --------------------------------------------------------------


def test_each_reaches_every_worker_once(launch: Callable[..., Launch]) -> None:
    """The next one shows it: it comes later than all of those before."""
    ours = launch()
    ours.until("ready")
    for number, *expected in ((USR1, 1, 0), (USR1, 2, 0), (USR2, 2, 1), (USR2, 2, 2)):
        ours.process.send_signal(number)
        got = lambda: [ours.got(USR1), ours.got(USR2)]  # noqa: E731
        until(lambda got=got, last=[[n] * 2 for n in expected]: got() == last, got)
    assert ours.end() == 0
    assert got() == [[2, 2], [2, 2]]
    assert [lines[-1] for lines in ours.written()] == ["end", "end"]
    assert len(ours.stderr().splitlines()) == 1, ours.stderr()


# The signal comes as soon as it may, before torch is imported.
EARLY = """
import os, signal
from torchrun_hpc import main
from torchrun_hpc.agent import signals

install = signals.install
signals.install = lambda: install() or os.kill(os.getpid(), signal.SIGUSR1)
main.main()
"""


def test_one_that_comes_before_the_workers(launch: Callable[..., Launch]) -> None:
    """And before their handlers."""
    ours = launch(command=[sys.executable, "-c", EARLY], LATE="1")
    ours.until("ready", "SIGUSR1")
    assert ours.end() == 0
    assert ours.got() == [1, 1]


@takes_signals
def test_what_torch_is_to_handle_comes_before_it_can(
    launch: Callable[..., Launch],
) -> None:
    """It ends the launcher at once, as it ends torchrun."""
    command = [sys.executable, "-c", EARLY]
    ours = launch(OURS, "--signals-to-handle=SIGTERM,SIGUSR1", command=command)
    assert ours.process.wait(PATIENCE) == -USR1
    assert ours.pids() == []


@takes_signals
def test_what_torch_is_to_handle_ends_the_job(launch: Callable[..., Launch]) -> None:
    option = "--signals-to-handle=SIGTERM,SIGUSR1"
    both = [launch(which, option) for which in (OURS, STOCK)]
    for one in both:
        one.until("ready")
        one.process.send_signal(USR1)
    codes = []
    for one in both:
        until(lambda one=one: one.got() == [1, 1], one.stderr)
        codes.append(one.end())
        assert one.got() == [1, 1]
        # Ours says how the job has ended.
        assert ("death signal, shutting down" in one.stderr()) is (one is both[1])
    assert codes == [1, 1]


PROGRAM = """
import os, signal, sys
import torchrun_hpc.auto
from torch.distributed import run

run.main(sys.argv[1:])
assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
print("went on", flush=True)
"""


def test_a_program_of_its_own(tmp_path: Path, launch: Callable[..., Launch]) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ours = launch(command=[sys.executable, str(program)])
    ours.until("ready")
    ours.process.send_signal(USR1)
    until(lambda: ours.got() == [1, 1], ours.stderr)
    assert ours.end() == 0, ours.stderr()
    assert "went on" in ours.stderr()


# --- SIGTERM, and more of them --------------------------------------------------------


def test_ctrl_c_ends_agent_and_workers(launch: Callable[..., Launch]) -> None:
    both = [launch(which) for which in (OURS, STOCK)]
    for one in both:
        one.until("ready")
        one.process.send_signal(signal.SIGINT)
    ours, stock = (one.process.wait(PATIENCE) for one in both)
    assert ours == stock != 0
    assert both[0].alive() == []


def test_checkpoints_are_written_after_sigterm(launch: Callable[..., Launch]) -> None:
    """With more signals the agent of stock torchrun is gone before its workers."""
    one = launch(OURS, *PATIENT, CHECKPOINT="1")
    one.until("ready")
    one.process.send_signal(TERM)
    until(lambda: one.got(TERM) == [1, 1], one.stderr)
    for number in (TERM, signal.SIGINT, signal.SIGHUP):
        one.send(number)
    one.tell("checkpoint")
    assert one.process.wait(PATIENCE) == 1
    assert one.alive() == []
    assert [lines[3:] for lines in one.written()] == [["SIGTERM", "checkpoint"]] * 2
    assert one.stderr().count("SignalException: ") == 1
    assert "death signal, shutting down" not in one.stderr()


def test_sigterm_while_workers_are_stopped_for_a_restart(
    launch: Callable[..., Launch],
) -> None:
    """It is the first one, so the agent ends of it, as soon as they have ended."""
    ours = launch(OURS, "--max-restarts=1", *PATIENT, CHECKPOINT="1")
    ours.until("ready")
    ours.tell("fail0")
    until(lambda: ours.got(TERM) == [0, 1], ours.stderr)
    ours.send(TERM)
    ours.tell("checkpoint")
    assert ours.process.wait(PATIENCE) == 1
    assert ours.written()[1][3:] == ["SIGTERM", "checkpoint"]
    assert len(ours.pids()) == 2
    assert "death signal, shutting down" not in ours.stderr()


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


@pytest.mark.parametrize("meets", ["", "c10d"])
def test_sigterm_while_a_worker_is_started(
    meets: str, tmp_path: Path, launch: Callable[..., Launch]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_FORK)
    path = os.pathsep.join([str(tmp_path), clean_environ()["PYTHONPATH"]])
    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"] if meets else []
    # The first fork is a worker's.
    ours = launch(OURS, "--hpc-preload=none", *options, PYTHONPATH=path)
    assert ours.process.wait(PATIENCE) == 1, ours.stderr()
    assert (ours.folder / "signalled").exists()
    assert "Exception ignored" not in ours.stderr()
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
def test_ctrl_c_while_torch_is_imported(
    options: list[str], tmp_path: Path, launch: Callable[..., Launch]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT)
    path = os.pathsep.join([str(tmp_path), clean_environ()["PYTHONPATH"]])
    ours = launch(OURS, *options, PYTHONPATH=path)
    assert ours.process.wait(PATIENCE) == -signal.SIGINT, ours.stderr()
    assert ours.stderr() == ""


# The job has ended well, and the process ends.
AT_EXIT = """
import atexit, os, signal

if "RANK" not in os.environ:
    atexit.register(os.kill, os.getpid(), signal.{name})
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("meets", ["", "c10d"])
def test_a_signal_after_the_job(
    meets: str, name: str, tmp_path: Path, launch: Callable[..., Launch]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT.format(name=name))
    path = os.pathsep.join([str(tmp_path), clean_environ()["PYTHONPATH"]])
    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"] if meets else []
    # Forks would call this at their end, too.
    ours = launch(OURS, "--hpc-preload=none", *options, PYTHONPATH=path)
    ours.until("ready")
    assert ours.end() == 0, ours.stderr()
    assert "Traceback" not in ours.stderr()


# --- SIGKILL --------------------------------------------------------------------------


def test_an_agent_that_is_killed(launch: Callable[..., Launch]) -> None:
    """With stock torchrun its workers would live on."""
    ours = launch()
    ours.until("ready")
    ours.process.kill()
    ours.process.wait(PATIENCE)
    until(lambda: ours.alive() == [], ours.written)
    assert not any("end" in lines for lines in ours.written())

"""Signals to a running agent: what they do to it, and to its workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from side_by_side import (
    COMMANDS,
    OURS,
    STOCK,
    bare,
    clean_environ,
)
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.run import get_args_parser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

USR1, USR2, TERM = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM

Multiprocessing: Any = multiprocessing_api
SubprocessHandler = Multiprocessing.SubprocessHandler
# Where workers are started: by Popen, or by that of subprocess.
Starting: Any = sys.modules[SubprocessHandler.__module__]
BY_NAME = hasattr(Starting, "Popen")

PARSER = get_args_parser()
# Seconds. The agent looks after its workers, and forwards signals, once in an interval.
SOON = 2 + PARSER.get_default("monitor_interval")

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
    time.sleep(float(os.environ.get("CHECKPOINT", "0")))
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
end = time.monotonic() + 60
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
        script.write_text(SCRIPT)
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
        _until(lambda: all(set(words) <= set(lines) for lines in self.written()))

    def tell(self, word: str) -> None:
        (self.folder / word).touch()

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def end(self) -> int:
        """Let the workers end by themselves; return the agent's exit code."""
        self.tell("end")
        return self.process.wait(timeout=20)


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _until(condition: Callable[[], object], limit: float = 30) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


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


def test_stock_dies_and_its_workers_live_on(launch: Callable[..., Launch]) -> None:
    stock = launch(STOCK)
    stock.until("ready")
    stock.process.send_signal(USR1)
    assert stock.process.wait(timeout=10) == -USR1
    assert stock.got() == [0, 0]
    assert len(stock.alive()) == 2


@pytest.mark.parametrize("number", [USR1, USR2])
def test_each_reaches_every_worker_once(
    number: signal.Signals, launch: Callable[..., Launch]
) -> None:
    ours = launch()
    ours.until("ready")
    for times in (1, 2):
        ours.process.send_signal(number)
        _until(lambda times=times: ours.got(number) == [times] * 2, SOON)
        time.sleep(0.5)
        assert ours.got(number) == [times] * 2
    assert ours.end() == 0
    assert [lines[-1] for lines in ours.written()] == ["end", "end"]
    assert len(ours.stderr().splitlines()) == 1, ours.stderr()


def _catches(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def test_one_that_comes_before_the_workers(launch: Callable[..., Launch]) -> None:
    ours = launch()
    _until(lambda: _catches(ours.process.pid, USR1))
    ours.process.send_signal(USR1)
    assert ours.pids() == []
    ours.until("ready", "SIGUSR1")
    assert ours.end() == 0
    assert ours.got() == [1, 1]


def test_one_that_comes_before_the_handler(launch: Callable[..., Launch]) -> None:
    ours = launch(LATE="1")
    _until(lambda: len(ours.pids()) == 2)
    ours.process.send_signal(USR1)
    ours.until("ready", "SIGUSR1")
    assert ours.end() == 0
    assert ours.got() == [1, 1]


@takes_signals
def test_what_torch_is_to_handle_ends_the_job(launch: Callable[..., Launch]) -> None:
    option = "--signals-to-handle=SIGTERM,SIGUSR1"
    both = [launch(which, option) for which in (OURS, STOCK)]
    for one in both:
        one.until("ready")
        one.process.send_signal(USR1)
    time.sleep(0.5)
    codes = []
    for one in both:
        codes.append(one.end())
        assert one.got() == [1, 1]
        assert "death signal, shutting down workers" in one.stderr()
    assert codes == [1, 1]


@takes_signals
def test_what_torch_is_to_handle_comes_before_it_can(
    launch: Callable[..., Launch],
) -> None:
    """It is over at once, as it is with torchrun."""
    ours = launch(OURS, "--signals-to-handle=SIGTERM,SIGUSR1")
    _until(lambda: _catches(ours.process.pid, USR1))
    ours.process.send_signal(USR1)
    assert ours.process.wait(timeout=20) == -USR1
    assert ours.pids() == []


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
    _until(lambda: ours.got() == [1, 1], SOON)
    assert ours.end() == 0, ours.stderr()
    assert "went on" in ours.stderr()


# --- SIGTERM, and more of them --------------------------------------------------------


@pytest.mark.parametrize("which", [OURS, STOCK])
def test_checkpoints_are_written_after_sigterm(
    which: str, launch: Callable[..., Launch]
) -> None:
    """With more signals the agent of stock torchrun is gone before its workers."""
    one = launch(which, CHECKPOINT="3")
    one.until("ready")
    for number in (TERM, TERM, signal.SIGINT, signal.SIGHUP):
        one.process.send_signal(number)
        time.sleep(0.4)
    code = one.process.wait(timeout=20)
    if which == STOCK:
        assert len(one.alive()) == 2
        assert not any("checkpoint" in lines for lines in one.written())
        return
    assert code == 1
    assert one.alive() == []
    assert [lines[3:] for lines in one.written()] == [["SIGTERM", "checkpoint"]] * 2
    assert one.stderr().count("SignalException: ") == 1
    assert "death signal, shutting down workers" in one.stderr()


def test_sigterm_while_workers_are_stopped_for_a_restart(
    launch: Callable[..., Launch],
) -> None:
    """It is the first one, so the agent ends of it, as soon as they have ended."""
    ours = launch(OURS, "--max-restarts=1", CHECKPOINT="2")
    ours.until("ready")
    ours.tell("fail0")
    _until(lambda: ours.got(TERM) == [0, 1])
    time.sleep(0.2)
    ours.process.send_signal(TERM)
    assert ours.process.wait(timeout=20) == 1
    assert ours.written()[1][3:] == ["SIGTERM", "checkpoint"]
    assert len(ours.pids()) == 2
    assert "death signal, shutting down workers" in ours.stderr()


# --- SIGKILL --------------------------------------------------------------------------


@pytest.mark.parametrize(("which", "left"), [(STOCK, 2), (OURS, 0)])
def test_an_agent_that_is_killed(
    which: str, left: int, launch: Callable[..., Launch]
) -> None:
    one = launch(which)
    one.until("ready")
    one.process.kill()
    one.process.wait(timeout=5)
    time.sleep(0.3)
    assert len(one.alive()) == left

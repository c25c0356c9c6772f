"""SIGUSR1 and SIGUSR2, sent to the agent, go to its workers, and training goes on.

Schedulers send them ahead of the end of a job, to the task that they started: that is
the agent, and stock torchrun dies of them. Here a handler takes note, and `forward`,
which is called as often as the agent looks after its workers, delivers: each worker
gets each signal once. One that would die of it, because its handler is not there yet,
gets it later.

Some schedulers signal all that descends from a task, some the task alone; with Slurm
that depends on ``ProctrackType``. So a process stands beside the workers, with all
signals blocked: what is pending there, the workers have had too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torchrun_hpc.errors import Message
from torchrun_hpc.reporting import intervals, report

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import FrameType

FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)

# Seconds after which whoever is signalled together with the agent has been.
_TOGETHER = 0.2

_PROC = Path("/proc")


@dataclass(eq=False)
class _Noted:
    """A signal that the agent got.

    Attributes:
        number: Which.
        when: When, by ``time.monotonic``.
        direct: Whether all processes beside the agent got it too; ``None`` if that is
            not known yet.
        reached: Numbers of the workers that have had it.
    """

    number: signal.Signals
    when: float
    direct: bool | None = None
    reached: set[int] = field(default_factory=set)


class _Forwarder:
    """The signals of this process, on their way to its workers."""

    def __init__(self) -> None:
        # A handler runs between any two steps of the rest, and only appends.
        self._arrived: deque[_Noted] = deque()
        self._noted: list[_Noted] = []
        self._scheduled = False
        self._canary: subprocess.Popen[bytes] | None = None
        self._reported = False

    def install(self) -> None:
        """Take note of the signals that would end this process.

        One that has a handler, or is ignored, is left as it is: the workers inherit
        the latter. Outside of the main thread this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in FORWARDED:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._note)

    def uninstall(self) -> None:
        """Let this process be as it was before `install`."""
        for number in FORWARDED:
            self._give_back(number)
        self._end_canary()
        self._arrived.clear()
        self._noted.clear()
        self._scheduled = self._reported = False

    def leave_to_torch(self, names: Iterable[str]) -> None:
        """Let some signals do what they do in torchrun.

        Args:
            names: Those of ``--signals-to-handle``. Torch installs its handler when
                it starts the workers; one that came before ends this process, as it
                would have ended torchrun.
        """
        wanted = {name.strip() for name in names}
        for number in FORWARDED:
            if number.name in wanted and self._give_back(number):
                self._collect()
                if any(noted.number == number for noted in self._noted):
                    signal.raise_signal(number)

    def begin(self, *, scheduled: bool) -> None:
        """Get ready, before the workers start.

        Args:
            scheduled: Whether a scheduler started this process, which may signal the
                workers too.
        """
        self._scheduled = scheduled
        if scheduled and any(signal.getsignal(n) == self._note for n in FORWARDED):
            self._renew_canary()

    def forward(self, workers: Mapping[int, int]) -> None:
        """Deliver what can be delivered.

        Args:
            workers: Local ranks and process numbers.
        """
        self._collect()
        if self._noted:
            now = time.monotonic()
            self._judge(now)
            self._deliver(workers, now)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._arrived.append(_Noted(signal.Signals(number), time.monotonic()))

    def _collect(self) -> None:
        while self._arrived:
            self._noted.append(self._arrived.popleft())

    def _give_back(self, number: signal.Signals) -> bool:
        """Restore the default action; say whether the handler was ours."""
        ours = signal.getsignal(number) == self._note
        if ours:
            signal.signal(number, signal.SIG_DFL)
        return ours

    def _judge(self, now: float) -> None:
        """Find out which signals the workers have had without us."""
        unknown = [noted for noted in self._noted if noted.direct is None]
        if not unknown:
            return
        if self._canary is not None and unknown[0].when + _TOGETHER > now:
            return
        pending = 0 if self._canary is None else _pending(self._canary.pid)
        for noted in unknown:
            # One that follows at once may be the same one as is pending, and nothing
            # tells: signals that are pending at the same time are one.
            if pending & _bit(noted.number):
                noted.direct = True
            elif self._canary is None or noted.when + _TOGETHER <= now:
                noted.direct = False
        if self._canary is not None and (pending or self._canary.poll() is not None):
            self._renew_canary()

    def _deliver(self, workers: Mapping[int, int], now: float) -> None:
        known = [noted for noted in self._noted if noted.direct is not None]
        alive: set[int] = set()
        for rank, pid in workers.items():
            status = _status(pid)
            # A number may have gone to a stranger: the agent has buried its owner.
            if status.get("PPid") != str(os.getpid()) or status["State"][0] in "ZX":
                continue
            alive.add(pid)
            for number in FORWARDED:
                owed = [
                    noted
                    for noted in known
                    if noted.number == number and pid not in noted.reached
                ]
                if owed:
                    self._deliver_to(rank, pid, status, owed, now)
        # What not all have had waits for the workers that replace them.
        self._noted = [
            noted for noted in self._noted if not alive or alive - noted.reached
        ]

    def _deliver_to(
        self,
        rank: int,
        pid: int,
        status: Mapping[str, str],
        owed: Iterable[_Noted],
        now: float,
    ) -> None:
        """Deliver signals of one kind, which are one if they wait for each other."""
        age = _age(pid)
        missing = []
        for noted in owed:
            if noted.direct and age > now - noted.when:
                noted.reached.add(pid)
            else:
                missing.append(noted)
        if not missing:
            return
        number = missing[0].number
        if _survives(pid, status, number):
            with contextlib.suppress(OSError):  # it has ended just now
                os.kill(pid, number)
            for noted in missing:
                noted.reached.add(pid)
            return
        waited = min(age, now - missing[0].when)
        if waited >= intervals.FIRST_REPORT and not self._reported:
            self._reported = True
            text = (
                f"{number.name} is held back from the worker of local rank {rank} "
                f"({status['Name']}, pid {pid}): it has had no handler for "
                f"{waited:.0f} s, and would die of it. A handler gets it as soon as "
                "it is there; a shell gets it never, so start the program in it "
                "with exec"
            )
            report.line(Message("HPC130", text), sys.stderr, "warning")

    def _renew_canary(self) -> None:
        self._end_canary()
        self._canary = _start_canary()

    def _end_canary(self) -> None:
        if self._canary is not None:
            with self._canary:
                self._canary.kill()
            self._canary = None


def _start_canary() -> subprocess.Popen[bytes] | None:
    """Start a process as the workers are started, that keeps all signals pending."""
    program = shutil.which("cat")
    if program is None:
        return None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        # It ends with this process, in whatever way that ends: its input does.
        return subprocess.Popen(  # noqa: S603
            [program],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
    except OSError:  # no more processes for this user
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _bit(number: int) -> int:
    return 1 << (number - 1)


def _status(pid: int, thread: int | None = None) -> dict[str, str]:
    """Read the status of a process or of one of its threads; empty if it is gone."""
    path = _PROC / str(pid)
    path = path / "status" if thread is None else path / f"task/{thread}/status"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in pairs}


def _pending(pid: int) -> int:
    """Return the signals that are pending for a process, one bit each."""
    return int(_status(pid).get("ShdPnd", "0"), 16)


def _survives(pid: int, status: Mapping[str, str], number: int) -> bool:
    """Say whether a process catches, ignores or blocks a signal.

    A signal that is blocked in some threads goes to another one.
    """
    handled = int(status["SigCgt"], 16) | int(status["SigIgn"], 16)
    if handled & _bit(number):
        return True
    try:
        threads = [int(entry.name) for entry in (_PROC / str(pid) / "task").iterdir()]
    except OSError:
        return False
    blocked = [_status(pid, thread).get("SigBlk", "0") for thread in threads]
    return all(int(mask, 16) & _bit(number) for mask in blocked)


def _age(pid: int) -> float:
    """Return for how many seconds a process has been there; 0 if it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    # The name, in brackets, may hold anything; the 22nd field is 20 behind it.
    ticks = int(text.rpartition(")")[2].split()[19])
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return since_boot - ticks / os.sysconf("SC_CLK_TCK")


# A process has one handler for each signal.
_forwarder = _Forwarder()
install = _forwarder.install
uninstall = _forwarder.uninstall
leave_to_torch = _forwarder.leave_to_torch
begin = _forwarder.begin
forward = _forwarder.forward

"""The signals of an agent: some are forwarded to its workers, others end the launch.

SIGUSR1 and SIGUSR2 are forwarded, and training continues.

Schedulers send them before a job's end to the task that they started: the agent.
Torchrun would die of them. `forward` delivers each signal once to each worker. A worker
without a handler would die of it, so it gets the signal later.

Some schedulers signal all descendants of a task, some only the task; Slurm's
``ProctrackType`` decides. So a probe process, with all signals blocked, runs beside the
workers: a signal pending there has also reached the workers.
"""

from __future__ import annotations

import _thread  # noqa: PLC2701 - a handler may have interrupted the module `threading`
import contextlib
import math
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchrun_hpc import limits
from torchrun_hpc.errors import Message
from torchrun_hpc.host import procfs
from torchrun_hpc.reporting import console

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import FrameType

    Handler = Callable[[int, FrameType | None], object]


FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(eq=False)
class _ReceivedSignal:
    """A signal that the agent received, at ``time.monotonic``.

    `workers_have_it` is ``None`` if unknown. `delivered_to` has process numbers.
    """

    number: signal.Signals
    when: float
    workers_have_it: bool | None = None
    delivered_to: set[int] = field(default_factory=set)


class _Forwarder:
    def __init__(self) -> None:
        # Changed in place: a handler may append to it between any two steps.
        self._undelivered: list[_ReceivedSignal] = []
        self._fork_server = 0
        self._probe: subprocess.Popen[bytes] | None = None
        self._reported = False

    def install(self) -> None:
        """Handle the signals that would end this process, in the main thread only.

        Workers inherit ignored signals, so leave these and handled ones alone.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in FORWARDED:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._on_signal)

    def uninstall(self) -> None:
        """Restore the state before `install`."""
        for number in FORWARDED:
            self._restore_default(number)
        self._end_probe()
        self._undelivered.clear()

    def leave_to_torch(self, names: Iterable[str]) -> None:
        """Give the signals of ``--signals-to-handle`` their meaning in torchrun.

        Until torch handles them, they end this process.
        """
        wanted = {name.strip() for name in names}
        for number in FORWARDED:
            is_left = number.name in wanted and self._restore_default(number)
            if is_left and any(r.number == number for r in self._undelivered):
                signal.raise_signal(number)

    def begin(self, *, scheduled: bool, fork_server: int = 0) -> None:
        """Prepare, before the workers start.

        A scheduler that started this process (`scheduled`) may also signal the workers.
        """
        self._fork_server, self._reported = fork_server, False
        if scheduled and any(signal.getsignal(n) == self._on_signal for n in FORWARDED):
            self._renew_probe()

    def forward(self, workers: Mapping[int, int]) -> None:
        """Deliver signals to workers, given by local rank and process number."""
        if self._undelivered:
            now = time.monotonic()
            self._find_who_has_it(now)
            self._deliver(workers, now)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        received = _ReceivedSignal(signal.Signals(number), time.monotonic())
        self._undelivered.append(received)

    def _restore_default(self, number: signal.Signals) -> bool:
        is_ours = signal.getsignal(number) == self._on_signal
        if is_ours:
            signal.signal(number, signal.SIG_DFL)
        return is_ours

    def _find_who_has_it(self, now: float) -> None:
        unknown = [r for r in self._undelivered if r.workers_have_it is None]
        if not unknown:
            return
        if self._probe is not None and unknown[0].when + limits.SIGNALS_TOGETHER > now:
            return
        pending = 0 if self._probe is None else _pending(self._probe.pid)
        for received in unknown:
            # The kernel merges pending signals of one number.
            if pending & _bit(received.number):
                received.workers_have_it = True
            elif self._probe is None or received.when + limits.SIGNALS_TOGETHER <= now:
                received.workers_have_it = False
        if self._probe is not None and (pending or self._probe.poll() is not None):
            self._renew_probe()

    def _deliver(self, workers: Mapping[int, int], now: float) -> None:
        examined = [r for r in self._undelivered if r.workers_have_it is not None]
        parents = {str(os.getpid()), str(self._fork_server)}
        for rank, pid in workers.items():
            status = procfs.status(pid)
            # If this worker was reaped, its number may belong to another process.
            if status.get("PPid") not in parents or status["State"][0] in "ZX":
                continue
            self._deliver_to(rank, pid, status, examined, now)
        # Keep what some workers have not had for the workers that replace them: one
        # that has ended may have failed.
        for received in tuple(self._undelivered):
            if workers and received.delivered_to.issuperset(workers.values()):
                self._undelivered.remove(received)

    def _deliver_to(
        self,
        rank: int,
        pid: int,
        status: Mapping[str, str],
        examined: Sequence[_ReceivedSignal],
        now: float,
    ) -> None:
        age = procfs.age(pid)
        for received in examined:
            if received.workers_have_it and age > now - received.when:
                received.delivered_to.add(pid)
        for number in FORWARDED:
            of_number = [r for r in examined if r.number == number]
            missing = [r for r in of_number if pid not in r.delivered_to]
            if missing and _survives(pid, status, number):
                with contextlib.suppress(OSError):  # it has ended just now
                    os.kill(pid, number)
                for received in missing:
                    received.delivered_to.add(pid)
            elif missing:
                waited = min(age, now - missing[0].when)
                self._report(number, f"{rank} ({status['Name']}, pid {pid})", waited)

    def _report(self, number: signal.Signals, worker: str, waited: float) -> None:
        if waited < limits.FIRST_REPORT or self._reported:
            return
        self._reported = True
        text = (
            f"{number.name} is held back from local rank {worker}, which has had no "
            f"handler for {waited:.0f} s: it would kill the worker. The worker gets it "
            "after it installs a handler. A shell never gets it, so start the program "
            "in the shell with exec"
        )
        console.write(Message("HPC130", text), "warning")

    def _renew_probe(self) -> None:
        self._end_probe()
        self._probe = _start_probe()

    def _end_probe(self) -> None:
        if self._probe is not None:
            with self._probe:
                self._probe.kill()
            self._probe = None


def _start_probe() -> subprocess.Popen[bytes] | None:
    """Start a process as the workers are started, with all signals blocked."""
    import subprocess  # noqa: PLC0415 - direct mode does without

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        # However this process ends, that closes cat's stdin, and cat also ends.
        return subprocess.Popen(
            ["cat"],  # noqa: S607
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
    except OSError:  # no such program, or no more processes for this user
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _bit(number: int) -> int:
    return 1 << (number - 1)


def _pending(pid: int) -> int:
    """Return a process's pending signals, one bit each."""
    return int(procfs.status(pid).get("ShdPnd", "0"), 16)


def _survives(pid: int, status: Mapping[str, str], number: int) -> bool:
    """Return whether a process handles a signal, or all its threads block it."""
    handled = int(status["SigCgt"], 16) | int(status["SigIgn"], 16)
    if handled & _bit(number):
        return True
    threads = procfs.threads(pid)
    blocked = [procfs.status(pid, thread).get("SigBlk", "0") for thread in threads]
    return bool(blocked) and all(int(mask, 16) & _bit(number) for mask in blocked)


# A process has one handler for each signal.
_forwarder = _Forwarder()
install = _forwarder.install
uninstall = _forwarder.uninstall
leave_to_torch = _forwarder.leave_to_torch
begin = _forwarder.begin
forward = _forwarder.forward


# --- death signals --------------------------------------------------------------------

# Each ends the launch, whatever the main thread does when it arrives. A handler that
# only raises an exception can lose the signal: Python ignores exceptions in at-fork
# hooks, in ``__del__`` and in log handlers. Between the starts of two workers, it also
# loses the first one. So a signal waits until such a step has ended, and an exception
# without effect is raised again.

FOREVER = math.inf


class DeathSignals:
    """The death signals of a launch, each held for at most ``limit`` seconds.

    Their handlers run in the main thread. A fork holds its own signals: until it has
    become another program, or for `limits.SIGNAL_TIMEOUT` seconds.
    """

    def __init__(self, limit: float = 0.0) -> None:
        self._limit = limit
        self._first = 0  # the number of the first one
        self._arrived = 0.0  # time.monotonic()
        self._is_over = False
        self.is_repeated = False  # since the launch ends
        self._sending = threading.Lock()

    def handler(self, act: Handler) -> Handler:
        """Return a handler that calls ``act`` when no step holds the first signal."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self._is_over:
                self.is_repeated = True
                return
            if not self._first:
                self._first, self._arrived = number, time.monotonic()
                # There may be no more threads, or Python ends (3.12).
                with contextlib.suppress(RuntimeError):
                    _thread.start_new_thread(self._send_again, ())
            if time.monotonic() - self._arrived >= self._limit:
                act(self._first, frame)

        return handle

    @contextlib.contextmanager
    def held(self, limit: float) -> Iterator[None]:
        """Hold signals for at most ``limit`` seconds; afterwards the first one acts."""
        before, self._limit = self._limit, limit
        try:
            yield
        finally:
            self._limit = before
        if self._first and not self._is_over:
            signal.raise_signal(self._first)

    def end(self) -> None:
        """Ignore signals from now on: the launch already ends."""
        self._is_over = True  # first: a handler may interrupt the wait
        with self._sending:
            pass

    def _send_again(self) -> None:
        main = threading.main_thread().ident or 0
        while not self._is_over:
            time.sleep(limits.SIGNAL_TIMEOUT)
            with self._sending:
                if not self._is_over:
                    signal.pthread_kill(main, self._first)  # also ends a system call


def die(number: int, _frame: FrameType | None) -> None:
    """End this process as the signal does without a handler."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def interrupt_kills() -> Iterator[None]:
    """Let Ctrl-C end this process at once, unless the program handles it otherwise.

    Before the start, a `KeyboardInterrupt` would only print a traceback. C++ code that
    runs during an import of torch can ignore it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) != signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)

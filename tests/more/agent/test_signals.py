"""Who gets SIGUSR1 and SIGUSR2, and when: real processes stand for the workers.

Time passes when a test lets it pass: of the clock, and of the ages of workers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.patience import NEVER_S, until
from tests.support.processes import RunningProgram, run_python
from torchrun_hpc import limits
from torchrun_hpc.agent import signals
from torchrun_hpc.host import procfs

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2

# It does what it reads, and says which signals it got.
WORKER = """
import os, signal, subprocess, sys, threading, time
def say(text):
    os.write(1, f"{text}\\n".encode())
def catch(*numbers):
    for number in numbers:
        signal.signal(number, lambda n, _: say(signal.Signals(n).name))
USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2
for line in sys.stdin:
    exec(line)
    say("done")
"""
CATCH = "catch(USR1, USR2)"
BLOCK = "signal.pthread_sigmask(signal.SIG_BLOCK, [USR1])"

# As often as the agent looks after its workers, and long enough for everything.
PERIOD = 0.05
SETTLED = 2 * limits.SIGNALS_TOGETHER

age_of = procfs.age


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


clock = Clock()


class SignalledWorker(RunningProgram):
    def __init__(self, command=CATCH):
        command_line = sys.executable, "-ISc", WORKER
        super().__init__(command_line, stdin=subprocess.PIPE, stderr=None)
        self.is_zombie = False
        self.born = clock.now
        clock.now += 1
        assert self.do(command) == []

    def do(self, line="pass"):
        """Let it do something; return what it has said, also of signals before."""
        if self.is_zombie:
            return []
        self.stdin.write(f"{line}\n".encode())
        return list(iter(self.line, "done"))

    def become_zombie(self):
        self.is_zombie = True
        self.send(signal.SIGKILL)
        wait_for_end_of(self.pid)


def wait_for_end_of(pid):
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def worker(monkeypatch):
    """Start workers, and end them."""
    started: dict[int, SignalledWorker] = {}
    monkeypatch.setattr(procfs, "age", lambda pid: clock.now - started[pid].born)
    with contextlib.ExitStack() as ending:

        def start(command=CATCH):
            one = ending.enter_context(SignalledWorker(command))
            started[one.pid] = one
            return one

        yield start


@pytest.fixture
def agent(monkeypatch):
    """Let this process be an agent."""
    monkeypatch.setattr(signals, "time", clock)
    before = {number: signal.getsignal(number) for number in signals.FORWARDED}
    forwarder = signals._Forwarder()
    forwarder.install()
    yield forwarder
    forwarder.uninstall()
    assert {n: signal.getsignal(n) for n in signals.FORWARDED} == before


def send(number=USR1):
    os.kill(os.getpid(), number)


def forward(agent, *workers, seconds=SETTLED):
    """Forward as the agent does; return what each worker received then."""
    for _ in range(round(seconds / PERIOD)):
        agent.forward({rank: worker.pid for rank, worker in enumerate(workers)})
        clock.now += PERIOD
    return [worker.do() for worker in workers]


# --- forwarding -----------------------------------------------------------------------


@pytest.mark.parametrize("number", signals.FORWARDED)
def test_every_worker_gets_it_once(agent, worker, number):
    workers = worker(), worker()
    send(number)
    assert forward(agent, *workers) == [[number.name]] * 2
    assert forward(agent, *workers) == [[], []]


def test_two_that_wait_for_each_other_are_one(agent, worker):
    one = worker()
    for _ in range(2):
        send(USR1)
        clock.now += 0.01
    send(USR2)
    assert sorted(forward(agent, one)[0]) == ["SIGUSR1", "SIGUSR2"]


def test_before_the_workers_are_there(agent, worker):
    send()
    agent.forward({})
    clock.now += 0.05
    assert forward(agent, worker()) == [["SIGUSR1"]]


def test_before_the_handler_is_there(agent, worker):
    quick, slow = worker(), worker("pass")
    send()
    assert forward(agent, quick, slow) == [["SIGUSR1"], []]
    assert slow.is_running
    slow.do(CATCH)
    assert forward(agent, quick, slow) == [[], ["SIGUSR1"]]


def test_workers_that_replace_others_get_what_not_all_have_had(agent, worker):
    quick, slow = worker(), worker("pass")
    send()
    assert forward(agent, quick, slow) == [["SIGUSR1"], []]
    # In this order: one that ends before those that have had it is not waited for.
    for old in quick, slow:
        old.become_zombie()
    forward(agent, quick, slow)
    assert forward(agent, worker(), worker()) == [["SIGUSR1"]] * 2


def test_workers_that_replace_others_do_not_get_what_all_have_had(agent, worker):
    old = worker()
    send()
    assert forward(agent, old) == [["SIGUSR1"]]
    assert forward(agent, worker()) == [[]]


def test_workers_that_replace_others_get_what_one_that_had_ended_missed(agent, worker):
    """It may have failed just now: then all are replaced."""
    ended, one = worker(), worker()
    ended.become_zombie()
    send()
    assert forward(agent, ended, one) == [[], ["SIGUSR1"]]
    assert forward(agent, worker(), worker()) == [["SIGUSR1"]] * 2


def test_strangers_are_left_alone(agent, worker):
    """The system has given the number of a worker that has ended to another."""
    starts = f"say(subprocess.Popen(['sleep', '{NEVER_S}']).pid)"
    (said,) = worker(BLOCK).do(starts)
    stranger = int(said)
    try:
        send()
        agent.forward({0: stranger})
        assert not signals._pending(stranger)
        os.kill(stranger, USR1)
        assert signals._pending(stranger)
    finally:
        os.kill(stranger, signal.SIGKILL)


# --- who survives it ------------------------------------------------------------------


def test_one_that_ignores_it(agent, worker):
    one = worker("signal.signal(USR1, signal.SIG_IGN)")
    send()
    assert forward(agent, one) == [[]]
    one.do(CATCH)  # it has been delivered: there is none left
    assert forward(agent, one) == [[]]


def test_one_that_waits_for_it(agent, worker):
    one = worker(BLOCK)
    send()
    assert forward(agent, one) == [[]]
    assert one.do("say(signal.sigwait([USR1]).name)") == ["SIGUSR1"]


def test_one_with_a_thread_that_would_die(agent, worker):
    start = "threading.Thread(target=time.sleep, args=(900,), daemon=True).start()"
    one = worker(f"{start}; {BLOCK}")
    send()
    assert forward(agent, one) == [[]]
    assert one.is_running
    one.do(CATCH)
    received = forward(agent, one)[0]
    # The thread took it, and Python tells the main thread, when that does something.
    until(lambda: received or received.extend(one.do()))
    assert received == ["SIGUSR1"]


def test_one_that_never_catches_it_is_named_once(agent, worker, capsys):
    one, other = worker(), worker("pass")
    send()
    forward(agent, one, other, seconds=9.9)
    assert capsys.readouterr().err == ""
    forward(agent, one, other, seconds=0.5)
    (line,) = capsys.readouterr().err.splitlines()
    name = Path(f"/proc/{other.pid}/comm").read_text().strip()
    assert line.startswith(
        "torchrun_hpc: warning[HPC130]: SIGUSR1 is held back from local rank 1 "
        f"({name}, pid {other.pid}), which has had no handler for 10 s: "
    )
    assert line.endswith("with exec")
    send()
    forward(agent, one, other)
    assert capsys.readouterr().err == ""


# --- whether the workers had it -------------------------------------------------------


def probe_of(agent):
    return agent._probe.pid


def direct(agent, *workers, number=USR1):
    """Signal as Slurm does where it signals all descendants of a task."""
    for pid in os.getpid(), *(worker.pid for worker in workers), probe_of(agent):
        os.kill(pid, number)


def test_the_workers_are_signalled_a_moment_later(agent, worker):
    one = worker()
    agent.begin(scheduled=True)
    send()
    received = forward(agent, one, seconds=0.1)[0]
    for pid in one.pid, probe_of(agent):
        os.kill(pid, USR1)
    assert received + forward(agent, one)[0] == ["SIGUSR1"]


@pytest.mark.parametrize("number", signals.FORWARDED)
def test_what_the_workers_have_had_is_not_forwarded_each_time(agent, worker, number):
    one = worker()
    agent.begin(scheduled=True)
    for _ in range(2):
        direct(agent, one, number=number)
        assert forward(agent, one) == [[number.name]]
        send(number)  # to the task alone
        assert forward(agent, one) == [[number.name]]


def test_two_kinds_at_once(agent, worker):
    one = worker()
    agent.begin(scheduled=True)
    direct(agent, one, number=USR1)
    send(USR2)
    assert sorted(forward(agent, one)[0]) == ["SIGUSR1", "SIGUSR2"]


def test_workers_that_came_later_have_not_had_it(agent, worker):
    old = worker()
    agent.begin(scheduled=True)
    direct(agent, old)
    clock.now += 0.05
    assert forward(agent, old, worker()) == [["SIGUSR1"]] * 2


def test_no_process_beside_the_workers_without_a_scheduler(agent, worker):
    agent.begin(scheduled=False)
    assert agent._probe is None
    one = worker()
    send()
    assert forward(agent, one, seconds=0.1) == [["SIGUSR1"]]


def test_a_machine_without_the_program(agent, worker, monkeypatch):
    one = worker()
    monkeypatch.setenv("PATH", "")
    agent.begin(scheduled=True)
    assert agent._probe is None
    send()
    assert forward(agent, one) == [["SIGUSR1"]]


def test_one_that_is_killed_is_replaced(agent, worker):
    one = worker()
    agent.begin(scheduled=True)
    before = probe_of(agent)
    os.kill(before, signal.SIGKILL)
    wait_for_end_of(before)
    send()
    assert forward(agent, one) == [["SIGUSR1"]]
    assert probe_of(agent) != before
    direct(agent, one)
    assert forward(agent, one) == [["SIGUSR1"]]


def test_it_takes_no_signal_and_has_nothing_of_the_agent(agent):
    agent.begin(scheduled=True)
    process = Path(f"/proc/{probe_of(agent)}")
    for number in signal.SIGTERM, signal.SIGINT, signal.SIGHUP:
        os.kill(probe_of(agent), number)
        assert signals._pending(probe_of(agent)) & signals._bit(number)
    assert agent._probe.poll() is None
    assert (process / "cwd").readlink() == Path("/")
    assert [(process / f"fd/{fd}").readlink().name for fd in (1, 2)] == ["null"] * 2
    assert os.getsid(probe_of(agent)) == probe_of(agent)
    # The mask is not ours.
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


PROGRAM = f"""
import time
from torchrun_hpc.host import procfs
from torchrun_hpc.agent import signals
signals.install()
signals.begin(scheduled=True)
print(signals._forwarder._probe.pid, flush=True)
time.sleep({NEVER_S})
"""


def test_it_ends_with_an_agent_that_is_killed():
    with RunningProgram([sys.executable, "-c", PROGRAM]) as program:
        probe = Path(f"/proc/{int(program.line())}")
        assert probe.exists()
        program.send(signal.SIGKILL)
        program.wait()
    until(lambda: procfs.status(int(probe.name)).get("State", "Z")[0] in "ZX")


def test_the_age_of_a_process(worker):
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    one = worker()
    age = age_of(one.pid)
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert -tick < age < time.clock_gettime(time.CLOCK_BOOTTIME) - before + 2 * tick
    assert age_of(os.getpid()) > age
    one.end()
    assert age_of(one.pid) == 0


# --- handlers -------------------------------------------------------------------------


def test_what_torch_is_to_handle(agent, worker):
    agent.leave_to_torch(["SIGTERM", " SIGUSR1", ""])
    assert signal.getsignal(USR1) == signal.SIG_DFL
    one = worker()
    send(USR2)
    assert forward(agent, one) == [["SIGUSR2"]]


def test_what_came_before_torch_could_handle_it():
    program = """
import os, signal
from torchrun_hpc.host import procfs
from torchrun_hpc.agent import signals
signals.install()
os.kill(os.getpid(), signal.SIGUSR1)
signals.leave_to_torch(["SIGUSR2"])
print("alive", flush=True)
signals.leave_to_torch(["SIGUSR1"])
print("alive")
"""
    done = run_python("-c", program, cwd="/")
    assert (done.code, done.out, done.err) == (-USR1, "alive\n", "")


@pytest.mark.parametrize("number", signals.FORWARDED)
def test_the_command_takes_note_before_it_imports_torch(number, tmp_path):
    (tmp_path / "torch.py").write_text(
        f"import os; os.kill(os.getpid(), {int(number)}); os._exit(77)\n"
    )
    done = run_python(
        *("-m", "torchrun_hpc", "train.py"),
        cwd=tmp_path,
        environ={},
        path=[tmp_path],
    )
    assert (done.code, done.err) == (77, "")

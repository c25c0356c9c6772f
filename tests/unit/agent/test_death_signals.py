"""Death signals end a launch wherever they interrupt the main thread."""

from __future__ import annotations

import pytest

from tests.support.patience import NEVER_S
from tests.support.processes import run_python

BEGIN = f"""
import contextlib, logging, os, signal, subprocess, time
from torchrun_hpc import limits
from torchrun_hpc.agent.signals import FOREVER, DeathSignals, die, interrupt_kills

NEVER_S = {NEVER_S}
limits.SIGNAL_TIMEOUT = 0.1
signals = DeathSignals()

class Ended(Exception):
    pass

def end(number, frame):
    raise Ended(signal.Signals(number).name)

def handle(signals, act):
    for number in signal.SIGTERM, signal.SIGINT:
        signal.signal(number, signals.handler(act))

def strike(*_):
    os.kill(os.getpid(), signal.SIGTERM)

def wait(is_last=True):
    try:
        time.sleep(NEVER_S)
    except Ended as ended:
        if is_last:
            signals.end()  # the signal would be sent again
        return str(ended)

handle(signals, end)
"""

# Where Python, or the program, ignores the exception of a handler.
PLACES = {
    "an at-fork hook": """
os.register_at_fork(before=strike)
subprocess.run(["true"], preexec_fn=os.getpid)
""",
    "__del__": """
class Closing:
    __del__ = strike
Closing()
""",
    "a log handler": """
class Handler(logging.Handler):
    def emit(self, record):
        try:
            strike()
        except Exception:
            self.handleError(record)
logging.getLogger().addHandler(Handler())
logging.error("text")
""",
    "an except clause": """
with contextlib.suppress(Exception):
    strike()
""",
}


@pytest.fixture
def run(tmp_path):
    def run(program):
        return run_python("-c", BEGIN + program, cwd=tmp_path)

    return run


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_without_effect_is_raised_again(run, place):
    done = run(PLACES[place] + "print(wait())")
    assert (done.code, done.out) == (0, "SIGTERM\n"), done.err


# Programs that hold signals for some time, and their output.
HELD = {
    "the first one acts at the end": (
        """
try:
    with signals.held(FOREVER):
        strike()
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.3)
        print("held")
except Ended as ended:
    signals.end()
    print(ended)
""",
        "held SIGTERM",
    ),
    "a step does not answer": (
        """
with contextlib.suppress(Ended), signals.held(limits.SIGNAL_TIMEOUT):
    strike()
    print(wait(is_last=False))
    os.read(os.pipe()[0], 1)
print(wait())
""",
        "SIGTERM SIGTERM",
    ),
    "a step within a step": (
        """
try:
    with signals.held(FOREVER):
        with signals.held(0.0):
            pass
        strike()
        print("held")
except Ended:
    signals.end()
    print("ended")
""",
        "held ended",
    ),
    "a step fails": (
        """
with contextlib.suppress(ValueError), signals.held(FOREVER):
    strike()
    raise ValueError
print(wait())
""",
        "SIGTERM",
    ),
    "the launch ends already": (
        """
with contextlib.suppress(Ended):
    strike()
signals.end()
for _ in range(3):
    strike()
    time.sleep(0.1)
with signals.held(FOREVER):
    strike()
print("ended")
""",
        "ended",
    ),
    "a function in a fork": (
        """
with signals.held(limits.SIGNAL_TIMEOUT):
    child = os.fork()
    if child == 0:
        strike()
        print(wait(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
print("agent")
""",
        "SIGTERM agent",
    ),
}


@pytest.mark.parametrize(("program", "printed"), HELD.values(), ids=HELD)
def test_signals_that_are_held(run, program, printed):
    done = run(program)
    assert (done.code, done.out.split()) == (0, printed.split()), done.err


def test_an_interrupt_kills_where_its_exception_may_be_ignored(run):
    done = run("""
signal.signal(signal.SIGINT, signal.default_int_handler)
with interrupt_kills():
    pass
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("as before", flush=True)
with interrupt_kills(), contextlib.suppress(BaseException):
    signal.raise_signal(signal.SIGINT)
print("ignored")
""")
    assert (done.code, done.out, done.err) == (-2, "as before\n", "")


def test_a_process_that_ends_writes_its_last_lines(run):
    done = run("""
signals.end()
ending = DeathSignals(NEVER_S)
handle(ending, die)
strike()
print("last line", flush=True)
ending._limit = 0.0  # the time is over
time.sleep(NEVER_S)
""")
    assert (done.code, done.out, done.err) == (-15, "last line\n", "")

"""Workers are watched as they start, and what they write to stderr is read."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, call

import psutil
import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.api import SignalException

from tests.support.patience import NEVER_S, PATIENCE, until
from tests.support.stock.inside_torch import (
    RecordedAgent,
    launcher_api,
    start_worker,
)
from torchrun_hpc.agent.patches import Hooks
from torchrun_hpc.agent.patches.agent import (
    ForkWorkers,
    ParentDeathSignal,
    WatchWorkers,
    extend,
)
from torchrun_hpc.agent.signals import DeathSignals
from torchrun_hpc.failures.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Callable

SLEEPS = f"import time; time.sleep({NEVER_S})"
EXITS = "raise SystemExit(3)"
LEFT = 2  # restarts


@pytest.fixture
def watch():
    """Record what a watch gets to know; and, as `torch`, what torch's agent does."""
    return Mock()


@pytest.fixture
def relay(monkeypatch):
    monkeypatch.setattr("torchrun_hpc.failures.relay.reason_not_to_read", str)
    made = Relay()
    yield made
    made.close(PATIENCE)


@pytest.fixture
def hooks(torch_again, watch, relay):  # noqa: ARG001
    return Hooks(lambda _: None, relay, watch, DeathSignals())


@pytest.fixture
def make_agent(hooks, watch, monkeypatch):
    """Make an agent of node 1, as a launch does it."""
    monkeypatch.setattr(launcher_api, "LocalElasticAgent", RecordedAgent)
    extend([WatchWorkers], None, hooks)

    def make(pids: dict[int, int] | None = None) -> Any:
        pids = pids or {}
        watch.torch.start_workers.return_value = pids
        ranks = range(len(pids), 2 * len(pids))
        workers = [SimpleNamespace(global_rank=r, world_size=ranks.stop) for r in ranks]
        return launcher_api.LocalElasticAgent(
            watch.torch,
            group=SimpleNamespace(workers=workers, group_rank=1, group_world_size=3),
            _remaining_restarts=LEFT,
            _pcontext=SimpleNamespace(stderrs={}, error_files={}),
        )

    return make


@pytest.fixture
def children():
    """A worker that fails, and one that runs."""
    started = [
        subprocess.Popen([sys.executable, "-S", "-c", program])
        for program in (EXITS, SLEEPS)
    ]
    yield started
    for child in started:
        child.kill()
        child.wait()


def _wait_for(exit_code: Callable[[], int | None]) -> int | None:
    until(lambda: exit_code() is not None)
    return exit_code()


# --- who is watched -----------------------------------------------------------------


def test_the_workers_are_watched_by_their_global_ranks(make_agent, watch, children):
    pids = {local: child.pid for local, child in enumerate(children)}
    torch_agent = make_agent(pids)
    torch_agent._pcontext.subprocess_handlers = {
        local: SimpleNamespace(proc=child) for local, child in enumerate(children)
    }
    assert torch_agent._start_workers(torch_agent.group) is pids
    ((fails, runs), left) = watch.begin.call_args.args
    assert left == LEFT
    assert watch.mock_calls[0] == call.torch.start_workers(torch_agent.group)
    found = [(w.rank, w.size, w.node, w.local_rank, w.pid) for w in (fails, runs)]
    assert found == [(2, 4, 1, 0, pids[0]), (3, 4, 1, 1, pids[1])]
    assert _wait_for(fails.exit_code) == 3
    assert runs.exit_code() is None
    assert children[0].wait() == 3  # torch's agent was faster
    assert (fails.exit_code(), runs.exit_code()) == (3, None)
    children[1].kill()
    children[1].wait()
    assert runs.exit_code() == -9


def test_workers_of_a_function_are_watched_too(make_agent, watch, children):
    """There torch has no process handlers."""
    torch_agent = make_agent({0: children[0].pid})
    torch_agent._start_workers(torch_agent.group)
    ((worker,), _) = watch.begin.call_args.args
    assert _wait_for(worker.exit_code) == 3
    assert children[0].wait() == 3  # it was left to be collected


def test_where_a_worker_writes(make_agent, watch):
    torch_agent = make_agent({0: 1, 1: 1, 2: 1})
    torch_agent._pcontext.stderrs = {0: "", 1: "1/stderr.log"}
    torch_agent._pcontext.error_files = {0: "0/error.json", 1: "1/error.json"}
    torch_agent._start_workers(torch_agent.group)
    found = [(w.log, w.error_file) for w in watch.begin.call_args.args[0]]
    expected = [("", "0/error.json"), ("1/stderr.log", "1/error.json"), ("", "")]
    assert found == expected


# --- when they are stopped ----------------------------------------------------------


def _raise(error: BaseException) -> None:
    raise error


# The exception that is handled, and whether a worker may have failed.
HANDLED = {
    "nothing": (None, True),
    "a failure": (ValueError("another node"), True),
    "a signal": (SignalException("ended", signal.SIGTERM), False),
}


@pytest.mark.parametrize("case", HANDLED)
def test_what_ends_the_workers_decides_whether_they_fail(case, make_agent, watch):
    error, look = HANDLED[case]
    torch_agent = make_agent()
    try:
        if error is not None:
            _raise(error)
        torch_agent._shutdown(15, is_restart=True)
    except Exception:  # noqa: BLE001 - as torch's agent, inside of it
        torch_agent._shutdown(15, is_restart=True)
    assert watch.mock_calls == [
        call.stopping(look=look),
        call.torch.shutdown(15, is_restart=True),
        call.all_stopped(),
    ]


@pytest.mark.parametrize("state", WorkerState)
def test_torch_stops_the_others_as_soon_as_it_sees_that_one_has_failed(
    state, make_agent, watch
):
    torch_agent = make_agent()
    watch.torch.monitor_workers.return_value = RunResult(state)
    assert torch_agent._monitor_workers(torch_agent.group).state is state
    looked = [call.before_poll(), call.torch.monitor_workers(torch_agent.group)]
    is_failed = state is WorkerState.FAILED
    assert watch.mock_calls == looked + [call.poll_was_clean()] * (not is_failed)


# --- what they write ----------------------------------------------------------------

# It writes what its streams are to stdout, and all bytes to stderr.
WRITES = """
import json, os
kinds = [os.fstat(number)[:3] for number in (1, 2)]
os.write(1, json.dumps(kinds).encode())
os.write(2, bytes(range(256)) * 1000 + b"no end")
"""
WRITTEN = bytes(range(256)) * 1000 + b"no end"


# Where torch lets a worker write, and why that could not be read; what becomes of it:
# whether it is read, and whether it is shown.
STDERR = {
    "shared": ("", "", True, True),
    "unread": ("", "it is a terminal", False, True),
    "a file": ("stderr.log", "", False, False),
    "hidden by --local-ranks-filter": (os.devnull, "", True, False),
}


@pytest.mark.parametrize("case", STDERR)
def test_what_becomes_of_stderr(case, hooks, tmp_path, capfdbinary):
    name, unread, is_read, is_shown = STDERR[case]
    file = tmp_path / name if name else None
    hooks.relay.unread = unread
    extend([WatchWorkers], None, hooks)
    handler = start_worker(sys.executable, "-S", "-c", WRITES, stderr=str(file or ""))
    assert (handler._stderr and handler._stderr.name) == (file and str(file))
    assert handler.proc.wait(PATIENCE) == 0
    assert hooks.relay.reads(handler.proc.pid) is is_read
    if is_read:
        assert hooks.relay.end_of(handler.proc.pid)[0] == WRITTEN[-64 * 1024 :]
    hooks.relay.close(PATIENCE)
    out, err = capfdbinary.readouterr()
    assert err == (WRITTEN if is_shown else b"")
    stdout, stderr = json.loads(out)
    assert stdout == [*os.fstat(1)[:3]]
    if is_read:
        assert stat.S_ISFIFO(stderr[0])
    else:
        assert stderr == [*(file.stat() if file else os.fstat(2))[:3]]
    if name == "stderr.log":
        assert (tmp_path / name).read_bytes() == WRITTEN


def test_a_program_that_is_missing(hooks, tmp_path):
    """The error is the same as without, and no pipe is left open."""
    errors = []
    before = psutil.Process().num_fds()
    for is_patched in (False, True):
        if is_patched:
            ParentDeathSignal.apply(None, hooks)
            extend([WatchWorkers], None, hooks)
        with pytest.raises(FileNotFoundError) as caught:
            start_worker(str(tmp_path / "missing"))
        errors.append((caught.value.errno, caught.value.filename, str(caught.value)))
    assert errors[0] == errors[1]
    until(lambda: psutil.Process().num_fds() == before)


@pytest.mark.parametrize("is_forked", [True, False])
def test_a_fork_writes_to_the_relay_too(hooks, relay, monkeypatch, is_forked):
    """It is not torch that starts it; where it cannot be one, torch does."""
    program = "import os; os.write(2, b'worker')"

    def fork(command: Any, environ: Any, stdout: Any, stderr: Any) -> Any:
        given = command, environ, stdout, stderr.fileno()
        forks.append(given)
        if not is_forked:
            return None
        return subprocess.Popen(command, env=environ, stdout=stdout, stderr=stderr)

    forks: list[Any] = []
    monkeypatch.setenv("IN", "the environment")
    more = Hooks(hooks.forward, relay, hooks.watch, DeathSignals(), fork)
    extend([ForkWorkers, WatchWorkers], None, more)
    handler = start_worker(sys.executable, "-S", "-c", program)
    assert handler.proc.wait(PATIENCE) == 0
    ((command, environ, stdout, stderr),) = forks
    assert command == (sys.executable, "-S", "-c", program)
    assert environ["IN"] == "the environment"
    assert stdout is None
    assert stderr > 2
    assert relay.end_of(handler.proc.pid)[0] == b"worker"

"""Signals to a running agent: what they do to it, and to its workers."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from side_by_side import (
    COMMANDS,
    OURS,
    STOCK,
    bare,
    clean_environ,
    run,
)
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.run import get_args_parser

from torchrun_hpc.planning.plan import LaunchPlan
from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches import (
    defer_signals_on_close,
    forward_signals,
    host_name,
    parent_death_signal,
    registry,
    replacing,
)

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


def test_an_agent_that_has_ended_before_the_worker_could_ask() -> None:
    called: list[int] = []
    tie = parent_death_signal._tie(
        lambda *args: called.append(args[0]) or 0, os.getpid()
    )
    child = os.fork()
    if child == 0:  # its parent is the agent
        tie()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    child = os.fork()
    if child == 0:
        parent_death_signal._tie(lambda *_: 0, -1)()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.usefixtures("torch_again")
def test_a_program_that_is_missing(tmp_path: Path) -> None:
    """The error that the agent reports is the same as without the patch."""
    errors = []
    given: dict[str, Any] = {"args": (), "env": {}, "local_rank_id": 0}
    given["entrypoint"] = str(tmp_path / "missing")
    names = list(inspect.signature(SubprocessHandler).parameters)
    for applied in ((), (parent_death_signal,)):
        for patch in applied:
            patch.apply(_plan())
        with pytest.raises(FileNotFoundError) as caught:
            SubprocessHandler(**{name: given.get(name) for name in names})
        errors.append((caught.value.errno, caught.value.filename, str(caught.value)))
    assert errors[0] == errors[1]


HOMES = {
    "by name": {"Popen": subprocess.Popen},
    "by module": {"subprocess": subprocess},
}


@pytest.mark.usefixtures("torch_again")
@pytest.mark.parametrize("home", HOMES)
def test_workers_are_tied_wherever_torch_starts_them(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older ones ask the module, which all others keep as it is."""
    module: Any = types.ModuleType("home")
    vars(module).update(HOMES[home])

    class Handler:
        def _popen(self, args: Any, env: Any) -> Any:
            if home == "by name":
                return module.Popen(args, env=env)
            return module.subprocess.Popen(args, env=env)

    Handler.__module__ = module.__name__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(multiprocessing_api, "SubprocessHandler", Handler)
    before, real = dict(vars(module)), subprocess.Popen
    assert parent_death_signal.fits()
    parent_death_signal.apply(_plan())
    options: list[Any] = []
    kept = parent_death_signal._tie
    monkeypatch.setattr(
        parent_death_signal,
        "_tie",
        lambda prctl, pid: options.append(pid) or kept(prctl, pid),
    )
    child = Handler()._popen([sys.executable, "-S", "-c", ""], dict(os.environ))
    assert child.wait() == 0
    assert options == [os.getpid()]
    assert subprocess.Popen is real
    if home == "by module":
        assert module.subprocess.TimeoutExpired is subprocess.TimeoutExpired
    replacing.restore()
    assert vars(module) == before


# --- the name of the host -------------------------------------------------------------

ASKED = """
import socket, sys
real = socket.getfqdn
def getfqdn(*args):
    print("asked", file=sys.stderr)
    return real(*args)
socket.getfqdn = getfqdn
from {module} import main
main(sys.argv[1:])
"""


@pytest.mark.skipif(
    not host_name.IS_FOR.present, reason="this torch needs the name as an address"
)
def test_no_name_server_is_asked(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    asked = {}
    for which, module in (
        (OURS, "torchrun_hpc.main"),
        (STOCK, "torch.distributed.run"),
    ):
        program = ASKED.format(module=module)
        options = ["--nproc-per-node=2", "--local-addr=127.0.0.1", *bare(which)]
        command = [sys.executable, "-c", program, *options, "train.py"]
        done = run(command, cwd=tmp_path)
        assert done.code == 0, done.err
        asked[which] = done.err.splitlines().count("asked")
    # Once for an address, which is put right afterwards.
    assert asked[OURS] == capabilities.ADDRESS_IS_LOST.present
    assert asked[STOCK] >= 2 + 2  # and once for each worker


# --- the patches ----------------------------------------------------------------------

NEW: tuple[Any, ...] = (
    forward_signals,
    defer_signals_on_close,
    parent_death_signal,
    host_name,
)


@pytest.fixture
def torch_again() -> Iterator[None]:
    """Put torch back behind the test."""
    replacing.restore()
    yield
    replacing.restore()


def _plan() -> LaunchPlan:
    return LaunchPlan(
        title="", nodes=1, node_rank=0, workers=1, is_reporter=True, endpoint=""
    )


@pytest.mark.usefixtures("torch_again")
def test_the_originals_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the one whose call is what must not happen."""
    monkeypatch.setattr(registry, "PATCHES", NEW)
    called: list[Any] = []

    def monitor(self: Any, worker_group: Any) -> Any:
        called.append((self, worker_group))
        return "state"

    def close(self: Any, death_sig: Any = None, timeout: int = 30) -> Any:
        called.append((self, death_sig, timeout))

    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", monitor)
    monkeypatch.setattr(multiprocessing_api.PContext, "close", close)
    for outcome in registry.apply_patches(_plan()):
        applied = outcome.state is registry.State.APPLIED
        assert applied is outcome.patch.IS_FOR.is_expected, outcome

    agent: Any = type("Agent", (), {"_pcontext": None})()
    agent_class: Any = LocalElasticAgent
    assert agent_class._monitor_workers(agent, "group") == "state"
    context: Any = multiprocessing_api.PContext
    context.close(agent, TERM, timeout=3)
    assert called == [(agent, "group"), (agent, TERM, 3)]
    if capabilities.RENDEZVOUS_INFO.present:
        assert agent_api._get_fq_hostname() == socket.gethostname()
        one = object.__new__(agent_class)
        assert one._get_fq_hostname() == socket.gethostname()


def _monitor_more(_agent: Any, worker_group: Any, more: Any) -> None: ...


def _close_otherwise(_context: Any, timeout: int) -> None: ...


def _start_otherwise(_self: Any) -> None: ...


def _popen_with_preexec(_self: Any, args: Any, env: Any) -> Any:
    return subprocess.Popen(args, env=env, preexec_fn=None)


def _popen_elsewhere(_self: Any, args: Any, env: Any) -> Any:
    return args, env


def _name_of(_host: str) -> str: ...


CHANGES = [
    (forward_signals, LocalElasticAgent, "_monitor_workers", None),
    (forward_signals, LocalElasticAgent, "_monitor_workers", _monitor_more),
    (forward_signals, LocalElasticAgent, "__init__", _start_otherwise),
    (forward_signals, multiprocessing_api.PContext, "pids", None),
    (defer_signals_on_close, multiprocessing_api.PContext, "close", None),
    (defer_signals_on_close, multiprocessing_api.PContext, "close", _close_otherwise),
    (defer_signals_on_close, multiprocessing_api.PContext, "start", _start_otherwise),
    (defer_signals_on_close, multiprocessing_api, "_terminate_process_handler", None),
    (parent_death_signal, Starting, "Popen" if BY_NAME else "subprocess", None),
    (parent_death_signal, multiprocessing_api, "SubprocessHandler", None),
    (parent_death_signal, SubprocessHandler, "_popen", _start_otherwise),
    (parent_death_signal, SubprocessHandler, "_popen", _popen_with_preexec),
    (parent_death_signal, SubprocessHandler, "_popen", _popen_elsewhere),
]
if not BY_NAME:
    CHANGES += [(parent_death_signal, Starting, "subprocess", object())]
if host_name.IS_FOR.present:
    CHANGES += [
        (host_name, agent_api, "_get_fq_hostname", None),
        (host_name, agent_api, "_get_fq_hostname", _name_of),
        (host_name, LocalElasticAgent, "_get_fq_hostname", None),
        (host_name, agent_api.SimpleElasticAgent, "_construct_event", _start_otherwise),
    ]


@pytest.mark.usefixtures("torch_again")
@pytest.mark.parametrize(("patch", "owner", "name", "changed"), CHANGES)
def test_a_torch_that_has_changed(
    patch: Any, owner: Any, name: str, changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if changed is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, changed)
    before = inspect.getattr_static(owner, name, None)
    monkeypatch.setattr(registry, "PATCHES", (patch,))
    (outcome,) = registry.apply_patches(_plan())
    assert outcome.state is registry.State.DOES_NOT_FIT
    assert "#" in patch.REASON
    assert inspect.getattr_static(owner, name, None) is before

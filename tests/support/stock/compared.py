"""Command lines that we and stock torchrun launch, side by side, and what is equal."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
import stat
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.support.patience import PATIENCE, START, without_waits
from tests.support.ports import own_port
from tests.support.processes import clean_environ
from tests.support.stock.side_by_side import (
    OURS,
    STOCK,
    Command,
    LaunchingProcess,
    bare,
    words_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.processes import Result

# What a worker reports.
Report = dict[str, Any]

# Torch is imported by the tests that need it: all workers of pytest import this module.
FORKS = "forks"  # ours, with --hpc-preload
KINDS = (OURS, FORKS, STOCK)


@pytest.fixture(scope="session")
def launcher() -> Iterator[LaunchingProcess]:
    """One launching process for all tests of a worker of pytest."""
    with LaunchingProcess() as process:
        yield process


@pytest.fixture
def outside_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be outside of any job."""
    for name in os.environ.keys() - clean_environ().keys():
        monkeypatch.delenv(name)


# The training script: it writes down what it sees, and does what its arguments name.
REPORT = """
import glob, json, os, signal, socket, sys, time
import psutil

# In one piece: print writes each of its arguments by itself.
sys.stdout.write(f"out {os.environ['RANK']} {sys.argv[1:]}\\n")
sys.stdout.flush()
if os.environ.get("SPEAK"):
    sys.stderr.write(f"err {os.environ['RANK']}\\n")

def reachable():
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(address, timeout=PATIENCE).close()
    except OSError as error:
        return str(error)
    return True

agent = psutil.Process(os.getppid())
if "torchrun_hpc.preload" in sys.modules:
    agent = agent.parent()  # of the fork server
listening = [
    c.laddr.ip for c in agent.net_connections("tcp") if c.status == "LISTEN"
]
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
path = os.path.join(
    os.environ["REPORT"], "-".join((os.environ["RANK"], attempt, str(os.getpid())))
)
with open(path + ".tmp", "w") as file:
    json.dump(
        {
            "environ": dict(os.environ),
            "argv": sys.argv,
            "name": __name__,
            "python": sys.executable,
            "cwd": os.getcwd(),
            "listening": listening,
            "reachable": reachable(),
            "pid": os.getpid(),
        },
        file,
    )
os.rename(path + ".tmp", path + ".json")

then = os.environ.get("THEN", "").split(":")
if then[0]:
    # The first worker to fail is the end of the others: let them speak before.
    everyone = os.path.join(os.environ["REPORT"], f"*-{attempt}-*.json")
    end = time.monotonic() + PATIENCE
    while len(glob.glob(everyone)) < int(os.environ["WORLD_SIZE"]):
        if time.monotonic() > end:
            sys.exit(f"fewer reports than workers: {glob.glob(everyone)}")
        time.sleep(0.01)
if then[0] == "exit":
    if then[2:] not in ([], [os.environ["RANK"]]):
        time.sleep(900)
    sys.exit(int(then[1]))
if then[0] == "raise":
    raise ValueError("a fault of the script")
if then[0] == "crash":
    import ctypes
    ctypes.string_at(0)
if then[0] == "kill":
    os.kill(os.getpid(), int(then[1]))
    time.sleep(900)
if then[0] == "fail-first" and attempt == "0":
    sys.exit(5)
if then[0] == "sleep":
    time.sleep(float(then[1]))
""".replace("PATIENCE", str(PATIENCE))

RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise ValueError("a fault of the script")

main()
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts."""
    made = tmp_path_factory.mktemp("scripts")
    (made / "report.py").write_text(REPORT)
    (made / "recorded.py").write_text(RECORDED)
    (made / "package").mkdir()
    (made / "package" / "__init__.py").touch()
    (made / "package" / "module.py").write_text(REPORT)
    program = made / "program"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" report.py "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return made


@dataclass(frozen=True)
class ComparedLine:
    """A command line that is compared.

    Attributes:
        text: Variables and options, as in a shell. ``{port}`` becomes a port of its
            own, ``{folder}`` that of the scripts, ``{which}`` the launcher, ``{base}``
            a folder for what is written.
        script: The script, module or program.
        workers: How many workers start.
        same: Variables that may differ elsewhere, and must be the same here.
        warning: The code and the beginning of the only warning; empty for none.
    """

    text: str = ""
    script: str = "report.py"
    workers: int = 1
    same: tuple[str, ...] = ()
    warning: str = ""

    @functools.cached_property
    def argv(self) -> list[str]:
        """The options."""
        return words_of(self.text)[0]

    @functools.cached_property
    def environ(self) -> dict[str, str]:
        """The variables."""
        return words_of(self.text)[1]

    def options_for(self, which: str) -> list[str]:
        """Return the options for one of the launchers; forks are the default."""
        form = ["--hpc-preload=none"] if which == OURS else []
        return [*form, *self.argv, *(bare(which) if self.is_bare else ())]

    @property
    def is_bare(self) -> bool:
        """Whether it has no option of a rendezvous."""
        explicit = {w.partition("=")[0] for w in self.argv if not w.endswith("=")}
        named = {"--standalone", "--rdzv-backend", "--rdzv-endpoint", "--master-port"}
        return not explicit & named and "PET_RDZV_BACKEND" not in self.environ

    @property
    def may_grow(self) -> bool:
        """Whether other nodes may join."""
        return "--nnodes=1:2" in self.argv

    @property
    def is_in_a_file(self) -> bool:
        """Whether the rendezvous needs no port."""
        return any("store_type=file" in word for word in self.argv)


# Different at each launch; the last three are ours to better.
RUN, ADDRESS = "TORCHELASTIC_RUN_ID", "MASTER_ADDR"
_DIFFERENT = {"REPORT", "TORCHELASTIC_ERROR_FILE", RUN, "MASTER_PORT", ADDRESS}
C10D = "--rdzv-backend=c10d --rdzv-endpoint=localhost:0"

# What argparse of Python 3.11 lets stock torchrun pass.
PLAIN_ARGS = ["x", "--nnodes=7", "-h", "a b", "--standalone", "", "--", "*", "$HOME"]


class ComparedLaunch(NamedTuple):
    """A launch that is compared.

    Attributes:
        result: How it ended.
        workers: The reports of its workers, in the order of their ranks.
        error_file: The content of its TORCHELASTIC_ERROR_FILE, if it wrote one.
    """

    result: Result
    workers: list[Report]
    error_file: Any


def reports(folder: Path) -> list[Report]:
    """Return what the workers have written, in the order of ranks and attempts."""
    paths = sorted(folder.glob("*.json"), key=lambda p: p.name.split("-")[:2])
    return [json.loads(path.read_text()) for path in paths]


@pytest.fixture
def launch(
    launcher: LaunchingProcess, folder: Path, tmp_path: Path
) -> Callable[..., dict[str, ComparedLaunch]]:
    """ComparedLaunch a line by ours, in both forms, and by stock, at the same time.

    Torch's default port is taken meanwhile: nothing may depend on it.
    """

    def launch(
        line: ComparedLine, *, with_error_file: bool = False
    ) -> dict[str, ComparedLaunch]:
        commands = []
        for which in KINDS:
            (tmp_path / which).mkdir()
            names = {"folder": str(folder), "which": which, "base": str(tmp_path)}
            names["port"] = str(own_port())
            words = [_filled(w, names) for w in (*line.options_for(which), line.script)]
            environ = {k: _filled(value, names) for k, value in line.environ.items()}
            environ["REPORT"] = str(tmp_path / which)
            if with_error_file:
                environ["TORCHELASTIC_ERROR_FILE"] = f"{tmp_path}/error-{which}"
            command = STOCK if which == STOCK else OURS
            commands.append(Command(command, words + PLAIN_ARGS, environ))
        with default_port_taken():
            results = launcher.launch_all(commands, cwd=folder, at_once=len(KINDS))
        launched = {}
        for which, result in zip(KINDS, results, strict=True):
            file = tmp_path / f"error-{which}"
            error = json.loads(file.read_text()) if file.exists() else None
            launched[which] = ComparedLaunch(result, reports(tmp_path / which), error)
        return launched

    return launch


def _filled(text: str, names: dict[str, str]) -> str:
    """Replace each ``{name}`` by its value."""
    for name, value in names.items():
        text = text.replace(f"{{{name}}}", value)
    return text


@contextlib.contextmanager
def default_port_taken() -> Iterator[None]:
    """Listen on torch's default port, unless stock torchrun needs it."""
    from torch.distributed import run as torch_run  # noqa: PLC0415

    port = 29400
    with contextlib.ExitStack() as stack:
        if f"localhost:{port}" not in torch_run.run.__code__.co_consts:
            with contextlib.suppress(OSError):  # somebody else takes it
                stack.enter_context(socket.create_server(("", port)))
        yield


# --- launches that end well ---------------------------------------------------------


def more(line: ComparedLine) -> set[str]:
    """Return the variables of the workers that stock torchrun does not set."""
    return {"PYTHONFAULTHANDLER"}.difference(line.environ)


def is_kept(worker: Report) -> bool:
    """Return whether an agent keeps the workers' store; otherwise worker 0 opens it."""
    from torchrun_hpc.host import capabilities  # noqa: PLC0415

    agents = worker["environ"]["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    return capabilities.SHARED_STORE.present or agents


def assert_same(line: ComparedLine, launched: dict[str, ComparedLaunch]) -> None:
    """See that ours, in both forms, does what stock does, and is quiet about it."""
    stock = launched[STOCK]
    lines = [f"out {rank} {PLAIN_ARGS}" for rank in range(line.workers)]
    assert stock.result.code == 0, stock.result.err
    assert sorted(stock.result.out.splitlines()) == lines, stock.result.err
    for which in (OURS, FORKS):
        ours = launched[which]
        assert ours.result.code == 0, (which, ours.result.err)
        assert sorted(ours.result.out.splitlines()) == lines, (which, ours.result.err)
        assert len(ours.workers) == len(stock.workers) == line.workers, which
        _assert_same_environment(which, line, ours.workers, stock.workers)
        _assert_reachable(which, line, ours.workers)
        _assert_clean(which, line, ours.result)


def _assert_same_environment(
    which: str,
    line: ComparedLine,
    ours: list[Report],
    stock: list[Report],
) -> None:
    different = _DIFFERENT.difference(line.same)
    for mine, theirs in zip(ours, stock, strict=True):
        own, other = mine["environ"], theirs["environ"]
        assert all(own[name] == "1" for name in more(line)), (which, own)
        assert own.keys() == other.keys() | more(line), which
        for variable in other.keys() - different:
            assert own[variable] == other[variable], (which, variable)
        for what in ("argv", "name", "python", "cwd"):
            assert mine[what] == theirs[what], (which, what)


def _assert_reachable(which: str, line: ComparedLine, ours: list[Report]) -> None:
    from torchrun_hpc.host import capabilities  # noqa: PLC0415

    for worker in ours:
        assert (worker["reachable"] is True) is is_kept(worker), (which, worker)
    addresses = {worker["environ"]["MASTER_ADDR"] for worker in ours}
    assert addresses <= {"127.0.0.1", socket.getfqdn()}, which
    if line.may_grow:
        return
    # The rank of the store is this node's: a number, so that nobody asks for a name.
    assert ours[0]["environ"]["MASTER_ADDR"] == "127.0.0.1", which
    if capabilities.LISTENING_SOCKET.present:
        for worker in ours:  # the agent listens to its own node only
            listens = not line.is_in_a_file or is_kept(worker)
            assert bool(worker["listening"]) is listens, (which, worker)
            assert set(worker["listening"]) <= {"127.0.0.1", "::1"}, (which, worker)


def _assert_clean(which: str, line: ComparedLine, result: Result) -> None:
    # The events that --event-log-handler=console asks for.
    lines = [x for x in result.err.splitlines() if '"name": "torchelastic' not in x]
    lines = [x for x in lines if not x.startswith("    export ")]  # a line to copy
    lines = without_waits(lines)
    warning = line.warning
    if "HPC169" in result.err:
        assert {"--no-python", "--run-path"}.intersection(line.argv), (which, lines)
        warning = "HPC169"
    assert lines == result.own_lines, (which, result.err)
    assert len(lines) == (2 if warning else 1), (which, result.err)
    count = f"{line.workers} worker{'s' if line.workers > 1 else ''}"
    shape = f"{count} on this machine"
    if line.may_grow:
        shape = f"1 to 2 nodes, {count} here; no scheduler; "
    assert lines[0].startswith(START + shape), (which, lines)
    last = f"torchrun_hpc: warning[{warning}" if warning else START
    assert lines[-1].startswith(last), (which, lines)


# --- launches that fail -------------------------------------------------------------

# How we say that the worker ended, and why.
ENDINGS = {
    "exit 3": ("ended with exit code 3", ""),
    "exit 3, one of two": ("ended with exit code 3", ""),
    "exit -1": ("ended with exit code 255", ""),
    "exception": ("ended with exit code 1", "ValueError: a fault of the script"),
    "killed": ("was killed by SIGKILL (9): probably out of memory", ""),
    "terminated": ("was killed by SIGTERM (15)", ""),
    "crashed": (
        "was killed by SIGSEGV (11)",
        "Fatal Python error: Segmentation fault",
    ),
    "no such module": (
        "ended with exit code 1",
        (
            f"{sys.executable}: Error while finding module specification for "
            "'missing.module' (ModuleNotFoundError: No module named 'missing')"
        ),
    ),
    "recorded": ("ended with exit code 1", "ValueError: a fault of the script"),
    "restarts used up": ("ended with exit code 4", ""),
}


FAILED = "torchrun_hpc: error[HPC125]: the job has failed: "

# What torch says of a failure.
BOX = "ChildFailedError: "
TORCHS_LINES = ("Sending process ", "failed (exitcode: ")


def assert_fails_alike(name: str, launched: dict[str, ComparedLaunch]) -> None:
    """See that ours, in both forms, fails as stock does, and says why."""
    stock = launched[STOCK]
    assert (BOX in stock.result.err) is (stock.result.code != 0), stock.result.err
    for which in (OURS, FORKS):
        ours = launched[which]
        shown = (which, ours.result.err)
        assert ours.result.code == stock.result.code, shown
        assert (ours.result.code == 0) == (name == "second attempt"), shown
        out = sorted(stock.result.out.splitlines())
        assert sorted(ours.result.out.splitlines()) == out, shown
        assert _shape(ours.error_file) == _shape(stock.error_file), shown
        _assert_report(name, ours.result)
    if name == "recorded":
        assert "a fault of the script" in str(launched[OURS].error_file)
    if name == "second attempt":
        for compared in launched.values():
            _assert_second_attempt(compared.workers)
    if name == "crashed":  # our report would not be there
        assert "Fatal" not in stock.result.err


def _assert_report(name: str, ours: Result) -> None:
    """See that our report takes the place of torch's."""
    start, *restarts = ours.own_lines
    assert START in start, ours.err
    for words in (BOX, *TORCHS_LINES, "torch/distributed/run.py"):
        assert words not in ours.err, ours.err
    if name == "second attempt":  # which of the two, is chance
        restart = r"restart 1 of all workers: worker [01] ended with exit code 5"
        (note,) = restarts
        assert re.fullmatch(rf"torchrun_hpc: note\[HPC128\]: {restart}", note), ours.err
        assert ours.err.splitlines() == ours.own_lines
        return
    *restarts, first, last = restarts
    rank = 1 if name == "exit 3, one of two" else 0
    how, cause = ENDINGS[name]
    why = f"worker {rank} {how}"
    assert re.fullmatch(
        rf"{re.escape(FAILED + why)} \(local rank {rank}, at [\d-]{{10}} [\d:]{{8}}\)",
        first,
    ), ours.err
    assert last == FAILED + why + (f": {cause}" if cause else ""), ours.err
    expected = [f"torchrun_hpc: note[HPC128]: restart 1 of all workers: {why}"]
    assert restarts == (expected if name == "restarts used up" else []), ours.err
    written, _, shown = ours.err.partition(f"{first}\n")
    assert shown.splitlines()[-1] == last, ours.err
    # The worker's own text comes before it, and once more in it.
    details = shown.splitlines()[:-1]
    assert all(line.startswith("    ") for line in details), ours.err
    assert {line.strip() for line in details} <= {
        line.strip() for line in written.splitlines()
    }, ours.err
    assert any(cause in line for line in details) is bool(cause), ours.err
    if name in {"exception", "recorded", "crashed"}:
        _assert_traceback(name, [line[4:] for line in details])


def _assert_traceback(name: str, lines: list[str]) -> None:
    """See that a traceback is whole; that of a crash has the innermost frame first."""
    frames = [line for line in lines if line.startswith("  File ")]
    if name == "crashed":
        assert lines[0] == "Fatal Python error: Segmentation fault", lines
        assert re.fullmatch(r"  File .*, line \d+ in string_at", frames[0]), lines
        assert re.search(r"report.py\", line \d+ in <module>$", frames[1]), lines
    else:
        assert lines[0] == "Traceback (most recent call last):", lines
        assert lines[-1] == ENDINGS[name][1], lines
        function = {"exception": "<module>", "recorded": "main"}[name]
        assert re.search(rf"re\w+.py\", line \d+, in {function}$", frames[-1]), lines


def _assert_second_attempt(workers: list[Report]) -> None:
    last = []
    for worker in workers:
        attempt = worker["environ"]["TORCHELASTIC_RESTART_COUNT"]
        assert attempt in {"0", "1"}
        if attempt == "1":
            last.append(worker)
    assert len(last) < len(workers)
    assert [worker["environ"]["RANK"] for worker in last] == ["0", "1"]
    for worker in last:
        assert (worker["reachable"] is True) is is_kept(worker), worker


def _shape(value: Any) -> Any:
    """Return all keys of a JSON value, and the texts that are not about this run."""
    if isinstance(value, dict):
        return {k: _shape(v) for k, v in value.items() if k != "extraInfo"} | {
            "extraInfo": sorted(value["extraInfo"]) if "extraInfo" in value else None
        }
    if isinstance(value, str):
        return re.sub(r"[0-9]{4,}", "N", value)
    return type(value).__name__

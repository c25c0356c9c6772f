"""Command lines that we and stock torchrun launch, side by side, and what is equal."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import stat
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.patience import PATIENCE, START, without_waits
from tests.support.ports import own_port
from tests.support.stock.side_by_side import OURS, STOCK, Launcher, bare, words_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.stock.side_by_side import Result

# Torch is imported by the tests that need it: all workers of pytest import this module.
FORKS = "forks"  # ours, with --hpc-preload
KINDS = (OURS, FORKS, STOCK)


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """One launching process for all tests of a worker of pytest."""
    made = Launcher(tmp_path_factory.mktemp("launches"))
    yield made
    made.close()


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
    """Where the scripts are."""
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
class Line:
    """A command line to be compared.

    Attributes:
        argv: The options. ``{port}`` becomes a port of its own, ``{folder}`` that of
            the scripts, ``{which}`` the launcher, ``{base}`` a folder for what is
            written.
        script: What is launched.
        environ: Variables to set.
        workers: How many workers start.
        same: Variables that may differ elsewhere, and must be the same here.
        warning: The code and the beginning of the only warning; empty for none.
    """

    argv: tuple[str, ...] = ()
    script: str = "report.py"
    environ: dict[str, str] = field(default_factory=dict)
    workers: int = 1
    same: tuple[str, ...] = ()
    warning: str = ""

    def launched_by(self, which: str) -> tuple[list[str], dict[str, str]]:
        """Return options and variables for one of the launchers.

        Forks are the default.
        """
        options = [*self.argv, *(bare(which) if self.bare else ())]
        if which == OURS:
            options = ["--hpc-preload=none", *options]
        return options, self.environ

    @property
    def bare(self) -> bool:
        """Whether nothing is said of a rendezvous."""
        explicit = {w.partition("=")[0] for w in self.argv if not w.endswith("=")}
        said = {"--standalone", "--rdzv-backend", "--rdzv-endpoint", "--master-port"}
        return not explicit & said and "PET_RDZV_BACKEND" not in self.environ

    @property
    def may_grow(self) -> bool:
        """Whether other nodes may join."""
        return "--nnodes=1:2" in self.argv

    @property
    def is_in_a_file(self) -> bool:
        """Whether the rendezvous needs no port."""
        return any("store_type=file" in word for word in self.argv)


def typed(text: str, **changes: Any) -> Line:
    """Return a line as it is typed: variables and options."""
    argv, environ = words_of(text)
    return Line(tuple(argv), environ=environ, **changes)


# Different at each launch; the last three are ours to better.
RUN, ADDRESS = "TORCHELASTIC_RUN_ID", "MASTER_ADDR"
_DIFFERENT = {"REPORT", "TORCHELASTIC_ERROR_FILE", RUN, "MASTER_PORT", ADDRESS}
C10D = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")

# What argparse of Python 3.11 lets stock torchrun pass.
PLAIN_ARGS = ["x", "--nnodes=7", "-h", "a b", "--standalone", "", "--", "*", "$HOME"]


@dataclass(frozen=True)
class Launch:
    """A launch.

    Attributes:
        result: How it ended.
        workers: What its workers saw, in the order of their ranks.
        error_file: What it has left as TORCHELASTIC_ERROR_FILE, if it was to.
    """

    result: Result
    workers: list[dict[str, Any]]
    error_file: Any


def reports(where: Path) -> list[dict[str, Any]]:
    """Return what the workers have written, in the order of ranks and attempts."""
    paths = sorted(where.glob("*.json"), key=lambda p: p.name.split("-")[:2])
    return [json.loads(path.read_text()) for path in paths]


def launch(
    launcher: Launcher,
    folder: Path,
    line: Line,
    base: Path,
    *,
    with_error_file: bool = False,
) -> dict[str, Launch]:
    """Launch a line with ours, in both forms, and with stock, at the same time.

    Torch's default port is taken meanwhile: nothing may depend on it.
    """
    launches, environs = [], []
    for which in KINDS:
        words, environ = line.launched_by(which)
        where = base / which
        where.mkdir()
        known = {"folder": str(folder), "which": which, "base": str(base)}
        known["port"] = str(own_port())
        words = [_filled(word, known) for word in (*words, line.script)]
        launches.append((STOCK if which == STOCK else OURS, words + PLAIN_ARGS))
        environ = {name: _filled(value, known) for name, value in environ.items()}
        if with_error_file:
            environ["TORCHELASTIC_ERROR_FILE"] = f"{base}/error-{which}"
        environs.append({**environ, "REPORT": str(where)})
    with default_port_taken():
        results = launcher.many(
            launches, environs=environs, cwd=folder, at_once=len(KINDS)
        )
    found = {}
    for which, result in zip(KINDS, results, strict=True):
        file = base / f"error-{which}"
        error = json.loads(file.read_text()) if file.exists() else None
        found[which] = Launch(result, reports(base / which), error)
    return found


def _filled(text: str, known: dict[str, str]) -> str:
    """Replace each ``{name}`` by what is known."""
    for name, value in known.items():
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


def more(line: Line) -> set[str]:
    """Return the variables of the workers that stock torchrun does not set."""
    return {"PYTHONFAULTHANDLER"}.difference(line.environ)


def is_kept(worker: dict[str, Any]) -> bool:
    """Say whether an agent keeps the workers' store; or worker 0 is to open it."""
    from torchrun_hpc.host import capabilities  # noqa: PLC0415

    agents = worker["environ"]["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    return capabilities.SHARED_STORE.present or agents


def assert_same(line: Line, launched: dict[str, Launch]) -> None:
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
    which: str, line: Line, ours: list[dict[str, Any]], stock: list[dict[str, Any]]
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


def _assert_reachable(which: str, line: Line, ours: list[dict[str, Any]]) -> None:
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


def _assert_clean(which: str, line: Line, result: Result) -> None:
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


def assert_fails_alike(name: str, launched: dict[str, Launch]) -> None:
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
        for found in launched.values():
            _assert_second_attempt(found.workers)
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
        assert re.fullmatch(rf"torchrun_hpc: note\[HPC128\]: {restart}", *restarts), (
            ours.err
        )
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
    # What the worker has written stands in front of it, and once more in it.
    details = shown.splitlines()[:-1]
    assert all(line.startswith("    ") for line in details), ours.err
    assert {line.strip() for line in details} <= {
        line.strip() for line in written.splitlines()
    }, ours.err
    assert any(cause in line for line in details) is bool(cause), ours.err
    if name in {"exception", "recorded", "crashed"}:
        _assert_traceback(name, [line[4:] for line in details])


def _assert_traceback(name: str, lines: list[str]) -> None:
    """Of a crash, too: the innermost frame is the first one there."""
    frames = [line for line in lines if line.startswith("  File ")]
    if name == "crashed":
        assert lines[0] == "Fatal Python error: Segmentation fault", lines
        assert re.fullmatch(r"  File .*, line \d+ in string_at", frames[0]), lines
        assert re.search(r"report.py\", line \d+ in <module>$", frames[1]), lines
    else:
        assert lines[0] == "Traceback (most recent call last):", lines
        assert lines[-1] == ENDINGS[name][1], lines
        where = {"exception": "<module>", "recorded": "main"}[name]
        assert re.search(rf"re\w+.py\", line \d+, in {where}$", frames[-1]), lines


def _assert_second_attempt(workers: list[dict[str, Any]]) -> None:
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

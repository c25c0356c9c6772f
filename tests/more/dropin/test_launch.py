"""Real launches on this machine, side by side with stock torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from side_by_side import COMMANDS, OURS, STOCK, bare, clean_environ, end_group, run
from torch.distributed import run as torch_run

from torchrun_hpc.network import free_port
from torchrun_hpc.torch_compat import capabilities

if TYPE_CHECKING:
    from side_by_side import Launcher, Result

BOTH = (OURS, STOCK)
FORKS = "forks"  # ours, with --hpc-preload
each_form = pytest.fixture(scope="module", params=[OURS, FORKS])

OPTIONS = torch_run.get_args_parser()._option_string_actions


def _known(*argv: str) -> tuple[str, ...]:
    """Return those of some options, ``--x=y``, that the installed torch has."""
    names = {word: word.partition("=")[0] for word in argv}
    return tuple(
        word
        for word, name in names.items()
        if any(option.startswith(name) for option in OPTIONS)
    )


# The training script: it writes down what it sees, and does what its arguments name.
REPORT = """
import glob, json, os, signal, socket, sys, time
import psutil

# In one piece: print writes each of its arguments by itself.
sys.stdout.write(f"out {os.environ['RANK']} {sys.argv[1:]}\\n")
sys.stdout.flush()
if os.environ.get("SPEAK"):
    print("err", os.environ["RANK"], file=sys.stderr, flush=True)

def reachable():
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(address, timeout=5).close()
    except OSError as error:
        return str(error)
    return True

agent = psutil.Process(os.getppid())
if "torchrun_hpc.worker" in sys.modules:
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
    end = time.monotonic() + 30
    while len(glob.glob(everyone)) < int(os.environ["WORLD_SIZE"]):
        if time.monotonic() > end:
            sys.exit(f"fewer reports than workers: {glob.glob(everyone)}")
        time.sleep(0.01)
if then[0] == "exit":
    if then[2:] not in ([], [os.environ["RANK"]]):
        time.sleep(30)
    sys.exit(int(then[1]))
if then[0] == "raise":
    raise ValueError("a fault of the script")
if then[0] == "crash":
    import ctypes
    ctypes.string_at(0)
if then[0] == "kill":
    os.kill(os.getpid(), int(then[1]))
    time.sleep(30)
if then[0] == "fail-first" and attempt == "0":
    sys.exit(5)
if then[0] == "sleep":
    time.sleep(float(then[1]))
"""

RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise ValueError("a fault of the script")

main()
"""


@pytest.fixture(scope="module")
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
        argv: The options. ``{port}`` becomes a free port, ``{folder}`` that of the
            scripts, ``{which}`` the launcher.
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

        The harness has imported torch already, without the number of threads: for a
        fork it has to be known.
        """
        options = [*self.argv, *(bare(which) if self.bare else ())]
        if which != FORKS:
            return options, self.environ
        has_several = self.workers > 1 or "--nproc-per-node=2" in self.argv
        threads = {"OMP_NUM_THREADS": "1"} if has_several else {}
        return ["--hpc-preload=torch", *options], {**threads, **self.environ}

    @property
    def bare(self) -> bool:
        """Whether nothing is said of a rendezvous."""
        explicit = {w.partition("=")[0] for w in self.argv if not w.endswith("=")}
        said = {"--standalone", "--rdzv-backend", "--rdzv-endpoint", "--master-port"}
        return not explicit & said and "PET_RDZV_BACKEND" not in self.environ


# Different at each launch; the last three are ours to better.
_RUN = "TORCHELASTIC_RUN_ID"
_DIFFERENT = {"REPORT", "TORCHELASTIC_ERROR_FILE", _RUN, "MASTER_PORT", "MASTER_ADDR"}
_ADDRESS = "MASTER_ADDR"
_C10D = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
_STATIC = ("--master-port={port}",)

LINES = {
    "nothing": Line(),
    "two workers": Line(("--nproc-per-node=2",), workers=2),
    "standalone": Line(("--standalone", "--nproc_per_node", "2"), workers=2),
    "one node": Line(("--nnodes=1:1",)),
    "cpu": Line(("--nproc_per_node=cpu",), workers=2),
    "auto": Line(
        ("--nproc-per-node", "auto"), environ={"CUDA_VISIBLE_DEVICES": ""}, workers=2
    ),
    "module": Line(("-m",), "package.module"),
    "no python": Line(("--no-python", "--nproc-per-node=2"), "./program", workers=2),
    "run path": Line(("--run-path",), "{folder}/report.py"),
    "c10d": Line((*_C10D, "--rdzv-id=my-job"), same=(_RUN,)),
    "conf": Line((*_C10D, "--rdzv-conf", "join_timeout=30,read_timeout=30")),
    "conf, unread": Line(
        (*_C10D, "--rdzv-conf=timeout='5',foo_timeout=1.5,rank=x,join_timeout=+3_0")
    ),
    "conf, empty": Line((*_C10D, "--rdzv-conf=")),
    "endpoint, empty": Line(("--rdzv-endpoint=",)),
    "endpoint": Line(("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}")),
    "endpoint, host": Line(
        (
            *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}"),
            "--rdzv-conf=is_host=true",
        )
    ),
    "elastic": Line(
        (
            *("--nnodes=1:2", "--rdzv-backend=c10d"),
            *("--rdzv-endpoint=localhost:{port}", "--rdzv-conf=last_call_timeout=1"),
        )
    ),
    "file store": Line(
        (
            *("--rdzv-backend=c10d", "--rdzv-endpoint={folder}/store-{which}"),
            "--rdzv-conf=store_type=file",
        )
    ),
    "master port": Line(_STATIC, same=(_ADDRESS,)),
    "static": Line(
        (*_STATIC, "--master-addr=127.0.0.1", "--node-rank=0", "--nproc-per-node=2"),
        workers=2,
        same=(_ADDRESS,),
    ),
    "static endpoint": Line(
        ("--rdzv-backend=static", "--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x"),
        same=(_ADDRESS, _RUN),
    ),
    "address": Line(
        ("--local-addr=127.0.0.1",),
        same=() if capabilities.ADDRESS_IS_LOST.present else (_ADDRESS,),
    ),
    "role": Line(
        (
            *("--role=trainer", "--max-restarts=2", "--monitor-interval=0.5"),
            *("--start-method=fork", *_known("--shutdown-timeout=3")),
            *_known("--event-log=console"),
        )
    ),
    "signals": Line(_known("--signals-to-handle=SIGTERM,SIGUSR1")),
    "virtual local rank": Line(
        (*_known("--virtual-local-rank"), "--nproc-per-node=2"), workers=2
    ),
    "variables": Line(
        environ={
            "PET_NPROC_PER_NODE": "2",
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": "localhost:0",
            "PET_RDZV_ID": "abc",
            "PET_STANDALONE": "0",
        },
        workers=2,
        same=(_RUN,),
    ),
    "threads": Line(environ={"OMP_NUM_THREADS": "2", "PYTHONFAULTHANDLER": ""}),
    "threads, too many": Line(
        ("--nproc-per-node=2",),
        environ={"OMP_NUM_THREADS": "3"},
        workers=2,
        warning="HPC094 OMP_NUM_THREADS=3 times 2 workers is 6 threads on 2 CPUs.",
    ),
    "workers, too many": Line(
        ("--nproc-per-node=3",),
        workers=3,
        warning="HPC092 3 workers share 2 CPUs: all that the affinity mask",
    ),
    "stale address": Line(environ={"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}),
    "site": Line(environ={"SYSTEMNAME": "juwelsbooster"}),
}
SCRIPT_ARGS = [
    "--rdzv",
    "x",
    "--nnodes=7",
    "-h",
    "--hpc-site",
    "a b",
    "--standalone",
    "",
]
# What argparse of Python 3.11 lets stock torchrun pass.
PLAIN_ARGS = ["x", "--nnodes=7", "-h", "a b", "--standalone", "", "--", "*", "$HOME"]


@dataclass(frozen=True)
class Launch:
    """A launch and what its workers saw, in the order of their ranks."""

    result: Result
    workers: list[dict[str, Any]]


def _reports(where: Path) -> list[dict[str, Any]]:
    paths = sorted(where.glob("*.json"), key=lambda p: p.name.split("-")[:2])
    return [json.loads(path.read_text()) for path in paths]


def _launch(
    launcher: Launcher, folder: Path, lines: list[Line], base: Path, **options: Any
) -> list[dict[str, Launch]]:
    """Launch every line with ours, in both forms, and with stock."""
    launches, environs, kinds = [], [], (OURS, FORKS, STOCK)
    for number, line in enumerate(lines):
        for which in kinds:
            words, environ = line.launched_by(which)
            where = base / f"{number}-{which}"
            where.mkdir()
            known = {
                "{port}": str(free_port("127.0.0.1")),
                "{folder}": str(folder),
                "{which}": which,
            }
            words = [_filled(word, known) for word in (*words, line.script)]
            launcher_name = STOCK if which == STOCK else OURS
            launches.append((launcher_name, words + PLAIN_ARGS))
            environ = {name: _filled(value, known) for name, value in environ.items()}
            environs.append({**environ, "REPORT": str(where)})
    results = launcher.many(
        launches, environs=environs, cwd=folder, at_once=4, **options
    )
    return [
        {
            which: Launch(
                results[len(kinds) * number + index],
                _reports(base / f"{number}-{which}"),
            )
            for index, which in enumerate(kinds)
        }
        for number in range(len(lines))
    ]


def _filled(text: str, known: dict[str, str]) -> str:
    """Replace each ``{name}`` by what is known."""
    for name, value in known.items():
        text = text.replace(name, value)
    return text


def _of(form: str, launched: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what ours in one form, and stock, did with each line."""
    return {
        name: {OURS: found[form], STOCK: found[STOCK]}
        for name, found in launched.items()
    }


@pytest.fixture(scope="module")
def all_launches(
    launcher: Launcher, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Launch]]:
    """All lines, launched once with each of them.

    Torch's default port is taken meanwhile: nothing may depend on it.
    """
    default = socket.socket()
    try:
        if not NEEDS_DEFAULT_PORT:
            default.bind(("", DEFAULT_PORT))
            default.listen()
    except OSError:
        pass  # somebody else takes it
    with default:
        base = tmp_path_factory.mktemp("reports")
        found = _launch(launcher, folder, list(LINES.values()), base, limit=45)
    return dict(zip(LINES, found, strict=True))


@each_form
def launches(
    request: pytest.FixtureRequest, all_launches: dict[str, dict[str, Launch]]
) -> dict[str, dict[str, Launch]]:
    """All lines, with ours in both forms, and stock."""
    return _of(request.param, all_launches)


# Stock torchrun of some releases cannot do without it.
DEFAULT_PORT = 29400
NEEDS_DEFAULT_PORT = f"localhost:{DEFAULT_PORT}" in torch_run.run.__code__.co_consts

each_line = pytest.mark.parametrize("name", LINES)


@each_line
def test_exit_code_and_output(
    name: str, launches: dict[str, dict[str, Launch]]
) -> None:
    ours, stock = (launches[name][which].result for which in BOTH)
    assert stock.code == 0, stock.err
    assert ours.code == 0, ours.err
    lines = [f"out {rank} {PLAIN_ARGS}" for rank in range(LINES[name].workers)]
    assert sorted(ours.out.splitlines()) == lines
    assert sorted(stock.out.splitlines()) == lines


def _more(line: Line) -> dict[str, str]:
    """Return the variables of the workers that stock torchrun does not set."""
    more = {"PYTHONFAULTHANDLER": "1"}
    return {name: value for name, value in more.items() if name not in line.environ}


@each_line
def test_environment_of_the_workers(
    name: str, launches: dict[str, dict[str, Launch]]
) -> None:
    line = LINES[name]
    ours, stock = (launches[name][which].workers for which in BOTH)
    assert len(ours) == len(stock) == line.workers
    different = _DIFFERENT.difference(line.same)
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["environ"] | _more(line) == mine["environ"]
        assert mine["environ"].keys() == theirs["environ"].keys() | _more(line)
        for variable in theirs["environ"].keys() - different:
            assert mine["environ"][variable] == theirs["environ"][variable], variable
        for what in ("argv", "name", "python", "cwd"):
            assert mine[what] == theirs[what]


def _is_kept(worker: dict[str, Any]) -> bool:
    """Say whether an agent keeps the workers' store; else worker 0 is to open it."""
    agents = worker["environ"]["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    return capabilities.SHARED_STORE.present or agents


@each_line
def test_master_is_reachable(name: str, launches: dict[str, dict[str, Launch]]) -> None:
    ours = launches[name][OURS].workers
    assert len(ours) == LINES[name].workers
    for worker in ours:
        assert (worker["reachable"] is True) is _is_kept(worker)
    assert {worker["environ"]["MASTER_ADDR"] for worker in ours} <= {
        "127.0.0.1",
        socket.getfqdn(),
    }
    # The rank of the store is this node's: a number, so that nobody asks for a name.
    if name != "elastic":
        assert ours[0]["environ"]["MASTER_ADDR"] == "127.0.0.1"


def _is_wide(worker: dict[str, Any]) -> bool:
    """Say whether the agent of a worker listens to more than its own node."""
    return not set(worker["listening"]) <= {"127.0.0.1", "::1"}


@pytest.mark.skipif(
    not capabilities.LISTENING_SOCKET.present,
    reason="this torch cannot listen on one address",
)
@pytest.mark.parametrize("name", [name for name in LINES if name != "elastic"])
def test_one_node_listens_to_itself_only(
    name: str, launches: dict[str, dict[str, Launch]]
) -> None:
    for worker in launches[name][OURS].workers:
        kept = name != "file store" or _is_kept(worker)
        assert bool(worker["listening"]) is kept
        assert not _is_wide(worker)


@each_line
def test_clean_start_is_one_line(
    name: str, launches: dict[str, dict[str, Launch]]
) -> None:
    result = launches[name][OURS].result
    # The events that --event-log-handler=console asks for.
    lines = [x for x in result.err.splitlines() if '"name": "torchelastic' not in x]
    warning = LINES[name].warning
    if "HPC169" in result.err:
        assert {"--no-python", "--run-path"}.intersection(LINES[name].argv)
        warning = "HPC169"
    expected = 2 if warning else 1
    assert lines == result.own_lines[:expected], result.err
    assert len(lines) == expected
    workers = LINES[name].workers
    count = f"{workers} worker{'s' if workers > 1 else ''}"
    shape = f"1 node, {count}"
    if name == "elastic":
        shape = f"1 to 2 nodes, {count} on this one"
    start = f"torchrun_hpc: HPC001 {shape}, no scheduler"
    assert lines[0].startswith(start)
    assert lines[-1].startswith(
        f"torchrun_hpc: warning: {warning}" if warning else start
    )


def test_stock_prints_its_banner(launches: dict[str, dict[str, Launch]]) -> None:
    """Without it, the test above would not show that ours is kept away."""
    err = launches["two workers"][STOCK].result.err
    assert "Setting OMP_NUM_THREADS" in err


@pytest.mark.parametrize("argv", [[], ["--standalone"]])
def test_the_default_port_is_taken(
    argv: list[str], launcher: Launcher, folder: Path, tmp_path: Path
) -> None:
    """For --standalone, too, a release of torch took it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # somebody else takes it
            stack.enter_context(socket.create_server(("", DEFAULT_PORT)))
        result = launcher.ours(
            [*argv, "report.py"], environ={"REPORT": str(tmp_path)}, cwd=folder
        )
    assert result.code == 0, result.err
    assert result.err.splitlines() == result.own_lines
    assert len(_reports(tmp_path)) == 1


def test_arguments_that_stock_refuses(launcher: Launcher, folder: Path) -> None:
    """They are the script's, whatever they look like."""
    where = folder / "arguments"
    where.mkdir()
    result = launcher.ours(
        ["--nnodes=1", "report.py", *SCRIPT_ARGS],
        environ={"REPORT": str(where)},
        cwd=folder,
    )
    assert result.code == 0, result.err
    assert _reports(where)[0]["argv"] == ["report.py", *SCRIPT_ARGS]


# --- the commands themselves ------------------------------------------------------


@pytest.mark.parametrize("command", ["module", "console script"])
def test_commands(command: str, folder: Path, tmp_path: Path) -> None:
    """Not forked, but as they are typed."""
    words = COMMANDS[OURS]
    if command == "console script":
        script = Path(sys.executable).with_name("torchrun_hpc")
        if not script.exists():
            pytest.skip("torchrun_hpc is not installed here: pip install -e .")
        words = [str(script)]
    result = run(
        [*words, "--nproc-per-node=2", "report.py", "a", "--nnodes=3"],
        env={**clean_environ(), "REPORT": str(tmp_path)},
        cwd=folder,
    )
    assert result.code == 0, result.err
    expected = [f"out {rank} ['a', '--nnodes=3']" for rank in (0, 1)]
    assert sorted(result.out.splitlines()) == expected
    assert len(_reports(tmp_path)) == 2
    assert result.err.splitlines() == result.own_lines
    assert len(result.own_lines) == 1


def test_console_script_is_declared() -> None:
    """Also where the project is not installed."""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert 'torchrun_hpc = "torchrun_hpc.main:main"' in text


def test_help_and_version_start_nothing(launcher: Launcher) -> None:
    ours, stock = launcher.both(["--help"])
    assert ours.code == stock.code == 0
    assert ours.err == stock.err == ""
    assert ours.out.startswith("usage: torchrun_hpc ")


# --- failing scripts --------------------------------------------------------------

FAILURES = {
    "exit 3": Line(environ={"THEN": "exit:3"}),
    "exit 3, one of two": Line(("--nproc-per-node=2",), environ={"THEN": "exit:3:1"}),
    "exit -1": Line(environ={"THEN": "exit:-1"}),
    "exception": Line(environ={"THEN": "raise"}),
    "killed": Line(environ={"THEN": f"kill:{int(signal.SIGKILL)}"}),
    "terminated": Line(environ={"THEN": f"kill:{int(signal.SIGTERM)}"}),
    "crashed": Line(environ={"THEN": "crash"}),
    "no such module": Line(("-m",), "missing.module"),
    "recorded": Line((), "recorded.py"),
    "restarts used up": Line(("--max-restarts=1",), environ={"THEN": "exit:4"}),
    "second attempt": Line(
        ("--max-restarts=1", "--nproc-per-node=2"), environ={"THEN": "fail-first"}
    ),
}
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


@pytest.fixture(scope="module")
def all_failures(
    launcher: Launcher, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Launch]]:
    base = tmp_path_factory.mktemp("failures")
    lines = [
        Line(
            line.argv,
            line.script,
            {
                **line.environ,
                "TORCHELASTIC_ERROR_FILE": f"{base}/error-{number}-{{which}}.json",
            },
        )
        for number, line in enumerate(FAILURES.values())
    ]
    found = _launch(launcher, folder, lines, base, limit=60)
    for number, pair in enumerate(found):
        for which, launch in pair.items():
            path = base / f"error-{number}-{which}.json"
            text = path.read_text() if path.exists() else "null"
            launch.workers.append({"error file": json.loads(text)})
    return dict(zip(FAILURES, found, strict=True))


@each_form
def failures(
    request: pytest.FixtureRequest, all_failures: dict[str, dict[str, Launch]]
) -> dict[str, dict[str, Launch]]:
    return _of(request.param, all_failures)


def _shape(value: Any) -> Any:
    """Return all keys of a JSON value, and the texts that are not about this run."""
    if isinstance(value, dict):
        return {k: _shape(v) for k, v in value.items() if k != "extraInfo"} | {
            "extraInfo": sorted(value["extraInfo"]) if "extraInfo" in value else None
        }
    if isinstance(value, str):
        return re.sub(r"[0-9]{4,}", "N", value)
    return type(value).__name__


FAILED = "torchrun_hpc: error: HPC125 the job has failed: "

# What torch says of a failure.
BOX = "ChildFailedError: "
TORCHS_LINES = ("Sending process ", "failed (exitcode: ")


each_failure = pytest.mark.parametrize("name", FAILURES)


@each_failure
def test_exit_code_of_failures(
    name: str, failures: dict[str, dict[str, Launch]]
) -> None:
    ours, stock = (failures[name][which].result for which in BOTH)
    assert ours.code == stock.code
    assert (ours.code == 0) == (name == "second attempt")
    assert sorted(ours.out.splitlines()) == sorted(stock.out.splitlines())


@each_failure
def test_report_of_failures(name: str, failures: dict[str, dict[str, Launch]]) -> None:
    """It takes the place of torch's."""
    ours, stock = (failures[name][which].result for which in BOTH)
    start, *restarts = ours.own_lines
    assert "HPC001" in start
    assert (BOX in stock.err) is (stock.code != 0)
    for words in (BOX, *TORCHS_LINES, "torch/distributed/run.py"):
        assert words not in ours.err
    if name == "second attempt":  # which of the two, is chance
        restart = r"restart 1 of all workers: worker [01] ended with exit code 5"
        assert re.fullmatch(f"torchrun_hpc: HPC128 {restart}", *restarts)
        assert ours.err.splitlines() == ours.own_lines
        return
    *restarts, first, last = restarts
    rank = 1 if name == "exit 3, one of two" else 0
    how, cause = ENDINGS[name]
    why = f"worker {rank} {how}"
    assert re.fullmatch(
        rf"{FAILED}{re.escape(why)} \(local rank {rank}, at [\d-]{{10}} [\d:]{{8}}\)",
        first,
    )
    assert last == FAILED + why + (f": {cause}" if cause else "")
    expected = [f"torchrun_hpc: HPC128 restart 1 of all workers: {why}"]
    assert restarts == (expected if name == "restarts used up" else [])
    written, _, shown = ours.err.partition(f"{first}\n")
    assert shown.splitlines()[-1] == last
    # What the worker has written stands in front of it, and once more in it.
    details = shown.splitlines()[:-1]
    assert all(line.startswith("    ") for line in details)
    assert {line.strip() for line in details} <= {
        line.strip() for line in written.splitlines()
    }
    assert any(cause in line for line in details) is bool(cause)


@pytest.mark.parametrize("name", ["exception", "recorded", "crashed"])
def test_the_report_has_the_traceback(
    name: str, failures: dict[str, dict[str, Launch]]
) -> None:
    """Of a crash, too: the innermost frame is the first one there."""
    _, _, report = failures[name][OURS].result.err.partition(FAILED)
    lines = [line[4:] for line in report.splitlines()[1:-1]]
    frames = [line for line in lines if line.startswith("  File ")]
    if name == "crashed":
        assert lines[0] == "Fatal Python error: Segmentation fault"
        assert re.fullmatch(r"  File .*, line \d+ in string_at", frames[0])
        assert re.search(r"report.py\", line \d+ in <module>$", frames[1])
        assert "Fatal" not in failures[name][STOCK].result.err  # it would not be there
    else:
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[-1] == ENDINGS[name][1]
        where = {"exception": "<module>", "recorded": "main"}[name]
        assert re.search(rf"re\w+.py\", line \d+, in {where}$", frames[-1])


@each_failure
def test_error_file_of_the_agent(
    name: str, failures: dict[str, dict[str, Launch]]
) -> None:
    ours, stock = (failures[name][which].workers[-1] for which in BOTH)
    assert _shape(ours) == _shape(stock)
    if name == "recorded":
        assert "a fault of the script" in str(ours)


def test_attempts(failures: dict[str, dict[str, Launch]]) -> None:
    for which in BOTH:
        workers = failures["second attempt"][which].workers[:-1]
        seen = [
            (w["environ"]["RANK"], w["environ"]["TORCHELASTIC_RESTART_COUNT"])
            for w in workers
        ]
        assert {("0", "1"), ("1", "1")} <= set(seen)
        assert {attempt for _, attempt in seen} == {"0", "1"}
        last = [w for w in workers if w["environ"]["TORCHELASTIC_RESTART_COUNT"] == "1"]
        assert [w["reachable"] is True for w in last] == [_is_kept(w) for w in last]


# --- what else the report depends on ----------------------------------------------

_ONE_OF_TWO = Line(("--nproc-per-node=2",), environ={"THEN": "exit:3:1"})
REPORTS = {
    "tee": Line(("--tee=3", "--log-dir={base}/tee"), environ={"THEN": "raise"}),
    "redirects": Line(
        ("--redirects=3", "--log-dir={base}/redirects"), environ={"THEN": "raise"}
    ),
    "as stdout": Line(environ={"THEN": "raise"}),
    "function": Line(
        ("--run-path", "--monitor-interval=0.01"), environ={"THEN": "raise"}
    ),
    # The user wants to see what torch says.
    "LOGLEVEL": Line(_ONE_OF_TWO.argv, environ={"LOGLEVEL": "INFO"}),
    "TORCH_LOGS": Line(_ONE_OF_TWO.argv, environ={"TORCH_LOGS": "distributed"}),
    "debug": Line((*_ONE_OF_TWO.argv, "--hpc-debug")),
}


@pytest.fixture(scope="module")
def reports(
    launcher: Launcher, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """What ours says; where stderr is the same file as stdout, it is ``out``."""
    base = tmp_path_factory.mktemp("reports")
    launches, environs = [], []
    for number, line in enumerate(REPORTS.values()):
        words = [_filled(word, {"{base}": str(base)}) for word in line.argv]
        launches.append((OURS, [*words, line.script]))
        (base / str(number)).mkdir()
        report = {"REPORT": str(base / str(number))}
        environs.append(_ONE_OF_TWO.environ | line.environ | report)
    streams = [{"2": name} if name == "as stdout" else {} for name in REPORTS]
    results = launcher.many(
        launches, environs=environs, streams=streams, cwd=folder, at_once=4
    )
    return dict(zip(REPORTS, results, strict=True))


@pytest.mark.parametrize("name", ["LOGLEVEL", "TORCH_LOGS", "debug"])
def test_who_wants_to_see_what_torch_says_sees_it(
    name: str, reports: dict[str, Result]
) -> None:
    result = reports[name]
    assert result.code == 1
    for words in (BOX, *TORCHS_LINES, "torch/distributed/run.py"):
        assert words in result.err
    last = f"{FAILED}worker 1 ended with exit code 3"
    assert result.err.count(f"{last}\n") == 1
    assert result.err.count(f"{last} (local rank 1, at ") == 1


@pytest.mark.parametrize("name", ["tee", "redirects"])
def test_the_report_has_the_traceback_of_a_log_file(
    name: str, reports: dict[str, Result]
) -> None:
    """And says which file it is."""
    result = reports[name]
    assert result.code == 1
    _, first, last = result.own_lines
    found = re.search(r"\(local rank 0, at .*, log file (/.*/0/stderr.log)\)$", first)
    assert found, first
    log = Path(found[1]).read_text()
    assert log.startswith("Traceback (most recent call last):\n  File ")
    shown = "".join(f"    {line}\n" for line in log.splitlines())
    assert result.err.endswith(f"{first}\n{shown}{last}\n")
    assert last.endswith(": ValueError: a fault of the script")
    prefixed = re.findall("^.*default0.*Traceback", result.err, re.MULTILINE)
    assert len(prefixed) == (name == "tee")


def test_the_order_of_stdout_and_stderr_is_kept(reports: dict[str, Result]) -> None:
    """Where they are one file, the report says so, and has no more to say."""
    result = reports["as stdout"]
    assert (result.code, result.err) == (1, "")
    start, out, *traceback, first, unread, last = result.out.splitlines()
    assert "HPC001" in start
    assert out.startswith("out 0 ")
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-1] == "ValueError: a fault of the script"
    assert first.startswith(f"{FAILED}worker 0 ended with exit code 1 (local rank 0, ")
    assert unread == (
        "torchrun_hpc:     its stderr is in the output: it is the same file as stdout"
    )
    assert last == f"{FAILED}worker 0 ended with exit code 1"


def test_a_function_of_torchs_fails(reports: dict[str, Result]) -> None:
    """It runs the script, writes nothing, and torch may be the first to see its end."""
    result = reports["function"]
    assert result.code == 1
    assert "ValueError: a fault of the script" in result.err


# All bytes, more than a pipe has room for, and the last line without an end.
BYTES = """
import os, sys
os.write(2, bytes(range(256)) * 2000)
os.write(1, bytes(range(256)))
sys.stderr.write("50 %\\r100 %")
"""
ALL_BYTES = bytes(range(256))


@pytest.mark.parametrize("options", [(), ("--hpc-preload=torch",)])
def test_streams_arrive_byte_for_byte(options: tuple[str, ...], tmp_path: Path) -> None:
    """By a pipe, and in a file."""
    (tmp_path / "train.py").write_text(BYTES)
    found = []
    with (tmp_path / "stderr").open("wb") as file:
        processes = [
            subprocess.Popen(
                [*COMMANDS[OURS], *options, "train.py"],
                env=clean_environ(),
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
            for stderr in (subprocess.PIPE, file)
        ]
    try:
        found = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            end_group(process.pid)
            process.wait(timeout=10)
    errs = [found[0][1], (tmp_path / "stderr").read_bytes()]
    for process, (out, _), err in zip(processes, found, errs, strict=True):
        start, _, rest = err.partition(b"\n")
        assert start.startswith(b"torchrun_hpc: HPC001 ")
        assert rest == ALL_BYTES * 2000 + b"50 %\r100 %"
        assert out == ALL_BYTES
        assert process.returncode == 0


# --- log files --------------------------------------------------------------------

_LOGS = {
    "redirects": ("-r3", "--nproc-per-node=2"),
    "tee": ("--tee=3", "--nproc-per-node=2"),
    "both": ("--redirects=0:1,1:2", "-t", "0:2,1:1", "--nproc-per-node=2"),
    "filter": ("-t3", "--local-ranks-filter=1", "--nproc-per-node=2"),
    "duplicates": ("-r3", "--duplicate-stdout-filters=out", "--nproc-per-node=2"),
}
LOGS = {
    name: argv
    for name, argv in _LOGS.items()
    if set(_known(*argv)) >= {word for word in argv if word.startswith("--")}
}


def _is_of_default(line: str) -> bool:
    """Say whether a line is torch's warning of an option that nobody has typed."""
    return capabilities.WARNS_OF_DEFAULT.present and "master_addr is only" in line


def _tree(base: Path) -> dict[str, str]:
    """Return all files below a folder: names without what is random, and contents."""
    return {
        re.sub(r"(?<=my-job_)[^/]+", "X", str(path.relative_to(base))): path.read_text()
        for path in base.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def all_logs(
    launcher: Launcher, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, tuple[Launch, dict[str, str]]]]:
    base = tmp_path_factory.mktemp("logs")
    lines = [
        Line(
            (*_C10D, "--rdzv-id=my-job", f"--log-dir={base}/{name}-{{which}}", *argv),
            environ={"SPEAK": "1", "OMP_NUM_THREADS": "1"},
        )
        for name, argv in LOGS.items()
    ]
    found = _launch(launcher, folder, lines, base)
    return {
        name: {which: (pair[which], _tree(base / f"{name}-{which}")) for which in pair}
        for name, pair in zip(LOGS, found, strict=True)
    }


@each_form
def logs(
    request: pytest.FixtureRequest,
    all_logs: dict[str, dict[str, tuple[Launch, dict[str, str]]]],
) -> dict[str, dict[str, tuple[Launch, dict[str, str]]]]:
    return _of(request.param, all_logs)


@pytest.mark.parametrize("name", LOGS)
def test_log_files(
    name: str, logs: dict[str, dict[str, tuple[Launch, dict[str, str]]]]
) -> None:
    (ours, our_files), (stock, stock_files) = (logs[name][which] for which in BOTH)
    assert ours.result.code == stock.result.code == 0
    assert stock_files
    assert our_files == stock_files
    assert sorted(ours.result.out.splitlines()) == sorted(stock.result.out.splitlines())
    rest = [x for x in ours.result.err.splitlines() if x not in ours.result.own_lines]
    assert len(ours.result.own_lines) == 1
    theirs = [x for x in stock.result.err.splitlines() if not _is_of_default(x)]
    assert sorted(rest) == sorted(theirs)


def test_no_folder_is_left_over(
    launcher: Launcher, folder: Path, tmp_path: Path
) -> None:
    """Reading the arguments twice must not make folders for logs twice."""
    environs = []
    for which in BOTH:
        (tmp_path / which).mkdir()
        environs.append({"TMPDIR": str(tmp_path / which), "REPORT": str(tmp_path)})
    launcher.many(
        [(which, ["-r3", *bare(which), "report.py"]) for which in BOTH],
        environs=environs,
        cwd=folder,
    )
    ours, stock = (
        [p.name.partition("_")[0] for p in (tmp_path / which).iterdir()]
        for which in BOTH
    )
    assert ours == stock


# --- ports ------------------------------------------------------------------------

TAKEN = {
    "c10d": ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}"),
    "c10d by name": ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}"),
    "static": ("--master-port={port}",),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_port_that_is_taken(
    name: str, launcher: Launcher, folder: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        argv = [word.replace("{port}", port) for word in TAKEN[name]]
        result = launcher.ours(
            [*argv, "report.py"],
            environ={"REPORT": str(tmp_path)},
            cwd=folder,
            limit=15,
        )
    assert "Traceback" not in result.err
    assert result.code == 2, result.err
    (line,) = result.own_lines
    start = f"torchrun_hpc: error: HPC055 port {port} on 127.0.0.1 cannot be used: it"
    assert line.startswith(f"{start} is taken by ")
    assert f"(pid {os.getpid()}" in line


@pytest.mark.parametrize(("which", "codes"), [(STOCK, [0, 0]), (OURS, [0, 2])])
def test_two_jobs_with_one_endpoint(
    which: str, codes: list[int], launcher: Launcher, folder: Path, tmp_path: Path
) -> None:
    """Stock lets the second in as a guest of the first, and it dies with its host."""
    endpoint = f"--rdzv-endpoint=localhost:{free_port('127.0.0.1')}"
    results = launcher.many(
        [
            (which, ["--rdzv-backend=c10d", endpoint, f"--rdzv-id={n}", "report.py"])
            for n in (1, 2)
        ],
        environ={"REPORT": str(tmp_path), "THEN": "sleep:1.5"},
        cwd=folder,
        limit=30,
    )
    assert sorted(result.code for result in results) == codes
    if which == OURS:
        (error,) = [x for r in results for x in r.own_lines if "error: " in x]
        # Found before anything is started, or a moment later.
        assert "error: HPC055 " in error or "error: HPC081 " in error
        assert "is taken by" in error


# --- two nodes without a scheduler: torchrun's own business -------------------------

TWO_NODES = {
    "c10d": ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}", "--rdzv-id=x"),
    "static": ("--node-rank={node}", "--master-addr=127.0.0.1", "--master-port={port}"),
}


@pytest.mark.parametrize("name", TWO_NODES)
def test_two_nodes_as_typed(
    name: str, launcher: Launcher, folder: Path, tmp_path: Path
) -> None:
    launches, environs = [], []
    for which in BOTH:
        port = str(free_port("127.0.0.1"))
        (tmp_path / which).mkdir()
        for node in ("0", "1"):
            argv = [
                word.replace("{port}", port).replace("{node}", node)
                for word in TWO_NODES[name]
            ]
            launches.append((which, ["--nnodes=2", *argv, "report.py"]))
            environs.append({"REPORT": str(tmp_path / which)})
    results = launcher.many(
        launches, environs=environs, cwd=folder, at_once=4, limit=45
    )
    assert [result.code for result in results] == [0] * 4, [r.err for r in results]
    ours, stock = (_reports(tmp_path / which) for which in BOTH)
    for workers in (ours, stock):
        assert [w["environ"]["RANK"] for w in workers] == ["0", "1"]
        assert [w["environ"]["GROUP_RANK"] for w in workers] == ["0", "1"]
        assert [w["environ"]["WORLD_SIZE"] for w in workers] == ["2", "2"]
        for worker in workers:
            assert (worker["reachable"] is True) is _is_kept(worker)
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["environ"].keys() == theirs["environ"].keys() | _more(Line())
    for result in results[:2]:
        assert "Traceback" not in result.err
    # The host of the endpoint speaks; with c10d both are on its machine.
    own = [len(result.own_lines) for result in results[:2]]
    assert own == [1, int(name == "c10d")]


# --- signals ----------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_agent_and_workers(
    number: int, folder: Path, tmp_path: Path
) -> None:
    processes = {}
    try:
        for which in BOTH:
            (tmp_path / which).mkdir()
            processes[which] = subprocess.Popen(
                [*COMMANDS[which], "--nproc-per-node=2", *bare(which), "report.py"],
                env={
                    **clean_environ(),
                    "REPORT": str(tmp_path / which),
                    "THEN": "sleep:60",
                },
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        codes, workers = {}, {}
        for which, process in processes.items():
            deadline = time.monotonic() + 40
            while len(_reports(tmp_path / which)) < 2:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.05)
            workers[which] = [w["pid"] for w in _reports(tmp_path / which)]
            process.send_signal(number)
        for which, process in processes.items():
            codes[which] = process.wait(timeout=20)
        assert codes[OURS] == codes[STOCK] != 0
        assert not [pid for pid in workers[OURS] if Path(f"/proc/{pid}").exists()]
    finally:
        for process in processes.values():
            end_group(process.pid)
            process.wait(timeout=10)


# --- torchrun_hpc.auto ------------------------------------------------------------

AUTO = """
import os, sys
from torch.distributed import run
from torch.distributed.elastic.rendezvous import (
    c10d_rendezvous_backend, dynamic_rendezvous, static_tcp_rendezvous,
)
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.launcher import api

def names():
    modules = [
        run, api, dynamic_rendezvous, dynamic_rendezvous.DynamicRendezvousHandler,
        c10d_rendezvous_backend, static_tcp_rendezvous, local_elastic_agent,
    ]
    return {
        (m.__name__, k): id(v) for m in modules for k, v in dict(vars(m)).items()
        if not k.startswith("__")
    }

before, environ, argv = names(), dict(os.environ), list(sys.argv)
import torchrun_hpc.auto
after = names()
changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
expected = {("torch.distributed.run", name) for name in ("run", "parse_args")}
expected.add((dynamic_rendezvous.__name__, "pickle"))
if int(os.environ["SHARED"]):
    expected.add(("DynamicRendezvousHandler", "next_rendezvous"))
assert changed == expected, changed
assert dict(os.environ) == environ
assert sys.argv == argv
del os.environ["SHARED"]
print("imported", flush=True)
for launch in range(int(sys.argv[1])):
    print("launch", file=sys.stderr, flush=True)
    run.main(sys.argv[2:])
"""


def _auto(
    folder: Path, report: Path, launches: int, argv: list[str], **environ: str
) -> Result:
    return run(
        [sys.executable, "-c", AUTO, str(launches), *argv],
        env={
            **clean_environ(),
            "REPORT": str(report),
            "SHARED": str(int(capabilities.SHARED_STORE.present)),
            **environ,
        },
        cwd=folder,
    )


def test_auto(folder: Path, tmp_path: Path) -> None:
    result = _auto(folder, tmp_path, 1, ["--nproc-per-node=2", "report.py", "a"])
    assert result.code == 0, result.err
    out = sorted(result.out.splitlines())
    assert out == ["imported", "out 0 ['a']", "out 1 ['a']"]
    assert [x for x in result.err.splitlines() if x != "launch"] == result.own_lines
    assert len(result.own_lines) == 1
    for worker in _reports(tmp_path):
        assert worker["environ"]["MASTER_ADDR"] == "127.0.0.1"
        if capabilities.LISTENING_SOCKET.present:
            assert set(worker["listening"]) == {"127.0.0.1"}
        assert worker["environ"]["OMP_NUM_THREADS"] == "1"
        assert (worker["reachable"] is True) is _is_kept(worker)


def test_auto_twice(folder: Path, tmp_path: Path) -> None:
    result = _auto(folder, tmp_path, 2, ["report.py"])
    assert result.code == 0, result.err
    assert len(_reports(tmp_path)) == 2
    lines = result.err.splitlines()
    assert [x == "launch" for x in lines] == [True, False, True, False], lines
    assert lines[1] == lines[3]


def test_auto_raises_what_torch_raises(folder: Path, tmp_path: Path) -> None:
    """And the report is there; no other line, because the program may go on."""
    result = _auto(folder, tmp_path, 1, ["report.py"], THEN="raise")
    assert result.code == 1
    for words in (BOX, TORCHS_LINES[1]):
        assert words in result.err
    _, only = result.own_lines
    assert only.startswith(f"{FAILED}worker 0 ended with exit code 1 (local rank 0, ")
    assert "\n    ValueError: a fault of the script\n" in result.err


def test_auto_respects_variables(folder: Path, tmp_path: Path) -> None:
    environ = {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "localhost:0",
        "PET_RDZV_ID": "my-job",
    }
    result = _auto(folder, tmp_path, 1, ["report.py"], **environ)
    assert result.code == 0, result.err
    assert _reports(tmp_path)[0]["environ"]["TORCHELASTIC_RUN_ID"] == "my-job"


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import os, sys; before = dict(os.environ); import torchrun_hpc, "
        "torchrun_hpc.main; assert 'torch' not in sys.modules; "
        "assert dict(os.environ) == before"
    )
    result = run([sys.executable, "-c", code])
    assert (result.code, result.out, result.err) == (0, "", "")

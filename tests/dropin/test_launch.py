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
    sys.exit(int(then[1]))
if then[0] == "raise":
    raise ValueError("a fault of the script")
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
    "threads": Line(environ={"OMP_NUM_THREADS": "2"}),
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


@each_line
def test_environment_of_the_workers(
    name: str, launches: dict[str, dict[str, Launch]]
) -> None:
    line = LINES[name]
    ours, stock = (launches[name][which].workers for which in BOTH)
    assert len(ours) == len(stock) == line.workers
    different = _DIFFERENT.difference(line.same)
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["environ"].keys() == theirs["environ"].keys()
        for variable in mine["environ"].keys() - different:
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
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'torchrun_hpc = "torchrun_hpc.main:main"' in text


def test_help_and_version_start_nothing(launcher: Launcher) -> None:
    ours, stock = launcher.both(["--help"])
    assert ours.code == stock.code == 0
    assert ours.err == stock.err == ""
    assert ours.out.startswith("usage: torchrun_hpc ")


# --- failing scripts --------------------------------------------------------------

FAILURES = {
    "exit 3": Line(environ={"THEN": "exit:3"}),
    "exit 3, two workers": Line(("--nproc-per-node=2",), environ={"THEN": "exit:3"}),
    "exit -1": Line(environ={"THEN": "exit:-1"}),
    "exception": Line(environ={"THEN": "raise"}),
    "killed": Line(environ={"THEN": f"kill:{int(signal.SIGKILL)}"}),
    "terminated": Line(environ={"THEN": f"kill:{int(signal.SIGTERM)}"}),
    "crashed": Line(environ={"THEN": f"kill:{int(signal.SIGSEGV)}"}),
    "no such module": Line(("-m",), "missing.module"),
    "recorded": Line((), "recorded.py"),
    "restarts used up": Line(("--max-restarts=1",), environ={"THEN": "exit:4"}),
    "second attempt": Line(
        ("--max-restarts=1", "--nproc-per-node=2"), environ={"THEN": "fail-first"}
    ),
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


def _report_of_torch(err: str) -> list[str]:
    """Return torch's table of failures, without times, hosts and process ids."""
    _, _, table = err.partition("ChildFailedError:")
    kept = [x for x in table.splitlines() if not x.startswith(("  time", "  host"))]
    kept = [re.sub(r"\(pid: [0-9]+\)|[0-9]{4,}", "", x) for x in kept]
    return [re.sub(r"/[^ ]*/(?=error.json)", "", x) for x in kept]


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
    ours, stock = (failures[name][which].result for which in BOTH)
    if "--nproc-per-node=2" in FAILURES[name].argv:
        # Which of them failed first, is chance.
        assert ("ChildFailedError" in ours.err) == ("ChildFailedError" in stock.err)
    else:
        assert _report_of_torch(ours.err) == _report_of_torch(stock.err)
    assert len(ours.own_lines) == 1


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
        assert mine["environ"].keys() == theirs["environ"].keys()
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

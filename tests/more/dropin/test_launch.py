"""Real launches on this machine, side by side with stock torchrun."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.cluster.commands import own_lines
from tests.support.patience import START
from tests.support.ports import own_port
from tests.support.processes import RunningProgram, clean_environ, run
from tests.support.stock.compared import (
    ADDRESS,
    BOX,
    C10D,
    FAILED,
    FORKS,
    RUN,
    TORCHS_LINES,
    ComparedLine,
    assert_fails_alike,
    assert_same,
    is_kept,
    more,
    reports,
)
from tests.support.stock.inside_torch import dist
from tests.support.stock.side_by_side import (
    COMMANDS,
    OURS,
    STOCK,
    Command,
    bare,
)
from torchrun_hpc.host import capabilities

if TYPE_CHECKING:
    from tests.support.processes import Result

BOTH = (OURS, STOCK)

# More are in tests/core/test_dropin.py.
LINES = {
    "nothing": ComparedLine(""),
    "standalone": ComparedLine("--standalone --nproc_per_node 2", workers=2),
    "one node": ComparedLine("--nnodes=1:1"),
    "cpu": ComparedLine("--nproc_per_node=cpu", workers=2),
    "auto": ComparedLine("CUDA_VISIBLE_DEVICES= --nproc-per-node auto", workers=2),
    "run path": ComparedLine("--run-path", script="{folder}/report.py"),
    "conf": ComparedLine(f"{C10D} --rdzv-conf join_timeout=30,read_timeout=30"),
    "conf, unread": ComparedLine(
        f"{C10D} \"--rdzv-conf=timeout='5',foo_timeout=1.5,rank=x,join_timeout=+3_0\""
    ),
    "conf, empty": ComparedLine(f"{C10D} --rdzv-conf="),
    "endpoint, empty": ComparedLine("--rdzv-endpoint="),
    "endpoint": ComparedLine("--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port}"),
    "elastic": ComparedLine(
        "--nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint=localhost:{port} "
        "--rdzv-conf=last_call_timeout=1"
    ),
    "file store": ComparedLine(
        "--rdzv-backend=c10d --rdzv-endpoint={folder}/store-{which} "
        "--rdzv-conf=store_type=file"
    ),
    "master port": ComparedLine("--master-port={port}", same=(ADDRESS,)),
    "static endpoint": ComparedLine(
        "--rdzv-backend=static --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=x",
        same=(ADDRESS, RUN),
    ),
    "address": ComparedLine(
        "--local-addr=127.0.0.1",
        same=() if capabilities.ADDRESS_IS_LOST.present else (ADDRESS,),
    ),
    "role": ComparedLine(
        "--role=trainer --max-restarts=2 --monitor-interval=0.5 --start-method=fork "
        "--shutdown-timeout=3 --event-log=console"
    ),
    "signals": ComparedLine("--signals-to-handle=SIGTERM,SIGUSR1"),
    "virtual local rank": ComparedLine(
        "--virtual-local-rank --nproc-per-node=2", workers=2
    ),
    "threads": ComparedLine("OMP_NUM_THREADS=2 PYTHONFAULTHANDLER="),
    "workers, too many": ComparedLine(
        "--nproc-per-node=3",
        workers=3,
        warning="HPC092]: 3 workers share 2 CPUs, the whole affinity mask",
    ),
    "stale address": ComparedLine("MASTER_ADDR=192.0.2.1 MASTER_PORT=1"),
    "site": ComparedLine("SYSTEMNAME=juwelsbooster"),
}


@pytest.mark.parametrize("name", LINES)
def test_it_is_launched_as_by_torchrun(name, launch):
    assert_same(LINES[name], launch(LINES[name]))


# --- the commands themselves ------------------------------------------------------


def test_console_script(folder, tmp_path):
    """Not forked, but as at a prompt."""
    script = Path(sys.executable).with_name("torchrun_hpc")
    if not script.exists():
        pytest.skip("torchrun_hpc is not installed here: pip install -e .")
    result = run(
        [str(script), "--nproc-per-node=2", "report.py", "a", "--nnodes=3"],
        environ={**clean_environ(), "REPORT": str(tmp_path)},
        cwd=folder,
    )
    assert result.code == 0, result.err
    expected = [f"out {rank} ['a', '--nnodes=3']" for rank in (0, 1)]
    assert sorted(result.out.splitlines()) == expected
    assert result.err.splitlines() == result.own_lines
    assert len(result.own_lines) == 1


def test_help(launcher):
    result = launcher.launch(OURS, ["--help"])
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("usage: torchrun_hpc ")


# --- failing scripts --------------------------------------------------------------

FAILURES = {
    "exit 3": ComparedLine("THEN=exit:3"),
    "exit -1": ComparedLine("THEN=exit:-1"),
    "terminated": ComparedLine(f"THEN=kill:{int(signal.SIGTERM)}"),
    "crashed": ComparedLine("THEN=crash"),
    "no such module": ComparedLine("-m", script="missing.module"),
    "recorded": ComparedLine("", script="recorded.py"),
    "restarts used up": ComparedLine("THEN=exit:4 --max-restarts=1"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_it_fails_as_with_torchrun(name, launch):
    assert_fails_alike(name, launch(FAILURES[name], with_error_file=True))


# --- what else the report depends on ----------------------------------------------


@pytest.fixture
def reported(launcher, folder, tmp_path):
    """Launch a script that fails, and return the result."""

    def launch_it(*options: str, **more: Any) -> Result:
        more |= {"REPORT": str(tmp_path), "cwd": folder}
        result = launcher.launch(OURS, [*options, "report.py"], **more)
        assert result.code == 1, result.err
        return result

    return launch_it


@pytest.mark.parametrize(
    ("options", "environ"),
    [
        ((), {"LOGLEVEL": "INFO"}),
        ((), {"TORCH_LOGS": "distributed"}),
        (("--hpc-debug",), {}),
    ],
)
def test_who_wants_to_see_what_torch_says_sees_it(options, environ, reported):
    result = reported("--nproc-per-node=2", *options, **environ, THEN="exit:3:1")
    for words in (BOX, *TORCHS_LINES, "torch/distributed/run.py"):
        assert words in result.err
    last = f"{FAILED}worker 1 ended with exit code 3"
    assert result.err.count(f"{last}\n") == 1
    assert result.err.count(f"{last} (local rank 1, at ") == 1


@pytest.mark.parametrize("option", ["--tee=3", "--redirects=3"])
def test_the_report_has_the_traceback_of_a_log_file(option, reported, tmp_path):
    """And says which file it is."""
    result = reported(option, f"--log-dir={tmp_path / 'logs'}", THEN="raise")
    _, first, last = result.own_lines
    found = re.search(r"\(local rank 0, at .*, log file (/.*/0/stderr.log)\)$", first)
    assert found, first
    log = Path(found[1]).read_text()
    assert log.startswith("Traceback (most recent call last):\n  File ")
    shown = "".join(f"    {line}\n" for line in log.splitlines())
    assert result.err.endswith(f"{first}\n{shown}{last}\n")
    assert last.endswith(": ValueError: a fault of the script")
    prefixed = re.findall("^.*default0.*Traceback", result.err, re.MULTILINE)
    assert len(prefixed) == (option == "--tee=3")


def test_the_order_of_stdout_and_stderr_is_kept(reported):
    """Where they are one file, the report says so, and has no more to say."""
    streams = {"2": "as stdout"}
    result = reported("--hpc-preload=none", streams=streams, THEN="raise")
    assert result.err == ""
    start, out, *traceback, first, unread, last = result.out.splitlines()
    assert START in start
    assert out.startswith("out 0 ")
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-1] == "ValueError: a fault of the script"
    assert first.startswith(f"{FAILED}worker 0 ended with exit code 1 (local rank 0, ")
    assert unread.startswith("torchrun_hpc:     look for its stderr in the output: ")
    assert "it is the same file as stdout" in unread
    assert last == f"{FAILED}worker 0 ended with exit code 1"


NOT_STARTED = {
    "no interpreter line": (["--no-python", "./program"], {}, "Exec format error"),
    "no such Python": (
        ["report.py"],
        {"PYTHON_EXEC": "/no/python"},
        "No such file or directory: /no/python",
    ),
}


@pytest.mark.parametrize("case", NOT_STARTED)
def test_a_program_that_cannot_be_started_is_one_message(case, launcher, folder):
    argv, environ, problem = NOT_STARTED[case]
    program = folder / "program"
    program.write_text("echo\n")
    program.chmod(0o755)
    result = launcher.launch(OURS, argv, cwd=folder, **environ)
    assert result.code == 1
    start, error = result.err.splitlines()
    assert START in start
    assert error.startswith("torchrun_hpc: error[HPC127]: on ")
    assert f": {problem}" in error


def test_a_function_of_torchs_fails(reported):
    """It runs the script, writes nothing, and torch may be the first to see its end."""
    result = reported("--run-path", "--monitor-interval=0.01", THEN="raise")
    assert "ValueError: a fault of the script" in result.err


# All bytes, more than a pipe has room for, and the last line without an end.
BYTES = """
import os, sys
os.write(2, bytes(range(256)) * 2000)
os.write(1, bytes(range(256)))
sys.stderr.write("50 %\\r100 %")
"""
ALL_BYTES = bytes(range(256))


@pytest.mark.parametrize("options", [(), ("--hpc-preload=none",)])
def test_streams_arrive_byte_for_byte(options, tmp_path):
    """By a pipe, and in a file."""
    (tmp_path / "train.py").write_text(BYTES)
    with (
        (tmp_path / "stderr").open("wb") as file,
        contextlib.ExitStack() as ending,
    ):
        command = [*COMMANDS[OURS], *options, "train.py"]
        programs = [
            ending.enter_context(RunningProgram(command, cwd=tmp_path, stderr=stderr))
            for stderr in (subprocess.PIPE, file)
        ]
        outs, errs = zip(*(p.process.communicate() for p in programs), strict=True)
        assert [program.wait() for program in programs] == [0, 0]
    errs = errs[0], (tmp_path / "stderr").read_bytes()
    for out, err in zip(outs, errs, strict=True):
        start, _, rest = err.partition(b"\n")
        assert start.startswith(START.encode())
        assert rest == ALL_BYTES * 2000 + b"50 %\r100 %"
        assert out == ALL_BYTES


# --- log files --------------------------------------------------------------------


def _is_of_default(line: str) -> bool:
    """Return whether a line is torch's warning of an option that is its default."""
    return capabilities.WARNS_OF_DEFAULT.present and "master_addr is only" in line


def _tree(base: Path) -> dict[str, str]:
    """Return all files below a folder: names without what is random, and contents."""
    return {
        re.sub(r"(?<=my-job_)[^/]+", "X", str(path.relative_to(base))): path.read_text()
        for path in base.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    "options",
    [
        "-r3",
        "--tee=3",
        "--redirects=0:1,1:2 -t 0:2,1:1",
        "-t3 --local-ranks-filter=1",
        "-r3 --duplicate-stdout-filters=out",
    ],
)
def test_log_files(options, launch, tmp_path):
    line = ComparedLine(
        f"SPEAK=1 OMP_NUM_THREADS=1 {C10D} --rdzv-id=my-job {options} "
        "--log-dir={base}/logs-{which} --nproc-per-node=2"
    )
    launched = launch(line)
    stock, stock_files = launched[STOCK].result, _tree(tmp_path / f"logs-{STOCK}")
    assert stock.code == 0, stock.err
    assert stock_files
    theirs = [x for x in stock.err.splitlines() if not _is_of_default(x)]
    for which in (OURS, FORKS):
        ours = launched[which].result
        assert ours.code == 0, (which, ours.err)
        assert _tree(tmp_path / f"logs-{which}") == stock_files, which
        assert sorted(ours.out.splitlines()) == sorted(stock.out.splitlines()), which
        rest = [x for x in ours.err.splitlines() if x not in ours.own_lines]
        assert len(ours.own_lines) == 1, (which, ours.err)
        assert sorted(rest) == sorted(theirs), which


def test_no_folder_is_left_over(launcher, folder, tmp_path):
    """Reading the arguments twice must not make folders for logs twice."""
    commands = []
    for which in BOTH:
        (tmp_path / which).mkdir()
        environ = {"TMPDIR": str(tmp_path / which), "REPORT": str(tmp_path)}
        commands.append(Command(which, ["-r3", *bare(which), "report.py"], environ))
    launcher.launch_all(commands, cwd=folder)
    ours, stock = (
        [p.name.partition("_")[0] for p in (tmp_path / which).iterdir()]
        for which in BOTH
    )
    assert ours == stock


# --- ports ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-backend=c10d --rdzv-endpoint=localhost:{port}",
        "--master-port={port}",
    ],
)
def test_a_port_that_is_taken(options, launcher, folder):
    """By another job's store: stock torchrun takes part in that job's rendezvous."""
    holder = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    argv = options.format(port=holder.port).split()
    result = launcher.launch(OURS, [*argv, "report.py"], cwd=folder)
    assert "Traceback" not in result.err
    assert result.code == 2, result.err
    (line,) = result.own_lines
    where = f"port {holder.port} on 127.0.0.1"
    start = f"torchrun_hpc: error[HPC055]: {where} cannot be used: it is taken by "
    assert line.startswith(start)
    assert f"(pid {os.getpid()}" in line


# --- two nodes without a scheduler: torchrun's own business -------------------------


@pytest.mark.parametrize(
    "options",
    [
        "--rdzv-backend=c10d --rdzv-endpoint=localhost:{port} --rdzv-id=x",
        "--node-rank={node} --master-addr=127.0.0.1 --master-port={port}",
    ],
)
def test_two_nodes_by_hand(options, launcher, folder, tmp_path):
    commands = []
    for which in BOTH:
        port = own_port()
        (tmp_path / which).mkdir()
        for node in range(2):
            argv = options.format(port=port, node=node).split()
            words = ["--nnodes=2", *argv, "report.py"]
            commands.append(Command(which, words, {"REPORT": str(tmp_path / which)}))
    results = launcher.launch_all(commands, cwd=folder, at_once=4)
    assert [result.code for result in results] == [0] * 4, [r.err for r in results]
    ours, stock = (reports(tmp_path / which) for which in BOTH)
    for workers in (ours, stock):
        assert [w["environ"]["RANK"] for w in workers] == ["0", "1"]
        assert [w["environ"]["GROUP_RANK"] for w in workers] == ["0", "1"]
        assert [w["environ"]["WORLD_SIZE"] for w in workers] == ["2", "2"]
        for worker in workers:
            assert (worker["reachable"] is True) is is_kept(worker)
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["environ"].keys() == theirs["environ"].keys() | more(ComparedLine())
    for result in results[:2]:
        assert "Traceback" not in result.err
    # The host of the endpoint speaks; with c10d both are on its machine.
    own = [len(own_lines(result.err)) for result in results[:2]]
    assert own == [1, int("c10d" in options)]

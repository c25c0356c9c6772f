"""The command: what is wrong with it is one message, and exit code 2."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from doctor.reports import make_report
from waiting import PATIENCE

from torchrun_hpc import doctor
from torchrun_hpc.doctor import __main__ as command
from torchrun_hpc.errors import LaunchError

WITH_A_WRONG_LINK = make_report(links=[{"first": 0}])
OF_ANOTHER_SCHEMA = make_report(schema="torchrun_hpc.doctor/0")
BAD = {
    "not JSON": b"{",
    "no report": b"{}",
    "a list": b"[]",
    "another schema": json.dumps(OF_ANOTHER_SCHEMA).encode(),
    "another one": json.dumps(WITH_A_WRONG_LINK).encode(),
    "deep": b"[" * 100_000,
    "not UTF-8": b"\xff",
}


def wrong(capsys, *argv):
    """Run a command that is wrong; return its message."""
    with pytest.raises(SystemExit) as ended:
        command.main([*argv])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_sizes(capsys):
    sizes = {"8": 8, "512K": 2**19, "16M": 2**24, "1G": 2**30, "2GiB": 2**31}
    assert {size: command._bytes(size) for size in sizes} == sizes
    for size in ["", "much", "-1", "0", "7", "1.5M", "1T", "M"]:
        line = wrong(capsys, f"--max-bytes={size}")
        assert f"HPC010 --max-bytes={size}: type a size of 8 bytes or more" in line


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--timeout=abc"], "argument --timeout: invalid float value: 'abc'"),
        (["--timeout=nan"], "--timeout=nan: type seconds"),
        (["--timeout=0"], "--timeout=0: type seconds"),
        (["--timeout=-3"], "--timeout=-3: type seconds"),
        (["--json"], "argument --json: expected one argument"),
        (["--json="], "--json= has no file"),
        (["--compare", ""], "--compare= has no file"),
        (["--hpc-dry-run"], "--hpc_dry_run=table: the doctor has no dry run"),
        (["--nproc_per_node=0"], "--nproc_per_node=0 starts no worker"),
        (["--nproc-per-node=two"], "--nproc_per_node=two: type a number"),
        (["--nnodes=2", "--node_rank=2", "--master_addr=127.0.0.1"], "nodes 0 to 1"),
        (["--jsn=a", "--nnodes=2"], "--jsn=a is no option of the doctor or torchrun"),
    ],
)
def test_wrong_values(words, problem, capsys):
    line = wrong(capsys, *words)
    assert ("HPC013 " if problem.endswith("worker") else "HPC010 ") in line
    assert problem in line


@pytest.mark.parametrize(
    ("argv", "json_file", "words"),
    [
        (["--json=a", "--nnodes=2"], "a", ["--nnodes=2"]),
        (["--nproc-per-node", "4", "--json", "a"], "a", ["--nproc-per-node", "4"]),
        # The job's own line: what stands behind the script is the script's.
        (["--nnodes=2", "a.py", "--json", "b"], None,
         ["--nnodes=2", "a.py", "--json", "b"]),
        (["--json", "a", "a.py", "--json"], "a", ["a.py", "--json"]),
        (["a.py", "--timeout=auto", "--help"], None,
         ["a.py", "--timeout=auto", "--help"]),
        (["--json", "a.py", "a.py"], "a.py", ["a.py"]),
        (["--rdzv_id", "a.py", "a.py"], None, ["--rdzv_id", "a.py", "a.py"]),
        (["--json=a", "-m", "train", "--html=c", "--", "x"], "a",
         ["-m", "train", "--html=c", "--", "x"]),
    ],
)  # fmt: skip
def test_what_is_ours(argv, json_file, words):
    args, others = command._parsed(argv)
    assert (args.json, args.html, others) == (json_file, None, words)


@pytest.mark.parametrize("kind", BAD)
def test_a_wrong_earlier_report(kind, capsys, tmp_path):
    file = tmp_path / "report.json"
    file.write_bytes(BAD[kind])
    line = wrong(capsys, f"--compare={file}")
    assert f"HPC195 --compare={file} cannot be read: it is no report" in line


NO_FILES = {
    "a pipe": (os.mkfifo, "It is not a file"),
    "a folder": (os.mkdir, "Is a directory"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "It is not a file"),
    "large": (lambda path: path.touch() or os.truncate(path, 2**40), "more than"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_earlier_report_at_all(kind, capsys, tmp_path):
    make, problem = NO_FILES[kind]
    make(tmp_path / "report.json")
    line = wrong(capsys, f"--compare={tmp_path / 'report.json'}")
    assert f"HPC195 --compare={tmp_path / 'report.json'} cannot be read: " in line
    assert problem in line


def test_an_earlier_report(tmp_path):
    """Also where the user has a link to the latest one."""
    file, link = tmp_path / "report.json", tmp_path / "latest"
    file.write_text(json.dumps(make_report()))
    link.symlink_to(file)
    for each in (file, link):
        assert command._earlier(str(each)) == make_report()


def test_a_page_without_the_library_for_pictures(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "matplotlib" else find(n)
    )
    assert "HPC196 --html draws with matplotlib" in wrong(capsys, "--html=page.html")


@pytest.mark.parametrize("name", ["json", "html"])
def test_a_file_that_cannot_be_written(name, tmp_path, capsys):
    """The other one is."""
    files = {"json": str(tmp_path / "report"), "html": str(tmp_path / "page")}
    files[name] = str(tmp_path / "none" / "file")
    assert not command._write(make_report(), argparse.Namespace(**files))
    assert "HPC197" in capsys.readouterr().err
    assert len([*tmp_path.iterdir()]) == 1


def write(path):
    wanted = argparse.Namespace(json=str(path), html=None)
    return command._write(make_report(), wanted)


def test_a_link_is_replaced_and_not_followed(tmp_path):
    victim, file = tmp_path / "victim", tmp_path / "report.json"
    for target in (victim, tmp_path / "nothing"):
        victim.write_text("what must stay")
        file.unlink(missing_ok=True)
        file.symlink_to(target)
        assert write(file)
        assert victim.read_text() == "what must stay"
        assert json.loads(file.read_text()) == make_report()
    assert {*tmp_path.iterdir()} == {victim, file}


def test_a_pipe_of_the_shell_is_written_to(tmp_path, monkeypatch):
    """The report has more than a pipe holds: the reader comes in time."""
    monkeypatch.setattr(command, "_as_json", lambda _: "x" * 2**18)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDWR)  # so that it does not end before it begins
    with os.fdopen(reading, "rb") as read, ThreadPoolExecutor(1) as pool:
        got = pool.submit(read.read, 2**18)
        assert write(f"/dev/fd/{reading}")
        assert got.result(PATIENCE) == b"x" * 2**18


@pytest.mark.parametrize("name", ["/dev/fd", "/proc/self/fd"])
def test_standard_output_that_is_a_file_is_written_to(name, tmp_path):
    """As by `--json=/dev/stdout >> job.log`: what is there already stays."""
    file = tmp_path / "report.json"
    with file.open("w") as output:
        output.write("what must stay\n")
        output.flush()
        assert write(f"{name}/{output.fileno()}")
        assert os.fstat(output.fileno()).st_nlink == 1
    before, written = file.read_text().split("\n", 1)
    assert (before, json.loads(written)) == ("what must stay", make_report())


def test_a_device_stays_one(capsys):
    before = Path("/dev/null").stat()
    assert write("/dev/null")
    assert Path("/dev/null").stat().st_ino == before.st_ino
    assert capsys.readouterr().err == ""


def test_a_program_gets_the_code_of_a_fault(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(LaunchError, match=r"HPC054 .*none0"):
        doctor.examine()

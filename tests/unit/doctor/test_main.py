"""The command: what is wrong with it is one message, and exit code 2."""

from __future__ import annotations

import argparse
import importlib.util
import json

import pytest
from doctor.reports import make_report

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
        (["--nproc_per_node=0"], "--nproc_per_node=0: type a number"),
        (["--nproc-per-node=two"], "--nproc_per_node=two: type a number"),
        (["--nnodes=2", "--node_rank=2", "--master_addr=127.0.0.1"], "nodes 0 to 1"),
        (["--jsn=a", "--nnodes=2"], "--jsn=a is no option of the doctor or torchrun"),
    ],
)
def test_wrong_values(words, problem, capsys):
    line = wrong(capsys, *words)
    assert "HPC010 " in line
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


def test_an_earlier_report(tmp_path):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(make_report()))
    assert command._earlier(str(file)) == make_report()


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


def test_a_program_gets_the_code_of_a_fault(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(LaunchError, match=r"HPC054 .*none0"):
        doctor.examine()

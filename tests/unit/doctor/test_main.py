"""The command: what is wrong with it is one message, and exit code 2."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.doctor_reports import make_report
from torchrun_hpc import doctor, wire
from torchrun_hpc.doctor import __main__ as command
from torchrun_hpc.doctor.results import DoctorReport, NotMetError
from torchrun_hpc.errors import LaunchError, Message

REPORT = wire.encode(make_report())
WITH_A_WRONG_LINK = REPORT | {"links": [{"first": 0}]}
OF_ANOTHER_SCHEMA = REPORT | {"schema": "torchrun_hpc.doctor/1"}
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
        assert f"HPC010]: --max-bytes={size} is not a valid size" in line


WRONG = [
    *(f"--timeout={value}" for value in ("abc", "nan", "1e300", "0", "-3", "5")),
    *("--json", "--json=", "--compare ", "--html=-", "--compare=-"),
    *("--json=a --html=a", "--quiet=yes", "--hpc-dry-run", "--nproc_per_node=0"),
    *("--nproc-per-node=two", "--nnodes=2 --node_rank=2 --master_addr=127.0.0.1"),
    "--jsn=a --nnodes=2",
]


def test_wrong_values(capsys, golden):
    lines = {words: wrong(capsys, *words.split(" ")) for words in WRONG}
    assert [words for words in WRONG if "HPC014]: " in lines[words]] == [
        "--nproc_per_node=0"
    ]
    assert all("HPC014" in line or "HPC010" in line for line in lines.values())
    of_torch = r"(?<=Pass a number, ).*"
    golden({words: re.sub(of_torch, "TORCH'S", line) for words, line in lines.items()})


@pytest.mark.parametrize(
    ("argv", "json_file", "words"),
    [
        (["--json=a", "--nnodes=2"], "a", ["--nnodes=2"]),
        (["--nproc-per-node", "4", "--json", "a"], "a", ["--nproc-per-node", "4"]),
        # The job's own line: what comes after the script is the script's.
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
    assert f"HPC195]: cannot read --compare={file}: it is not a report" in line


def make_large(path):
    path.touch()
    os.truncate(path, 2**40)


NO_FILES = {
    "a pipe": (os.mkfifo, "It is not a file"),
    "a folder": (os.mkdir, "Is a directory"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "It is not a file"),
    "large": (make_large, "more than"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_earlier_report_at_all(kind, capsys, tmp_path):
    make, problem = NO_FILES[kind]
    make(tmp_path / "report.json")
    line = wrong(capsys, f"--compare={tmp_path / 'report.json'}")
    assert f"HPC195]: cannot read --compare={tmp_path / 'report.json'}: " in line
    assert problem in line


def test_an_earlier_report(tmp_path):
    """Also if the user has a link to the latest one."""
    file, link = tmp_path / "report.json", tmp_path / "latest"
    file.write_text(json.dumps(REPORT))
    link.symlink_to(file)
    for each in (file, link):
        assert command._earlier(str(each)) == make_report()


def test_a_program_gets_the_code_of_a_fault(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(LaunchError, match=r"HPC054 .*none0"):
        doctor.examine()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_bytes": "64K"},
        {"max_bytes": 0},
        {"timeout": "1"},
        {"timeout": 0},
        {"argv": "--standalone"},
    ],
)
def test_a_program_may_not_pass_everything_either(wrong):
    text = r"HPC010 (--max-bytes|--timeout|argv)=.*[Pp]ass "
    with pytest.raises(LaunchError, match=text):
        doctor.examine(**wrong)


def place_at(monkeypatch, *, is_first=True):
    place = SimpleNamespace(is_first=is_first)
    monkeypatch.setattr(command, "find_place", lambda *_: place)


@pytest.mark.parametrize(
    ("is_first", "scheduler", "code"),
    [(True, "Slurm", 1), (False, "", 1), (False, "Open MPI in Slurm", 0)],
)
def test_a_task_that_has_not_met_the_others(is_first, scheduler, code, monkeypatch):
    """Mpirun would end all tasks with it. Only the first needs an earlier report."""

    def examine(*_):
        alone = replace(make_report(), scheduler=scheduler)
        raise NotMetError(Message("HPC198", "only this node was seen"), alone)

    place_at(monkeypatch, is_first=is_first)
    monkeypatch.setattr(command, "examine", examine)
    assert command.main([] if is_first else ["--compare=/no/report"]) == code


# --- what a person, or a program, gets ------------------------------------------------


@pytest.fixture
def _examined(monkeypatch):
    """Let the examination show how far it is, and find a slow node."""

    def examine(_place, tell):
        tell(Message("HPC177", "3 nodes: 3 pairs"))
        return make_report(3, slow=[1])

    place_at(monkeypatch)
    monkeypatch.setattr(command, "examine", examine)


VERDICT = "Suspicious: jwb0002 (1 of 3 nodes).\n    --exclude=jwb0002\n"


@pytest.mark.usefixtures("_examined")
def test_the_verdict_is_on_top(capsys):
    assert command.main([]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{VERDICT}\n3 nodes examined in ")
    assert printed.err == "torchrun_hpc: note[HPC177]: 3 nodes: 3 pairs\n"


@pytest.mark.usefixtures("_examined")
def test_quiet_is_the_verdict_only(capsys):
    assert command.main(["--quiet"]) == 1
    assert capsys.readouterr() == (VERDICT, "")


@pytest.mark.usefixtures("_examined")
@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_a_program_gets_json_and_nothing_else(quiet, capsys):
    assert command.main(["--json=-", *quiet]) == 1
    printed = capsys.readouterr()
    found = wire.decode(DoctorReport, json.loads(printed.out))
    assert found == make_report(3, slow=[1])
    assert printed.err.endswith(VERDICT)
    assert ("HPC177" in printed.err) is not bool(quiet)

"""Files that a person wants: they are tried before the examination, and written."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
from doctor.reports import make_report
from waiting import PATIENCE, until

from torchrun_hpc import wire
from torchrun_hpc.doctor import output
from torchrun_hpc.doctor.output import Output

REPORT = json.loads(json.dumps(wire.encode(make_report())))

FOLDER, NONE = "Is a directory", "No such file or directory"
NO_FOLDER = "Not a directory"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "old").write_text("report")
    (tmp_path / "link to none").symlink_to("target")
    (tmp_path / "link out").symlink_to("none/target")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("new", None),
        ("old", None),
        ("pipe", None),
        ("link to none", None),
        ("/dev/null", None),
        ("", FOLDER),
        ("none/file", NONE),
        ("old/file", NO_FOLDER),
        ("link out", None),  # it is replaced
        ("/dev/stdout", None),
    ],
)
def test_a_file_is_tried_and_left_as_it_is(name, problem, folder):
    before = {file: file.lstat() for file in folder.iterdir()}
    file, messages = str(folder / name), []
    Output(html=file).check(messages.append)
    assert [message.text for message in messages] == [
        f"cannot write {file}: {each}. The report is printed anyway"
        for each in filter(None, [problem])
    ]
    assert {file: file.lstat() for file in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["new", "old"])
def test_a_folder_of_others(name, folder, as_nobody):
    file = str(folder / name)

    def try_files():
        messages = []
        Output(file).check(lambda message: messages.append(message.text))
        return messages

    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    (text,) = as_nobody(try_files)
    assert text.startswith(f"cannot write {file}: Permission denied.")


def test_nobody_waits_for_what_is_tried(folder):
    messages = []
    Output("-", str(folder / "none" / "page")).start_check(messages.append)
    until(lambda: messages)
    assert len(messages) == 1


def test_nothing_is_tried_without_files():
    Output().check(pytest.fail)


def test_a_program_can_write_the_same():
    assert json.loads(json.dumps(asdict(make_report()))) == REPORT


# --- what is written ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["json", "html"])
def test_a_file_that_cannot_be_written(name, tmp_path, capsys):
    """The other one is."""
    files = {"json": str(tmp_path / "report"), "html": str(tmp_path / "page")}
    files[name] = str(tmp_path / "none" / "file")
    assert not Output(**files).write(make_report())
    assert "HPC197" in capsys.readouterr().err
    assert len([*tmp_path.iterdir()]) == 1


def write(path):
    return Output(json=str(path), is_quiet=True).write(make_report())


def test_a_link_is_replaced_and_not_followed(tmp_path):
    victim, file = tmp_path / "victim", tmp_path / "report.json"
    for target in (victim, tmp_path / "nothing"):
        victim.write_text("what must stay")
        file.unlink(missing_ok=True)
        file.symlink_to(target)
        assert write(file)
        assert victim.read_text() == "what must stay"
        assert json.loads(file.read_text()) == REPORT
    assert {*tmp_path.iterdir()} == {victim, file}


def test_a_pipe_of_the_shell_is_written_to(tmp_path, monkeypatch):
    """The report has more than a pipe holds: the reader comes in time."""
    monkeypatch.setattr(output, "_as_json", lambda _: "x" * 2**18)
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
    assert (before, json.loads(written)) == ("what must stay", REPORT)


def test_a_device_stays_one(capsys):
    before = Path("/dev/null").stat()
    assert write("/dev/null")
    assert Path("/dev/null").stat().st_ino == before.st_ino
    assert capsys.readouterr().err == ""


def test_standard_output_that_is_closed(capsys, monkeypatch, tmp_path):
    """The file is written all the same."""
    monkeypatch.setattr(sys, "stdout", None)
    assert not write(tmp_path / "report")
    assert "HPC101" in capsys.readouterr().err
    assert json.loads((tmp_path / "report").read_text()) == REPORT

"""Reading and writing files in folders in which others can also write."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from torchrun_hpc import files
from torchrun_hpc.host.procfs import BOOT_ID

VICTIM = "what must stay\n"


@pytest.fixture
def folder(tmp_path):
    """Make one of each kind, and a file that must stay as it is."""
    (tmp_path / "victim").write_text(VICTIM)
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").touch()
    (tmp_path / "large").write_text("12345")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("victim")
    (tmp_path / "link to nothing").symlink_to("nothing")
    (tmp_path / "link to itself").symlink_to("link to itself")
    (tmp_path / "link to a pipe").symlink_to("pipe")
    (tmp_path / "second name").hardlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        number = os.open(tmp_path, os.O_PATH)
        made.bind(f"/proc/self/fd/{number}/socket")  # a name has 107 bytes
        os.close(number)
    return tmp_path


def open_files():
    return sorted(each.name for each in Path("/proc/self/fd").iterdir())


# --- reading --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "most", "expected"),
    [
        ("file", 4, b"text"),
        ("file", 2**20, b"text"),
        ("empty", 0, b""),
        ("link", 99, VICTIM.encode()),
        (BOOT_ID, 99, Path(BOOT_ID).read_bytes()),  # of the kernel: its size is 0
    ],
)
def test_what_is_read(name, most, expected, folder):
    assert files.read(folder / name, most) == expected
    assert files.read(str(folder / name), most) == expected


@pytest.mark.parametrize(
    ("name", "flags", "problem"),
    [
        ("missing", 0, "No such file or directory"),
        ("link to nothing", 0, "No such file or directory"),
        ("file/file", 0, "Not a directory"),
        ("folder", 0, "Is a directory"),
        ("pipe", 0, "It is not a file"),
        ("link to a pipe", 0, "It is not a file"),
        ("/dev/zero", 0, "It is not a file"),
        ("socket", 0, "No such device or address"),
        ("large", 0, "It has more than 4 bytes"),
        ("link to itself", 0, "Too many levels of symbolic links"),
        ("link", os.O_NOFOLLOW, "Too many levels of symbolic links"),
        ("link to a pipe", os.O_NOFOLLOW, "Too many levels of symbolic links"),
    ],
)
def test_what_is_not_read(name, flags, problem, folder):
    before = open_files()
    with pytest.raises(OSError, match=problem):
        files.read(folder / name, 4, flags)
    assert open_files() == before


def test_no_more_is_read_than_allowed(folder):
    """The file has holes, and would fill all memory."""
    os.truncate(folder / "large", 2**40)
    with pytest.raises(OSError, match="It has more than 10,000 bytes"):
        files.read(folder / "large", 10_000)


# --- writing --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("new", "file", "link", "link to nothing", "link to itself"),
        *("link to a pipe", "second name", "pipe", "socket"),
    ],
)
def test_what_is_there_is_replaced_and_never_followed(name, folder):
    others = {*folder.iterdir()} - {folder / name}
    files.write(folder / name, "ä\n")
    assert {*folder.iterdir()} - {folder / name} == others
    assert (folder / "victim").read_text() == VICTIM
    assert (folder / name).lstat().st_nlink == 1
    assert not (folder / name).is_symlink()
    assert (folder / name).read_bytes() == "ä\n".encode()


@pytest.mark.parametrize("mask", [0, 0o022, 0o027, 0o077])
def test_others_may_read_it_as_the_umask_says(mask, folder):
    before = os.umask(mask)
    try:
        for name in ("new", "file"):
            files.write(folder / name, "")
            assert (folder / name).stat().st_mode & 0o7777 == 0o666 & ~mask
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("folder", "", IsADirectoryError),
        ("none/file", "", FileNotFoundError),
        ("file/file", "", NotADirectoryError),
        ("file", "\udcff", UnicodeEncodeError),
    ],
)
def test_where_nothing_can_be_written_nothing_is_left(name, text, error, folder):
    before = sorted(folder.rglob("*"))
    with pytest.raises(error):
        files.write(folder / name, text)
    assert sorted(folder.rglob("*")) == before
    assert (folder / "file").read_text() == "text"


def test_nobody_can_guess_the_name_of_a_file_that_is_being_written(folder, monkeypatch):
    names = []

    def replace(new, _target):
        names.append(new.name)
        assert new.parent == folder

    monkeypatch.setattr(Path, "replace", replace)
    for _ in range(2):
        files.write(folder / "file", "")
    first, second = names
    assert first != second
    assert all(len(name) > 16 and name.startswith(".") for name in names)

"""Files that a person wants are tried before the examination."""

from __future__ import annotations

import os

import pytest

from torchrun_hpc.doctor import examination

FOLDER, NONE = "Is a directory", "No such file or directory"


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
        ("old/file", NONE),
        ("link out", None),  # it is replaced
        ("/dev/stdout", None),
    ],
)
def test_a_file_is_tried_and_left_as_it_is(name, problem, folder):
    before = {file: file.lstat() for file in folder.iterdir()}
    file, messages = str(folder / name), []
    examination._try_files([file], messages.append)
    assert [message.text for message in messages] == [
        f"{file} cannot be written: {each}; the report is printed all the same"
        for each in filter(None, [problem])
    ]
    assert {file: file.lstat() for file in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["new", "old"])
def test_a_folder_of_others(name, folder, as_nobody):
    file = str(folder / name)

    def try_files():
        messages = []
        examination._try_files([file], lambda message: messages.append(message.text))
        return messages

    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    (text,) = as_nobody(try_files)
    assert text.startswith(f"{file} cannot be written: Permission denied;")

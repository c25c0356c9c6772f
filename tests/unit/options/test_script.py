"""The script that Python is to run, looked at before anything is started."""

from __future__ import annotations

import os
import zipfile

import pytest

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.options.options import Options
from torchrun_hpc.options.script import check, check_program, check_script


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Make files in the folder in which the workers look."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "no suffix").touch()
    for name in ("empty", "program", "compiled"):
        (tmp_path / name).mkdir()
    (tmp_path / "program" / "__main__.py").touch()
    (tmp_path / "compiled" / "__main__.pyc").touch()
    (tmp_path / "link.py").symlink_to("train.py")
    (tmp_path / "broken.py").symlink_to("nothing.py")
    with zipfile.ZipFile(tmp_path / "archive.pyz", "w") as archive:
        archive.writestr("__main__.py", "")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        *("train.py", "./train.py", "../{}/train.py", "no suffix", "link.py"),
        *("program", "program/", "compiled", "archive.pyz", "pipe", "{absolute}"),
        *("-", "-c", "/dev/stdin", "/dev/null"),
    ],
)
def test_what_python_runs(name, folder):
    name = name.replace("{absolute}", str(folder / "train.py"))
    check_script(name.replace("{}", folder.name), {})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("trian.py", "No such file or directory in {}"),
        ("scripts/train.py", "No such file or directory in {}"),
        ("{}/none.py", "No such file or directory. "),
        ("broken.py", "No such file or directory in {}"),
        ("train.py/x", "Not a directory in {}"),
        ("empty", "a folder without __main__.py"),
        ("x" * 300, "File name too long"),
        ("", "a folder without __main__.py"),
    ],
)
def test_what_it_does_not_find(name, why, folder):
    explicit = name.replace("{}", str(folder))
    with pytest.raises(LaunchError) as caught:
        check_script(explicit, {})
    assert (caught.value.code, caught.value.everywhere) == ("HPC150", False)
    start = f"{explicit} cannot be run: "
    assert str(caught.value).startswith(start + why.replace("{}", str(folder)))


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("trian.py", "Did you mean train.py?"),
        ("examples/dpp.py", "Did you mean examples/ddp.py?"),
        ("ddp.py", "Pass a path that is valid on every node"),
        ("scripts/train.py", "Pass a path that is valid on every node"),
    ],
)
def test_a_near_script_is_proposed(name, guess, folder):
    (folder / "examples").mkdir()
    (folder / "examples" / "ddp.py").touch()
    with pytest.raises(LaunchError) as caught:
        check_script(name, {})
    assert guess in str(caught.value)


def test_a_working_folder_that_is_gone(folder, monkeypatch):
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()
    with pytest.raises(LaunchError, match="No such file or directory"):
        check_script("train.py", {})
    check_script(str(folder / "train.py"), {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(folder):
    (folder / "train.py").chmod(0)
    with pytest.raises(LaunchError, match="Permission denied"):
        check_script("train.py", {})


def test_another_python_may_see_other_files():
    check_script("/workspace/train.py", {"PYTHON_EXEC": "/opt/in-container"})


def test_programs(folder):
    (folder / "run.sh").touch(0o755)
    check_program("run.sh", {"PATH": f"/nowhere{os.pathsep}{folder}"})
    check_program("./run.sh", {})
    for name, path in (("run.sh", "/nowhere"), ("./train.py", str(folder)), ("", "/")):
        with pytest.raises(LaunchError, match=f"^{name}: there is no such program"):
            check_program(name, {"PATH": path})


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, "HPC150"),
        ({"no_python": False, "module": False, "hpc_dry_run": ""}, "HPC150"),
        ({"no_python": True}, "HPC016"),
        ({"no_python": True, "hpc_dry_run": "table"}, "HPC016"),
        ({"module": True}, None),
        ({"hpc_dry_run": "table"}, None),
    ],
)
def test_what_is_checked(options, code):
    environ = {"PATH": "/nowhere"}
    if code is None:
        check("not-there", Options(**options), environ)
        return
    with pytest.raises(LaunchError) as caught:
        check("not-there", Options(**options), environ)
    assert caught.value.code == code

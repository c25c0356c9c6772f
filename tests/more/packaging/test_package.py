"""The sdist and the wheel, and the wheel in an empty environment."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.metadata import Metadata

import torchrun_hpc
from tests.support import ROOT
from tests.support.cluster.commands import require
from tests.support.pages.blocks import block
from tests.support.patience import NEVER_S
from tests.support.processes import clean_environ, run

pytestmark = pytest.mark.xdist_group("package")

NAME = f"torchrun_hpc-{torchrun_hpc.__version__}"


@pytest.fixture(scope="module")
def sdist(built):
    return built / f"{NAME}.tar.gz"


@pytest.fixture(scope="module")
def wheel(built):
    return built / f"{NAME}-py3-none-any.whl"


def test_twine_finds_no_fault(sdist, wheel, tool):
    done = tool("twine", "check", "--strict", str(sdist), str(wheel))
    assert done.code == 0, done.out + done.err


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "torchrun_hpc").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {"torchrun_hpc/py.typed", "torchrun_hpc/sites/jsc.toml"} < package
    about = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(names) == sorted(package | {f"{NAME}.dist-info/{x}" for x in about})


@pytest.mark.skipif(
    not (shutil.which("git") and (ROOT / ".git").exists()),
    reason="only git knows what is in the repository",
)
def test_the_sdist_has_all_of_the_repository(sdist):
    # Without the option, git refuses a checkout that belongs to somebody else.
    listed = run(["git", "-c", "safe.directory=*", "ls-files"], cwd=ROOT)
    assert listed.code == 0, listed.err
    with tarfile.open(sdist) as archive:
        files = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    folders = {parent.as_posix() for name in files for parent in Path(name).parents}
    published = files - folders - {NAME, "PKG-INFO"}
    assert published == set(listed.out.splitlines())


def test_metadata(wheel):
    text = zipfile.ZipFile(wheel).read(f"{NAME}.dist-info/METADATA")
    about: Any = Metadata.from_email(text)
    needed = {str(line) for line in about.requires_dist if "extra ==" not in str(line)}
    tomli = 'tomli; python_version < "3.11"'
    assert needed == {"torch>=2.0", "psutil", "packaging", tomli}
    assert set(about.provides_extra) == {"doctor", "preload", "stacks"}
    assert str(about.requires_python) == ">=3.10"
    assert about.license_expression == "BSD-3-Clause"


# --- installed ---------------------------------------------------------------------

SCRIPT = r"""
import os, sys
sys.stdout.write(f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}\n")
"""


@pytest.fixture(scope="module")
def environment(wheel, tool, tmp_path_factory):
    """Install the wheel into an environment that is empty, even of pip.

    The documentation has a clone's folder in its place, of which pip makes a wheel.
    """
    if os.environ.get("CI", "").lower() not in {"1", "true", "yes"}:
        pytest.skip("torch is installed once more: CI does that")
    assert block("docs/install.md", "pip install").text == "pip install .\n"
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    # The release of torch that is here already: pip has it in its cache.
    pinned = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
    [torch] = re.findall(r"^torch==\S+", pinned, re.MULTILINE)
    pip = ("pip", f"--python={folder / 'bin' / 'python'}", "install", "--quiet")
    # Most of torch is never imported here: to compile it takes longer than the rest.
    done = tool(*pip, "--no-compile", str(wheel), torch, limit=NEVER_S)
    # Pip also reports this if it cannot reach an index.
    if "No matching distribution found" in done.err:
        require(f"pip does not find all packages: {done.err}")
    assert done.code == 0, done.err
    yield folder
    shutil.rmtree(folder)  # pytest would keep it, and it is large


@pytest.fixture
def start(environment, tmp_path):
    """Start a program of that environment in a folder with nothing but script.py."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    programs = environment / "bin"
    environ = {k: v for k, v in clean_environ().items() if k != "PYTHONPATH"}
    environ["PATH"] = f"{programs}:{os.defpath}"

    def start(name, *arguments):
        done = run([str(programs / name), *arguments], environ=environ, cwd=tmp_path)
        assert done.code == 0, done.err
        return done

    return start


def test_it_starts_workers(start):
    done = start("torchrun_hpc", "--nproc_per_node=2", "script.py")
    assert sorted(done.out.splitlines()) == ["0 of 2", "1 of 2"]
    assert len(done.own_lines) == 1, done.err


def test_it_finds_its_data(start):
    assert "JUWELS Booster" in start("python", "-m", "torchrun_hpc.sites", "list").out
    assert "Fix: " in start("python", "-m", "torchrun_hpc.explain", "HPC125").out


def test_help_names_our_options(start):
    assert "--hpc-site" in start("python", "-m", "torchrun_hpc", "--help").out

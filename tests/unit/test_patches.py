"""The patches for administrators: one for each release; the check says what fails."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import ROOT

FOLDER = ROOT / "patches"
PATCHES = sorted(FOLDER.glob("*.patch"))

check = SimpleNamespace(**runpy.run_path(str(FOLDER / "check.py")))


@pytest.mark.parametrize(
    ("name", "releases"),
    [
        ("torch-2.4.patch", ["2.4"]),
        ("torch-2.8-2.11.patch", ["2.8", "2.9", "2.10", "2.11"]),
    ],
)
def test_the_name_says_the_releases(name, releases):
    assert check.releases_of(Path("folder", name)) == releases


@pytest.mark.parametrize(
    "name",
    ["torch-2.4.1.patch", "torch-2.9-2.8.patch", "torch-3.0.patch", "2.4.patch", "x"],
)
def test_another_name_is_an_error(name):
    with pytest.raises(check.CheckError, match=re.escape(name)):
        check.releases_of(Path(name))


def test_each_release_has_one_patch():
    assert list(check.by_release(PATCHES)) == check.RELEASES


@pytest.mark.parametrize(
    ("patches", "message"),
    [
        (PATCHES[1:], r"torch 2\..* has none"),
        ([*PATCHES, Path("torch-2.5-2.6.patch")], r"torch 2\.5 .* torch-2\.5\.patch"),
        ([*PATCHES, Path("torch-2.99.patch")], r"torch 2\.99 is not in RELEASES"),
    ],
)
def test_a_release_without_just_one_patch_is_an_error(patches, message):
    with pytest.raises(check.CheckError, match=message):
        check.by_release(patches)


def test_each_patch_changes_files_below_torch_and_has_a_row_in_the_readme():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for patch in PATCHES:
        old = re.findall(r"^--- a/(\S+)$", patch.read_text("utf-8"), re.MULTILINE)
        assert old == check.targets(patch), patch
        assert all(path.startswith("torch/distributed/") for path in old), patch
        releases = check.releases_of(patch)
        row = " to ".join(sorted({releases[0], releases[-1]}, key=releases.index))
        assert f"| `{patch.name}` | {row} |" in readme, patch


@pytest.mark.parametrize("text", ["a = 0\nb = 2\nc = 3\n", "a = 1\nb = 4\nc = 3\n", ""])
def test_a_hunk_that_does_not_fit_is_an_error(tmp_path, text):
    """Other lines around it, a patch that is already there, a file that is empty."""
    if shutil.which("patch") is None:
        pytest.skip("not installed: patch")
    module, patch = tmp_path / "run.py", tmp_path / "torch-2.4.patch"
    module.write_text(text, encoding="utf-8")
    hunk = "@@ -1,3 +1,3 @@\n a = 1\n-b = 2\n+b = 4\n c = 3\n"
    patch.write_text(f"--- a/run.py\n+++ b/run.py\n{hunk}", encoding="utf-8")
    with pytest.raises(check.CheckError, match=r"torch-2\.4\.patch does not apply"):
        check.apply(patch, tmp_path)
    assert module.read_text(encoding="utf-8") == text
    assert sorted(tmp_path.iterdir()) == [module, patch]

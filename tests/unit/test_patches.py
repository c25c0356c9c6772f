"""The patches for administrators: one for each release; the check says what fails."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "patches"
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


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_release_without_a_patch_is_found(patch):
    others = [other for other in PATCHES if other != patch]
    release = check.releases_of(patch)[0]
    with pytest.raises(check.CheckError, match=rf"torch {release} .* has none"):
        check.by_release(others)


def test_a_release_with_two_patches_is_found():
    second = Path("torch-2.5-2.6.patch")
    with pytest.raises(check.CheckError, match=r"torch 2\.5 .* torch-2\.5\.patch"):
        check.by_release([*PATCHES, second])


def test_a_patch_for_an_unknown_release_is_found():
    with pytest.raises(check.CheckError, match=r"torch 2\.99 is not in RELEASES"):
        check.by_release([*PATCHES, Path("torch-2.99.patch")])


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_readme_has_a_row_for_each_patch(patch):
    releases = check.releases_of(patch)
    row = releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"| `{patch.name}` | {row} |" in readme


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_patch_changes_files_below_torch_and_makes_none(patch):
    targets = check.targets(patch)
    old = re.findall(r"^--- a/(\S+)$", patch.read_text(encoding="utf-8"), re.MULTILINE)
    assert old == targets
    assert all(target.startswith("torch/distributed/") for target in targets)


@pytest.fixture
def small(tmp_path):
    """A torch of one file, and a patch for it."""
    if shutil.which("patch") is None:
        pytest.skip("not installed: patch")
    module = tmp_path / "torch" / "distributed" / "run.py"
    module.parent.mkdir(parents=True)
    module.write_text("a = 1\nb = 2\nc = 3\n", encoding="utf-8")
    patch = tmp_path / "torch-2.4.patch"
    patch.write_text(
        "--- a/torch/distributed/run.py\n+++ b/torch/distributed/run.py\n"
        "@@ -1,3 +1,3 @@\n a = 1\n-b = 2\n+b = 4\n c = 3\n",
        encoding="utf-8",
    )
    return SimpleNamespace(root=tmp_path, module=module, patch=patch)


def test_applying_and_undoing(small):
    before = small.module.read_text(encoding="utf-8")
    check.apply(small.patch, small.root, "--dry-run")
    assert small.module.read_text(encoding="utf-8") == before
    check.apply(small.patch, small.root)
    assert small.module.read_text(encoding="utf-8") == "a = 1\nb = 4\nc = 3\n"
    check.apply(small.patch, small.root, "--reverse")
    assert small.module.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("text", ["a = 0\nb = 2\nc = 3\n", "a = 1\nb = 4\nc = 3\n", ""])
def test_a_hunk_that_does_not_fit_is_an_error(small, text):
    """Other lines around it, a patch that is already there, a file that is empty."""
    small.module.write_text(text, encoding="utf-8")
    with pytest.raises(check.CheckError, match=r"torch-2\.4\.patch does not apply"):
        check.apply(small.patch, small.root)
    assert small.module.read_text(encoding="utf-8") == text
    assert sorted(small.root.iterdir()) == [small.root / "torch", small.patch]


def test_an_unknown_release_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        check.main(["2.99"])
    assert ended.value.code == 2
    assert "no patch for torch 2.99: there are 2.0 to" in capsys.readouterr().err

"""Checks that the patches apply to every release of torch that they are for.

    python patches/check.py            # all releases
    python patches/check.py 2.4 2.13   # these

Nothing of torch is imported. A release that is installed gives its own files; of the
others the wheel for macOS is downloaded, the smallest one (75 MB): the Python files of
all wheels of a release are the same.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

FOLDER = Path(__file__).parent

# All minor releases that some patch has to be for. Which of them a patch is for stands
# in its file's name, and nowhere else.
RELEASES = [f"2.{minor}" for minor in range(16)]

_NAME = re.compile(r"torch-2\.(\d+)(?:-2\.(\d+))?\.patch")
_TARGET = re.compile(r"^\+\+\+ b/(\S+)$", re.MULTILINE)
_PARTS = "torch/distributed/"  # what is looked at of torch
_WHEEL = (
    *("--no-deps", "--only-binary=:all:", "--implementation=cp"),
    *("--python-version=3.11", "--platform=macosx_26_0_arm64"),
)


class CheckError(Exception):
    """A patch does not do what it is for; the text is for a person."""


def releases_of(patch: Path) -> list[str]:
    """Return the minor releases that a patch is for, such as "2.4".

    Args:
        patch: ``torch-2.4.patch``, or with the first and the last of several releases,
            ``torch-2.6-2.15.patch``.

    Raises:
        CheckError: The file has another name.
    """
    match = _NAME.fullmatch(patch.name)
    if match is None:
        raise CheckError(f"{patch.name}: not torch-2.X.patch or torch-2.X-2.Y.patch")
    first = int(match[1])
    last = int(match[2] or first)
    if last < first:
        raise CheckError(f"{patch.name}: 2.{last} comes before 2.{first}")
    return [f"2.{minor}" for minor in range(first, last + 1)]


def by_release(patches: list[Path]) -> dict[str, Path]:
    """Return the one patch of each release, in the order of the releases.

    Raises:
        CheckError: A release has no patch or two, or a patch is for an unknown one.
    """
    found: dict[str, list[Path]] = {release: [] for release in RELEASES}
    for patch in patches:
        for release in releases_of(patch):
            if release not in found:
                raise CheckError(f"{patch.name}: torch {release} is not in RELEASES")
            found[release].append(patch)
    for release, several in found.items():
        if len(several) != 1:
            names = ", ".join(sorted(patch.name for patch in several)) or "none"
            raise CheckError(f"torch {release} needs one patch, and has {names}")
    return {release: several[0] for release, several in found.items()}


def targets(patch: Path) -> list[str]:
    """Return the files that a patch changes, relative to the folder above torch."""
    return _TARGET.findall(patch.read_text(encoding="utf-8"))


def apply(patch: Path, root: Path, *options: str) -> str:
    """Apply a patch to the torch below a folder, and return what patch(1) says.

    Line numbers may be off, the lines themselves not (no fuzz).

    Args:
        patch: The patch.
        root: The folder above torch.
        options: More options of patch(1): ``--dry-run``, ``--reverse``.

    Raises:
        CheckError: A hunk does not apply, or there is no patch(1).
    """
    program = shutil.which("patch")
    if program is None:
        raise CheckError("patch(1) is not installed")
    done = _run(
        [
            *(program, "--strip=1", "--fuzz=0", "--batch", "--forward", *options),
            *("--no-backup-if-mismatch", "--reject-file=-"),
            *(f"--directory={root}", f"--input={patch.resolve()}"),
        ],
    )
    if done.returncode != 0:
        raise CheckError(f"{patch.name} does not apply\n{done.stdout}")
    return done.stdout


def unpack(release: str, folder: Path) -> str:
    """Put the Python files of a release into a folder, and return its full version.

    Raises:
        CheckError: The wheel could not be downloaded.
    """
    try:
        installed = distribution("torch")
    except PackageNotFoundError:
        installed = None
    if installed is not None and installed.version.startswith(f"{release}."):
        source = Path(str(installed.locate_file(_PARTS)))
        for file in source.rglob("*.py"):
            copy = folder / _PARTS / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        return installed.version

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    done = _run([*pip, "--quiet", *_WHEEL, f"--dest={folder}", f"torch=={release}.*"])
    if done.returncode != 0:
        raise CheckError(f"torch {release} could not be downloaded\n{done.stdout}")
    (wheel,) = folder.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(
            folder,
            [n for n in names if n.startswith(_PARTS) and n.endswith(".py")],
        )
    wheel.unlink()
    return wheel.name.split("-")[1]


def check(patch: Path, release: str) -> str:
    """Apply a patch to a release, and return the release's full version.

    Raises:
        CheckError: It does not apply, the result is no Python, or it cannot be undone.
    """
    with tempfile.TemporaryDirectory(prefix="patches-check-") as name:
        root = Path(name)
        version = unpack(release, root)
        before = _contents(patch, root)
        apply(patch, root, "--dry-run")
        if _contents(patch, root) != before:
            raise CheckError("the dry run has changed something")
        apply(patch, root)
        try:
            for path, text in _contents(patch, root).items():
                compile(text, path, "exec", dont_inherit=True)
        except SyntaxError as error:
            place = f"{error.filename}, line {error.lineno}"
            raise CheckError(f"{place}: {error.msg}") from error
        apply(patch, root, "--reverse")
        if _contents(patch, root) != before:
            raise CheckError("--reverse leaves something behind")
    return version


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program that asks nothing; what it says is one text."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _contents(patch: Path, root: Path) -> dict[str, bytes]:
    return {path: (root / path).read_bytes() for path in targets(patch)}


def main(argv: list[str] | None = None) -> int:
    """Check the patches, and return the exit code: 1 if one fails."""
    parser = argparse.ArgumentParser(description="Apply the patches to their releases.")
    parser.add_argument(
        "releases", nargs="*", metavar="RELEASE", help="such as 2.4; default: all"
    )
    chosen = parser.parse_args(argv).releases
    unknown = [release for release in chosen if release not in RELEASES]
    if unknown:
        known = f"{RELEASES[0]} to {RELEASES[-1]}"
        parser.error(f"no patch for torch {', '.join(unknown)}: there are {known}")

    try:
        patches = by_release(sorted(FOLDER.glob("*.patch")))
    except CheckError as error:
        print(error, file=sys.stderr)
        return 1

    failed = []
    for release in chosen or RELEASES:
        patch = patches[release]
        try:
            version = check(patch, release)
        except CheckError as error:
            failed.append(release)
            print(f"torch {release:<8} {patch.name:<22} FAILED: {error}", flush=True)
        else:
            done = "applies, compiles, can be undone"
            print(f"torch {version:<8} {patch.name:<22} {done}", flush=True)

    count = len(chosen or RELEASES)
    print(f"{count - len(failed)} of {count} releases", end="")
    print(f"; failed: {', '.join(failed)}" if failed else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

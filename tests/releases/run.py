"""Try the project with releases of torch, one after the other: ``make matrix``.

    python tests/releases/run.py [RELEASE ...]

Each release gets an environment of its own, which is removed in the end; the next one
is installed while the tests of this one run. They are those that look into torch
(`IN_PROCESS`), and on three nodes those with the marker ``release``. The exit code is 1
if a test failed or a release could not be installed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements-dev.txt"
UV = Path(sys.executable).with_name("uv")

RELEASES = tuple(f"2.{minor}" for minor in range(16))
PYTHON = "3.11"  # the newest that torch 2.0 has wheels for; and all others have them
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "shtab")

DROPIN = "tests/more/dropin"
IN_PROCESS = (
    *("tests/more/agent/patches", f"{DROPIN}/test_describe.py"),
    *(f"{DROPIN}/test_rendezvous_handler.py", f"{DROPIN}/test_binding.py"),
    *(f"{DROPIN}/test_options.py", f"{DROPIN}/test_read_at_import.py"),
    "tests/core/test_binding.py",
    "tests/core/test_dropin.py::test_every_option_in_every_spelling",
    "tests/core/test_dropin.py::test_the_table_has_the_options_of_this_torch",
)
MARKED = ("tests/core", "tests/more", "tests/releases")
AT_ONCE = 3
TEST_LIMIT_S = 850
LIMIT_S = 3000  # of a run of pytest
GRACE_S = 60  # for pytest, from SIGINT to its end: it has clusters to clear away


class ReleaseError(Exception):
    """A release was not installed, or its tests did not end; says what happened."""


def requirements(release: str) -> list[str]:
    """Return what is installed for a minor release of torch: it, and the tools."""
    text = REQUIREMENTS.read_text(encoding="utf-8")
    pins = {line.partition("==")[0]: line.split()[0] for line in text.splitlines()}
    old = release in {"2.0", "2.1", "2.2"}  # compiled for the interface of numpy 1
    numpy = "numpy<2" if old else pins["numpy"]
    return [f"torch=={release}.*", numpy, *(pins[tool] for tool in TOOLS)]


class Environment:
    """A virtual environment for a release, which is installed in the background."""

    def __init__(self, release: str) -> None:
        self.release = release
        self.folder = Path(tempfile.mkdtemp(prefix=f"torch-{release}-"))
        self.python = self.folder / "venv" / "bin" / "python"
        self._log = self.folder / "uv.log"
        # uv's cache is in the folder as well: it would grow by gigabytes.
        environ = os.environ | {
            "UV_CACHE_DIR": str(self.folder / "cache"),
            "UV_PYTHON": PYTHON,
            "VIRTUAL_ENV": str(self.folder / "venv"),
        }
        install = (
            '"$0" venv --quiet "$VIRTUAL_ENV" && exec "$0" pip install --quiet "$@"'
        )
        wanted = [*requirements(release), "--editable", str(ROOT)]
        with self._log.open("w", encoding="utf-8") as log:
            self._program = subprocess.Popen(
                ["sh", "-c", install, str(UV), *wanted],
                env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Wait until the installation has ended."""
        self._program.wait()

    def versions(self) -> str:
        """Return which torch and Python there are.

        Imports what an agent imports: it is compiled once, and not by all agents.

        Raises:
            ReleaseError: It could not be installed or cannot be imported.
        """
        if self._program.returncode != 0:
            raise ReleaseError(self._log.read_text(encoding="utf-8"))
        text = (
            "import platform, torch.distributed.run;"
            "print(f'torch {torch.__version__}, Python {platform.python_version()}')"
        )
        done = subprocess.run(
            [self.python, "-W", "ignore", "-c", text],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ReleaseError(done.stderr)
        return done.stdout.strip()

    def close(self) -> None:
        """End the installation, if it still runs, and remove the folder."""
        end(self._program, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def end(program: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """End a program, if it still runs: with a signal, and if need be by force."""
    if program.poll() is None:
        os.killpg(program.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(GRACE_S)
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()


def marked() -> list[str]:
    """Return the files with tests that have the marker."""
    files = (path for folder in MARKED for path in (ROOT / folder).rglob("test_*.py"))
    return sorted(
        str(path.relative_to(ROOT))
        for path in files
        if "pytest.mark.release" in path.read_text(encoding="utf-8")
    )


def run_tests(environment: Environment, selection: Sequence[str]) -> bool:
    """Run pytest, and return whether all tests have passed; print what it says if not.

    Raises:
        ReleaseError: It did not come to an end.
    """
    log, temporary = environment.folder / "pytest.log", environment.folder / "tmp"
    temporary.mkdir(exist_ok=True)
    own = {"CI": "true", "TMPDIR": str(temporary), "PYTEST_ADDOPTS": ""}
    with log.open("w", encoding="utf-8") as output:
        program = subprocess.Popen(
            [environment.python, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider",
             "-n", str(AT_ONCE), "--dist=loadgroup", f"--timeout={TEST_LIMIT_S}",
             *selection],
            cwd=ROOT, env=os.environ | own, stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            program.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            say(log.read_text(encoding="utf-8", errors="replace"))
            raise ReleaseError(f"pytest has not ended within {LIMIT_S} s") from None
        finally:
            end(program, signal.SIGINT)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    if program.returncode != 0:
        say("\n".join(lines))
    say(f"  {lines[-1].strip('= ') if lines else 'no output'}")
    return program.returncode == 0


def try_release(environment: Environment) -> bool:
    """Run all tests with a release, and return whether all have passed."""
    start = time.monotonic()
    try:
        say(environment.versions())
        passed = run_tests(environment, IN_PROCESS)
        passed &= run_tests(environment, ["-m", "release", *marked()])
    except ReleaseError as error:
        say(f"torch {environment.release}: {error}")
        passed = False
    say(f"  {'ok' if passed else 'FAILED'}, {time.monotonic() - start:.0f} s")
    return passed


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def main() -> int:
    """Try the given releases, or all; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="such as 2.4")
    releases = parser.parse_args().releases or RELEASES
    for release in releases:
        if re.fullmatch(r"2\.\d+", release) is None:
            parser.error(f"{release!r} is no minor release of torch, such as 2.4")
    failed = []
    with contextlib.ExitStack() as stack:

        def install(release: str) -> Environment:
            return stack.enter_context(contextlib.closing(Environment(release)))

        environment = install(releases[0])
        for release, after in zip_longest(releases, releases[1:]):
            environment.wait()
            following = install(after) if after else environment
            if not try_release(environment):
                failed.append(release)
            environment.close()
            environment = following
    say(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    # Also SIGINT: in the background it is ignored, also by the programs started here.
    for number in signal.SIGTERM, signal.SIGINT:
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

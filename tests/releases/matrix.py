"""Try the project with releases of torch, one after the other: ``make matrix``.

    python tests/releases/matrix.py [--print] [RELEASE ...]

Each release gets an environment of its own, which is removed in the end. There the
tests of `UNIT` run, and those of tests/more and tests/releases with the marker
``release``, which names the checks that a test belongs to. What came out goes into the
table of docs/compatibility.md, in the rows of these releases; with --print only to the
terminal.
The exit code is 1 if a check failed or could not run.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
REQUIREMENTS = ROOT / "requirements-dev.txt"
UV = Path(sys.executable).with_name("uv")

RELEASES = tuple(f"2.{minor}" for minor in range(16))
PYTHON = "3.11"  # the newest that torch 2.0 has wheels for; all others have them, too
TOOLS = (
    *("hypothesis", "pytest", "pytest-rerunfailures", "pytest-timeout"),
    "pytest-xdist",
)

# What looks into torch. Signals and whole launches take long, and are tried on the
# cluster.
UNIT = (
    *("tests/more/dropin/test_options.py", "tests/more/torch_compat"),
    *(
        "tests/more/dropin/test_describe.py",
        "tests/more/dropin/test_rendezvous_handler.py",
    ),
    "tests/more/dropin/test_binding.py",
)
CLUSTER = ("--dist", "worksteal", "-m", "release", "tests/more", "tests/releases")
CHECKS = (
    *("unit", "ranks", "MASTER_ADDR", "interfaces", "restarts", "elastic", "hostile"),
    *("signals", "port", "direct", "dry run", "training"),
)
LIMIT_S = 1200  # of a run of pytest
TEST_LIMIT_S = 200
GRACE_S = 60  # for pytest, from SIGINT to its end: it has clusters to clear away

BEGIN, END = "<!-- written by tests/releases/matrix.py -->", "<!-- end -->"
HEAD = ("torch", "Python", "date")

Outcome = Literal["ok", "failed", "-"]


class MatrixError(Exception):
    """Something could not be done; says what."""


@dataclass(frozen=True)
class Case:
    """A test that was run.

    Attributes:
        name: Its function, and the parameters.
        checks: Those that it belongs to.
        outcome: "-" if it was skipped.
        reason: Why it failed or was skipped, in one line.
    """

    name: str
    checks: tuple[str, ...]
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """A release in the table.

    Attributes:
        cells: From the name of a column to the text there.
        notes: What is said below the table: what failed, and why.
    """

    cells: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def release(self) -> tuple[int, int]:
        """The minor release."""
        return _release(self.cells["torch"])

    @property
    def is_good(self) -> bool:
        """Whether all checks ran, and none failed."""
        return all(self.cells[check] in {"ok", "-"} for check in CHECKS)


# --- what pytest says -------------------------------------------------------------


def read_tests(report: str, default: Sequence[str]) -> list[Case]:
    """Read the report of ``pytest --junitxml``.

    Args:
        report: The file's text.
        default: The checks of what has no marker ``release``: tests of another folder,
            or a file that could not be imported.
    """
    tests = []
    for case in ET.fromstring(report).iter("testcase"):  # noqa: S314 - pytest wrote it
        checks = tuple(
            str(item.get("value"))
            for item in case.iter("property")
            if item.get("name") == "release"
        )
        outcome: Outcome = "ok"
        reason = ""
        for tag, meaning in (
            ("skipped", "-"),
            ("failure", "failed"),
            ("error", "failed"),
        ):
            found = case.find(tag)
            if found is not None:
                outcome = "failed" if meaning == "failed" else "-"
                reason = last_line(explanation(found))
        name = case.get("name", "")
        tests.append(Case(name, checks or tuple(default), outcome, reason))
    return tests


def explanation(element: ET.Element) -> str:
    """Return what pytest says of a failure; the attribute is cut after some lines."""
    marked = re.findall(r"^E +(.*)", element.text or "", re.MULTILINE)
    return "\n".join(marked) or element.get("message", "")


def last_line(message: str, limit: int = 200) -> str:
    """Return the last line of a message that says something.

    What pytest explains of an assertion comes behind the message that was written for
    it. Slurm's own lines, one for each task, are behind all others.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    ends = [n for n, line in enumerate(lines) if re.match(r"(\w+: )?assert ", line)]
    written = lines[: ends[0]] if ends else lines
    telling = [line for line in written if not re.match(r"srun: |slurmstepd-", line)]
    rest = lines[ends[0] :] if ends else lines
    said = (telling[-1:] or rest[:1] or ["no message"])[0]
    return said if len(said) <= limit else said[: limit - 1] + "…"


def outcome_of(check: str, tests: Sequence[Case]) -> Outcome:
    """Return the outcome of a check: that of its tests; no test at all is a failure."""
    outcomes = {test.outcome for test in tests if check in test.checks}
    if not outcomes or "failed" in outcomes:
        return "failed"
    return "ok" if "ok" in outcomes else "-"


def note(version: str, test: Case) -> str:
    """Return the line that says why a test failed or was skipped."""
    checks = ", ".join(test.checks)
    reason = test.reason.replace("`", "'")
    verb = "failed" if test.outcome == "failed" else "was left out"
    return f"- torch {version}, {checks}: `{test.name}` {verb}: `{reason}`"


def make_row(version: str, python: str, date: str, tests: Sequence[Case]) -> Row:
    """Return the row of a release on which these tests ran."""
    outcomes = {check: outcome_of(check, tests) for check in CHECKS}
    told = [
        test
        for test in tests
        if test.outcome == "failed"
        or (
            test.outcome == "-" and any(outcomes[check] == "-" for check in test.checks)
        )
    ]
    tested = {check for test in tests for check in test.checks}
    notes = [note(version, test) for test in told]
    notes += [
        f"- torch {version}, {check}: no test ran"
        for check in CHECKS
        if check not in tested
    ]
    cells = dict(zip(HEAD, (version, python, date), strict=True))
    return Row({**cells, **outcomes}, tuple(notes))


def failed_row(release: str, date: str, reason: str) -> Row:
    """Return the row of a release that could not be tried at all."""
    cells = dict(zip(HEAD, (release, "", date), strict=True))
    text = last_line(reason).replace("`", "'")
    return Row(
        {**cells, **dict.fromkeys(CHECKS, "failed")},
        (f"- torch {release} could not be tried: `{text}`",),
    )


# --- the table --------------------------------------------------------------------


def write_table(rows: Sequence[Row]) -> str:
    """Write the table, and below it the notes."""
    columns = (*HEAD, *CHECKS)
    lines = [columns, ("---",) * len(columns)]
    lines += [tuple(_cell(row, column) for column in columns) for row in rows]
    notes = [note for row in rows for note in row.notes]
    table = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join(("", *table, "", *notes, "")) + "\n" * bool(notes)


def read_table(text: str) -> list[Row]:
    """Read what `write_table` has written, with this or another choice of checks."""
    table = [
        [cell.strip().strip("*") for cell in line.strip("| ").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    notes = [line for line in text.splitlines() if line.startswith("- torch ")]
    rows = []
    for line in table[2:]:
        cells = dict.fromkeys(CHECKS, "") | dict(zip(table[0], line, strict=True))
        own = [n for n in notes if _release(n.split()[2]) == _release(cells["torch"])]
        rows.append(Row(cells, tuple(own)))
    return rows


def merge(page: str, rows: Sequence[Row]) -> str:
    """Put rows into the page: in the place of those of the same releases.

    Raises:
        MatrixError: The page has no place for the table.
    """
    before, begin, rest = page.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end:
        raise MatrixError(f"{PAGE.name} has no lines {BEGIN} and {END}")
    merged = {row.release: row for row in (*read_table(table), *rows)}
    text = write_table([merged[release] for release in sorted(merged)])
    return f"{before}{BEGIN}\n{text}{END}{after}"


def _cell(row: Row, column: str) -> str:
    text = row.cells.get(column, "")
    return f"**{text}**" if text == "failed" else text


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise MatrixError(f"{version!r} is no release of torch, such as 2.4")
    return int(found[1]), int(found[2])


# --- environments -----------------------------------------------------------------


def requirements(release: str, pinned: str) -> list[str]:
    """Return what is installed for a release: it, and the tools.

    Args:
        release: Minor release of torch.
        pinned: Text of requirements-dev.txt.
    """
    pins = {
        line.partition("==")[0]: line.split()[0]
        for line in pinned.splitlines()
        if "==" in line
    }
    old = _release(release) < (2, 3)  # compiled for the interface of numpy 1
    numpy = "numpy<2" if old else pins["numpy"]
    return [f"torch=={release}.*", numpy, *(pins[tool] for tool in TOOLS)]


def install(release: str, folder: Path) -> Path:
    """Make an environment in a folder, and return its Python.

    Raises:
        MatrixError: It could not be made.
    """
    python = folder / "venv" / "bin" / "python"
    # uv's cache is in the folder as well: it would grow by gigabytes.
    environ = os.environ | {"UV_CACHE_DIR": str(folder / "cache")}
    wanted = requirements(release, REQUIREMENTS.read_text(encoding="utf-8"))
    tools = ["pip", "install", "--quiet", f"--python={python}"]
    for command in (
        ["venv", "--quiet", f"--python={PYTHON}", str(folder / "venv")],
        [*tools, *wanted, "--editable", "."],
    ):
        done = subprocess.run(
            [UV, "--system-certs", *command],
            cwd=ROOT,
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise MatrixError(done.stderr)
    return python


def versions(python: Path) -> tuple[str, str]:
    """Return the versions of torch and Python in an environment.

    Imports what an agent imports, so that it is compiled once and not by all agents.

    Raises:
        MatrixError: It cannot be imported.
    """
    text = (
        "import platform, torch.distributed.run;"
        "print(torch.__version__.partition('+')[0], platform.python_version())"
    )
    done = subprocess.run(
        [python, "-W", "ignore", "-c", text],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise MatrixError(done.stderr)
    torch, version = done.stdout.split()
    return torch, version


def run_tests(
    python: Path, folder: Path, selection: Sequence[str], default: Sequence[str]
) -> list[Case]:
    """Run pytest of an environment; print what it says if a test fails.

    Raises:
        MatrixError: It did not come to an end.
    """
    report, log = folder / "report.xml", folder / "pytest.log"
    report.unlink(missing_ok=True)
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        program = subprocess.Popen(
            [
                *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
                *("-n", "4", f"--timeout={TEST_LIMIT_S}"),
                *(f"--junitxml={report}", *selection),
            ],
            cwd=ROOT,
            env=os.environ | {"CI": "true", "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = program.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(program)
    text = log.read_text(encoding="utf-8", errors="replace")
    if code != 0:
        print(text)
    if code is None:
        raise MatrixError(f"pytest has not ended within {LIMIT_S} s")
    if not report.exists():
        raise MatrixError(text)
    return read_tests(report.read_text(encoding="utf-8"), default)


def _end(program: subprocess.Popen[bytes]) -> None:
    """End pytest, if it still runs: as with Ctrl-C, and if need be by force."""
    if program.poll() is not None:
        return
    program.send_signal(signal.SIGINT)
    try:
        program.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def try_release(release: str) -> Row:
    """Run all checks on a release, and say each outcome."""
    date = datetime.now(tz=timezone.utc).date().isoformat()
    start = time.monotonic()
    say(f"torch {release}: installing")
    with tempfile.TemporaryDirectory(prefix="matrix-") as name:
        folder = Path(name)
        try:
            python = install(release, folder)
            version, python_version = versions(python)
            say(f"torch {version}, Python {python_version}{since(start)}")
            tests: list[Case] = []
            for selection, checks in (UNIT, CHECKS[:1]), (CLUSTER, CHECKS[1:]):
                start = time.monotonic()
                tests += run_tests(python, folder, selection, checks)
                say_outcomes(checks, tests)
                say(f"  together{since(start)}")
        except MatrixError as error:
            row = failed_row(release, date, str(error))
        else:
            row = make_row(version, python_version, date, tests)
    for line in row.notes:
        say(f"  {line}")
    return row


def say_outcomes(checks: Sequence[str], tests: Sequence[Case]) -> None:
    """Print a line for each check."""
    for check in checks:
        number = sum(check in test.checks for test in tests)
        noun = "test" if number == 1 else "tests"
        say(f"  {check:12} {outcome_of(check, tests):7} {number} {noun}")


def since(start: float) -> str:
    """Return the time since some point of the monotonic clock, for a line's end."""
    return f" ({time.monotonic() - start:.0f} s)"


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def main() -> int:
    """Try the releases that are typed, or all; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--print", action="store_true", help=f"leave docs/{PAGE.name} as it is"
    )
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="such as 2.4")
    args = parser.parse_args()
    for release in args.releases:
        if re.fullmatch(r"\d+\.\d+", release) is None:
            parser.error(f"{release!r} is no minor release of torch, such as 2.4")
    merge(PAGE.read_text(encoding="utf-8"), [])  # fails now, not in an hour
    rows = []
    for release in args.releases or RELEASES:
        rows.append(try_release(release))
        if not args.print:
            page = PAGE.read_text(encoding="utf-8")
            PAGE.write_text(merge(page, rows[-1:]), encoding="utf-8")
    say(write_table(rows))
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    # SIGINT, too: in the background it is ignored, also by the programs started here.
    for number in signal.SIGTERM, signal.SIGINT:
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except MatrixError as error:
        sys.exit(f"matrix: {error}")

"""Examine the nodes of a job: ``python -m torchrun_hpc.doctor``."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from torchrun_hpc import files, limits, wire
from torchrun_hpc.agent.abort import LaunchState, faults_reported
from torchrun_hpc.doctor import summary
from torchrun_hpc.doctor.examination import examine
from torchrun_hpc.doctor.output import STDOUT, Output, finding_lines
from torchrun_hpc.doctor.place import COMMAND, ExaminedLaunch, Wishes, find_place
from torchrun_hpc.doctor.results import SCHEMA, DoctorReport, NotMetError, exit_code
from torchrun_hpc.errors import INTERRUPTED, WRONG_USE, LaunchError, Message
from torchrun_hpc.options import command_line
from torchrun_hpc.options.command_line import wrong_line
from torchrun_hpc.reporting import console
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

_LARGEST = 2**28  # bytes of a report
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``, and return the exit code."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(argv: Sequence[str]) -> int:
    with faults_reported(LaunchState()):
        import psutil  # noqa: F401, PLC0415 - its threads need it

        args, words = _parsed(argv)
        output = _output(args)
    launch = ExaminedLaunch(words, argv)
    with faults_reported(launch):
        wishes = Wishes(args.max_bytes, args.timeout)
        tell = console.write if not args.quiet else lambda _: None
        place, earlier = find_place(launch, wishes), None
        if place.is_first:
            earlier = _earlier(args.compare) if args.compare else None
            output.start_check(tell)
        try:
            report = examine(place, tell)
        except NotMetError as error:
            console.write(error.message, "error", finding_lines(error.report.findings))
            # mpirun ends all tasks with the first that fails. Task 0 reports it.
            return int(place.is_first or not error.report.scheduler)
    if report is None:
        return 0
    if earlier is not None:
        tell(Message("HPC200", summary.scope(report, earlier)))
        report = summary.with_slower(report, earlier)
    return exit_code(report) if output.write(report) else WRONG_USE


def _parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Separate our options from the job's. None of ours comes after a script."""
    parser = _parser()
    for end in range(1, len(argv) + 1):
        with contextlib.suppress(LaunchError):  # an incomplete or a wrong line
            args, words = parser.parse_known_args(argv[:end])
            if command_line.parse(words, {}).options.script:
                return args, [*words, *argv[end:]]
    return parser.parse_known_args(argv)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise wrong_line(message)


def _parser() -> argparse.ArgumentParser:
    about = f"Examine the nodes of a job: srun {COMMAND} --nproc_per_node=gpu"
    others = "All other options are the job's. A script can follow: it does not run."
    parser = _Parser(COMMAND, description=about, epilog=others, allow_abbrev=False)
    add = parser.add_argument
    add_file = partial(add, type=_file, metavar="FILE")
    add_file("--json", help="write the report as JSON; - means stdout")
    add_file("--html", help="write the report as a page for a browser")
    add_file("--compare", help="show what became slower since this --json report")
    add("--quiet", action="store_true", help="print only the verdict, and no progress")
    size = "largest size of the collectives: a number, with K, M or G (default: 16M)"
    names = "--max-bytes", "--max_bytes"
    add(*names, type=_bytes, default="16M", metavar="SIZE", help=size)
    default, least = limits.DOCTOR_TIMEOUT, limits.LEAST_DOCTOR_TIMEOUT
    valid = f"default: {default:.0f}; at least {least}"
    wait = f"how long to wait for nodes and for progress ({valid})"
    add("--timeout", type=_seconds, default=default, metavar="SECONDS", help=wait)
    return parser


def _file(name: str) -> str:
    if name:
        return name
    raise argparse.ArgumentTypeError("the name is empty. Pass a file")


def _bytes(size: str) -> int | str:
    match = re.fullmatch(r"([1-9][0-9]{0,11})([KMG]?)i?B?", size)
    return int(match[1]) * _UNITS[match[2]] if match else size


def _seconds(timeout: str) -> float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(timeout)
    return timeout


def _output(args: argparse.Namespace) -> Output:
    if STDOUT in (args.html, args.compare):
        raise wrong_line("--html and --compare need a file. Only --json can be -")
    if args.json is not None and args.json == args.html:
        raise wrong_line(f"--json and --html are both {args.json}. Pass two files")
    return Output(args.json or "", args.html or "", args.quiet)


def _earlier(file: str) -> DoctorReport:
    """Read an earlier report on task 0, from a regular file of limited size.

    The user has named the file, so links are followed.
    """
    problem = f"it is not a report of the form {SCHEMA}"
    try:
        report = wire.decode(DoctorReport, wire.from_json(files.read(file, _LARGEST)))
        if report.schema == SCHEMA:
            return report
    except OSError as error:
        problem = str(error.strerror)
    except WireError:
        pass
    raise LaunchError("HPC195", f"cannot read --compare={file}: {problem}")


if __name__ == "__main__":
    sys.exit(main())

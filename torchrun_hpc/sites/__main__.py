"""Show and check the sites: ``python -m torchrun_hpc.sites``."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from typing import TYPE_CHECKING

from torchrun_hpc import schedulers, sites
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.reporting import report
from torchrun_hpc.schedulers.process import this_process
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

VARIABLE = "PET_HPC_SITE"

# Exit codes: no site matches here; a file is wrong, or a name (as argparse's).
NOT_FOUND = 1
WRONG = 2

_WIDTH = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that stands in ``argv``, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrun_hpc.sites",
        description="Show and check what torchrun_hpc knows about computing centres.",
    )
    parser.set_defaults(run=_list)
    commands = parser.add_subparsers(metavar="COMMAND")
    add = commands.add_parser
    add("list", help="all sites, as they are asked; * this machine's (the default)")
    show = add("show", help="everything about one site")
    show.add_argument("site", metavar="NAME|FILE")
    show.set_defaults(run=_show)
    add("here", help="this machine's site, and why").set_defaults(run=_here)
    check = add("check", help="say what is wrong in files of sites")
    check.add_argument("files", metavar="FILE", nargs="+")
    check.set_defaults(run=_check)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except LaunchError as error:
        return _wrong(error)


def _list(_: argparse.Namespace) -> int:
    here = _found(_host())
    for site in sites.load(os.environ):
        is_here = here is not None and (here.name, here.file) == (site.name, site.file)
        mark = "*" if is_here else " "
        _write(f"{mark} {site.name}", [f"{site.title}; {site.centre}", *_signs(site)])
        _write("", [f"{host} -> {fast}" for host, fast in site.examples.items()][:1])
        if site.variables:
            first, *others = (f"{k}={v}" for k, v in site.variables.items())
            _write("", [f"{first}, and {len(others)} more" if others else first])
    return 0


def _show(args: argparse.Namespace) -> int:
    shown: Iterable[sites.Site | None]
    if sites.is_file(args.site):
        shown = sites.read_site_file(args.site, os.environ)
    else:
        shown = [sites.find(os.environ, "", Setting(args.site, "site"))]
    for site in shown:
        if site is None:
            _write(sites.NONE, ["no file is read, and no rule is used"])
            continue
        _write("name", [site.name])
        _write("systems", [site.title])
        _write("centre", [site.centre])
        _write("recognised by", _signs(site))
        if site.pattern:
            _write("host names", [f"'{site.pattern}' -> '{site.replacement}'"])
        _write("", (f"{host} -> {fast}" for host, fast in site.examples.items()))
        _write("variables", (f"{k}={v}" for k, v in site.variables.items()))
        _write("source", [site.source])
        _write("file", [site.file])
    return 0


def _here(_: argparse.Namespace) -> int:
    host = _host()
    site = _found(host)
    if site is not None:
        _write(site.name, [f"{site.title}; {site.centre}", site.found_by, site.file])
        return 0
    explicit = os.environ.get(VARIABLE)
    seen = [f"{VARIABLE}={explicit}"] if explicit else [f"host name {host}"]
    if not explicit:
        signs = (sign for site in sites.load(os.environ) for sign in site.signs)
        names = dict.fromkeys(sign.variable for sign in signs if sign.variable)
        environ = schedulers.environment()
        values = ((name, environ.get(name)) for name in names)
        seen += [f"{k}={v}" if v else f"{k} is not set" for k, v in values]
    _write(sites.NONE, seen)
    return NOT_FOUND


def _check(args: argparse.Namespace) -> int:
    return max(map(_check_file, args.files))


def _check_file(file: str) -> int:
    try:
        names = ", ".join(site.name for site in sites.read_site_file(file, os.environ))
    except LaunchError as error:
        return _wrong(error)
    report.output(f"{file}: ok: {names}\n")
    return 0


def _host() -> str:
    """Return the name of the job's first node, else of this machine."""
    job = schedulers.detect(schedulers.weigh(this_process()))
    return socket.gethostname() if job is None else job.a_node


def _found(host: str) -> sites.Site | None:
    explicit = os.environ.get(VARIABLE)
    environ = schedulers.environment()
    return sites.find(environ, host, Setting(explicit, VARIABLE) if explicit else None)


def _signs(site: sites.Site) -> list[str]:
    return [*map(str, site.signs)] or ["by name only"]


def _write(name: str, lines: Iterable[str]) -> None:
    """Write lines behind a name."""
    for line in lines:
        report.output(f"{name:{_WIDTH}} {line}\n")
        name = ""


def _wrong(error: LaunchError) -> int:
    report.line(Message(error.code, str(error)), sys.stderr, "error")
    return WRONG


if __name__ == "__main__":
    sys.exit(main())

"""Show and check the sites: ``python -m torchrun_hpc.sites``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from torchrun_hpc import sites
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.launching.preflight import preflight
from torchrun_hpc.reporting import console
from torchrun_hpc.setting import Setting
from torchrun_hpc.sites.site import BIND_NONE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

COMMAND = "python -m torchrun_hpc.sites"
VARIABLE = "PET_HPC_SITE"

# Exit codes: no site matches here; a file is wrong, or a name (as argparse's).
NOT_FOUND = 1
WRONG = 2

_WIDTH = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that stands in ``argv``, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog=COMMAND,
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
    check.set_defaults(run=lambda args: max(map(_check_file, args.files)))
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except LaunchError as error:
        return _wrong(error)


def _list(_: argparse.Namespace) -> int:
    environ, _host, here = _look()
    for site in sites.load(environ):
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
    environ = preflight(COMMAND).environ
    if sites.is_file(args.site):
        shown = sites.read_site_file(args.site, environ)
    else:
        shown = [sites.find(environ, "", Setting(args.site, "site"))]
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
        _write("preload", [",".join(site.preload)] if site.preload else [])
        _write("bind", [site.bind] if site.bind != BIND_NONE else [])
        _write("source", [site.source])
        _write("file", [site.file])
    return 0


def _here(_: argparse.Namespace) -> int:
    environ, host, site = _look()
    if site is not None:
        _write(site.name, [f"{site.title}; {site.centre}", site.found_by, site.file])
        return 0
    wanted = environ.get(VARIABLE)
    looked_at = [f"{VARIABLE}={wanted}" if wanted else f"host name {host}"]
    if not wanted:
        signs = (sign for site in sites.load(environ) for sign in site.signs)
        names = dict.fromkeys(sign.variable for sign in signs if sign.variable)
        values = ((name, environ.get(name)) for name in names)
        looked_at += [f"{k}={v}" if v else f"{k} is not set" for k, v in values]
    _write(sites.NONE, looked_at)
    return NOT_FOUND


def _check_file(file: str) -> int:
    environ = preflight(COMMAND).environ
    try:
        names = ", ".join(site.name for site in sites.read_site_file(file, environ))
    except LaunchError as error:
        return _wrong(error)
    console.output(f"{file}: ok: {names}\n")
    return 0


def _look() -> tuple[Mapping[str, str], str, sites.Site | None]:
    """Return the environment, the host by which a site is recognised, and the site.

    Raises:
        LaunchError: The job of this process cannot be found out, or a file is wrong.
    """
    seen = preflight(COMMAND)
    if seen.problem is not None:
        raise seen.problem
    environ, host = seen.environ, seen.site_host
    wanted = environ.get(VARIABLE)
    setting = Setting(wanted, VARIABLE) if wanted else None
    return environ, host, sites.find(environ, host, setting)


def _signs(site: sites.Site) -> list[str]:
    return [*map(str, site.signs)] or ["by name only"]


def _write(name: str, lines: Iterable[str]) -> None:
    for line in lines:
        console.output(f"{name:{_WIDTH}} {line}\n")
        name = ""


def _wrong(error: LaunchError) -> int:
    console.write(Message(error.code, str(error)), "error")
    return WRONG


if __name__ == "__main__":
    sys.exit(main())

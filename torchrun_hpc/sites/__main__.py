"""The command ``python -m torchrun_hpc.sites``, which shows and checks the sites."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrun_hpc import files, sites
from torchrun_hpc.errors import LaunchError, Setting
from torchrun_hpc.host.network import this_node
from torchrun_hpc.main import Launch, Stage
from torchrun_hpc.options.options import Options
from torchrun_hpc.options.values import BIND_NONE
from torchrun_hpc.planning import network_env
from torchrun_hpc.planning.inputs import Inputs
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.preflight import preflight
from torchrun_hpc.reporting import console
from torchrun_hpc.sites import profile
from torchrun_hpc.sites.site import read_sites

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

COMMAND = "python -m torchrun_hpc.sites"

_WIDTH = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``, and return the exit code.

    It is 1 if this machine has no site, and 2 if a file or name is wrong (as in
    argparse).
    """
    parser = argparse.ArgumentParser(
        COMMAND, description="Show and check the known computing centres."
    )
    parser.set_defaults(run=_list)
    add = parser.add_subparsers(metavar="COMMAND").add_parser
    add("list", help="list all sites in the order of checking (the default)")
    show = add("show", help="print everything about one site")
    show.add_argument("site", metavar="NAME|FILE")
    show.set_defaults(run=_show)
    here = add("here", help="print this machine's site, and why it is recognised")
    here.set_defaults(run=_here)
    check = add("check", help="check site files")
    check.add_argument("files", metavar="FILE", nargs="+")
    check.set_defaults(run=lambda args: max(map(_check, args.files)))
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except LaunchError as error:
        return console.refuse(error)


def _list(_: argparse.Namespace) -> int:
    environ, _host, _setting, this_site = _look()
    marked = (this_site.name, this_site.file) if this_site else ()
    console.output("Known sites; * marks the one of this machine:\n")
    for site in sites.load(environ):
        mark = "*" if (site.name, site.file) == marked else " "
        _write(f"{mark} {site.name}", [f"{site.title}; {site.centre}", *_markers(site)])
        _write("", _lines("examples", site.examples)[:1])
        first, *more = _lines("variables", site.variables) or [""]
        _write("", [f"{first}, and {len(more)} more" if more else first])
    return 0


def _show(args: argparse.Namespace) -> int:
    environ = preflight(COMMAND).environ
    shown = sites.load(environ, setting=Setting(args.site, "site"))
    for site in shown:
        for name, value in (vars(site) | {"markers": _markers(site)}).items():
            _write(name, _lines(name, value))
    if not shown:
        _write(sites.NONE, ["no site: no file is read"])
    return 0


def _here(_: argparse.Namespace) -> int:
    environ, host, setting, site = _look()
    if site is not None:
        _write(site.name, [f"{site.title}; {site.centre}", site.found_by, site.file])
        return 0
    if setting is not None:
        _write(sites.NONE, [str(setting)])
        return 1
    markers = [marker for site in sites.load(environ) for marker in site.markers]
    names = dict.fromkeys(marker.variable for marker in markers if marker.variable)
    values = ((name, environ.get(name)) for name in names)
    looked_at = (f"{k}={v}" if v else f"{k} is not set" for k, v in values)
    absent = (f"{marker} does not exist" for marker in markers if marker.file)
    _write(sites.NONE, [f"host name {host}", *looked_at, *absent])
    return 1


def _check(file: str) -> int:
    try:
        checked = read_sites(Path(file), everywhere=False)
    except LaunchError as error:
        return console.refuse(error)
    console.output(f"{file}: ok: {', '.join(site.name for site in checked)}\n")
    network, options = this_node(), Options()
    for site in checked:
        values = profile.of_site(site)
        inputs = Inputs(Mode.ONE_NODE, None, site, network, options, {}, profile=values)
        for message in (*network_env.unread(inputs), *network_env.advice(inputs)):
            # Other machines may have the file.
            console.write(message, "warning" if files.exists(site.profile) else "note")
    return 0


def _look() -> tuple[Mapping[str, str], str, Setting | None, sites.Site | None]:
    launch = Launch(COMMAND)
    launch.run(upto=Stage.PARSE)
    facts, setting = launch.facts, launch.options.given.get("hpc_site")
    if facts.problem is not None:
        raise facts.problem
    environ, host = facts.environ, facts.site_host
    return environ, host, setting, sites.find(environ, host, setting)


def _markers(site: sites.Site) -> list[str]:
    return [*map(str, site.markers)] or ["by name only"]


def _lines(name: str, value: Any) -> list[str]:
    if isinstance(value, str):
        return [value] if value not in ("", BIND_NONE) else []
    if not isinstance(value, dict):
        return [*value]
    joint = " -> " if name == "examples" else "="
    return [f"{key}{joint}{value}" for key, value in value.items()]


def _write(name: str, lines: Iterable[str]) -> None:
    for line in filter(None, lines):
        console.output(f"{name:{_WIDTH}} {line}\n")
        name = ""


if __name__ == "__main__":
    sys.exit(main())

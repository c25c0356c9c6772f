"""The facts about computing centres: one TOML file each, and no code.

``jsc.toml`` is an example. A user's or administrator's file adds systems, or replaces
a system of the same name. ``python -m torchrun_hpc.sites`` shows and checks the files.
"""

from __future__ import annotations

import glob
import re
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, choices
from torchrun_hpc.options.values import NONE
from torchrun_hpc.schedulers import pbs, slurm
from torchrun_hpc.sites.site import REMEDY, Marker, Site, read_sites
from torchrun_hpc.variables import CONFIG_HOME, HOME

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torchrun_hpc.errors import Setting

__all__ = ["NONE", "Marker", "Site", "find", "load"]

OURS = Path(__file__).parent
ADMINISTRATORS = Path("/etc/torchrun_hpc/sites")

# The order of markers: a centre's own variables, a scheduler's, host names, files.
# Several centres may have similar host names. Files come last, because nodes can differ
# in a file.
_LAST = (pbs.JOB_ID, slurm.CLUSTER, "", "file")


def find(
    environ: Mapping[str, str],
    host: str,
    setting: Setting | None = None,
    folders: Sequence[Path] | None = None,
) -> Site | None:
    """Return the site of this machine; refuse an unknown name, or a wrong file.

    Args:
        environ: Environment of this process.
        host: Name of the head node, so that all nodes find the same site. Without a
            job, name of this machine.
        setting: The user's setting: a site's name, a file, or ``none``, for which no
            file is read. ``None`` to recognise the site.
        folders: Folders of additional files, in order of precedence; by default the
            user's and the administrator's.
    """
    if setting is None:
        return _recognise(load(environ, folders), environ, host)
    sites = load(environ, folders, setting)
    if not sites:
        return None
    if len(sites) == 1:
        return replace(sites[0], found_by=str(setting))
    site = _recognise(sites, environ, host)
    if site is not None:
        return replace(site, found_by=f"{setting}, {site.found_by}")
    names = ", ".join(site.name for site in sites)
    raise LaunchError(
        "HPC048",
        f"{setting} describes {names}, and none of them is recognised here. Pass a "
        f"file that describes one site, or put this one into {_folders(environ)[0]} "
        f"and pass a name: --hpc-site={sites[0].name}",
        everywhere=True,
    )


def load(
    environ: Mapping[str, str],
    folders: Sequence[Path] | None = None,
    setting: Setting | None = None,
) -> tuple[Site, ...]:
    """Return all sites in the order of checking, or those of a setting; see `find`.

    The setting is a site's name, a file, or ``none``, which returns no site.
    """
    wanted = setting.value if setting else ""
    if wanted == NONE:
        return ()
    if "/" in wanted or wanted.endswith(".toml"):
        if wanted.startswith("~/"):  # no shell expands it after a =
            wanted = environ.get(HOME, "~") + wanted[1:]
        return read_sites(
            Path(wanted), everywhere=_is_everywhere(Path(wanted), environ)
        )
    sites: dict[str, Site] = {}
    for folder in (*(_folders(environ) if folders is None else folders), OURS):
        for site in _of_folder(folder, everywhere=_is_everywhere(folder, environ)):
            sites.setdefault(site.name, site)
    if setting is None:
        return tuple(sites.values())
    if wanted in sites:
        return (sites[wanted],)
    # Users may pass a system's name instead of its site's: juwels, daint.
    titles = {name: re.findall(r"[\w-]+", s.title.lower()) for name, s in sites.items()}
    near = next((name for name in sites if wanted.lower() in titles[name]), wanted)
    raise LaunchError(
        "HPC040",
        f"{setting}: there is no such site. {choices(near, sites)}, {NONE}. A file "
        "also works: /path/to/site.toml",
        everywhere=True,
    )


def _of_folder(folder: Path, *, everywhere: bool) -> list[Site]:
    # An unreadable folder counts as empty.
    files = sorted(glob.glob("*.toml", root_dir=folder))  # noqa: PTH207
    read = [read_sites(folder / file, everywhere=everywhere) for file in files]
    sites = list(chain.from_iterable(read))
    for site in sites:
        both = " and ".join(twin.file for twin in sites if twin.name == site.name)
        if both != site.file:
            text = f"{both} both describe {site.name}. Remove one, {REMEDY}"
            raise LaunchError("HPC049", text, everywhere=everywhere)
    return sorted(sites, key=lambda s: min(map(_order, s.markers), default=len(_LAST)))


def _recognise(
    sites: Iterable[Site], environ: Mapping[str, str], host: str
) -> Site | None:
    for _, group in groupby(sites, lambda site: Path(site.file).parent):
        markers = [(marker, site) for site in group for marker in site.markers]
        for marker, site in sorted(markers, key=lambda pair: _order(pair[0])):
            if found_by := marker.match(environ, host):
                return replace(site, found_by=found_by)
    return None


def _order(marker: Marker) -> int:
    """Return the place of a marker's kind in `_LAST`; -1 for other variables."""
    kind = "file" if marker.file else marker.variable
    return _LAST.index(kind) if kind in _LAST else -1


def _folders(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the user's and the administrator's folder.

    Source: XDG Base Directory Specification, which ignores relative paths.
    """
    config = Path(environ.get(CONFIG_HOME, ""))
    if not config.is_absolute():
        config = Path(environ.get(HOME, ""), ".config")
    folders = (config / "torchrun_hpc" / "sites", ADMINISTRATORS)
    return tuple(filter(Path.is_absolute, folders))


def _is_everywhere(path: Path, environ: Mapping[str, str]) -> bool:
    """Return whether all nodes find the same file: it is ours, or in the home."""
    home = Path(environ.get(HOME) or OURS)
    return path.is_relative_to(OURS) or path.is_relative_to(home)

"""What is particular to a computing centre: one TOML file each, and no code.

A file says how its systems are recognised, how a node's name is rewritten to its name
on the fast network, and which variables the centre documents for torch. A file of the
user or of the administrator adds systems to ours, or replaces one of the same name;
``jsc.toml`` is an example. ``python -m torchrun_hpc.sites`` shows and checks them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, choices
from torchrun_hpc.sites.reading import NONE, read
from torchrun_hpc.sites.site import Sign, Site, is_module

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.setting import Setting

__all__ = [
    "NONE",
    "Sign",
    "Site",
    "find",
    "is_file",
    "is_module",
    "load",
    "read_site_file",
]

OURS = Path(__file__).parent
ADMINISTRATORS = Path("/etc/torchrun_hpc/sites")

# The order in which signs are checked; host names come last, because those of several
# centres may be alike. A variable that is not listed is of a user's or administrator's
# file, and is checked first.
VARIABLES = (
    "SYSTEMNAME",
    "NCAR_HOST",
    "LMOD_SYSTEM_NAME",
    "PAWSEY_CLUSTER",
    "CLUSTER_NAME",
    "PBS_JOBID",
    "SLURM_CLUSTER_NAME",
)


def find(
    environ: Mapping[str, str],
    host: str,
    setting: Setting | None = None,
    folders: Sequence[Path] | None = None,
) -> Site | None:
    """Return the site that this machine belongs to.

    Args:
        environ: Environment of this process.
        host: Name of the job's first node, so that all nodes find the same; without a
            job, of this machine.
        setting: What the user has set: name of a site, a file of sites, or ``none``,
            for which no file is read; ``None`` to recognise the site.
        folders: Folders of additional files, the first one takes precedence; by
            default those of the user and of the administrator.

    Raises:
        LaunchError: There is no site of this name, or a file is wrong.
    """
    if setting is not None and setting.value == NONE:
        return None
    if setting is not None and is_file(setting.value):
        return _of_file(environ, host, setting)
    groups = _groups(environ, folders)
    if setting is None:
        found = (_recognise(group, environ, host) for group in groups)
        return next(filter(None, found), None)
    sites = {site.name: site for group in groups for site in group}
    if setting.value in sites:
        return replace(sites[setting.value], found_by=str(setting))
    # Users may take the name of a system for that of its site: juwels, daint.
    system = setting.value.lower()
    words = {name: re.findall(r"[\w-]+", s.title.lower()) for name, s in sites.items()}
    wanted = next((name for name in sites if system in words[name]), setting.value)
    raise LaunchError(
        "HPC040",
        f"{setting}: there is no such site. {choices(wanted, sites)}, {NONE}, or a "
        "file: /path/to/site.toml",
        everywhere=True,
    )


def load(
    environ: Mapping[str, str], folders: Sequence[Path] | None = None
) -> tuple[Site, ...]:
    """Read all sites, in the order in which their signs are checked; see `find`.

    Raises:
        LaunchError: A file is wrong.
    """
    return tuple(site for group in _groups(environ, folders) for site in group)


def is_file(value: str) -> bool:
    """Return whether a value of ``--hpc-site`` is a file, not the name of a site."""
    return "/" in value or value.endswith(".toml")


def read_site_file(value: str, environ: Mapping[str, str]) -> tuple[Site, ...]:
    """Read the sites of a file that the user has typed.

    Raises:
        LaunchError: The file is wrong.
    """
    if value.startswith("~/"):  # which no shell expands behind a =
        value = environ.get("HOME", "~") + value[1:]
    path = Path(value)
    return read(path, everywhere=_is_everywhere(path, environ))


def _of_file(environ: Mapping[str, str], host: str, setting: Setting) -> Site:
    """Return the only site of a file, or the one that is recognised."""
    sites = read_site_file(setting.value, environ)
    if len(sites) == 1:
        return replace(sites[0], found_by=str(setting))
    found = _recognise(sites, environ, host)
    if found is not None:
        return replace(found, found_by=f"{setting}, {found.found_by}")
    names = ", ".join(site.name for site in sites)
    raise LaunchError(
        "HPC048",
        f"{setting} describes {names}, and none of them is recognised here. Type a "
        "file that describes one, or put this one into "
        f"{_folders(environ)[0]} and type a name: --hpc-site={sites[0].name}",
        everywhere=True,
    )


def _recognise(
    sites: Sequence[Site], environ: Mapping[str, str], host: str
) -> Site | None:
    """Return the site of the first sign, in the order of checking, that is there."""
    signs = ((sign, site) for site in sites for sign in site.signs)
    for sign, site in sorted(signs, key=lambda entry: _order(entry[0])):
        if found_by := sign.match(environ, host):
            return replace(site, found_by=found_by)
    return None


def _order(sign: Sign) -> int:
    """Return the place of a sign in the order of checking."""
    if not sign.variable:
        return len(VARIABLES)
    return VARIABLES.index(sign.variable) if sign.variable in VARIABLES else -1


def _groups(
    environ: Mapping[str, str], folders: Sequence[Path] | None
) -> list[list[Site]]:
    """Read the sites of every folder, ours last, without those that are replaced."""
    replaced: set[str] = set()
    groups = []
    for folder in [*(_folders(environ) if folders is None else folders), OURS]:
        group: dict[str, Site] = {}
        for file in _files(folder):
            everywhere = _is_everywhere(file, environ)
            for site in read(file, everywhere=everywhere):
                if site.name in group:
                    files = f"{site.file} and {group[site.name].file}"
                    raise LaunchError(
                        "HPC049",
                        f"{files} both describe {site.name}. Remove one, or type "
                        f"--hpc-site={NONE}",
                        everywhere=everywhere,
                    )
                group[site.name] = site
        kept = [site for site in group.values() if site.name not in replaced]
        last = len(VARIABLES) + 1  # by name only
        kept.sort(key=lambda site: min(map(_order, site.signs), default=last))
        groups.append(kept)
        replaced.update(group)
    return groups


def _folders(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders of the user and of the administrator.

    Source: XDG Base Directory Specification, which ignores relative paths.
    """
    config = Path(environ.get("XDG_CONFIG_HOME", ""))
    if not config.is_absolute():
        config = Path(environ.get("HOME", "")) / ".config"
    users = config / "torchrun_hpc" / "sites"
    return (users, ADMINISTRATORS) if users.is_absolute() else (ADMINISTRATORS,)


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder by name; none if the folder cannot be read."""
    try:
        files = sorted(folder.iterdir())
    except OSError:
        return []
    return [f for f in files if f.suffix == ".toml" and not f.name.startswith(".")]


def _is_everywhere(file: Path, environ: Mapping[str, str]) -> bool:
    """Return whether all nodes find the same file: one of ours, or in the home."""
    home = Path(environ.get("HOME") or OURS)
    return file.is_relative_to(OURS) or file.is_relative_to(home)

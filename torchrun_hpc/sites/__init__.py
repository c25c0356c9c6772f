"""What is particular to a computing centre: one TOML file each, and no code.

A file says how the site is recognised (a variable and its values: names such as
``SYSTEMNAME`` are too common for their presence to mean anything) and how a node's
name is rewritten to its name on the fast network.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.inputs import Value

# What a user types to switch the rules off.
NONE = "none"


@dataclass(frozen=True)
class Site:
    """A computing centre, or some of its systems.

    Attributes:
        name: Short name, as typed after ``--hpc-site``.
        variable: Environment variable by whose value the site is recognised.
        values: The values of ``variable``.
        pattern: Regular expression that finds the part of a host name to rewrite. It
            must not match a name that has been rewritten.
        replacement: What to put there.
    """

    name: str
    variable: str
    values: tuple[str, ...]
    pattern: str
    replacement: str

    def rewrite(self, host: str) -> str:
        """Return the name of a node on the fast network; idempotent."""
        return re.sub(self.pattern, self.replacement, host, count=1)


def find(environ: Mapping[str, str], typed: Value | None = None) -> Site | None:
    """Return the site that this machine belongs to.

    Args:
        environ: Environment of this process.
        typed: Name of a site, or ``none`` for no site; ``None`` to recognise it.

    Raises:
        LaunchError: There is no site of the wanted name.
    """
    if typed is not None and typed.value == NONE:
        return None
    sites = load()
    if typed is None:
        return next((s for s in sites if environ.get(s.variable) in s.values), None)
    for site in sites:
        if site.name == typed.value:
            return site
    names = ", ".join([site.name for site in sites] + [NONE])
    raise LaunchError(
        f"{typed}: there is no such site; type one of {names}", everywhere=True
    )


def load() -> tuple[Site, ...]:
    """Read the sites that come with this package, in the order of their names."""
    files = sorted(
        (
            entry
            for entry in resources.files(__name__).iterdir()
            if entry.name.endswith(".toml")
        ),
        key=lambda entry: entry.name,
    )
    return tuple(_parse(entry.read_text(encoding="utf-8")) for entry in files)


def _parse(text: str) -> Site:
    table = tomllib.loads(text)
    return Site(
        name=table["name"],
        variable=table["recognise"]["variable"],
        values=tuple(table["recognise"]["values"]),
        pattern=table["hosts"]["pattern"],
        replacement=table["hosts"]["replacement"],
    )

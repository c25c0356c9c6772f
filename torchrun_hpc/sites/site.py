"""A computing centre's system, or a cloud's, and its markers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchrun_hpc import files

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Marker:
    """A marker of a site: a variable's value, a host name, or an existing file.

    Names such as ``SYSTEMNAME`` are too common to be a marker without their value.
    """

    variable: str = ""  # environment variable; empty for the host name
    values: tuple[str, ...] = ()
    pattern: str = ""  # regular expression for the whole value, or the whole host name
    file: str = ""  # path of a file or folder; otherwise empty

    def match(self, environ: Mapping[str, str], host: str) -> str:
        """Return the marker's value here: ``SYSTEMNAME=juwels``; empty without a match.

        The host is the head node, or this machine. An empty variable counts as unset.
        """
        if self.file:
            return str(self) if files.exists(self.file) else ""
        text = environ.get(self.variable, "") if self.variable else host
        if not text or not (text in self.values or re.fullmatch(self.pattern, text)):
            return ""
        return f"{self.variable}={text}" if self.variable else f"host name {text}"

    def __str__(self) -> str:
        """Describe it: ``SYSTEMNAME=juwels or jusuf``."""
        if self.file:
            return f"file {self.file}"
        what = " or ".join(self.values) or f"'{self.pattern}'"
        return f"{self.variable}={what}" if self.variable else f"host name {what}"


@dataclass(frozen=True)
class Site:
    """A system of a computing centre, or several similar ones.

    ``examples`` are node names, and their names on the fast network. ``variables`` are
    set if they are unset. ``profile`` is the path of a file on each node, whose values
    of ``profile_names`` come before ``variables``; see `profile`. ``options`` are
    defaults of ``--hpc-*`` options, as text.
    """

    name: str  # as passed to ``--hpc-site``
    title: str  # names of the systems
    centre: str
    source: str  # where the centre documents the facts
    file: str  # path of the file that describes it
    markers: tuple[Marker, ...] = ()  # how it is recognised; empty if only by name
    pattern: str = ""  # regular expression for the part of a node's name to rewrite
    replacement: str = ""  # as for ``re.sub``
    examples: Mapping[str, str] = field(default_factory=dict, hash=False)
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)
    profile: str = ""
    profile_names: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict, hash=False)
    found_by: str = ""  # the marker or setting that chose it: ``SYSTEMNAME=juwels``

    def rewrite(self, host: str) -> str:
        """Return a node's name on the fast network; idempotent."""
        if not self.pattern:
            return host
        return re.sub(self.pattern, self.replacement, host, count=1)

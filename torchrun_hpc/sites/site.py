"""A computing centre's system, and the signs by which it is recognised."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Sign:
    """A sign by which a site is recognised: a variable's value, or a host name.

    Names such as ``SYSTEMNAME`` are too common to be a sign without their value.

    Attributes:
        variable: Environment variable; empty for the host name.
        values: Its values that are the sign.
        pattern: Regular expression of the whole value, or of the whole host name.
    """

    variable: str = ""
    values: tuple[str, ...] = ()
    pattern: str = ""

    def match(self, environ: Mapping[str, str], host: str) -> str:
        """Return what the sign is here: ``SYSTEMNAME=juwels``; empty if it is not.

        The host is the job's first node, or this machine. An empty variable is unset.
        """
        text = environ.get(self.variable, "") if self.variable else host
        if not text or not (text in self.values or re.fullmatch(self.pattern, text)):
            return ""
        return f"{self.variable}={text}" if self.variable else f"host name {text}"

    def __str__(self) -> str:
        """Describe it in brief: ``SYSTEMNAME=juwels or jusuf``."""
        what = " or ".join(self.values) or f"'{self.pattern}'"
        return f"{self.variable}={what}" if self.variable else f"host name {what}"


@dataclass(frozen=True)
class Site:
    """A system of a computing centre, or several that are alike.

    Attributes:
        name: As passed to ``--hpc-site``.
        title: The systems in words.
        centre: Who runs them.
        source: Where the facts are documented.
        file: Path of the file that describes it.
        signs: How it is recognised; empty if by name only.
        pattern: Regular expression that finds the part of a node's name to rewrite;
            empty if names stay as they are.
        replacement: Its replacement, as for ``re.sub``.
        examples: Node names, and their names on the fast network.
        variables: The variables that the centre documents, to be set where unset.
        options: Defaults of options, as text: of ``hpc_preload`` and ``hpc_bind``.
        found_by: By what it was recognised or chosen: ``SYSTEMNAME=juwels``.
    """

    name: str
    title: str
    centre: str
    source: str
    file: str
    signs: tuple[Sign, ...] = ()
    pattern: str = ""
    replacement: str = ""
    examples: Mapping[str, str] = field(default_factory=dict, hash=False)
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)
    options: Mapping[str, str] = field(default_factory=dict, hash=False)
    found_by: str = ""

    def rewrite(self, host: str) -> str:
        """Return the name of a node on the fast network; idempotent."""
        if not self.pattern:
            return host
        return re.sub(self.pattern, self.replacement, host, count=1)

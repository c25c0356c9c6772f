"""A node's own profile: lines of ``NAME=VALUE``, which are read and never executed.

Images of clouds have one. Its values fit the installed release of NCCL's plugin, while
a list in a package becomes wrong with the next image (NVIDIA/aicr#422).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchrun_hpc import files
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torchrun_hpc.sites.site import Site

_LARGEST = 100_000  # bytes

# An assignment that a shell takes as it is, and perhaps a comment.
_PLAIN = re.compile(
    r"""(?:export[ \t]+)?([A-Z_][A-Z0-9_]*)=
    ("[^"\\$`]*"|'[^'$`]*'|[^ \t"'\\$`;&|<>()*?~]*)(?:[ \t]+\#.*)?""",
    re.VERBOSE,
)

# A name in any other line that can change it.
_NAME = re.compile(r"\b([A-Z_][A-Z0-9_]*)\+?=")

# A line that does not continue on the next one: every quote is closed, no \ or <<.
_WHOLE = re.compile(
    r"""((?!<<)[^'"\\#]|(?<![ \t])#|\\.|"([^"\\]|\\.)*"|'[^']*')*([ \t]#.*)?"""
)

# A shell may skip the lines of a block.
_BEGIN = re.compile(r"(?!elif\b).*(\b(then|do|in)|[({])([ \t]+#.*)?")
_END = re.compile(r"(fi|done|esac)\b|[)}]")


@dataclass(frozen=True)
class Profile:
    """The content of a profile.

    Attributes:
        variables: The values that the site allows, each with file and line.
        skipped: The names whose last value was not taken, each with line and reason.
        problem: Why the file cannot be read; empty if it was read.
    """

    variables: Mapping[str, Setting] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def of_site(site: Site | None) -> Profile:
    """Read the file on this node that a site names, if it names one."""
    if site is None or not site.profile:
        return Profile()
    try:
        text = files.read(site.profile, _LARGEST).decode()
    except (OSError, ValueError) as error:
        return Profile(problem=str(getattr(error, "strerror", None) or error))
    return parse(site.profile, text, site.profile_names)


def parse(file: str, text: str, allowed: Collection[str]) -> Profile:
    """Parse the text of a profile; of a repeated name, only the last line counts."""
    found: dict[str, Setting] = {}
    skipped: dict[str, str] = {}
    depth = 0.0
    for number, line in enumerate(text.split("\n"), 1):
        words = line.strip(" \t\r")
        if words.startswith("#"):
            continue
        opens = bool(_BEGIN.fullmatch(words)) if _WHOLE.fullmatch(words) else math.inf
        if _END.match(words):
            depth = max(depth - 1, 0)
        plain = _PLAIN.fullmatch(words)
        for name in [plain[1]] if plain else _NAME.findall(words):
            found.pop(name, None)
            skipped.pop(name, None)
            if name not in allowed:
                skipped[name] = f"line {number}, the site does not allow it"
            elif depth or opens or not plain or not plain[2].isprintable():
                why = "in a block" if depth else "the value is for a shell"
                skipped[name] = f"line {number}, {why}"
            elif value := plain[2].strip("\"'"):
                found[name] = Setting(value, f"{file}, line {number}")
        depth += opens
    return Profile(found, skipped)

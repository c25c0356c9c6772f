"""A node's own profile: lines of ``NAME=VALUE``, which are read and never executed.

Images of clouds have such a file. Its values fit the installed release of NCCL's
plugin. A list in a package would become wrong with the next image (NVIDIA/aicr#422).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchrun_hpc import files
from torchrun_hpc.errors import Setting

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torchrun_hpc.sites.site import Site

_LARGEST = 100_000  # bytes

# An assignment that a shell takes as it is, and perhaps a comment.
_PLAIN = re.compile(
    r"""(?:export[ \t]+)?([A-Z_][A-Z0-9_]*)=
    (?:"([^"\\$`]*)"|'([^'$`]*)'|([^ \t"'\\$`;&|<>(){}*?~]*))(?:[ \t]+\#.*)?""",
    re.VERBOSE,
)

# A name that any other line can change, but not a name that the line only reads.
_NAME = re.compile(r"(?<![$\w{])[A-Z_][A-Z0-9_]*\b")

# A comment at the end of a line.
_COMMENT = r"((?<![^\s;&|(){}])#.*)?"

# A line that ends a command: no open quote, no <<, \, && or | at its end.
_WHOLE = re.compile(
    r"""((?!<<)[^'"\\#]|(?<=[^\s;&|(){}])#|\\.|"([^"\\]|\\.)*"|'[^']*')*"""
    rf"(?<![&|])(?<![&|]\s){_COMMENT}"
)

# After these, a shell possibly does not reach the next line.
_LEAVES = re.compile(r"(^|[\s;&|(){}])(return|exit|exec|break|continue)($|[\s;&|)}])")

# The words that open a block, and those that close it.
_BLOCKS = {"if": "fi", "do": "done", "case": "esac", "{": "}", "(": ")"}
_WORD = re.compile(r"[(){}]|[^\s;&|(){}]+")


@dataclass(frozen=True)
class Profile:
    """The content of a profile.

    Attributes:
        variables: The values whose names the site allows, each with file and line.
        skipped: The names whose last value was not taken, each with line and reason.
        problem: Why the file cannot be read; empty if it was read.
    """

    variables: Mapping[str, Setting] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def of_site(site: Site | None) -> Profile:
    """Read the profile that a site names, on this node; empty if it names none."""
    if site is None or not site.profile:
        return Profile()
    try:
        text = files.read(site.profile, _LARGEST).decode()
    except (OSError, ValueError) as error:
        return Profile(problem=str(getattr(error, "strerror", None) or error))
    return parse(site.profile, text, site.profile_names)


def parse(file: str, text: str, allowed: Collection[str]) -> Profile:
    """Parse the text of a profile; only the last line with a name counts."""
    variables: dict[str, Setting] = {}
    skipped: dict[str, str] = {}
    open_blocks: Counter[str] = Counter()
    is_clear = True  # whether each line was understood
    for number, line in enumerate(text.split("\n"), 1):
        words = line.strip(" \t\r")
        if words.startswith("#"):
            continue
        plain = _PLAIN.fullmatch(words) if words.isprintable() else None
        parts = [] if plain else _WORD.findall(words)
        for first, last in _BLOCKS.items():
            still = open_blocks[first] + parts.count(first) - parts.count(last)
            open_blocks[first] = max(still, 0)
        if plain:
            names, value = [plain[1]], plain[2] or plain[3] or plain[4] or ""
        else:
            names, value = _NAME.findall(words), None
        for name in (n for n in names if n in allowed or f"{n}=" in words):
            variables.pop(name, None)
            skipped.pop(name, None)
            if name not in allowed:
                skipped[name] = f"line {number}, the site does not allow it"
            elif not is_clear or any(open_blocks.values()) or value is None:
                skipped[name] = f"line {number}, only a shell can tell its value"
            elif value:
                variables[name] = Setting(value, f"{file}, line {number}")
        is_clear &= bool(_WHOLE.fullmatch(words)) and not _LEAVES.search(words)
    return Profile(variables, skipped)

"""The command ``python -m torchrun_hpc.explain``, which explains messages by code.

It needs no network: ``messages.toml`` is part of the package.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrun_hpc import files
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.reporting import console

if TYPE_CHECKING:
    from collections.abc import Sequence

_DATA = Path(__file__).with_name("messages.toml")
_LINK = re.compile(r"\[([^]]+)\]\(([^)]+)\)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``, and return the exit code: 2 for an unknown code."""
    parser = argparse.ArgumentParser("python -m torchrun_hpc.explain")
    about = "a message to explain, such as HPC125; without a code, list all"
    parser.add_argument("codes", metavar="CODE", nargs="*", help=about)
    codes = parser.parse_args(argv).codes
    entries: dict[str, Any] = {}
    for part in parts().values():
        entries |= {code: entry for code, entry in part.items() if code != "intro"}
    every = (f"{code}  {entry['title']}\n" for code, entry in entries.items())
    try:
        texts = "\n".join(_explained(code, entries) for code in codes)
        console.output(texts or "".join(every))
    except LaunchError as error:
        return console.refuse(error)
    return 0


def parts() -> dict[str, dict[str, Any]]:
    """Return for each part of the page its ``intro``, and its messages by code."""
    return files.from_toml(_DATA.read_text(encoding="utf-8"))


def _explained(wanted: str, entries: dict[str, dict[str, Any]]) -> str:
    number = re.search(r"(?i)(?:^|hpc) *([0-9]+)", wanted)
    name = f"HPC{number[1].zfill(3)}" if number else wanted
    aliases = {a: code for code in entries for a in entries[code].get("aliases", ())}
    code = aliases.get(name, name)
    if code not in entries:
        text = f"there is no message {wanted!r}. Without a code, the command lists all"
        raise LaunchError("HPC245", text)
    keys = ("title", "text", "cause", "fix")
    shown = (_LINK.sub(r"\1 (docs/\2)", entries[code][key]).strip() for key in keys)
    title, text, cause, fix = shown
    return f"{code}: {title}\n\n{text}\n\n{cause}\n\nFix: {fix}\n"


if __name__ == "__main__":
    sys.exit(main())

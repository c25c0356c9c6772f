"""Write the tables of variables and of limits: ``python docs/write_constants.py``.

reference.md gets the environment variables, and internals.md the time limits. Both come
from constants and the comments before them. The docstrings of torchrun_hpc/variables.py
and torchrun_hpc/limits.py describe the form.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "torchrun_hpc"

VARIABLES_FILE = DOCS / "reference.md"
LIMITS_FILE = DOCS / "internals.md"
_MARK = "<!-- Written by docs/write_constants.py from torchrun_hpc/{}. -->\n"

VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_\w+)*")
_HEADING = re.compile(r"# --- (.+?) -+")
# Words of a comment that are code on a page: options, and names with an underscore.
_CODE = re.compile(r"(?<![\w`./])(--[\w-]+(=\w+)?|[\w./]*_[\w./]*\w|_\w+_)(?![\w`])")


class Constant(NamedTuple):
    """A public constant of a module."""

    group: str  # the last heading before it, or empty
    name: str
    values: tuple[object, ...]  # its text or number, or those of a tuple
    meaning: str  # the comment right before it, or empty


def constants(path: Path) -> Iterator[Constant]:
    """Yield the public constants of a module that have texts or numbers."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.parse(text).body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Constant() | ast.Tuple() as value):
                parts = ast.walk(value)
            case _:
                continue
        values = tuple(part.value for part in parts if isinstance(part, ast.Constant))
        before = lines[node.lineno - 2 :: -1]
        comment = [*itertools.takewhile(lambda line: line.startswith("# "), before)]
        headings = filter(None, map(_HEADING.fullmatch, before))
        group = next((heading[1] for heading in headings), "")
        if re.fullmatch("[A-Z][A-Z_]*", name) and values:
            meaning = " ".join(line[2:] for line in reversed(comment))
            yield Constant(group, name, values, meaning)


def variables() -> Iterator[Constant]:
    """Yield the constants that name variables, with their owners as groups."""
    yield from constants(PACKAGE / "variables.py")
    for path in sorted((PACKAGE / "schedulers").glob("[a-z]*.py")):
        module = importlib.import_module(f"torchrun_hpc.schedulers.{path.stem}")
        detector = getattr(module, "DETECTOR", None)
        owner = detector.name if detector else path.stem.upper()
        for each in constants(path):
            if all(VARIABLE.fullmatch(str(value)) for value in each.values):
                yield each._replace(group=owner)


def limits() -> Iterator[Constant]:
    """Yield the constants that are time limits."""
    yield from constants(PACKAGE / "limits.py")


def variables_text() -> str:
    """Return the whole page with the variables."""
    table = "| variable | meaning |\n|---|---|\n"
    for group, members in itertools.groupby(variables(), lambda each: each.group):
        table += f"| **{group}** | |\n"
        for each in members:
            names = ", ".join(f"`{value}`" for value in each.values)
            table += f"| {names} | {_code(each.meaning)} |\n"
    return _page(VARIABLES_FILE, _MARK.format("variables.py and schedulers/"), table)


def limits_text() -> str:
    """Return the whole page with the limits."""
    table = "| limit | seconds | reason | at its end |\n|---|---|---|---|\n"
    for group, members in itertools.groupby(limits(), lambda each: each.group):
        table += f"| **{group}** | | | |\n"
        for each in members:
            name, number = f"`{each.name}`", each.values[0]
            reason, _, end = map(_code, each.meaning.partition(" At its end, "))
            table += f"| {name} | {number} | {reason} | {_upper(end)} |\n"
    return _page(LIMITS_FILE, _MARK.format("limits.py"), table)


def _page(file: Path, mark: str, table: str) -> str:
    """Return a page with a new table after the mark, up to the next heading."""
    head, _, rest = file.read_text(encoding="utf-8").partition(mark)
    _, heading, tail = rest.partition("\n## ")
    return f"{head}{mark}\n{table}{heading}{tail}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _code(comment: str) -> str:
    return _CODE.sub(r"`\1`", comment)


if __name__ == "__main__":
    VARIABLES_FILE.write_text(variables_text(), encoding="utf-8")
    LIMITS_FILE.write_text(limits_text(), encoding="utf-8")

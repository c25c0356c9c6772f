"""Write the fields of the report into doctor.md: ``python docs/write_report.py``."""

from __future__ import annotations

import inspect
import re
import typing
from pathlib import Path

from torchrun_hpc.doctor import results

FILE = Path(__file__).with_name("doctor.md")
MARK = "<!-- Written by docs/write_report.py from torchrun_hpc.doctor.results. -->\n"

TYPES = (
    *(results.Report, results.Finding, results.Node, results.Interface),
    *(results.Folder, results.Gpu, results.Torch, results.Link, results.Collective),
)


def fields(kind: type) -> str:
    """Return the fields of one type as a table."""
    documented = inspect.getdoc(kind) or ""
    title, _, attributes = documented.partition("Attributes:\n")
    texts = {
        name: " ".join(text.split()).replace("``", "`")
        for name, text in re.findall(
            r"^ {4}(\w+): (.*?)(?=^ {4}\w+: |\Z)", attributes, re.DOTALL | re.MULTILINE
        )
    }
    rows = "".join(
        f"| `{name}` | {_written(hint)} | {texts[name]} |\n"
        for name, hint in typing.get_type_hints(kind).items()
    )
    first, head = title.splitlines()[0], "| field | type | |\n|---|---|---|\n"
    return f"### {kind.__name__}\n\n{first}\n\n{head}{rows}"


def _written(hint: object) -> str:
    """Write a type for a person."""
    return re.sub(r"[\w.]+\.|<class '|'>", "", str(hint)).replace("|", "or")


def text() -> str:
    """Return the whole page."""
    head, _, _ = FILE.read_text(encoding="utf-8").partition(MARK)
    return head + MARK + "\n" + "\n".join(map(fields, TYPES))


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")

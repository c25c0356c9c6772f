"""The job scripts of examples/README.md, taken from where users read them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = Path(__file__).parents[1] / "examples" / "README.md"


@dataclass(frozen=True)
class JobScript:
    """A block of shell on the page.

    Attributes:
        where: The heading above it: ``Dresden: Capella``.
        text: The script.
    """

    where: str
    text: str

    @property
    def example(self) -> str:
        """The name of the example that it starts: ``fsdp.py``."""
        (name,) = re.findall(r"examples/(\w+\.py)", self.text)
        return str(name)

    def __str__(self) -> str:
        return f"{self.where}-{self.example}"

    def smaller(self, arguments: str, instead: Mapping[str, str] | None = None) -> str:
        """Return the script for a small machine.

        Args:
            arguments: For the example; they follow those on the page, and so count.
            instead: What stands on the page, and what to put there.
        """
        text = self.text.rstrip("\n")
        for there, other in (instead or {}).items():
            assert there in text, f"no {there} in:\n{text}"
            text = text.replace(there, other)
        return f"{text} {arguments}\n"


def job_scripts() -> list[JobScript]:
    """Return all of them, in the order of the page."""
    found = []
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        where = section.partition("\n")[0]
        blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
        found += [JobScript(where, block) for block in blocks]
    return found


def job_script(where: str, example: str) -> JobScript:
    """Return the one for a centre, named by the beginning of its heading."""
    (found,) = (
        script
        for script in job_scripts()
        if script.where.startswith(where) and script.example == example
    )
    return found


def pbs_resources(script: str) -> tuple[int, dict[str, int]]:
    """Read ``#PBS -l select=N:ncpus=C:...`` of a script: chunks, and what each has."""
    (select,) = re.findall(r"^#PBS .*-l select=(\S+)", script, re.MULTILINE)
    chunks, *resources = select.split(":")
    pairs = (resource.split("=") for resource in resources)
    return int(chunks), {name: int(number) for name, number in pairs}

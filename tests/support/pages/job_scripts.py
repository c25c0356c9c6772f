"""The job scripts of docs/run.md that start an example."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.pages.blocks import blocks, replaced

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = "docs/run.md"


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
        text = replaced(self.text, instead or {}).rstrip("\n")
        return f"{text} {arguments}\n"


def job_scripts() -> list[JobScript]:
    """Return all of them, in the order of the page."""
    return [
        JobScript(block.heading, block.text)
        for block in blocks(PAGE)
        if "bin/activate" in block.text and "examples/" in block.text
    ]


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
    return int(chunks), {name: int(number.rstrip("GB")) for name, number in pairs}

"""The pages of the documentation, and the blocks of code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

_FOLDERS = (".", "docs", "examples", "packaging", "patches", "tests")
PAGES = sorted(
    str(path.relative_to(ROOT))
    for folder in _FOLDERS
    for path in (ROOT / folder).glob("*.md")
)

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        heading: The heading above it: ``Dresden: Capella``.
        language: The word after the backticks: ``bash``.
        title: The text above the block on the site.
        text: The code.
    """

    heading: str
    language: str
    title: str
    text: str

    def has(self, words: str) -> bool:
        """Return whether all words, separated by ``&``, are in it or in its heading."""
        return all(
            each in f"{self.heading}\n{self.text}" for each in words.split(" & ")
        )

    def prompts(self) -> list[tuple[str, str]]:
        """Return each command after a prompt, and its output."""
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]
        return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts]


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page, in its order; its path is as in `PAGES`."""
    found = []
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        above = _FENCE.sub("", text[: match.start()])
        heading = re.findall(r"^#+ (.*)", above, re.MULTILINE)[-1]
        language, _, rest = match[1].partition(" ")
        title = re.search('title="(.*?)"', rest)
        found.append(Block(heading, language, title[1] if title else "", match[2]))
    return found


def block(page: str, words: str) -> Block:
    """Return the one block of a page that has these words."""
    (found,) = (each for each in blocks(page) if each.has(words))
    return found


def outside_of_blocks(page: str) -> str:
    """Return a page without its blocks."""
    return _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))


def replaced(text: str, instead: Mapping[str, str]) -> str:
    """Replace words of a text; all of them must be in it."""
    for there, other in instead.items():
        assert there in text, f"no {there} in:\n{text}"
        text = text.replace(there, other)
    return text

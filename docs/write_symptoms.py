"""Write the messages into symptoms.md: ``python docs/write_symptoms.py``.

A comment of that page, ``<!-- HPC060 HPC061 -->``, names the messages of a symptom.
What each says, what it means and what to do comes from messages.md, and stands below
the comment, up to ``<!-- end -->``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("symptoms.md")
MESSAGES = Path(__file__).with_name("messages.md")

_PLACE = re.compile(r"<!-- ((?:HPC\d{3} ?)+)-->\n.*?<!-- end -->\n", re.DOTALL)
# The first sentence; the kind of a message, as in "A note.", is not all of it.
_SENTENCE = re.compile(
    r"(?:(?:advice|a note|a wait|a warning|part of HPC085)\b[^.]*\. )?"
    r".*?[.?](?= [A-Z`]|$)"
)


class Described(NamedTuple):
    """What messages.md says of a message.

    Attributes:
        text: The message itself, as Markdown.
        cause: The first sentence of its cause.
        remedy: The first sentence of its remedy.
    """

    text: str
    cause: str
    remedy: str


def described() -> dict[str, Described]:
    """Return what the documentation says of each message, by its code."""
    page = MESSAGES.read_text(encoding="utf-8")
    found = {}
    for part in re.split(r"^### (?=HPC\d{3})", page, flags=re.MULTILINE)[1:]:
        code, _, rest = part.partition("\n")
        text, cause = re.split(r"^Cause: ", rest, maxsplit=1, flags=re.MULTILINE)
        cause, remedy = re.split(r"^Remedy: ", cause, maxsplit=1, flags=re.MULTILINE)
        found[code] = Described(" ".join(text.split()), _first(cause), _first(remedy))
    return found


def _first(text: str) -> str:
    """Return the first sentence of a text; it begins with a capital."""
    words = " ".join(text.partition("\n\n")[0].split())
    match = _SENTENCE.match(words)
    sentence = match[0] if match else words.rstrip(":") + "."
    return sentence[0].upper() + sentence[1:]


def _linked(text: str) -> str:
    """Let the codes in a text lead to what they stand for."""
    return re.sub(r"(?<![\[#])\bHPC(\d{3})\b", r"[HPC\1](messages.md#hpc\1)", text)


def text() -> str:
    """Return the whole page."""
    known = described()

    def listed(match: re.Match[str]) -> str:
        codes = match[1].split()
        items = "".join(
            f"- {known[code].text} ([{code}](messages.md#{code.lower()}))<br>\n"
            f"  {_linked(known[code].cause)} **Do:** {_linked(known[code].remedy)}\n"
            for code in codes
        )
        return f"<!-- {' '.join(codes)} -->\n\n{items}\n<!-- end -->\n"

    return _PLACE.sub(listed, FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")

"""Every message has a code of its own, a section in the documentation, and a test."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"\bHPC[0-9]{3}\b")
PAGE = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
HEADING = re.compile(r"^### `?(HPC[0-9]{3})\b.*\n+(?=[^#\s])", re.MULTILINE)


def texts(folder):
    return {
        path: path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")
    }


TREES = {path: ast.parse(text) for path, text in texts("torchrun_hpc").items()}


def strings(tree):
    """Return the texts of a program that are no docstrings."""
    is_alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in is_alone
    ]


# Each as often as it is there.
CODES = Counter(
    code
    for tree in TREES.values()
    for text in strings(tree)
    for code in CODE.findall(text)
)


def test_every_code_is_of_one_message():
    assert len(CODES) > 50
    assert not [code for code, number in CODES.items() if number > 1]


def test_every_code_has_one_section_that_is_not_empty():
    found = Counter(HEADING.findall(PAGE))
    assert {*found} - {*CODES} == set()  # sections without a message
    assert {*CODES} - {*found} == set()  # messages without a section
    assert set(found.values()) == {1}


def test_no_code_that_is_gone_comes_back():
    """A person may look it up in an old page."""
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    gone = CODE.findall("".join(re.findall(r"Codes that are gone:[^.]*", log)))
    assert gone
    assert {*gone} & {*CODES} == set()


def test_every_code_is_in_a_test():
    """Or in a recording, beside which there is what is found in it."""
    recordings = (ROOT / "tests" / "unit" / "environments").glob("*.json")
    tests = [
        *texts("tests").values(),
        *(path.read_text("utf-8") for path in recordings),
    ]
    tested = {code for text in tests for code in CODE.findall(text)}
    assert sorted(CODES.keys() - tested) == []


def test_the_sections_of_a_part_are_in_order():
    for part in re.split(r"^## ", PAGE, flags=re.MULTILINE):
        codes = HEADING.findall(part)
        assert codes == sorted(codes), part.partition("\n")[0]


def test_every_message_is_made_with_a_code():
    """A code that is not written where the message is made could not be found."""
    made = [
        (path, node)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in {"LaunchError", "Message"}
    ]
    assert {node.func.id for _, node in made} == {"LaunchError", "Message"}
    for path, node in made:
        first = node.args[0]
        written = isinstance(first, ast.Constant) and CODE.fullmatch(str(first.value))
        # Those that pass on the code of another, or of a whole family.
        passed = ast.unparse(first) in {"code", "error.code", "fault.code"}
        assert written or passed, f"{path}:{node.lineno}"

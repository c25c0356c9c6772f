"""Every message has a code of its own, a section in the documentation, and a test."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter

from tests.support import ROOT
from tests.support.python_programs import load
from tests.support.syntax import modules

CODE = re.compile(r"\bHPC[0-9]{3}\b")
WRITER = load(ROOT / "docs" / "write_messages.py")
PARTS = WRITER.parts()
FIELDS = {"title", "text", "cause", "fix"}


def texts(folder):
    return {
        path: path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")
    }


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


@functools.cache
def codes_in_use():
    """Return the codes in the package. Places that find one problem share its code."""
    return {
        code
        for tree in modules().values()
        for text in strings(tree)
        for code in CODE.findall(text)
    }


def entries():
    return [
        (code, entry)
        for part in PARTS.values()
        for code, entry in part.items()
        if code != "intro"
    ]


def test_every_code_is_explained_once():
    codes = Counter(code for code, _ in entries())
    aliases = Counter(old for _, entry in entries() for old in entry.get("aliases", ()))
    assert {*codes} ^ codes_in_use() == set()
    assert max((codes + aliases).values()) == 1
    for code, entry in entries():
        assert FIELDS <= {*entry} <= {*FIELDS, "aliases"}, code
        assert all(entry[name].strip() for name in FIELDS), code
        # Nothing follows: `explain` prints these texts alone.
        assert not any(entry[name].strip().endswith(":") for name in FIELDS), code
        assert len(entry["title"]) <= 50, code


def test_the_page_is_written_from_the_data():
    page = WRITER.FILE.read_text(encoding="utf-8")
    assert page == WRITER.text(), "python docs/write_messages.py"


def test_no_code_that_is_gone_comes_back():
    """A person may look it up in an old page."""
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    gone = CODE.findall("".join(re.findall(r"Codes that are gone:[^.]*", log)))
    assert gone
    assert {*gone} & codes_in_use() == set()


def test_every_code_is_in_a_test():
    """Or in a golden file, or in a recording, which has its expected code."""
    unit = ROOT / "tests" / "unit"
    files = [*unit.glob("environments/*.json"), *unit.glob("*/golden/*.txt")]
    tests = [*texts("tests").values(), *(path.read_text("utf-8") for path in files)]
    tested = {code for text in tests for code in CODE.findall(text)}
    assert sorted(codes_in_use() - tested) == []


def test_every_message_is_made_with_a_code():
    """A code that is not written where the message is made could not be found."""
    made = [
        (path, node)
        for path, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in {"LaunchError", "Message"}
    ]
    assert {ast.unparse(node.func) for _, node in made} == {"LaunchError", "Message"}
    for path, node in made:
        first = node.args[0]
        written = isinstance(first, ast.Constant) and CODE.fullmatch(str(first.value))
        # Those that pass on the code of another, or of a whole family.
        passed = ast.unparse(first) in {"code", "each.code", "error.code", "fault.code"}
        assert written or passed, f"{path}:{node.lineno}"

"""Every message has a code of its own, a section in the documentation, and a test."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"\bHPC[0-9]{3}\b")


# --- how they are found -------------------------------------------------------------


def docstrings(tree):
    """Return the constants that are docstrings."""
    with_body = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, with_body)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }


def codes_in(source):
    """Return the codes in the texts of a program, each as often as it is there."""
    tree = ast.parse(source)
    skipped = docstrings(tree)
    return [
        code
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in skipped
        for code in CODE.findall(node.value)
    ]


def places(sources):
    """Return for each code the files that have it, once for each occurrence.

    Args:
        sources: Name to text of each file.
    """
    found = defaultdict(list)
    for name, source in sources.items():
        for code in codes_in(source):
            found[code].append(name)
    return found


def sections(page):
    """Return for each code that is a heading the text below it; a list, if twice."""
    found = defaultdict(list)
    for part in re.split(r"^(?=#+ )", page, flags=re.MULTILINE):
        heading, _, text = part.partition("\n")
        match = re.match(r"### `?(HPC[0-9]{3})\b", heading)
        if match:
            found[match[1]].append(text.strip())
    return found


def unordered(page):
    """Return the parts of the documentation whose codes are not in order."""
    for part in re.split(r"^## ", page, flags=re.MULTILINE):
        codes = list(sections(part))
        if codes != sorted(codes):
            yield part.partition("\n")[0]


def faults(sources, page, tests):
    """Say what is wrong with the codes.

    Args:
        sources: Name to text of each file of the package.
        page: The documentation of the messages.
        tests: Texts of all files of tests.
    """
    used = places(sources)
    documented = sections(page)
    tested = {code for text in tests for code in CODE.findall(text)}
    for code in sorted({*used, *documented}):
        if len(used[code]) > 1:
            yield f"{code} is at more than one place: {', '.join(used[code])}"
        if not used[code]:
            yield f"{code} is documented, and no message has it"
        elif not documented[code]:
            yield f"{code} is not documented"
        elif not all(documented[code]):
            yield f"{code} has an empty section"
        if len(documented[code]) > 1:
            yield f"{code} is documented twice"
        if used[code] and code not in tested:
            yield f"{code} is in no test"


# --- those of the package -----------------------------------------------------------


def texts(folder, *without):
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.py"))
        if path not in without
    }


SOURCES = texts(ROOT / "torchrun_hpc")
TESTS = texts(ROOT / "tests", Path(__file__))


def test_codes_are_found():
    assert len(places(SOURCES)) > 50


def test_every_message_has_one_code_one_section_and_a_test():
    page = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
    assert list(faults(SOURCES, page, TESTS.values())) == []


def test_messages_are_in_order():
    page = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
    assert list(unordered(page)) == []


@pytest.mark.parametrize("kind", ["LaunchError", "Message"])
def test_every_message_is_made_with_a_code(kind):
    """A code that is not written where the message is made could not be found."""
    made = [
        (name, node)
        for name, source in SOURCES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == kind
    ]
    assert made
    for name, node in made:
        first = node.args[0]
        written = isinstance(first, ast.Constant) and CODE.fullmatch(str(first.value))
        # Those that pass on the code of another, or of a whole family.
        passed = ast.unparse(first) in {"code", "error.code", "fault.code"}
        assert written or passed, f"{name}:{node.lineno}"


# --- that the search can fail -------------------------------------------------------

RAISED = 'raise LaunchError("HPC901", "text")'
SECTION = "### HPC901\n\nWhy, and what to do.\n"
TEST = 'refused("HPC901")'
FAULTS = {
    "nothing": (RAISED, SECTION, TEST, []),
    "more in the heading": (RAISED, "### HPC901 text of it\n\nWhy.\n", TEST, []),
    "in quotes": (RAISED, "### `HPC901`\n\nWhy.\n", TEST, []),
    "in front of a text": ('fail("HPC901 the text")', SECTION, TEST, []),
    "part of a text with values": ('fail(f"HPC901 {x}")', SECTION, TEST, []),
    "twice in one file": (
        f"{RAISED}\n{RAISED}",
        SECTION,
        TEST,
        ["HPC901 is at more than one place: a.py, a.py"],
    ),
    "not in the documentation": (RAISED, "", TEST, ["HPC901 is not documented"]),
    "in the documentation's text only": (
        RAISED,
        "### HPC902\n\nNot HPC901.\n",
        TEST,
        [
            "HPC901 is not documented",
            "HPC902 is documented, and no message has it",
        ],
    ),
    "a heading of another level": (
        RAISED,
        "## HPC901\n\nWhy.\n",
        TEST,
        ["HPC901 is not documented"],
    ),
    "an empty section": (
        RAISED,
        "### HPC901\n\n\n## More\n\ntext\n",
        TEST,
        ["HPC901 has an empty section"],
    ),
    "an empty section in front of another": (
        f'{RAISED}; fail("HPC902")',
        f"### HPC902\n{SECTION}",
        f"{TEST} HPC902",
        ["HPC902 has an empty section"],
    ),
    "two sections": (RAISED, SECTION * 2, TEST, ["HPC901 is documented twice"]),
    "in no test": (RAISED, SECTION, "HPC9012 XHPC901", ["HPC901 is in no test"]),
    "gone": ("", SECTION, TEST, ["HPC901 is documented, and no message has it"]),
    "in a docstring only": (
        'def f():\n    """Raise HPC901."""\n',
        SECTION,
        TEST,
        ["HPC901 is documented, and no message has it"],
    ),
    "in a comment only": (
        "# HPC901",
        SECTION,
        TEST,
        ["HPC901 is documented, and no message has it"],
    ),
    "everything": (
        RAISED,
        "### HPC902\n\n",
        "",
        [
            "HPC901 is not documented",
            "HPC901 is in no test",
            "HPC902 is documented, and no message has it",
        ],
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_are_found(case):
    source, page, test, expected = FAULTS[case]
    assert list(faults({"a.py": source}, page, [test])) == expected


def test_one_code_in_two_files():
    found = faults({"a.py": RAISED, "b.py": RAISED}, SECTION, [TEST])
    assert list(found) == ["HPC901 is at more than one place: a.py, b.py"]


def test_codes_out_of_order_are_found():
    a, b = SECTION, SECTION.replace("901", "902")
    page = f"# Page\n## One\n{a}## Two\n{b}{a}## Three\n{a}{b}"
    assert list(unordered(page)) == ["Two"]


def test_docstrings_are_no_messages():
    module = '"""HPC901"""\nclass A:\n    """HPC902"""\n    x = "HPC903"\n'
    assert codes_in(module) == ["HPC903"]

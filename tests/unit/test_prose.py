"""Pages, docstrings, comments, and messages follow the rules of docs/style.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize

import pytest

from tests.support import ROOT
from tests.support.pages.blocks import PAGES

# The rules of the page that are marked as errors, each with what to write instead.
RULES = {
    "for ever": "forever",
    r"in the place of|in place of the": "instead of",
    r"in front of": "before",
    r"mend(s|ed|ing)?": "fix",
    r"(?<!by )hand(s|ed|ing)? on": "forward, pass on",
    r"(go|goes|going|went|gone) on": "continue",
    r"anew": "again",
    r"as ever|as before it": "as usual",
    r"(has|have) stopped to|(stop|start)s? to (answer|serve)": "stopped answering",
    r"(part|answers?|comes?|runs?) no more": "no longer",
    r"stands? (behind|in front|there)|stood": "be, come after, come before",
    r"(has|have|had) not (a|an|the|got|come)": "does not have, did not join",
    r"typed(?! (field|dict))": "explicit, given, passed, set",
    r"need not": "does not have to",
    r"may not": "must not, cannot",
    r"(is|are|was|were) to be": "must be, will be",
    r"(?<=, )too(?=[.,:;)]|$| )": "also, before the verb",
    r"(?<=[;,.] )[Ee]lse(?! [a-z]+:)": "otherwise",
    r"(?-i:(?<![\w:,] )Where (a|an|the|it|no|nothing|only|all|each|this|there))": "if",
    r"(?-i:(?<![\w:,] )What [^.?!:]*?(is|are|has|have)(?![^.]*\?))": "subject first",
    r"(?-i:(?<![\w,] )Say (whether|what|who|why|how|that|in))": "return, report",
    r"(?-i:(?<![\w,] )Type(?=:|,| (?!of)[a-z`-]))": "pass, set, run",
}
FOUND = [
    (re.compile(rf"\b(?:{rule})\b", re.IGNORECASE), r) for rule, r in RULES.items()
]

# A rule that does not fit: the words around, and why. Ten at most.
EXCEPTIONS: dict[str, str] = {}

STYLE = "docs/style.md"
FIXES = re.compile(r"^(as (for|of)|none|nothing|another|the same)\b", re.IGNORECASE)
MODULES = sorted((ROOT / "torchrun_hpc").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
FORMS = sorted((ROOT / ".github").rglob("*.*"))


def plain(markdown: str) -> str:
    """Return Markdown without blocks of code; code in a line is one word."""
    text = re.sub(r"^ *(```+).*?^ *\1", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(`+).+?\1", "`code`", text, flags=re.DOTALL)
    return re.sub(r"\n(?! *\n| *[-|#>*!=])", " ", text)  # a line for each paragraph


def comments(text: str) -> str:
    """Return the comments of a program."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(x.string.lstrip("# ") for x in tokens if x.type == tokenize.COMMENT)


def docstrings(text: str) -> list[str]:
    """Return the docstrings of a program."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, owners)]
    return [ast.get_docstring(node, clean=False) or "" for node in nodes]


def texts(text: str) -> list[str]:
    """Return all texts of a program; docstrings are some of them."""
    joined: set[int] = set()
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            parts = [getattr(each, "value", None) for each in node.values]
            joined.update(map(id, node.values))
            found.append("".join(x if isinstance(x, str) else "X" for x in parts))
        elif isinstance(node, ast.Constant) and id(node) not in joined:
            found += [str(node.value)] * (len(str(node.value).split()) > 3)
    return found


def prose(*parts: str) -> str:
    """Return parts of a program as plain paragraphs."""
    return "\n\n".join(plain(re.sub(r"``?", "`", part)) for part in parts)


def problems(path: str, text: str) -> list[str]:
    """Return what breaks the rules, with its surroundings."""
    return [
        f"{path}: ...{around}...: {advice}"
        for rule, advice in FOUND
        for match in rule.finditer(text)
        for around in [text[max(match.start() - 30, 0) : match.end() + 30]]
        if not any(known in around for known in EXCEPTIONS)
    ]


@pytest.mark.parametrize("path", [*PAGES, *(str(p.relative_to(ROOT)) for p in FORMS)])
def test_pages(path):
    if path != STYLE:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not problems(path, plain(text))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_programs(path):
    text = path.read_text(encoding="utf-8")
    assert not problems(path.name, prose(comments(text), *texts(text)))


@pytest.mark.parametrize("path", TESTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_tests(path):
    """Other texts of a test are its data."""
    text = path.read_text(encoding="utf-8")
    assert not problems(path.name, prose(comments(text), *docstrings(text)))


def test_remedies_begin_with_a_verb():
    text = (ROOT / "torchrun_hpc" / "messages.toml").read_text(encoding="utf-8")
    fixes = re.findall(r"^fix = ['\"]+\n?(.*)", text, re.MULTILINE)
    assert len(fixes) == text.count("\nfix = ") > 100
    assert not [fix for fix in fixes if FIXES.match(fix)]
    assert not problems("messages.toml", plain(text))


def test_few_exceptions():
    assert len(EXCEPTIONS) <= 10
    with pytest.raises(AssertionError):
        assert not problems("x", "What counts is the file, too. It may not be typed.")

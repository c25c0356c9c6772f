"""Golden files: tables, reports, pages and messages, which a reader reviews as text.

A test passes its texts to the fixture ``golden``, by the names of their cases. The file
of ``test_tables.py::test_dry_runs`` is ``golden/tables.dry_runs.txt``, beside the test.
``UPDATE=1`` rewrites the files. Review their diff before you commit it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import pytest

from tests.support import ROOT

if TYPE_CHECKING:
    from pathlib import Path

Texts = Mapping[str, str | Iterable[str]]
Golden = Callable[[Texts], None]

_UPDATES = pytest.StashKey[bool]()


def is_updating(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the tests write what they otherwise compare.

    Raises:
        pytest.UsageError: In CI, which must compare.
    """
    updates = bool(environ.get("UPDATE"))
    if updates and environ.get("CI"):
        raise pytest.UsageError("UPDATE=1 is not for CI: a reader reviews the diff")
    return updates


def pytest_configure(config: pytest.Config) -> None:
    """Read ``UPDATE`` once, because tests change the environment."""
    config.stash[_UPDATES] = is_updating()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Return the function that compares a test's texts with its golden file."""
    if hasattr(request.node, "callspec"):
        pytest.fail("a parametrized test has no golden file: use one test for all")
    test = request.path.stem.removeprefix("test_")
    case = request.node.name.removeprefix("test_")
    path = request.path.parent / "golden" / f"{test}.{case}.txt"

    def check(texts: Texts) -> None:
        __tracebackhide__ = True
        compare(path, page(texts), updates=request.config.stash[_UPDATES])

    return check


def page(texts: Texts) -> str:
    """Return the text of a golden file: each case below a line with its name."""
    parts = []
    for name, text in texts.items():
        lines = text if isinstance(text, str) else "\n".join(text)
        parts.append(f"=== {name} ===\n{lines}\n")
    return "\n".join(parts)


def compare(path: Path, text: str, *, updates: bool) -> None:
    """Fail with a diff if a file has another text, or rewrite the file."""
    __tracebackhide__ = True
    expected = path.read_bytes().decode() if path.exists() else ""
    if text == expected:
        return
    if updates:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode())
        return
    diff = difflib.unified_diff(
        *(expected.splitlines(), text.splitlines()), "golden file", "test", lineterm=""
    )
    pytest.fail("\n".join([f"UPDATE=1 rewrites {path}", *diff]))


def without_test(folder: Path = ROOT / "tests") -> list[Path]:
    """Return the golden files that belong to no test."""
    return [
        path
        for path in sorted(folder.glob("**/golden/*.txt"))
        if not _has_test(path.parents[1], *path.stem.split(".", 1))
    ]


def _has_test(folder: Path, module: str, name: str) -> bool:
    test = folder / f"test_{module}.py"
    defined = rf"^def test_{re.escape(name)}\([^)]*\bgolden\b[^)]*\):$"
    return test.exists() and bool(re.search(defined, test.read_text(), re.MULTILINE))

"""The syntax trees of the package, parsed once by the first test that asks."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING

from tests.support import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGE = ROOT / "torchrun_hpc"


@functools.cache
def modules() -> Mapping[str, ast.Module]:
    """Return the syntax trees of the modules, by their full names."""
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        text = path.read_text(encoding="utf-8")
        trees[".".join(parts).removesuffix(".__init__")] = ast.parse(text, path)
    return trees

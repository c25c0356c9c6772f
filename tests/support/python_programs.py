"""Programs of the repository that are in no package."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from pathlib import Path


def load(path: Path) -> Any:
    """Import a program, with the modules beside it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(path.parent), *sys.path]):
        spec.loader.exec_module(module)
    return module

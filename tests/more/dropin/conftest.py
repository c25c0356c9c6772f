"""One launching process for all tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from side_by_side import Launcher

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("launches"))
    yield launcher
    launcher.close()

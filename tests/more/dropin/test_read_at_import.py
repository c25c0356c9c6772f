"""The list of the variables that ``import torch`` reads, and the installed torch."""

from __future__ import annotations

import shutil

from tests.support.cluster.commands import require
from tests.support.stock.read_at_import import missing


def test_the_list_has_all_names():
    """``tests/support/stock/read_at_import.py --write`` adds those that it lacks."""
    require(None if shutil.which("cc") else "there is no C compiler (cc)")
    assert missing() == {}

"""A rank does not come to a collective, and is named."""

from __future__ import annotations

import pytest

from tests.support.cluster import hangs
from tests.support.pages.blocks import block, replaced


@pytest.mark.release
def test_a_rank_that_sleeps(juelich):
    hangs.run(juelich, ["sleep"])


def test_the_page_shows_such_a_report():
    page = block("docs/troubleshooting.md", "did not call it").text
    own = {"train.py": "stays_away.py", "data.py": "stays_away.py", "read at": "odd at"}
    (lines,) = hangs.explained(replaced(page, own).replace("(node 0)", "(local rank"))
    hangs.check("sleep", lines)

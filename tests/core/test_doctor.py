"""The doctor names the node whose link is slow."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from examinations import MBITS, SMALL, examined, typed
from links import shaped, throttled

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster


def test_a_link_with_half_the_rate(juelich: Cluster, tmp_path: Path) -> None:
    with shaped(juelich, MBITS), throttled(juelich, "jwb0002", MBITS // 2):
        done = typed(juelich, tmp_path, "=gpu", {"=gpu": f"=1 {SMALL} --json=file"})
    found = examined(done, tmp_path / "file", 1)
    assert found.suspects == [("HPC191", [1])]
    text = r"jwb0002, with 2 of 2 nodes: 4\d Mbit/s, and 9\d Mbit/s"
    assert re.search(text, found.text("HPC191")), found.text("HPC191")
    assert found.last_line == "--exclude=jwb0002"
    assert {row["wrong"] for row in found.report["collectives"]} == {0}

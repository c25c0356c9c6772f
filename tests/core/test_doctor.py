"""The doctor names the node whose link is slow."""

from __future__ import annotations

import re

from examinations import MBITS, SMALL, examined, typed
from links import shaped, throttled


def test_a_link_with_half_the_rate(juelich, tmp_path):
    with shaped(juelich, MBITS), throttled(juelich, "jwb0002", MBITS // 2):
        done = typed(juelich, tmp_path, "=gpu", {"=gpu": f"=1 {SMALL} --json=file"})
    found = examined(done, tmp_path / "file", 1)
    assert found.suspects == [("HPC191", [1])]
    text = r"jwb0002, with 2 of 2 nodes: (\d+) Mbit/s, and (\d+) Mbit/s"
    seen = re.search(text, found.text("HPC191"))
    assert seen, found.text("HPC191")
    slow, fast = map(int, seen.groups())
    # A busy machine takes some.
    assert MBITS // 4 < slow < MBITS // 2 < fast < MBITS, found.text("HPC191")
    assert found.verdict == [
        "Suspicious: jwb0002 (1 of 3 nodes).",
        "--exclude=jwb0002",
    ]
    assert {row["wrong"] for row in found.report["collectives"]} == {0}

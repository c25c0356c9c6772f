"""The doctor finds nothing on a healthy cluster; see more/faults for what is bad."""

from __future__ import annotations

from tests.support.cluster.examinations import (
    MBITS,
    SMALL,
    examine_as_on_page,
    examined,
)
from tests.support.cluster.links import shaped


def test_a_healthy_cluster(juelich, tmp_path):
    """Nodes, links, and a launch of torch's collectives."""
    words = {".doctor": f".doctor {SMALL}"}
    with shaped(juelich, MBITS):
        done = examine_as_on_page(juelich, tmp_path, "monday.json", words, lines=1)
    found = examined(done, tmp_path / "monday.json")
    assert found.suspects == []
    assert found.verdict[0].startswith("Nothing suspicious on 3 nodes")
    report = found.report
    assert report["hosts"] == list(juelich.names)
    assert [(x["first"], x["second"]) for x in report["links"]] == [
        (0, 1), (0, 2), (1, 2),
    ]  # fmt: skip
    for link in report["links"]:
        rates = [link[way] * 8e-6 for way in ("forward", "backward")]
        assert MBITS / 2 < min(rates) <= max(rates) < 1.1 * MBITS  # a busy machine
        assert (link["lost_mtu"], link["problem"]) == (0, "")
        assert abs(link["clock_s"]) < 0.1
    assert {node["interface"] for node in report["nodes"]} == {"ib0"}
    assert report["backend"] == "gloo"
    assert {row["operation"]: row["wrong"] for row in report["collectives"]} == {
        "all_reduce": 0, "all_gather": 0, "reduce_scatter": 0, "broadcast": 0,
    }  # fmt: skip
    # Who waits sees how far it is, and what it costs.
    pairs = "HPC177]: 3 nodes: 3 pairs in 3 rounds, about "
    assert pairs in done.stderr

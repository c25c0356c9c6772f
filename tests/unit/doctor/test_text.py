from __future__ import annotations

import pytest
from doctor import reports

from torchrun_hpc.doctor import text


def lines_of(report):
    return text.render(report).splitlines()


def line_with(word, report):
    """Return the first line that begins with a word, as its words."""
    return next(line.split() for line in lines_of(report) if line.startswith(word))


# --- as a whole -----------------------------------------------------------------------


def test_the_title_says_what_was_examined():
    first = lines_of(reports.make_report(3))[0]
    assert first == "3 nodes examined in 14.2 s, site jsc, launch 123456.0"


def test_the_title_says_how_many_nodes_have_come():
    report = reports.make_report(3, missing=[1], site="", launch_id="")
    assert lines_of(report)[0] == "2 of 3 nodes examined in 14.2 s"


@pytest.mark.parametrize("nodes", [1, 3, 32, 128])
def test_healthy_nodes_fit_on_a_screen(nodes):
    lines = lines_of(reports.make_report(nodes))
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


def test_suspect_nodes_fit_on_a_screen():
    lines = lines_of(reports.make_report(128, slow=[6, 40], missing=[127]))
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100


def test_a_report_without_measurements_can_be_read():
    report = reports.make_report(2, links=[], collectives=[], nodes=[])
    assert "0 of 2 nodes" in text.render(report)


def test_a_terminal_gets_nothing_to_act_on():
    rendered = text.render(reports.hostile_report())
    assert rendered.replace("\n", "").isprintable()


# --- the last line --------------------------------------------------------------------


def test_the_last_line_can_be_copied():
    assert lines_of(reports.make_report(3, slow=[2]))[-1] == "--exclude=jwb0003"


def test_no_node_is_suspect():
    assert lines_of(reports.make_report(3))[-1] == "no node is suspect"


def test_most_nodes_are_suspect():
    last = lines_of(reports.make_report(3, slow=[1, 2]))[-1]
    assert last.startswith("2 of 3 nodes are suspect: jwb0002, jwb0003; it is likely")


def test_a_node_without_a_name_is_suspect():
    report = reports.make_report(3, slow=[2], hosts=["", "", ""])
    assert lines_of(report)[-1] == "1 of 3 nodes is suspect: node 2"


def test_no_single_node_is_suspect():
    finding = {**reports.slow_node(0, "a", 1), "nodes": []}
    report = reports.make_report(3, findings=[finding])
    assert lines_of(report)[-1].startswith("no single node is to blame")


# --- findings -------------------------------------------------------------------------


def test_what_is_suspect_comes_first_with_its_remedy():
    report = reports.make_report(3, slow=[2])
    report["findings"].insert(0, reports.advice(0, 1))
    lines = lines_of(report)
    assert lines[2].startswith("HPC191  suspect  jwb0003, with 2 of 2 nodes: 3.70")
    assert lines[3].strip().startswith("remedy: leave the node out")
    assert lines[4].startswith("HPC184  advice   jwb0001, jwb0002: the limit of open")


def test_long_findings_are_broken():
    finding = {**reports.advice(0), "text": "word " * 100, "remedy": "do " * 100}
    lines = lines_of(reports.make_report(3, findings=[finding]))
    assert max(map(len, lines)) <= 100


def test_many_findings_are_counted():
    findings = [reports.slow_node(0, "jwb0001", 1)] * 50
    assert "and 38 more findings" in lines_of(reports.make_report(3, findings=findings))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([2], "jwb0003"),
        ([0, 1, 2, 3, 4, 5], "jwb0001, jwb0002, jwb0003, jwb0004 and 2 more"),
        (range(7), "all nodes"),
        ([], ""),
    ],
)
def test_nodes_are_named(ranks, expected):
    assert text.names(reports.make_report(7), ranks) == expected


# --- nodes ----------------------------------------------------------------------------


def test_the_worst_node_is_the_first_one():
    report = reports.make_report(32, slow=[20], missing=[30])
    report["findings"].append(reports.advice(7))
    nodes = text.node_columns(report)["node"]
    assert nodes[:3] == ["jwb0031", "jwb0021", "jwb0008"]


def test_only_some_nodes_are_shown():
    report = reports.make_report(128, slow=range(12))
    lines = lines_of(report)
    assert "and 118 more, 2 of them with findings" in lines
    assert sum(line.startswith("jwb") for line in lines) == 10


def test_what_is_the_same_on_all_nodes_is_written_once():
    lines = lines_of(reports.make_report(3))
    common = next(line for line in lines if line.startswith("all nodes: "))
    assert "torch 2.8.0+cu128, interface ib0 (MTU 4092, 200 Gbit/s)" in common
    assert "GPUs 4 x NVIDIA A100-SXM4-40GB" in common


def test_what_differs_is_a_column():
    report = reports.make_report(3)
    report["nodes"][1]["interfaces"][1]["mtu"] = 2044
    found = line_with("jwb0002", report)
    assert "ib0 (MTU 2044, 200 Gbit/s)" in " ".join(found)


def test_one_node_needs_no_table():
    lines = lines_of(reports.make_report(1))
    assert lines[2].startswith("node jwb0001, import (s) 6.")


def test_latency_and_bandwidth_are_of_the_node():
    """It receives slowly; what its partners have among them is not its fault."""
    words = line_with("jwb0003", reports.make_report(3, slow=[2]))
    assert words[:2] == ["jwb0003", "HPC191"]
    latency, sends, receives = map(float, words[2:5])
    assert 30 < latency < 40
    assert receives < 5
    assert sends > 180
    assert float(line_with("jwb0001", reports.make_report(3, slow=[2]))[3]) > 180


@pytest.mark.parametrize(
    ("changes", "title", "expected"),
    [
        ({"cpus": "0-3,8,10-11", "cores": 7}, "CPUs", "7"),
        ({"cpus": "0-3", "cores": 96}, "CPUs", "4 of 96"),
        ({"interface": ""}, "interface", "-"),
        ({"interface": "net9"}, "interface", "net9"),
        ({"torch": None}, "torch", "-"),
        ({"torch": {**reports.TORCH, "version": ""}}, "torch", "fails"),
        ({"gpus": []}, "GPUs", "4"),  # what torch sees
        ({"gpus": [], "torch": None}, "GPUs", "0"),
        (
            {"gpus": [reports.GPU, {**reports.GPU, "model": "H100"}]},
            "GPUs",
            "1 x NVIDIA A100-SXM4-40GB, 1 x H100",
        ),
    ],
)
def test_what_a_node_has(changes, title, expected):
    node = reports.make_node(0, **changes)
    columns = text.node_columns(reports.make_report(1, nodes=[node]))
    assert columns[title] == [expected]


def test_the_speed_of_an_interface_may_not_be_known():
    interface = reports.make_interface("ib0", "10.0.0.1", 9000, 0)
    node = reports.make_node(0, interfaces=[interface])
    columns = text.node_columns(reports.make_report(1, nodes=[node]))
    assert columns["interface"] == ["ib0 (MTU 9000)"]


# --- pairs ----------------------------------------------------------------------------


def test_the_slowest_way_has_a_direction():
    columns = text.pair_columns(reports.make_report(3, slow=[0]))
    assert columns["3 of 3 pairs"] == ["latency (us)", "bandwidth (Gbit/s)"]
    assert columns["which"][1] in {"jwb0002 to jwb0001", "jwb0003 to jwb0001"}
    assert columns["worst"][1] == "3.68"


def test_pairs_without_figures_are_named():
    report = reports.make_report(3)
    report["links"][1] = reports.broken_link(0, 2)
    assert "2 of 3 pairs" in text.pair_columns(report)
    assert "no figures between jwb0001 and jwb0003" in lines_of(report)


# --- collectives ----------------------------------------------------------------------


def test_the_largest_size_of_each_operation_is_shown():
    report = reports.make_report(3)
    words = line_with("all_reduce", report)
    assert words[:6] == ["all_reduce", "all", str(2**30), str(2**28), "float", "sum"]
    operations = [line.split()[0] for line in lines_of(report) if str(2**30) in line]
    assert operations == [*reports.FACTORS] * 2


def test_of_the_nodes_the_slowest_is_shown():
    report = reports.make_report(3)
    rows = [line for line in lines_of(report) if line.startswith("broadcast")]
    assert rows[1].split()[1] == "jwb0003"


def test_a_few_rows_are_all_shown():
    rows = reports.make_collectives(2)[:3]
    rows[0]["wrong"] = -1
    report = reports.make_report(3, collectives=rows)
    shown = [line for line in lines_of(report) if line.startswith("all_reduce")]
    assert len(shown) == 3
    assert shown[0].endswith("N/A")


def test_figures_are_in_the_units_of_nccl_tests():
    row = {**reports.make_collectives(2)[0], "time_s": 1e-3, "algbw": 2e9, "busbw": 4e9}
    columns = text.collective_columns([row])
    assert columns["time (us)"] == ["1000.00"]
    assert columns["algbw (GB/s)"] == ["2.00"]
    assert columns["busbw (GB/s)"] == ["4.00"]

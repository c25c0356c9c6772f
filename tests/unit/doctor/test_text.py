"""What a person reads on a terminal."""

from __future__ import annotations

import pytest
from doctor import reports
from doctor.reports import make_report

from torchrun_hpc.doctor import text


def lines_of(report):
    return text.render(report).splitlines()


def rows_of(report):
    return {row["node"]: row for row in text.node_rows(report)}


@pytest.mark.parametrize(
    "report",
    [make_report(1), make_report(3), make_report(128, slow=range(30), missing=[99])],
    ids=lambda report: len(report["hosts"]),
)
def test_it_fits_on_a_screen(report):
    *lines, _ = lines_of(report)
    assert len(lines) <= 55
    assert max(map(len, lines)) <= 100
    assert len(report["hosts"]) < 128 or "and 21 more findings" in lines


def test_a_report_without_measurements_can_be_read():
    report = make_report(2, links=[], collectives=[], nodes=[])
    assert lines_of(report) == [
        "0 of 2 nodes examined in 14.2 s, site jsc, launch 123456.0", "",
        "node     findings  latency  sends  receives",
        "jwb0001  -         -        -      -",
        "jwb0002  -         -        -      -", "",
        "no node is suspect",
    ]  # fmt: skip


def test_a_terminal_gets_nothing_to_act_on():
    rendered = text.render(reports.hostile_report())
    assert rendered.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "3 nodes examined in 14.2 s, site jsc, launch 123456.0"),
        ({"missing": [1], "launch_id": "", "site": ""},
         "2 of 3 nodes examined in 14.2 s"),
        ({}, "no node is suspect"),
        ({"slow": [2]}, "--exclude=jwb0003"),
        ({"slow": [1, 2]},
         "suspect: jwb0002, jwb0003 (2 of 3 nodes); look for what they share"),
        ({"slow": [2], "hosts": ["", "", ""]}, "suspect: node 2 (1 of 3 nodes)"),
        ({"findings": [reports.finding("HPC191", "")]}, "no single node is to blame"),
    ],
)  # fmt: skip
def test_the_first_and_the_last_line(changes, line):
    first, *_, last = lines_of(make_report(3, **changes))
    assert line in (first, last)


def test_a_finding_has_a_code_and_a_remedy():
    advice = reports.finding("HPC184", "/tmp is full", is_suspect=False)  # noqa: S108
    assert lines_of(make_report(3, findings=[advice]))[2:4] == [
        "HPC184  advice   /tmp is full",
        "                 remedy: leave the node out, and tell the administrator",
    ]


def test_long_findings_are_broken_but_no_option():
    finding = reports.finding("HPC191", "word " * 16 + "--hpc-interface=ib0")
    lines = lines_of(make_report(3, findings=[finding]))
    assert lines[2].startswith("HPC191  suspect  word word")
    assert lines[3].split() == ["--hpc-interface=ib0"]


def test_the_worst_node_is_the_first_one():
    report = make_report(32, slow=[20, 4], missing=[30])
    assert [*rows_of(report)][:4] == ["jwb0031", "jwb0021", "jwb0005", "jwb0001"]
    assert "and 22 more nodes" in lines_of(report)


def test_latency_and_bandwidth_are_of_the_node():
    """It receives slowly; what its partners have among them is not its fault."""
    rows = rows_of(make_report(3, slow=[2]))
    figures = {name: [*row.values()][1:5] for name, row in rows.items()}
    assert figures["jwb0003"] == ["HPC191", "31 us", "192.00 Gbit/s", "3.68 Gbit/s"]
    assert figures["jwb0001"] == ["", "31 us", "184.00 Gbit/s", "192.00 Gbit/s"]


@pytest.mark.parametrize(
    ("changes", "title", "expected"),
    [
        ({}, "CPUs", "0-47 of 96"),
        ({}, "import", "4.0 s"),
        ({"torch": None}, "torch", ""),
        ({"torch": reports.make_torch(version="", import_s=0)}, "torch", "fails"),
        ({"gpus": []}, "GPUs", "4"),  # what torch sees
        ({"gpus": [], "torch": None}, "GPUs", "0"),
        ({"gpus": [reports.make_gpu(), reports.make_gpu(model="H100")]}, "model",
         "A100, H100"),
    ],
)  # fmt: skip
def test_what_a_node_has(changes, title, expected):
    report = make_report(1, nodes=[reports.make_node(0, **changes)])
    assert rows_of(report)["jwb0001"][title] == expected


def test_the_worst_pairs():
    report = make_report(3)
    report["links"][1]["backward"] = 1e8
    report["links"][0]["latency_s"] = 0.002
    report["links"][2] = reports.make_link(1, 2, problem="no answer")
    assert text.pair_lines(report) == [
        "2 of 3 pairs measured",
        "latency: 31 us is usual, worst 2.0 ms from jwb0001 to jwb0002",
        "bandwidth: 192.00 Gbit/s is usual, worst 800 Mbit/s from jwb0003 to jwb0001",
    ]


def test_networks_that_are_closed_between_all():
    report = make_report(3)
    report["links"][0]["networks"] = {"eth0": False, "eth1": False, "eth2": True}
    report["links"][1]["networks"] = {"eth0": False, "eth1": True, "eth2": True}
    assert lines_of(report).count(
        "eth0 is closed between the nodes, as many are: jobs use ib0"
    )
    report["links"][1]["networks"].clear()
    assert text.pair_lines(report)[-1].startswith("eth0, eth1 are closed")


def test_the_largest_size_of_the_slowest_node():
    found = [line.split()[:3] for line in lines_of(make_report(3))[-10:-2]]
    largest, operations = str(2**30), sorted(reports.OPERATIONS)
    assert found == [[op, w, largest] for w in ("all", "jwb0003") for op in operations]


def test_figures_are_in_the_units_of_nccl_tests():
    row = {**reports.make_collectives()[3], "time_s": 1e-3, "algbw": 2e9, "busbw": 4e9}
    titles, *lines = text.cells(text.collective_rows([row, {**row, "wrong": -1}]))
    assert " ".join(titles[2:]) == "size count type redop time algbw busbw #wrong"
    assert [" ".join(line[2:]) for line in lines] == [
        "1024 256 float sum 1000.00 2.00 4.00 0",
        "1024 256 float sum 1000.00 2.00 4.00 -",
    ]

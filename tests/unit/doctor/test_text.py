"""What a person reads on a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doctor import reports
from doctor.reports import changed, make_report

from torchrun_hpc.doctor import text
from torchrun_hpc.doctor.results import printable

ADVICE = reports.finding("HPC184", "/tmp is full", is_suspect=False)  # noqa: S108


def lines_of(report):
    return text.render(report).splitlines()


def rows_of(report):
    return {row["node"]: row for row in text.node_rows(report)}


@pytest.mark.parametrize(
    "report",
    [make_report(1), make_report(3), make_report(128, slow=range(30), missing=[99])],
    ids=lambda report: len(report.hosts),
)
def test_it_fits_on_a_screen(report):
    lines = lines_of(report)
    assert len(lines) <= 55
    assert max(len(line) for line in lines if "--exclude=" not in line) <= 100
    assert len(report.hosts) < 128 or "and 21 more findings" in lines


def test_a_report_without_measurements_can_be_read():
    report = make_report(2, links=(), collectives=(), nodes=(), workers=())
    assert lines_of(report) == [
        "Nothing suspicious on 2 nodes.", "",
        "0 of 2 nodes examined in 14.2 s, site jsc, launch 123456.0", "",
        "node     findings  latency  sends  receives",
        "jwb0001  -         -        -      -",
        "jwb0002  -         -        -      -", "",
        "0 of 1 pair measured",
    ]  # fmt: skip


def test_a_terminal_gets_nothing_to_act_on():
    rendered = text.render(printable(reports.hostile_report()))
    assert rendered.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, ["Nothing suspicious on 3 nodes."]),
        ({"findings": (ADVICE,)},
         ["Nothing suspicious on 3 nodes; 1 piece of advice."]),
        ({"findings": (ADVICE,) * 2},
         ["Nothing suspicious on 3 nodes; 2 pieces of advice."]),
        ({"slow": [2]},
         ["Suspicious: jwb0003 (1 of 3 nodes).", "    --exclude=jwb0003"]),
        ({"slow": [1, 2]},
         ["Suspicious: jwb0002, jwb0003 (2 of 3 nodes). Look for a common cause."]),
        ({"slow": [2], "hosts": ("", "", "")}, ["Suspicious: node 2 (1 of 3 nodes)."]),
        ({"findings": (reports.finding("HPC191", ""),)},
         ["Suspicious: see HPC191. No single node is named."]),
    ],
)  # fmt: skip
def test_the_verdict_comes_first(changes, verdict):
    report = make_report(3, **changes)
    assert lines_of(report)[: len(verdict) + 1] == [*verdict, ""]
    assert text.render(report, is_quiet=True).splitlines() == verdict


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({}, "3 nodes examined in 14.2 s, site jsc, launch 123456.0"),
        ({"missing": [1], "launch_id": "", "site": ""},
         "2 of 3 nodes examined in 14.2 s"),
    ],
)  # fmt: skip
def test_the_title(changes, title):
    assert title in lines_of(make_report(3, **changes))[2:4]


def test_a_finding_has_a_code_and_a_remedy():
    assert lines_of(make_report(3, findings=(ADVICE,)))[4:6] == [
        "HPC184  advice   /tmp is full",
        "                 remedy: exclude the node, and report it to the administrator",
    ]


def test_long_findings_are_broken_but_no_option():
    finding = reports.finding("HPC191", "word " * 16 + "--hpc-interface=ib0")
    lines = lines_of(make_report(3, findings=(finding,)))
    assert lines[4].startswith("HPC191  suspect  word word")
    assert lines[5].split() == ["--hpc-interface=ib0"]


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
        ({"gpus": ()}, "GPUs", "4"),  # what torch sees
        ({"gpus": (), "torch": None}, "GPUs", "0"),
        ({"gpus": (reports.make_gpu(), reports.make_gpu(model="H100"))}, "model",
         "A100, H100"),
    ],
)  # fmt: skip
def test_what_a_node_has(changes, title, expected):
    report = make_report(1, nodes=(reports.make_node(0, **changes),))
    assert rows_of(report)["jwb0001"][title] == expected


def test_the_worst_pairs():
    report = changed(make_report(3), "links", 1, backward=1e8)
    report = changed(report, "links", 0, latency_s=0.002)
    report = changed(report, "links", 2, problem="no answer")
    assert text.pair_lines(report) == [
        "2 of 3 pairs measured",
        "latency: 31 us is usual, worst 2.0 ms from jwb0001 to jwb0002",
        "bandwidth: 184.00 Gbit/s is usual, worst 800 Mbit/s from jwb0003 to jwb0001",
    ]


def test_the_largest_size_of_the_slowest_node():
    found = [line.split()[:3] for line in lines_of(make_report(3))[-8:]]
    operations = sorted(reports.OPERATIONS)
    assert found == [[op, w, "1"] for w in ("all", "jwb0003") for op in operations]


def test_figures_have_units():
    row = reports.make_collectives()[3]
    row = replace(row, time_s=1e-3, algbw=2e9, busbw=4e9)
    titles, *lines = text.cells(text.collective_rows([row, replace(row, wrong=-1)]))
    assert " ".join(titles[2:]) == "size count time algbw busbw #wrong"
    assert [" ".join(line[2:]) for line in lines] == [
        "1 KiB 256 1.0 ms 2.00 GB/s 4.00 GB/s 0",
        "1 KiB 256 1.0 ms 2.00 GB/s 4.00 GB/s -",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "240.00 TFLOP/s is usual, worst 240.00 TFLOP/s on rank 0 (jwb0001)"),
        ({"flops": (9e11, 1e12)},
         "240.00 TFLOP/s is usual, worst 900.00 GFLOP/s on rank 2 (jwb0001)"),
    ],
)  # fmt: skip
def test_the_compute_test_is_one_line(changes, line):
    report = changed(make_report(3), "workers", 2, **changes)
    line = f"compute in bfloat16: {line}"
    assert text.worker_lines(report) == [line]
    assert line in lines_of(report)

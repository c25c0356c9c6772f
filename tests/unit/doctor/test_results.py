"""A report's suspects and exit code, and figures with their units."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.doctor_reports import finding, make_gpu, make_node, make_report
from torchrun_hpc import wire
from torchrun_hpc.doctor import results


def report_of(nodes, *findings):
    """Return a report with findings about some nodes: ranks, and whether suspect."""
    found = [
        finding("HPC191", "", *ranks, is_suspect=is_it) for ranks, is_it in findings
    ]
    return make_report(nodes, findings=tuple(found))


@pytest.mark.parametrize(
    ("nodes", "findings", "suspects", "excluded", "code"),
    [
        (3, [], [], "", 0),
        (3, [([1], False)], [], "", 0),  # advice
        (3, [([1], True)], [1], "--exclude=jwb0002", 1),
        (8, [([5], True), ([1], True), ([5], True)], [1, 5],
         "--exclude=jwb0002,jwb0006", 1),
        (3, [([], True)], [], "", 1),  # nobody knows which one
        (2, [([1], True)], [1], "--exclude=jwb0002", 1),
        (3, [([1], True), ([2], True)], [1, 2], "", 1),  # most of them
        (1, [([0], True)], [0], "", 1),
    ],
)  # fmt: skip
def test_suspects(nodes, findings, suspects, excluded, code):
    report = report_of(nodes, *findings)
    assert results.suspects(report) == suspects
    assert results.exclude(report) == excluded
    assert results.exit_code(report) == code


def test_who_can_be_excluded():
    """By an option of sbatch and salloc, and by its name."""
    report = report_of(3, ([1], True))
    for scheduler in "Slurm", "Open MPI in Slurm":
        option = results.exclude(replace(report, scheduler=scheduler))
        assert option == "--exclude=jwb0002"
    for scheduler in "", "PBS", "Open MPI in PBS", "Flux", "MPICH":
        assert results.exclude(replace(report, scheduler=scheduler)) == ""
    assert results.exclude(replace(report, hosts=("a", "", "c"))) == ""


def test_what_others_have_set_is_made_printable():
    """Or it would be refused where it arrives, with all the rest."""
    node = make_node(variables={"a\r": "\x1b[1m"}, gpus=(make_gpu(model="\n"),))
    found = results.printable(node)
    assert found == make_node(
        variables={"a\\r": "\\x1b[1m"}, gpus=(make_gpu(model="\\n"),)
    )
    assert wire.decode(results.NodeReport, wire.encode(found)) == found


@pytest.mark.parametrize(
    ("write", "values", "texts"),
    [
        (results.rate, (1.25e8, 6e7, 0.0), ("1.00 Gbit/s", "480 Mbit/s", "0 Mbit/s")),
        (results.gigabytes, (1.5e9, 0.0), ("1.50 GB/s", "0.00 GB/s")),
        (results.duration, (3e-5, 5.3e-3), ("30 us", "5.3 ms")),
        (results.size, (0, 8, 1024, 2**20 - 4), ("0 B", "8 B", "1 KiB", "1024 KiB")),
        (results.size, (2**24, 2**24 - 4), ("16 MiB", "16 MiB")),
        (results.size, (1.5 * 2**30,), ("1.5 GiB",)),
        (results.size, (2**42,), ("4096 GiB",)),
        (results.speed, (4.2e10, 2.5e14), ("42.00 GFLOP/s", "250.00 TFLOP/s")),
    ],
)
def test_units(write, values, texts):
    assert tuple(map(write, values)) == texts

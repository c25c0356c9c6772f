"""Which nodes are to blame, and what follows; the fields in the documentation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doctor.reports import finding, make_gpu, make_node, make_report

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
    assert wire.decode(results.Node, wire.encode(found)) == found

"""What became slower since an earlier report."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doctor.reports import OPERATIONS, changed, make_report

from torchrun_hpc.doctor import comparison
from torchrun_hpc.doctor.results import exit_code


def slower(report, **factors):
    """Return a report of which some figures are other ones."""

    def times(part):
        own = {name: getattr(part, name, None) for name in factors}
        known = {name: own[name] * factors[name] for name in own if own[name]}
        return replace(part, **known)

    return replace(
        report,
        nodes=tuple(replace(node, torch=times(node.torch)) for node in report.nodes),
        links=tuple(map(times, report.links)),
        collectives=tuple(map(times, report.collectives)),
    )


def compared(report, earlier):
    """Return what the comparison adds."""
    found = comparison.with_slower(report, earlier)
    return [f for f in found.findings if f not in report.findings]


BANDWIDTH = "median bandwidth of the pairs: "


@pytest.mark.parametrize(
    ("factors", "text"),
    [
        ({"forward": 0.5}, BANDWIDTH),
        ({"backward": 0.5}, BANDWIDTH),
        ({"latency_s": 9}, "median latency of the pairs: "),
        ({"import_s": 2}, "import of torch: "),
    ],
)
def test_what_became_slower(factors, text):
    earlier = make_report(4)
    report = slower(earlier, **factors)
    (finding,) = compared(report, earlier)
    assert finding.text.startswith(text)
    assert f" on {earlier.started[:10]}" in finding.text
    assert (finding.nodes, finding.is_suspect) == ((), False)
    assert exit_code(comparison.with_slower(report, earlier)) == 0


def test_collectives_of_the_same_size_on_as_many_workers():
    earlier = make_report(4)
    report = slower(earlier, time_s=2)
    texts = [finding.text for finding in compared(report, earlier)]
    assert [text.split()[0] for text in texts] == OPERATIONS
    assert compared(report, make_report(8)) == compared(
        replace(report, collectives=()), make_report(8)
    )


def test_a_network_on_which_large_sizes_are_left_out_now():
    """Because they take too long: the largest that both have is compared."""
    earlier = make_report(4)
    report = slower(earlier, time_s=10)
    size = max(row.size for row in report.collectives)
    rows = tuple(row for row in report.collectives if row.size < size)
    report = replace(report, collectives=rows)
    assert len(compared(report, earlier)) == 4
    scope = comparison.scope(report, earlier)
    assert scope == "compared with 4 nodes of 2026-11-23T01:02"


SMALL = tuple(row for row in make_report(4).collectives if row.size < 2**20)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"collectives": ()}, "this one has none"),
        ({"backend": "gloo"}, "16 workers of nccl then, and 16 workers of gloo"),
        ({"nodes": make_report(8).nodes}, "16 workers of nccl then, and 32 workers"),
        ({"collectives": SMALL}, "the reports share no size of 1 MiB or more"),
    ],
)
def test_collectives_that_cannot_be_compared(changes, reason):
    earlier = make_report(4)
    report = replace(slower(earlier, time_s=10), **changes)
    assert compared(report, earlier) == []
    scope = comparison.scope(report, earlier)
    assert f"not compared: {reason}" in scope


def test_a_size_that_was_rounded_down():
    """Three workers gather and scatter 1,048,572 bytes, not 1,048,576."""
    earlier = make_report(4)
    rows = (replace(x, size=min(x.size, 2**20 - 4)) for x in earlier.collectives)
    earlier = replace(earlier, collectives=tuple(rows))
    assert len(compared(slower(earlier, time_s=2), earlier)) == 4


@pytest.mark.parametrize("factor", [1.0, 1.2, 0.9])
def test_noise_is_not_slower(factor):
    earlier = make_report(4)
    report = slower(earlier, latency_s=factor, forward=1 / factor, time_s=factor)
    assert compared(report, earlier) == []


@pytest.mark.parametrize("nodes", [1, 2])
def test_nothing_to_compare(nodes):
    report = make_report(nodes, links=(), collectives=())
    report = changed(report, "nodes", 0, torch=None)
    report = replace(report, nodes=report.nodes[:1])
    assert compared(report, make_report(4)) == []
    assert compared(make_report(4), report) == []

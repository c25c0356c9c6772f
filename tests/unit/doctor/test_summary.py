"""The report: absent nodes, the launcher's messages, and an earlier report."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from tests.support.doctor_reports import (
    OPERATIONS,
    changed,
    finding,
    make_collectives,
    make_node,
    make_nodes,
    make_report,
    make_worker,
)
from torchrun_hpc.doctor import results, summary
from torchrun_hpc.doctor.launch import LaunchEnd
from torchrun_hpc.doctor.place import Wishes
from torchrun_hpc.doctor.results import Finding, Torch, exit_code
from torchrun_hpc.doctor.summary import Records
from torchrun_hpc.planning.meeting import Meeting
from torchrun_hpc.planning.mode import Mode

if TYPE_CHECKING:
    from torchrun_hpc.doctor.place import Place

DIRECT = next(mode for mode in Mode if mode.is_direct)
# No names on the job's network: nobody looks for nodes of these names here.
MEETING = Meeting("c10d", nodes=3, launch_id="7.0", ports=(1,))
ALONE = replace(MEETING, endpoint="10.30.0.1:25592", interface="eth0")


def report_of(mode=Mode.SEVERAL_NODES, meeting=MEETING, **found):
    """Return the report of three nodes, as task 0 writes it."""
    place = SimpleNamespace(
        mode=mode,
        meeting=meeting,
        tasks_meeting=meeting,
        facts=SimpleNamespace(job=SimpleNamespace(scheduler="Slurm")),
        wishes=Wishes(),
    )
    nodes = found.pop("nodes", make_nodes(3))
    records = Records({n.rank: n for n in nodes}, **found)
    return summary.report(records, cast("Place", place))


def texts_of(report):
    return {finding.text: finding.nodes for finding in report.findings}


@pytest.mark.parametrize(
    ("mode", "missing", "came", "texts"),
    [
        (Mode.SEVERAL_NODES, [], [0, 1, 2], {}),
        (Mode.SEVERAL_NODES, [2], [0, 1], {"node 2": (2,)}),
        # A node whose tasks did not join, or the first one of them.
        (DIRECT, [4, 6, 7], [0, 2],
         {"node 1": (1,), "some tasks (4,6-7)": ()}),
        (DIRECT, [5, 6], [0, 1, 2], {"some tasks (5-6)": ()}),
    ],
)  # fmt: skip
def test_who_has_not_come(mode, missing, came, texts):
    nodes = [make_node(rank) for rank in came]
    found = texts_of(report_of(mode, missing=missing, nodes=nodes))
    late = {f"{who} did not join within 60 s": nodes for who, nodes in texts.items()}
    assert found == late


def test_that_no_other_node_has_come():
    """They may be well, and not reach this one: its network is named, and no node."""
    for hint in ("", "Name the network"):
        meeting = replace(ALONE, network_hint=hint)
        report = report_of(meeting=meeting, missing=[1, 2], nodes=[make_node(0)])
        (finding,) = report.findings
        assert finding.code == "HPC178"
        assert "The network of 10.30.0.1:25592 (eth0)" in finding.text
        assert (finding.remedy == hint) is bool(hint)
        assert not results.suspects(report)
        assert results.exit_code(report) == 1


def test_a_node_that_has_stopped_responding():
    report = report_of(hung={2: "while the pairs were measured"})
    text = "jwb0003 stopped responding while the pairs were measured"
    assert texts_of(report) == {text: (2,)}


def test_workers_and_causes():
    workers = [make_worker(2), make_worker(0, wrong=1), make_worker(1)]
    causes = [("jwb0003: worker 9 was killed by SIGKILL", (2,))]
    report = report_of(workers=workers, causes=causes)
    assert [worker.rank for worker in report.workers] == [0, 1, 2]
    assert {f.code: f.nodes for f in report.findings} == {
        "HPC243": (0,),
        "HPC193": (2,),
    }


def test_a_terminal_gets_nothing_to_act_on():
    meeting = replace(MEETING, launch_id="\x07")
    report = report_of(meeting=meeting, nodes=[make_node(host="\x1b[31mred\n")])
    assert (report.hosts[0], report.launch_id) == (r"\x1b[31mred\n", r"\x07")


def test_the_slowest_import_counts():
    """The second launch finds the files in memory."""
    records = Records({0: make_node(torch=None)})
    for seconds, version in ((40.0, ""), (2.0, "2.13.0"), (3.0, "")):
        records.keep(0, LaunchEnd(1, imports=(Torch(version, seconds),)))
    assert records.nodes[0].torch == Torch("2.13.0", 40.0)


def test_ranks_and_names_are_those_of_the_job():
    """A worker of the launch does not know them."""
    records = Records({1: make_node(1)})
    rows = tuple(make_collectives(scope)[0] for scope in ("", "node 0"))
    records.keep(1, LaunchEnd(0, workers=(make_worker(9, node=-1),), rows=rows))
    assert [worker.node for worker in records.workers] == [1]
    assert [row.scope for row in records.rows] == ["", "jwb0002"]


@pytest.mark.parametrize("code", [1, 2])
def test_only_a_launcher_that_refuses_to_start_has_errors(code):
    warning = Finding("HPC162", "trying again", is_suspect=False)
    error = Finding("HPC127", "no file is left", is_suspect=True)
    records = Records({1: make_node(1)})
    records.keep(1, LaunchEnd(code, messages=(warning, error)))
    assert records.messages.keys() == {warning, *([error] if code == 2 else [])}


@pytest.mark.parametrize("is_refusal", [True, False])
@pytest.mark.parametrize("code", ["HPC018", "HPC054"])
@pytest.mark.parametrize(
    ("ranks", "where"),
    [([1], "on jwb0002: "), ([1, 2], "on jwb0002, jwb0003: "), ([0, 1, 2], "")],
)
def test_what_the_launcher_says(code, ranks, where, is_refusal):
    """A fault of some nodes names them. Only without torch they are to blame."""
    message = Finding(code, "no such thing", is_suspect=is_refusal)
    (found,) = report_of(messages={message: ranks}).findings
    expected = finding(code, f"{where}no such thing", is_suspect=is_refusal)
    blamed = ranks if where and code == "HPC018" else []
    assert found == replace(expected, nodes=tuple(blamed), remedy="")


def test_a_torch_that_no_node_has_is_no_fault_of_some():
    """Who hears of it first says nothing."""
    nodes = [make_node(rank, torch=None) for rank in range(3)]
    message = Finding("HPC018", "torch cannot be imported", is_suspect=True)
    (found,) = report_of(messages={message: [0, 1]}, nodes=nodes).findings
    assert found.nodes == ()


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
    found = summary.with_slower(report, earlier)
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
    assert exit_code(summary.with_slower(report, earlier)) == 0


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
    scope = summary.scope(report, earlier)
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
    scope = summary.scope(report, earlier)
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

"""The report: who is missing, and what the launcher says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from doctor.reports import (
    finding,
    make_node,
    make_nodes,
    make_worker,
)
from plans import make_launch_plan

from torchrun_hpc.doctor import results, summary
from torchrun_hpc.doctor.summary import Found
from torchrun_hpc.planning.mode import Mode

DIRECT = next(mode for mode in Mode if mode.is_direct)
ALONE = {"endpoint": "10.30.0.1:25592", "interface": "eth0"}
PLANNED = {*ALONE, "launch_id", "network_hint"}


def report_of(mode=Mode.SEVERAL_NODES, **found):
    """Return the report of three nodes, as task 0 writes it."""
    changes = {name: found.pop(name) for name in PLANNED & found.keys()}
    # No names on the job's network: nobody looks for nodes of these names here.
    changes = {"launch_id": "7.0", "ports": (1,)} | changes
    plan = make_launch_plan(mode, nodes=3, **changes)
    where = plan.meeting
    here = SimpleNamespace(
        mode=mode,
        meeting=where,
        tasks_meeting=where,
        job=SimpleNamespace(scheduler="Slurm"),
    )
    nodes = found.pop("nodes", make_nodes(3))
    return summary.report(Found({n.rank: n for n in nodes}, **found), here, 60)


def texts_of(report):
    return {finding.text: finding.nodes for finding in report.findings}


@pytest.mark.parametrize(
    ("mode", "missing", "came", "texts"),
    [
        (Mode.SEVERAL_NODES, [], [0, 1, 2], {}),
        (Mode.SEVERAL_NODES, [2], [0, 1], {"node 2": (2,)}),
        # A node whose tasks have not come, or the first one of them.
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
        planned = {**ALONE, "network_hint": hint}
        report = report_of(missing=[1, 2], nodes=[make_node(0)], **planned)
        (finding,) = report.findings
        text = (
            "no other node joined within 60 s. The network of 10.30.0.1:25592 "
            "(eth0) may be closed"
        )
        assert (finding.code, finding.text) == ("HPC178", text)
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
    report = report_of(nodes=[make_node(host="\x1b[31mred\n")], launch_id="\x07")
    assert (report.hosts[0], report.launch_id) == (r"\x1b[31mred\n", r"\x07")


@pytest.mark.parametrize("is_refusal", [True, False])
@pytest.mark.parametrize("text", ["torch cannot be imported by x", "no such thing"])
@pytest.mark.parametrize(
    ("ranks", "where"),
    [([1], "on jwb0002: "), ([1, 2], "on jwb0002, jwb0003: "), ([0, 1, 2], "")],
)
def test_what_the_launcher_says(text, ranks, where, is_refusal):
    """What is wrong on some nodes names them. Only without torch they are to blame."""
    (found,) = report_of(said={("HPC054", text, is_refusal): ranks}).findings
    expected = finding("HPC054", f"{where}{text}", is_suspect=is_refusal)
    blamed = ranks if where and "torch" in text else []
    assert found == replace(expected, nodes=tuple(blamed), remedy="")


def test_a_torch_that_no_node_has_is_no_fault_of_some():
    """Who hears of it first says nothing."""
    nodes = [make_node(rank, torch=None) for rank in range(3)]
    said = {("HPC018", "torch cannot be imported by x", True): [0, 1]}
    (found,) = report_of(said=said, nodes=nodes).findings
    assert found.nodes == ()

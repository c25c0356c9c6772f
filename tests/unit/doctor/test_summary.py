"""The report: who is missing, and what the launcher says."""

from __future__ import annotations

import pytest
from doctor.reports import make_node
from plans import make_launch_plan

from torchrun_hpc.doctor import results, summary
from torchrun_hpc.doctor.place import Place
from torchrun_hpc.doctor.summary import Found
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.schedulers.job import Task

DIRECT = next(mode for mode in Mode if mode.is_direct)
UNFIT = results.of_launcher("HPC080", "torch 9.9 has changed it", [])
WRONG = results.of_launcher("HPC054", "no interface none0", [1], is_suspect=True)
ALONE = {"endpoint": "10.30.0.1:25592", "interface": "eth0"}
PLANNED = {*ALONE, "network_hint"}
ADVICE = results.of_launcher("HPC092", "4 workers share 2 CPUs", [])


def report_of(mode=Mode.SEVERAL_NODES, tasks=3, **found):
    """Return the report of three nodes, as task 0 writes it."""
    hosts = ("jwb0001", "jwb0002", "jwb0003")
    changes = {name: found.pop(name) for name in PLANNED & found.keys()}
    # No names on the job's network: nobody looks for nodes of these names here.
    plan = make_launch_plan(mode, nodes=3, launch_id="7.0", ports=(1,), **changes)
    where = plan.meeting
    here = Place(mode, where, where, Task(0, tasks), 0, 1, hosts[0], "Slurm")
    nodes = [make_node(rank) for rank in range(3)]
    return summary.report(Found(**{"nodes": nodes, **found}), here, 60)


def texts_of(report):
    return {finding["text"]: finding["nodes"] for finding in report["findings"]}


@pytest.mark.parametrize(
    ("mode", "tasks", "missing", "came", "texts"),
    [
        (Mode.SEVERAL_NODES, 3, [], [0, 1, 2], {}),
        (Mode.SEVERAL_NODES, 3, [2], [0, 1], {"node 2": [2]}),
        # A node whose tasks have not come, or the first one of them.
        (DIRECT, 12, [4, 6, 7], [0, 2],
         {"node 1": [1], "a part of the tasks (4,6-7)": []}),
        (DIRECT, 12, [5, 6], [0, 1, 2], {"a part of the tasks (5-6)": []}),
    ],
)  # fmt: skip
def test_who_has_not_come(mode, tasks, missing, came, texts):
    nodes = [make_node(rank) for rank in came]
    found = texts_of(report_of(mode, tasks, missing=missing, nodes=nodes))
    late = {f"{who} has not come within 60 s": nodes for who, nodes in texts.items()}
    assert found == late


def test_that_no_other_node_has_come():
    """They may be well, and not reach this one: its network is named, and no node."""
    for hint in ("", "Name the network"):
        planned = {**ALONE, "network_hint": hint}
        report = report_of(missing=[1, 2], nodes=[make_node(0)], **planned)
        (finding,) = report["findings"]
        text = (
            "no other node has come within 60 s; the network of 10.30.0.1:25592 "
            "(eth0) may be closed"
        )
        assert (finding["code"], finding["text"]) == ("HPC178", text)
        assert (finding["remedy"] == hint) is bool(hint)
        assert not results.suspects(report)
        assert results.exit_code(report) == 1


def test_a_node_that_has_stopped_to_answer():
    report = report_of(hung={2: "while the pairs were measured"})
    text = "jwb0003 has stopped to answer while the pairs were measured"
    assert texts_of(report) == {text: [2]}


@pytest.mark.parametrize(
    ("ranks", "where"),
    [([1], "on jwb0002: "), ([1, 2], "on jwb0002, jwb0003: "), ([0, 1, 2], "")],
)
def test_what_the_launcher_says(ranks, where):
    """What is wrong on some nodes names them, and blames none."""
    nodes = [make_node(rank) for rank in range(3)]
    nodes[0]["findings"] = [ADVICE]
    for rank in ranks:
        nodes[rank]["findings"] = [*nodes[rank]["findings"], WRONG]
        nodes[rank]["torch"]["findings"] = [UNFIT]
    wrong, unfit = (f"{where}{finding['text']}" for finding in (WRONG, UNFIT))
    agents = report_of(nodes=nodes)
    assert texts_of(agents) == {wrong: [], unfit: [], ADVICE["text"]: []}
    tasks = report_of(DIRECT, nodes=nodes)  # torch is not changed there
    assert texts_of(tasks) == {wrong: [], ADVICE["text"]: []}

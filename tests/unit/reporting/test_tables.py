from __future__ import annotations

import re

import pytest

from tests.support.juelich import step
from tests.support.plans import make_launch_plan
from torchrun_hpc.errors import Message, Setting
from torchrun_hpc.planning.workers import Binding, Share
from torchrun_hpc.reporting import tables
from torchrun_hpc.reporting.description import DescribedPatch, Description

COMMAND = ["torchrun", "--nnodes=2", "train.py", "--name=two words"]
PATCHES = (
    DescribedPatch("report_missing_nodes", "", "it is silent", "", "patched"),
    DescribedPatch(
        *("host_exits_last", "", "it is loud", ""),
        "left out: this torch has changed its target",
    ),
)


def described(rank=0, nodes=2, *, job=True, options=None, **changes):
    """Describe one node of a dry run by hand: what is shown of it.

    Args:
        rank: Its rank.
        nodes: Number of nodes.
        job: Whether there is a scheduler.
        options: What was typed.
        changes: Fields of the plan that are others.
    """
    environment = changes.pop("environment", {"GLOO_SOCKET_IFNAME": ("ib0", "owner")})
    hosts = tuple(f"n{number}" for number in range(nodes)) if job else ()
    usual = {
        "nodes": nodes,
        "hosts": hosts,
        "node_rank": rank,
        "workers": 4,
        "backend": "c10d",
        "endpoint": "n0:25592",
        "local_address": f"10.0.0.{rank}",
        "interface": "ib0",
        "listen": ("10.0.0.0", 25592) if rank == 0 else None,
    }
    plan = make_launch_plan(**usual | changes)
    found = step(
        nodes=hosts or ("n0",),
        provenance={"node_rank": "SLURMD_NODENAME"},
    )
    if options is None:
        options = {"nproc_per_node": Setting("4", "PET_NPROC_PER_NODE")}
    return Description(
        version=1,
        torchrun_hpc="0.1.0",
        torch="2.13.0",
        python="3.11.2",
        job=found if job else None,
        meeting=plan.meeting,
        workers=plan.workers,
        options=options,
        environment={k: Setting(v, s) for k, (v, s) in environment.items()},
        messages=plan.messages,
        patches=PATCHES,
        exports={name: value for name, (value, _) in environment.items()},
        command=(*COMMAND, f"--node={rank}"),
    )


def paragraphs(nodes, missing=(), limit=60):
    """Return the paragraphs of a dry run, each as its lines without alignment."""
    text = tables.render(nodes, missing, limit)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert text.startswith("OK: " if not missing else "NOT OK: ")
    return [
        [" ".join(line.split()) for line in paragraph.split("\n")]
        for paragraph in text.removesuffix("\n").split("\n\n")[1:]
    ]


def verdict(nodes, missing=()):
    return tables.render(nodes, missing, 60).partition("\n")[0]


def test_the_verdict_comes_first():
    one, two = described(job=False, nodes=1), [described(0), described(1)]
    assert verdict([one]) == "OK: would start 4 workers on 1 node"
    assert verdict(two) == "OK: would start 8 workers on 2 nodes"
    assert verdict(two[:1]) == "OK: would start 4 workers on this node"
    missing = verdict(two[:1], ["n1"])
    assert missing == "NOT OK: 1 node did not answer within 60 s: n1"
    task = described(backend="direct", workers=1, size=6)
    assert verdict([task]) == "OK: would start 6 workers on 2 nodes"
    nodes = [described(n, 3, spares=1) for n in range(3)]
    kept = "OK: would start 8 workers on 2 nodes, and keep 1 spare idle"
    assert verdict(nodes) == kept


def test_patches_are_shown_on_request():
    options = {"hpc_debug": Setting(value=True, source="--hpc-debug")}
    found = paragraphs([described(options=options)])
    assert [
        "inside torch is because",
        "report_missing_nodes patched it is silent",
        "host_exits_last left out: this torch has changed its target it is loud",
    ] in found


def test_dry_run_shows_how_long_an_agent_may_be_silent():
    node = described(backend="scheduler", silence_timeout=120)
    row = "rendezvous scheduler at n0:25592 an agent may be silent for 120 s"
    assert row in paragraphs([node])[1]


def test_the_last_column_is_wrapped():
    source = "a long reason " * 20
    lines = tables.render([described(environment={"X": ("1", source)})], (), 0)
    assert max(map(len, lines.splitlines())) <= 100
    assert " ".join(lines.split()).count("long reason") == 20


VERSIONS = "torchrun_hpc 0.1.0, torch 2.13.0, Python 3.11.2"
TITLE = f"Dry run by {VERSIONS}. Nothing was started."


def test_dry_run_of_two_nodes():
    assert paragraphs([described(0), described(1)]) == [
        [TITLE],
        [
            "value is from",
            "scheduler Slurm a step",
            "node rank 0 SLURMD_NODENAME",
            "workers 4 PET_NPROC_PER_NODE=4",
            "rendezvous c10d at n0:25592",
            "listens on 10.0.0.0:25592 this node is the host",
            "--nproc_per_node 4 PET_NPROC_PER_NODE",
        ],
        [
            "rank node address interface workers",
            "0 n0 10.0.0.0 ib0 4",
            "1 n1 10.0.0.1 ib0 4",
        ],
        ["variable is set to from", "GLOO_SOCKET_IFNAME ib0 owner"],
        ["The same launch with plain torchrun, on n0:"],
        [
            "export GLOO_SOCKET_IFNAME=ib0",
            "torchrun --nnodes=2 train.py '--name=two words' --node=0",
        ],
        ["The same launch with plain torchrun, on n1:"],
        [
            "export GLOO_SOCKET_IFNAME=ib0",
            "torchrun --nnodes=2 train.py '--name=two words' --node=1",
        ],
    ]


def test_dry_run_of_one_node_without_scheduler():
    node = described(
        *(0, 1),
        job=False,
        options={},
        endpoint="localhost",
        environment={},
        interface="",
    )
    found = paragraphs([node])
    assert found[1:3] == [
        [
            "value is from",
            "workers 4 default",
            "rendezvous c10d at localhost",
            "listens on 10.0.0.0:25592 this node is the host",
        ],
        ["rank node address interface workers", "0 this node 10.0.0.0 - 4"],
    ]
    assert found[3:] == [  # no variable, no table
        ["The same launch with plain torchrun:"],
        ["torchrun --nnodes=2 train.py '--name=two words' --node=0"],
    ]


def test_dry_run_shows_what_differs_on_a_node():
    """What is the same as on the first node is shown once."""
    nodes = [
        described(0, 3, environment={"GLOO": ("ib0", "a"), "OMP": ("1", "default")}),
        described(1, 3, environment={"GLOO": ("ib1", "b"), "OMP": ("1", "default")}),
        described(
            2, 3, environment={"MORE": ("x", "c")}, local_address=None, interface=""
        ),
    ]
    found = paragraphs(nodes)
    assert found[2] == [
        "rank node address interface workers",
        "0 n0 10.0.0.0 ib0 4",
        "1 n1 10.0.0.1 ib0 4",
        "2 n2 unknown - 4",
    ]
    assert found[3] == [
        "variable is set to from",
        "GLOO ib0 a",
        "OMP 1 default",
        "GLOO on n1 ib1 b",
        "MORE on n2 x c",
        "GLOO on n2 (nothing)",
        "OMP on n2 (nothing)",
    ]


def bound(*cpus):
    """Return how the CPUs are divided: those of each worker, on a NUMA node each."""
    shares = [Share(c, f"NUMA node {n}", f"GPU {n}") for n, c in enumerate(cpus)]
    return Binding(Setting("gpu", "--hpc_bind"), tuple(shares))


def test_dry_run_shows_the_site_and_the_cpus_of_each_worker():
    """Those of other nodes, where they differ."""
    usual, other = bound((0, 1, 2, 3), (4, 5, 6, 7)), bound((0, 1))
    site = Setting("jsc", "SYSTEMNAME=juwels")
    nodes = [
        described(rank, 3, binding=binding, site=site)
        for rank, binding in enumerate((usual, usual, other))
    ]
    found = paragraphs(nodes)
    assert found[1][4:6] == ["site jsc SYSTEMNAME=juwels", "CPUs gpu --hpc_bind"]
    assert found[3] == [
        "worker CPUs where because",
        "0 0-3 NUMA node 0 GPU 0",
        "1 4-7 NUMA node 1 GPU 1",
        "0 on n2 0-1 NUMA node 0 GPU 0",
    ]


def test_dry_run_names_the_nodes_that_did_not_answer():
    nodes = [described(0, 5), described(3, 5)]
    found = paragraphs(nodes, ["n1", "n2", "n4"], 7)
    assert verdict(nodes, ["n1", "n2", "n4"]).endswith(": n[1-2,4]")
    assert [line.split()[:2] for line in found[2][1:]] == [["0", "n0"], ["3", "n3"]]


@pytest.mark.parametrize("number", [3, 4, 5, 6])
def test_dry_run_shows_the_commands_of_a_few_of_many_nodes(number):
    found = paragraphs([described(rank, number) for rank in range(number)])
    commands = [x for y in found for x in y if x.startswith("torchrun --nnodes")]
    assert [line[-1] for line in commands] == [str(n) for n in range(min(number, 4))]
    assert len(found[2]) == number + 1
    assert ("--hpc-dry-run=json also" in found[-1][0]) is (number > 4)


def test_an_address_of_ipv6_is_in_brackets():
    node = described(listen=("fd00::1", 25592))
    assert "listens on [fd00::1]:25592 this node is the host" in paragraphs([node])[1]


def test_dry_run_says_what_a_launch_would_say():
    """Notes and advice are the same on all nodes, warnings are of one."""
    shared = {
        "notes": (Message("HPC074", "a rewritten to b"),),
        "advice": (Message("HPC096", "fewer GPUs"),),
    }
    nodes = [
        described(0, 3, **shared),
        described(1, 3, **shared, warnings=(Message("HPC056", "not here"),)),
        described(2, 3, **shared, warnings=(Message("HPC057", "none"),)),
    ]
    found = paragraphs(nodes)
    assert found[4] == [
        "HPC074 a rewritten to b",
        "HPC096 fewer GPUs",
        "HPC056 n1: not here",
        "HPC057 n2: none",
    ]


def test_columns_of_a_dry_run_are_aligned():
    text = tables.render([described(0), described(1)], (), 60)
    rows = text.split("\n\n")[3].split("\n")
    columns = [[m.start() for m in re.finditer(r"\S+", row)] for row in rows]
    assert columns[0] == columns[1] == columns[2]
    assert all(line == line.rstrip() for line in text.split("\n"))

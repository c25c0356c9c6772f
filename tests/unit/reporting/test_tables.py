from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.support.juelich import step
from torchrun_hpc.errors import Message, Setting
from torchrun_hpc.planning.meeting import Meeting, Spares
from torchrun_hpc.planning.plan import Messages
from torchrun_hpc.planning.workers import Binding, Share, Workers
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


def described(rank=0, nodes=2, *, job=True, options=None, environment=None, **changes):
    """Describe one node of a dry run by hand.

    Args:
        rank: Its rank.
        nodes: Number of nodes.
        job: Whether there is a scheduler.
        options: The explicit ones.
        environment: Value and source by the names of the variables to set.
        changes: Other fields of its meeting.
    """
    if environment is None:
        environment = {"GLOO_SOCKET_IFNAME": ("ib0", "owner")}
    hosts = tuple(f"n{number}" for number in range(nodes)) if job else ()
    meeting = Meeting(
        "c10d",
        nodes=nodes,
        hosts=hosts,
        node_rank=rank,
        endpoint="n0:25592",
        local_address=f"10.0.0.{rank}",
        interface="ib0",
        listen=("10.0.0.0", 25592) if rank == 0 else None,
    )
    found = replace(
        step(nodes=hosts or ("n0",)), provenance={"node_rank": "SLURMD_NODENAME"}
    )
    if options is None:
        options = {"nproc_per_node": Setting("4", "PET_NPROC_PER_NODE")}
    return Description(
        version=1,
        torchrun_hpc="0.1.0",
        torch="2.13.0",
        python="3.11.2",
        job=found if job else None,
        meeting=replace(meeting, **changes),
        workers=Workers(4),
        options=options,
        environment={k: Setting(v, s) for k, (v, s) in environment.items()},
        messages=Messages(),
        patches=PATCHES,
        exports={name: value for name, (value, _) in environment.items()},
        command=(*COMMAND, f"--node={rank}"),
    )


def text(*nodes, part="", missing=(), limit=60):
    """Return a dry run, or the paragraph in it that begins with a word."""
    shown = tables.render(nodes, missing, limit)
    assert shown.startswith("NOT OK: " if missing else "OK: ")
    assert shown.endswith("\n")
    paragraphs = shown.removesuffix("\n").split("\n\n")
    return next(x for x in paragraphs if x.startswith(part)) if part else shown


def bound(*cpus):
    """Return how the CPUs are divided: those of each worker, on a NUMA node each."""
    shares = [Share(c, f"NUMA node {n}", f"GPU {n}") for n, c in enumerate(cpus)]
    return Binding(Setting("gpu", "--hpc_bind"), tuple(shares))


def test_dry_runs(golden):
    usual, other = bound((0, 1, 2, 3), (4, 5, 6, 7)), bound((0, 1))
    debug = {"hpc_debug": Setting(value=True, source="--hpc-debug")}
    alone = {"endpoint": "localhost", "environment": {}, "interface": ""}
    site = Setting("jsc", "SYSTEMNAME=juwels")
    shared = Messages(
        notes=(Message("HPC074", "a rewritten to b"),),
        advice=(Message("HPC096", "fewer GPUs"),),
    )
    warnings = ((), (Message("HPC056", "not here"),), (Message("HPC057", "none"),))
    golden(
        {
            "two nodes": text(described(0), described(1)),
            "one of them": text(described(0)),
            "one node without a scheduler": text(
                described(0, 1, job=False, options={}, **alone)
            ),
            "nodes that did not answer": text(
                *(described(0, 5), described(3, 5)), missing=["n1", "n2", "n4"], limit=7
            ),
            "one node that did not answer": text(
                described(0), part="NOT OK", missing=["n1"]
            ),
            "one task of six": text(
                replace(described(backend="direct"), workers=Workers(1, size=6))
            ),
            "a spare": text(
                *(described(n, 3, spares=Spares(1)) for n in range(3)), part="OK"
            ),
            "nodes that differ": text(
                described(0, 3, environment={"GLOO": ("ib0", "a"), "OMP": ("1", "b")}),
                described(1, 3, environment={"GLOO": ("ib1", "c"), "OMP": ("1", "b")}),
                described(
                    *(2, 3),
                    environment={"MORE": ("x", "d")},
                    local_address=None,
                    interface="",
                ),
            ),
            "a site, and other CPUs on the last node": text(
                *(
                    replace(
                        described(rank, 3, site=site),
                        workers=Workers(4, binding=binding),
                    )
                    for rank, binding in enumerate((usual, usual, other))
                )
            ),
            "notes and advice of all nodes, warnings of one": text(
                *(
                    replace(described(rank, 3), messages=replace(shared, warnings=each))
                    for rank, each in enumerate(warnings)
                ),
                part="HPC",
            ),
            "debug output": text(described(options=debug), part="inside"),
            "a silent agent": text(
                described(backend="scheduler", silence_timeout=120), part="value"
            ),
            "an address of IPv6": text(
                described(listen=("fd00::1", 25592)), part="value"
            ),
            "a long source": text(
                described(environment={"X": ("1", "a long reason " * 20)}),
                part="variable",
            ),
        }
    )


@pytest.mark.parametrize("number", [3, 4, 5, 6])
def test_dry_run_shows_the_commands_of_a_few_of_many_nodes(number):
    shown = text(*(described(rank, number) for rank in range(number)))
    commands = re.findall(r"torchrun --nnodes.* --node=(\d)", shown)
    assert commands == [str(n) for n in range(min(number, 4))]
    assert all(f"{n}     n{n} " in shown for n in range(number))
    assert ("--hpc-dry-run=json also" in shown) is (number > 4)

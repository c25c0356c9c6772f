from __future__ import annotations

import pytest

from tests.support import ROOT
from tests.support.plans import make_launch_plan
from torchrun_hpc import __version__
from torchrun_hpc.errors import Message, Setting
from torchrun_hpc.planning.head_node import port_of
from torchrun_hpc.reporting.start_line import joined_line, start_line

LINE = "3 nodes, 4 workers here; Slurm 19.0; c10d rendezvous at jwb0001i:25592"
JSC = Setting("jsc", "SYSTEMNAME=juwelsbooster")


def plan(**changes):
    settings = {
        "title": "Slurm 19.0",
        "nodes": 3,
        "node_rank": 0,
        "workers": 4,
        "endpoint": "jwb0001i:25592",
    }
    return make_launch_plan(**settings | changes)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, LINE),
        ({"fewest": 3}, LINE),
        ({"fewest": 2}, f"2 to {LINE}"),
        ({"workers": 1}, LINE.replace("4 workers", "1 worker")),
        ({"nodes": 4, "spares": 1}, LINE.replace("3 nodes", "3 nodes and 1 spare")),
        ({"nodes": 5, "spares": 2}, LINE.replace("3 nodes", "3 nodes and 2 spares")),
        (
            {"listen": ("10.20.0.1", 25592), "interface": "ib0", "site": JSC},
            f"{LINE} over ib0; site jsc",
        ),
        (
            {"endpoint": "10.20.0.1:29400", "listen": ("10.20.0.1", 29400)},
            LINE.replace("jwb0001i:25592", "10.20.0.1:29400"),
        ),
        (
            {"endpoint": "[fd00::1]:29400", "listen": ("fd00::1", 29400)},
            LINE.replace("jwb0001i:25592", "[fd00::1]:29400"),
        ),
        (
            {"nodes": 1, "workers": 1, "endpoint": "localhost", "backend": "static"},
            "1 node, 1 worker; Slurm 19.0",
        ),
        (
            {"nodes": 1, "endpoint": "localhost", "title": "no scheduler"},
            "4 workers on this machine",
        ),
        (
            {"nodes": 1, "may_grow": True, "title": "no scheduler"},
            "4 workers on this machine; c10d rendezvous at jwb0001i:25592",
        ),
        (
            {"nodes": 2, "endpoint": "", "title": "no scheduler"},
            "2 nodes, 4 workers here; no scheduler",
        ),
        (
            {"size": 6, "workers": 2},
            LINE.replace(", 4 workers here", " x 2 tasks"),
        ),
        (
            {"notes": (Message("HPC074", "a rewritten to b"), Message("HPC075", "c"))},
            f"{LINE}; note[HPC074]: a rewritten to b; note[HPC075]: c",
        ),
    ],
)
def test_start_line(changes, line):
    assert start_line(plan(**changes)) == f"torchrun_hpc {__version__}: {line}"


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        (3, "all 3 nodes joined after 3.1 s, 12 workers started"),
        (2, "2 of 3 nodes joined after 3.1 s, 12 workers started"),
    ],
)
def test_joined_line(nodes, text):
    assert joined_line(plan(), nodes, 12, 3.14) == f"torchrun_hpc: {text}"


def test_readme_shows_the_line_that_is_printed():
    """The port in it is the one of job 123456."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    port = port_of("123456.0")
    shown = plan(
        title="Slurm 123456.0",
        nodes=4,
        backend="scheduler",
        endpoint=f"jwb0001i:{port}",
        listen=("10.20.0.1", port),
        interface="ib0",
        site=JSC,
    )
    assert f"\n{start_line(shown)}\n" in readme

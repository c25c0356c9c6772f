from __future__ import annotations

from typing import Any

from tests.support import ROOT
from tests.support.plans import make_launch_plan
from torchrun_hpc import __version__
from torchrun_hpc.errors import Message, Setting
from torchrun_hpc.planning.head_node import port_of
from torchrun_hpc.reporting.start_line import joined_line, start_line

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


ALONE = {"nodes": 1, "title": "no scheduler"}
PLANS: dict[str, dict[str, Any]] = {
    "three nodes": {},
    "at least three": {"fewest": 3},
    "at least two": {"fewest": 2},
    "one worker": {"workers": 1},
    "one spare": {"nodes": 4, "spares": 1},
    "two spares": {"nodes": 5, "spares": 2},
    "an interface and a site": {
        "listen": ("10.20.0.1", 25592),
        "interface": "ib0",
        "site": JSC,
    },
    "an address": {"endpoint": "10.20.0.1:29400", "listen": ("10.20.0.1", 29400)},
    "an address of IPv6": {"endpoint": "[fd00::1]:29400", "listen": ("fd00::1", 29400)},
    "one node of a job": {
        "nodes": 1,
        "workers": 1,
        "endpoint": "localhost",
        "backend": "static",
    },
    "one machine": {**ALONE, "endpoint": "localhost"},
    "one machine that others may join": {**ALONE, "may_grow": True},
    "two machines": {"nodes": 2, "endpoint": "", "title": "no scheduler"},
    "direct mode": {"size": 6, "workers": 2},
    "notes": {
        "notes": (Message("HPC074", "a rewritten to b"), Message("HPC075", "c")),
    },
}


def test_start_lines(golden):
    lines = {case: start_line(plan(**changes)) for case, changes in PLANS.items()}
    assert lines["at least three"] == lines["three nodes"]
    golden(
        {case: line.replace(__version__, "VERSION") for case, line in lines.items()}
        | {f"{n} of 3 joined": joined_line(plan(), n, 12, 3.14) for n in (2, 3)}
    )


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

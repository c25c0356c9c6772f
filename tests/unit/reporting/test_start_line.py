from __future__ import annotations

from dataclasses import replace

from tests.support import ROOT
from tests.support.plans import PLAN
from torchrun_hpc import __version__
from torchrun_hpc.errors import Message, Setting
from torchrun_hpc.planning.head_node import port_of
from torchrun_hpc.planning.meeting import Meeting, Spares
from torchrun_hpc.planning.plan import Messages
from torchrun_hpc.planning.workers import Workers
from torchrun_hpc.reporting.start_line import joined_line, start_line

JSC = Setting("jsc", "SYSTEMNAME=juwelsbooster")


MEETING = Meeting("c10d", nodes=3, endpoint="jwb0001i:25592")
HERE = Meeting("c10d", endpoint="localhost")  # the only node


def plan(meeting=MEETING, *, workers=4, size=0, title="Slurm 19.0", notes=()):
    return replace(
        PLAN,
        meeting=meeting,
        workers=Workers(workers, size),
        messages=Messages(title, notes),
    )


NOTES = (Message("HPC074", "a rewritten to b"), Message("HPC075", "c"))
PLANS = {
    "three nodes": plan(),
    "at least three": plan(replace(MEETING, fewest=3)),
    "at least two": plan(replace(MEETING, fewest=2)),
    "one worker": plan(workers=1),
    "one spare": plan(replace(MEETING, nodes=4, spares=Spares(1))),
    "two spares": plan(replace(MEETING, nodes=5, spares=Spares(2))),
    "an interface and a site": plan(
        replace(MEETING, listen=("10.20.0.1", 25592), interface="ib0", site=JSC)
    ),
    "an address": plan(
        replace(MEETING, endpoint="10.20.0.1:29400", listen=("10.20.0.1", 29400))
    ),
    "an address of IPv6": plan(
        replace(MEETING, endpoint="[fd00::1]:29400", listen=("fd00::1", 29400))
    ),
    "one node of a job": plan(replace(HERE, backend="static"), workers=1),
    "one machine": plan(HERE, title="no scheduler"),
    "one machine that others may join": plan(
        replace(MEETING, nodes=1, may_grow=True), title="no scheduler"
    ),
    "two machines": plan(Meeting("c10d", nodes=2), title="no scheduler"),
    "direct mode": plan(size=6, workers=2),
    "notes": plan(notes=NOTES),
}


def test_start_lines(golden):
    lines = {case: start_line(each) for case, each in PLANS.items()}
    assert lines["at least three"] == lines["three nodes"]
    golden(
        {case: line.replace(__version__, "VERSION") for case, line in lines.items()}
        | {f"{n} of 3 joined": joined_line(plan(), n, 12, 3.14) for n in (2, 3)}
    )


def test_readme_shows_the_line_that_is_printed():
    """The port in it is the one of job 123456."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    port = port_of("123456.0")
    meeting = Meeting(
        "scheduler", nodes=4, endpoint=f"jwb0001i:{port}", interface="ib0", site=JSC
    )
    shown = plan(meeting, title="Slurm 123456.0")
    assert f"\n{start_line(shown)}\n" in readme

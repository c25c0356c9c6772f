"""faults.md, beside the tests of faults, which compare it or write it."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.support import ROOT
from tests.support.cluster.faults import FAULTS, Seconds
from tests.support.golden import is_updating
from torchrun_hpc.reporting.console import PREFIX

if TYPE_CHECKING:
    from tests.support.cluster.training_job import TrainingJob

PAGE = ROOT / "tests" / "more" / "faults" / "faults.md"
WRITES = is_updating()

HEAD = """# Faults

<!-- Written by the tests of faults, with UPDATE=1. Do not edit. -->

What follows when something goes wrong, as tests on a real Slurm cluster have seen it:
three nodes, jwb0001 to jwb0003, and one worker on each; spares are jwb0004
and jwb0005. The workers stand still when a step fails, as NCCL's do, so whatever ends
them is the launcher. Where a job does not go on, all agents that are left end with exit
code 1. The seconds were measured on a quiet machine, once; the tests fail if another
line is printed. docs/messages.md explains the codes.
"""
NOTHING = "The launcher prints nothing."
NODE = r"jwb\d+ \(node \d\)"
TITLES = [each.title for each in FAULTS.values()]


class Done(NamedTuple):
    """A fault that was done to a job.

    Attributes:
        name: Of the fault.
        printed: The launcher's lines.
        seconds: What was measured.
        output: All that the job has printed so far.
    """

    name: str
    printed: list[str]
    seconds: Seconds
    output: str


def do(names: list[str], job: TrainingJob) -> list[Done]:
    """Do faults to one job, one after the other."""
    done = []
    for name in names:
        seconds = FAULTS[name].scenario(job)
        done.append(Done(name, as_printed(job), seconds, job.output))
        job.forget()
    return done


def as_printed(job: TrainingJob) -> list[str]:
    """Return the launcher's lines, with names in place of what is another each time."""
    text = "\n".join(job.lines())
    for number, host in enumerate(job.hosts, start=1):
        text = text.replace(host, f"jwb{number:04}")
    text = text.replace(str(job.folder), "FOLDER")
    text = re.sub(r"\d+\.0_\w{8}\b", "JOBID.0_RANDOM", text)
    text = re.sub(r"(i|10\.20\.0\.\d+):\d{5}\b", r"\1:PORT", text)
    text = re.sub(r"up to \d+ s", "up to N s", text)
    text = re.sub(r"at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "at TIME", text)
    # The number of other workers that had time to fail is a matter of chance.
    return [line for line in text.splitlines() if not line.startswith(f"{PREFIX}    ")]


def template(name: str) -> str:
    """Return what is written about a fault, with the names of the seconds in it."""
    paragraphs = inspect.cleandoc(FAULTS[name].scenario.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(text.split()) for text in paragraphs)


def section(done: Done) -> str:
    """Write a section."""
    shown = {
        key: f"{value:.0f}" if value >= 10 else f"{max(value, 0.1):.1f}"
        for key, value in done.seconds.items()
    }
    paragraphs = [
        textwrap.fill(text, 88, break_long_words=False, break_on_hyphens=False)
        for text in template(done.name).format(**shown).split("\n\n")
    ]
    printed = "\n".join(["```text", *done.printed, "```"]) if done.printed else NOTHING
    return "\n\n".join([f"## {FAULTS[done.name].title}", *paragraphs, printed])


def sections() -> dict[str, str]:
    """Read the page's sections, by title."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].removeprefix("## "): part.strip() for part in parts}


def write(done: list[Done]) -> None:
    """Write the page, with the sections that are new."""
    known = sections() | {FAULTS[each.name].title: section(each) for each in done}
    ordered = [known[title] for title in TITLES if title in known]
    PAGE.write_text("\n\n".join([HEAD.strip(), *ordered, ""]), encoding="utf-8")


def check(done: list[Done]) -> None:
    """See that the page says what has happened; with UPDATE=1, let it."""
    for each in done:
        print(each.name, {key: round(value, 2) for key, value in each.seconds.items()})
    if WRITES:
        write(done)
        return
    for name, printed, _, output in done:
        written = sections().get(FAULTS[name].title)
        if written is None:
            pytest.fail(f"no section {FAULTS[name].title!r}: run with UPDATE=1")
        _, *paragraphs, last = written.split("\n\n")
        text = " ".join(" ".join(paragraphs).split())
        words = re.escape(" ".join(template(name).split()))
        pattern = re.sub(r"\\\{\w+\\\}", r"[0-9.]+", words)
        assert re.fullmatch(pattern, text), f"not as documented: {name}: {text}"
        # Which of two nodes was silent first, or whether both are named in one line, is
        # a matter of chance.
        nodes = f"{NODE}(, {NODE})*"
        lines = [re.sub(nodes, "NODE", line) for line in printed]
        known = [re.sub(nodes, "NODE", line) for line in last.splitlines()]
        known = [line for line in known if not line.startswith("```")]
        if not any("HPC214" in line for line in known):  # it comes only if it lasts
            lines = [line for line in lines if "HPC214" not in line]
        assert sorted(set(lines or [NOTHING])) == sorted(set(known)), (
            f"{name}:\n{output}"
        )

"""Jobs that fail, and say why on one screen: the examples of docs/troubleshooting.md.

With UPDATE=1 the examples are rewritten.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support import ROOT
from tests.support.cluster.commands import FORMS, JUELICH, KILL, own_lines
from tests.support.cluster.real_job import launch
from tests.support.golden import is_updating
from tests.support.pages.blocks import blocks
from tests.support.patience import without_waits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster.testbed import Cluster

PAGE = "docs/troubleshooting.md"
MARK = "<!-- Examples: written by their tests, with UPDATE=1. -->\n"
WRITES = is_updating()

# The lines of ours that an example may have, beside the traceback that it repeats.
MOST = 12


@dataclass(frozen=True)
class Example:
    """A job that fails.

    Attributes:
        title: What happens.
        program: What the workers run.
        options: Those of the launcher.
        script: The name of the script on the command line.
        code: How it ends.
        form: How its workers are started; see `FORMS`.
        is_cut_off: Whether Slurm ends all tasks as soon as one ends with an error.
    """

    title: str
    program: str
    options: tuple[str, ...] = ()
    script: str = "train.py"
    code: int = 1
    form: str = "exec"
    is_cut_off: bool = False


EXAMPLES = {
    "exception": Example(
        "An exception in one worker",
        """\
import os, torch, torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(1)
try:
    for batch in range(100):
        if batch == 17 and os.environ["RANK"] == "3":
            raise ValueError(f"bad batch {batch}")
        dist.all_reduce(ones)
finally:
    dist.destroy_process_group()
""",
        form="fork",
    ),
    "killed": Example(
        "A worker is killed",
        """\
import os, signal, torch, torch.distributed as dist

dist.init_process_group("gloo")
for batch in range(100):
    if batch == 17 and os.environ["RANK"] == "3":
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel, where memory is short
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
""",
        form="fork",
        is_cut_off=True,
    ),
    "aborts": Example(
        "A worker aborts in C++",
        """\
import ctypes, os, time

def backward():
    ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()  # std::terminate()

if os.environ["RANK"] == "3":
    backward()
time.sleep(900)
""",
        is_cut_off=True,
    ),
    "import": Example(
        "A module is missing on all nodes",
        """\
import os, time
from pathlib import Path

Path(f"ready{os.environ['RANK']}").touch()
while len(list(Path().glob("ready*"))) < 4:  # all at the same time
    time.sleep(0.01)
import missing_module
""",
    ),
    "script": Example("The script's name is wrong", "", script="trian.py", code=2),
    "restart": Example(
        "A restart is left",
        """\
import os, time

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "3":
        raise ValueError("bad batch 17")
    time.sleep(900)
""",
        options=("--max-restarts=1",),
        code=0,
    ),
}


def report_of(stderr: str, folder: Path) -> list[str]:
    """Return what the launcher has printed after its first line, traceback and all."""
    text = stderr.replace(f"{folder}/", "")
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "2026-11-22 17:30:01", text)
    text = re.sub("0x[0-9a-f]{8,}", "0x00007f6b2c9d0740", text)
    found: list[str] = []
    for line in text.splitlines():
        is_ours = line.startswith("torchrun_hpc: ") and without_waits([line])
        if is_ours or (found and line.startswith("    ")):
            found.append(line)
    return found


# How many had the time to fail before they were stopped, is chance.
OTHERS = re.compile(r"torchrun_hpc:     ranks? [\d,-]+ of 4: RuntimeError: .*")


# And so is which of all was the first, if all fail at the same time.
CHANCE = re.compile(
    r"worker \d on jwb000\d \(node \d\)|local rank \d|\d other ranks?: [\d,-]+"
)


def _certain(report: list[str]) -> list[str]:
    """Return what is no matter of chance."""
    lines = [line for line in report if not OTHERS.fullmatch(line)]
    is_one_of_all = any("the same on" in line for line in lines)
    return [CHANCE.sub("ONE", line) if is_one_of_all else line for line in lines]


def examples() -> dict[str, list[str]]:
    """Read the examples of the page, by title."""
    return {
        block.heading: block.text.splitlines()
        for block in blocks(PAGE)
        if block.language == "text"
    }


def write(example: Example, report: list[str]) -> None:
    """Write an example into the page, instead of the old one."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    text = f"### {example.title}\n\n"
    if example.program:
        text += f"```python\n{example.program}```\n\n"
    text += "```text\n" + "\n".join(report) + "\n```\n"
    head, _, old = page.partition(MARK)
    sections = re.split(r"^(?=### )", old, flags=re.MULTILINE)
    kept = {part.splitlines()[0]: part.strip() for part in sections if part.strip()}
    kept[f"### {example.title}"] = text.strip()
    titles = (f"### {each.title}" for each in EXAMPLES.values())
    ordered = [kept[title] for title in titles if title in kept]
    text = head + MARK + "\n" + "\n\n".join(ordered) + "\n"
    (ROOT / PAGE).write_text(text, encoding="utf-8")


def check(name: str, cluster: Cluster, folder: Path) -> None:
    """Run an example, and compare it with the page."""
    example = EXAMPLES[name]
    (folder / "train.py").write_text(example.program)
    done = launch(
        cluster,
        *("--nproc_per_node=2", *example.options),
        script=[folder / example.script],
        nodes=2,
        srun=[KILL] if example.is_cut_off else [],
        environ=JUELICH | FORMS[example.form],
        cwd=folder,
    )
    if example.is_cut_off:  # the code may be that of a task that Slurm has ended
        assert done.returncode != 0
    else:
        assert done.returncode == example.code
    assert len(own_lines(done.stderr)) - 1 <= MOST
    # The last one would be a traceback of ours.
    for words in "ChildFailedError", "closing signal", f"{ROOT}/torchrun_hpc/":
        assert words not in done.stderr, words
    report = report_of(done.stderr, folder)
    if WRITES:
        write(example, report)
    assert _certain(report) == _certain(examples()[example.title]), done.stderr

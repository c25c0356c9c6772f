"""A job fails, and says why on one screen: the examples of docs/failures.md.

With WRITE_FAILURES=1 the examples are written anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from commands import FORMS, HPC, JUELICH, KILL, ONE_TASK, lines, own_lines
from pages import ROOT, blocks

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster

PAGE = "docs/failures.md"
MARK = "<!-- Examples: written by tests/more/faults/test_failures.py. -->\n"
WRITES = bool(os.environ.get("WRITE_FAILURES"))

# The lines of ours that an example may have, beside the traceback that it repeats.
MOST = 12


@dataclass(frozen=True)
class Example:
    """A job that fails.

    Attributes:
        title: What happens.
        program: What the workers run.
        options: Those of the launcher.
        script: The name that is typed.
    """

    title: str
    program: str
    options: tuple[str, ...] = ()
    script: str = "train.py"


EXAMPLES = {
    "exception": Example(
        "An exception in one worker",
        """\
import os, torch, torch.distributed as dist

dist.init_process_group("gloo")
try:
    for batch in range(100):
        if batch == 17 and os.environ["RANK"] == "3":
            raise ValueError(f"bad batch {batch}")
        dist.all_reduce(torch.ones(1))
finally:
    dist.destroy_process_group()
""",
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
""",
    ),
    "aborts": Example(
        "A worker aborts in C++",
        """\
import ctypes, os, time

def backward():
    ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()  # std::terminate()

if os.environ["RANK"] == "3":
    backward()
time.sleep(60)
""",
    ),
    "import": Example(
        "A module is missing on all nodes",
        """\
import os, time
from pathlib import Path

Path(f"ready{os.environ['RANK']}").touch()
while len(list(Path().glob("ready*"))) < 6:  # all at the same time
    time.sleep(0.01)
import missing_module
""",
    ),
    "script": Example("The script's name is wrong", "", script="trian.py"),
    "restart": Example(
        "A restart is left",
        """\
import os, time

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "3":
        raise ValueError("bad batch 17")
    time.sleep(60)
""",
        options=("--max-restarts=1",),
    ),
}


def run(
    cluster: Cluster, folder: Path, example: Example, **environ: str
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(example.program)
    return cluster.srun(
        *("-N3", ONE_TASK, *HPC, "--nproc_per_node=2", *example.options),
        str(folder / example.script),
        env=JUELICH | environ,
        cwd=folder,
    )


def report_of(stderr: str, folder: Path) -> list[str]:
    """Return what the launcher has printed behind its first line, traceback and all."""
    text = stderr.replace(f"{folder}/", "")
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "2026-11-22 17:30:01", text)
    text = re.sub("0x[0-9a-f]{8,}", "0x00007f6b2c9d0740", text)
    found: list[str] = []
    for line in text.splitlines():
        is_ours = line.startswith("torchrun_hpc: ") and "HPC001" not in line
        if is_ours or (found and line.startswith("    ")):
            found.append(line)
    return found


# How many had the time to fail before they were stopped, is chance.
OTHERS = re.compile(r"torchrun_hpc:     ranks? [\d,-]+ of 6: RuntimeError: .*")


# And so is which of all was the first, where all fail at the same time.
CHANCE = re.compile(
    r"worker \d on jwb000\d \(node \d\)|local rank \d|other ranks: [\d,-]+"
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
    """Write an example into the page, in the place of the one that is there."""
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


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, juelich: Cluster, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    done = run(juelich, tmp_path, example)
    assert done.returncode == {"restart": 0, "script": 2}.get(name, 1), done.stderr
    assert len(own_lines(done.stderr)) - 1 <= MOST
    assert "ChildFailedError" not in done.stderr
    assert "closing signal" not in done.stderr
    assert "torchrun_hpc/" not in done.stderr  # no traceback of the launcher
    report = report_of(done.stderr, tmp_path)
    print(done.stderr)
    if WRITES:
        write(example, report)
    assert _certain(report) == _certain(examples()[example.title])


# --- how it gets there ----------------------------------------------------------------

STUBBORN = """\
import os, signal, sys, time
from pathlib import Path

rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(f"ready{rank}").touch()
while len(list(Path().glob("ready*"))) < 6:
    time.sleep(0.01)
if rank == "3":
    Path("failed").write_text(str(time.time()))
    raise ValueError("bad batch 17")
time.sleep(12)
print("saved after SIGTERM", file=sys.stderr)
"""


def test_the_report_does_not_wait_for_the_workers(
    juelich: Cluster, tmp_path: Path
) -> None:
    """They may take their time; in the end the last line says the cause once more."""
    (tmp_path / "train.py").write_text(STUBBORN)
    argv = ["srun", "-N3", ONE_TASK, *HPC, "--nproc_per_node=2", "train.py"]
    program = juelich.popen(argv, env=JUELICH, cwd=tmp_path, stderr=subprocess.STDOUT)
    try:
        assert program.stdout is not None
        seen = [(time.time(), line) for line in program.stdout]
    finally:
        juelich.end(program)
    texts = [line for _, line in seen]
    (reported,) = (when for when, line in seen if "(local rank 1, at " in line)
    failed = float((tmp_path / "failed").read_text())
    print(f"reported after {reported - failed:.2f} s")
    assert reported - failed < 6  # two, and a machine that is busy
    assert texts.count("    ValueError: bad batch 17\n") == 1
    (saved, *_) = (i for i, text in enumerate(texts) if "saved after" in text)
    (last,) = (i for i, t in enumerate(texts) if "exit code 1: ValueError" in t)
    assert texts.index("    ValueError: bad batch 17\n") < saved < last


@pytest.mark.parametrize("form", FORMS)
def test_nothing_cuts_it_off(form: str, juelich: Cluster, tmp_path: Path) -> None:
    """Slurm ends all tasks as soon as one ends with an error."""
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '3':\n"
        "    raise ValueError('bad batch 17')\n"
        "time.sleep(60)\n"
    )
    done = juelich.srun(
        *("-N3", ONE_TASK, KILL, *HPC, "--nproc_per_node=2", "train.py"),
        env=JUELICH | FORMS[form],
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert "    ValueError: bad batch 17" in lines(done.stderr)


def test_direct_mode_has_no_agent(juelich: Cluster, tmp_path: Path) -> None:
    """What a worker writes is all there is."""
    (tmp_path / "train.py").write_text("raise ValueError('bad batch 17')\n")
    done = juelich.srun(
        "-N2", "--ntasks-per-node=2", *HPC, "train.py", env=JUELICH, cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr.count("ValueError: bad batch 17\n") == 4
    assert "HPC125" not in done.stderr

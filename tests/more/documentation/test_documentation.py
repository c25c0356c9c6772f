"""A small cluster runs the commands of the documentation, word by word.

`tests.support.pages.documented` says how each block is run, and by which test.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.cluster import mpi as launchers
from tests.support.cluster.commands import ENVIRON, JUELICH, WORLD, column, require
from tests.support.cluster.mpi import INTELMPI, MPICH_4, OPENMPI_4, type_on_each
from tests.support.pages import documented
from tests.support.pages.blocks import blocks, replaced
from tests.support.patience import PATIENCE, START

MPI = {"Open MPI 4": OPENMPI_4, "MPICH 4": MPICH_4, "Intel MPI": INTELMPI}
RUNS = documented.runs()


@pytest.fixture
def folder(tmp_path):
    """Make a folder with what a user has in it: scripts, and an environment."""
    tmp_path.chmod(0o755)
    for script in "main.py", "train.py":
        (tmp_path / script).symlink_to(WORLD)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "HOSTFILE").write_text("n9\nn9\nn10\nn10\n")
    return tmp_path


def printed(run, text, folder, request):
    """Run a block in a job, as a job's script, or on machines. Return the output."""
    if run.where in {"job", "script"}:
        juelich = request.getfixturevalue("juelich")
        if run.where == "script":
            done = juelich.sbatch(text, *run.options, env=JUELICH, cwd=folder)
            output = done.output
        else:
            command = ["salloc", *run.options, "bash", "-ec", text]
            done = juelich.run(command, env=JUELICH, cwd=folder)
            output = done.stdout + done.stderr
        assert done.returncode == 0, output
        return output
    bare = request.getfixturevalue("bare")
    environ = ENVIRON | run.environ
    if run.where in MPI:
        require(launchers.missing(MPI[run.where]))
        environ["PATH"] = MPI[run.where].install(bare, folder)
    outputs, errors = type_on_each(bare, text, run.hosts, env=environ, cwd=folder)
    return "".join([*outputs, errors])


@pytest.mark.parametrize(
    ("run", "block"), [run[1:] for run in RUNS], ids=[run[0] for run in RUNS]
)
def test_block(run, block, folder, request):
    output = printed(run, run.text(block), folder, request)
    (line,) = re.findall(f"{START}(.*)", output)
    assert line.startswith(run.starts)
    assert column(output, "RANK", "WORLD_SIZE") == [
        (str(rank), str(run.workers)) for rank in range(run.workers)
    ], output
    assert re.search(run.prints, output), output


@pytest.mark.parametrize("words", ["first=", "gpu train.py"])
def test_by_hand_and_with_the_launcher(juelich, folder, words):
    """The two blocks of the README start the same world."""
    (shown,) = documented.found("README.md", words)
    script = f"#!/bin/bash\n{replaced(shown.text, documented.TWO)}"
    options = ("--nodes=2", "--ntasks-per-node=1")
    done = juelich.sbatch(script, *options, env=JUELICH, cwd=folder)
    assert done.returncode == 0, done.output
    assert column(done.output, "RANK", "host", "GLOO_SOCKET_IFNAME") == [
        (str(rank), f"jwb000{1 + rank // 2}", "ib0") for rank in range(4)
    ]


def test_a_first_session():
    """docs/README.md shows the commands of a session and their output."""
    section = "Try it without a cluster"
    page = [each for each in blocks("docs/README.md") if each.heading == section]
    commands = [each.text for each in page if each.language == "bash"]
    assert commands[0] == "make cluster\n"
    assert all(text.startswith("srun ") for text in commands[1:])
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.cluster.shell"],
        # Without the null device, srun would read the next command.
        input="".join(f"{{ {text} }} < /dev/null\n" for text in commands[1:]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    output = done.stdout.replace(str(ROOT), "/home/you/torchrun_hpc")
    shown = [each.text for each in page if each.language == "text"]
    assert [text for text in shown if text not in output] == [], output
    assert "rank 5 of 6 on jwb0003" in output
    assert "Nothing was started" in output

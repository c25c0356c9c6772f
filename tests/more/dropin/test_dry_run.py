"""--hpc-dry-run and the options page: launches of one node that start nothing."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import ROOT
from tests.support.processes import run, run_python
from tests.support.python_programs import load
from tests.support.stock.side_by_side import OURS, STOCK, Command, words_of
from torchrun_hpc.host import capabilities
from torchrun_hpc.reporting import description

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.processes import Result

SCRIPT = "train.py"
TRACE = """
import os, sys
open(f"trace-{os.environ['RANK']}", "w").close()
sys.stdout.write(f"{sys.argv[1:]}\\n")  # in one piece
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with a script that leaves a trace."""
    (tmp_path / SCRIPT).write_text(TRACE)
    return tmp_path


def _assert_dry(result: Result, folder: Path) -> None:
    assert result.code == 0, result.err
    assert result.err == ""
    assert [path.name for path in folder.iterdir()] == [SCRIPT]


def _node(result: Result) -> dict[str, Any]:
    answer = json.loads(result.out)
    assert (answer["missing"], set(answer)) == ([], {"nodes", "missing", "limit_s"})
    (node,) = answer["nodes"]
    return dict(node)


@pytest.mark.parametrize(
    ("shell", "code", "message"),
    [
        ("{} >&-", 2, "HPC101"),
        ("{} > /dev/full", 2, "HPC101"),
        ("set -o pipefail; {} | true", 0, ""),
        ("PYTHONIOENCODING=ascii {} > /dev/null", 0, ""),
    ],
)
def test_an_output_of_sites_that_takes_nothing(shell, code, message):
    """The same of the dry run is in test_streams.py."""
    line = shell.format(f"{shlex.quote(sys.executable)} -m torchrun_hpc.sites")
    done = run(["bash", "-c", line])
    assert done.code == code, done.err
    assert len(done.err.splitlines()) == bool(message), done.err
    assert message in done.err


def test_debugging_is_part_of_what_is_shown(launcher, folder):
    argv = ["--hpc-debug", "--hpc-dry-run=json", SCRIPT]
    done = launcher.launch(OURS, argv, cwd=folder, TORCH_CPP_LOG_LEVEL="")
    node = _node(done)
    assert node["options"]["tee"] == {"value": "2", "source": "--hpc-debug"}
    assert node["exports"]["TORCH_CPP_LOG_LEVEL"] == "INFO"
    assert "--tee=2" in node["command"]


def test_every_value_has_its_source(launcher, folder):
    argv, environ = words_of(
        # An empty one counts as not set: to torch it would be a wrong number.
        "PET_HPC_DRY_RUN=1 PET_ROLE=trainer PET_MASTER_PORT= --nproc-per-node=2 "
        f"--max-restarts=1 --hpc-debug {SCRIPT} --lr 'two words'"
    )
    result = launcher.launch(OURS, argv, cwd=folder, **environ)
    _assert_dry(result, folder)
    assert result.out.startswith("OK: would start 2 workers on 1 node\n")
    command = shlex.split(result.out.splitlines()[-1])
    assert command[:1] + command[-3:] == ["torchrun", SCRIPT, "--lr", "two words"]
    rows = [" ".join(line.split()) for line in result.out.splitlines()]
    for row in (
        "workers 2 --nproc_per_node=2",
        "rendezvous within the agent, without a port",
        "--standalone True one node",
        "--max_restarts 1 --max_restarts",
        "--role trainer PET_ROLE",
        "0 this node 127.0.0.1 - 2",
        "OMP_NUM_THREADS 1 torchrun's default",
    ):
        assert row in rows, result.out
    patched = [row for row in rows if row.startswith("state_as_json patched ")]
    assert len(patched) == 1
    assert not [row for row in rows if row.startswith("scheduler ")]


def test_what_it_proposes_is_what_would_run(launcher, folder):
    """Its exports and its command, given to torchrun itself."""
    argv = ["--nproc-per-node=2", SCRIPT, "--lr", "two words", "$HOME"]
    dry = launcher.launch(OURS, ["--hpc-dry-run=json", *argv], cwd=folder)
    _assert_dry(dry, folder)
    node = _node(dry)
    assert set(node) == set(description.Description.__annotations__)
    name, *words = node["command"]
    assert name == "torchrun"
    commands = Command(STOCK, words, node["exports"]), Command(OURS, argv)
    stock, ours = launcher.launch_all(commands, cwd=folder)
    assert stock.code == ours.code == 0, stock.err + ours.err
    assert sorted(stock.out.splitlines()) == sorted(ours.out.splitlines())
    if not capabilities.WARNS_OF_DEFAULT.present:
        assert stock.err == ""  # no banner: the exports have been enough
    assert "OMP_NUM_THREADS" not in stock.err
    assert (folder / "trace-1").exists()


def test_of_a_program_that_calls_torchrun_itself(folder):
    program = "import torchrun_hpc.auto, torch.distributed.run as run; run.main()"
    result = run_python("-c", program, "--hpc-dry-run=json", SCRIPT, cwd=folder)
    _assert_dry(result, folder)
    assert _node(result)["command"][-1] == SCRIPT


# --- the page of all options ------------------------------------------------------


@pytest.mark.usefixtures("outside_of_jobs")
def test_the_page_of_options_is_what_the_parser_says():
    module = load(ROOT / "docs" / "write_options.py")
    page = module.text()
    written = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    pinned = f"torch=={capabilities.RELEASE}\n"
    if pinned in (ROOT / "requirements-dev.txt").read_text(encoding="utf-8"):
        assert page == written
    # Another torchrun has other options.
    assert page.partition(module.TORCH)[0] == written.partition(module.TORCH)[0]
    assert "\n| `--hpc-dry-run=json` |" in page

"""--hpc-dry-run and the options page: launches of one node that start nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from side_by_side import OURS, STOCK, clean_environ, run

from torchrun_hpc.reporting import description
from torchrun_hpc.torch_compat import capabilities

if TYPE_CHECKING:
    from side_by_side import Launcher, Result

ROOT = Path(__file__).parents[3]

SCRIPT = "train.py"
TRACE = """
import os, sys
open(f"trace-{os.environ['RANK']}", "w").close()
sys.stdout.write(f"{sys.argv[1:]}\\n")  # in one piece
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where scripts are that leave a trace; two of them have odd names."""
    for name in (SCRIPT, "json", "table"):
        (tmp_path / name).write_text(TRACE)
    return tmp_path


def _assert_dry(result: Result, folder: Path) -> None:
    assert result.code == 0, result.err
    assert result.err == ""
    assert sorted(path.name for path in folder.iterdir()) == ["json", "table", SCRIPT]


def _last_words(result: Result) -> list[str]:
    """Return the command for plain torchrun, the last line of a table."""
    return shlex.split(result.out.splitlines()[-1])


def _node(result: Result) -> dict[str, Any]:
    answer = json.loads(result.out)
    assert (answer["missing"], set(answer)) == ([], {"nodes", "missing", "limit_s"})
    (node,) = answer["nodes"]
    return dict(node)


# --- where it prints ----------------------------------------------------------------


@pytest.mark.parametrize("command", ["-m torchrun_hpc --hpc-dry-run x.py",
                                     "-m torchrun_hpc.sites"])  # fmt: skip
@pytest.mark.parametrize(
    ("shell", "code", "message"),
    [
        ("{} >&-", 2, "HPC101"),
        ("{} > /dev/full", 2, "HPC102"),
        ("set -o pipefail; {} | true", 0, ""),
        ("PYTHONIOENCODING=ascii {} > /dev/null", 0, ""),
    ],
)
def test_an_output_that_takes_nothing(
    command: str, shell: str, code: int, message: str
) -> None:
    line = shell.format(f"{shlex.quote(sys.executable)} {command}")
    done = run(["bash", "-c", line], env=clean_environ())
    assert done.code == code, done.err
    assert len(done.err.splitlines()) == bool(message), done.err
    assert message in done.err


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        ([SCRIPT], {"PET_HPC_DEBUG": "true"}, "HPC011 a PET_* variable cannot be read"),
        (["--hpc-site=--", SCRIPT], {}, "HPC010 hpc_site has no value"),
        (["--hpc-omp-threads=--", SCRIPT], {}, "HPC010 hpc_omp_threads has no value"),
        (["--hpc-site=/dev/zero", SCRIPT], {}, "HPC041 /dev/zero cannot be read"),
    ],
)
def test_wrong_values_of_our_options(
    words: list[str], environ: dict[str, str], message: str
) -> None:
    done = run([sys.executable, "-m", "torchrun_hpc", "--nproc-per-node=1", *words],
               env=clean_environ() | environ)  # fmt: skip
    assert done.code == 2
    (line,) = [line for line in done.err.splitlines() if "torchrun_hpc: " in line]
    assert f"error: {message}" in line


def test_debugging_is_part_of_what_is_shown(folder: Path) -> None:
    words = [sys.executable, "-m", "torchrun_hpc", "--hpc-debug", "--hpc-dry-run=json"]
    done = run([*words, SCRIPT], env=clean_environ(), cwd=folder)
    node = _node(done)
    assert node["options"]["tee"] == {"value": "2", "source": "--hpc-debug"}
    assert node["exports"]["TORCH_CPP_LOG_LEVEL"] == "INFO"
    assert "--tee=2" in node["command"]


# --- its forms --------------------------------------------------------------------

# Options, variables, the form that is printed.
FORMS = {
    "underscores": (["--hpc_dry_run"], {}, "table"),
    "json, underscores": (["--hpc_dry_run=json"], {}, "json"),
    "variable": ([], {"PET_HPC_DRY_RUN": "1"}, "table"),
    "variable, by name": ([], {"PET_HPC_DRY_RUN": "table"}, "table"),
    "variable, json": ([], {"PET_HPC_DRY_RUN": "json"}, "json"),
    "option and variable": (["--hpc-dry-run"], {"PET_HPC_DRY_RUN": "json"}, "table"),
    "json and variable": (["--hpc-dry-run=json"], {"PET_HPC_DRY_RUN": "1"}, "json"),
    "option and no variable": (["--hpc-dry-run"], {"PET_HPC_DRY_RUN": "0"}, "table"),
    "the last one": (["--hpc-dry-run", "--hpc-dry-run=json"], {}, "json"),
}


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, launcher: Launcher, folder: Path) -> None:
    options, environ, form = FORMS[name]
    argv = [*options, "--nproc-per-node=2", SCRIPT, "--lr", "two words"]
    result = launcher.ours(argv, environ=environ, cwd=folder)
    _assert_dry(result, folder)
    if form == "table":
        assert result.out.startswith("torchrun_hpc ")
        assert "a dry run, nothing is started\n" in result.out
        command = _last_words(result)
    else:
        node = _node(result)
        assert set(node) == set(description.Description.__annotations__)
        command = node["command"]
    assert command[0] == "torchrun"
    assert "--nproc_per_node=2" in command
    assert command[-3:] == [SCRIPT, "--lr", "two words"]


NO_DRY_RUNS = {
    "variable, zero": ([], {"PET_HPC_DRY_RUN": "0"}, SCRIPT, ["x"]),
    "variable, empty": ([], {"PET_HPC_DRY_RUN": ""}, SCRIPT, ["x"]),
    "the script's": ([], {}, SCRIPT, ["--hpc-dry-run", "--hpc-dry-run=json"]),
    "the script's, behind dashes": (["--"], {}, SCRIPT, ["--hpc-dry-run"]),
}


@pytest.mark.parametrize("name", NO_DRY_RUNS)
def test_what_is_no_dry_run(name: str, launcher: Launcher, folder: Path) -> None:
    options, environ, script, rest = NO_DRY_RUNS[name]
    result = launcher.ours([*options, script, *rest], environ=environ, cwd=folder)
    assert result.code == 0, result.err
    assert result.out == f"{rest}\n"
    assert (folder / "trace-0").exists()
    assert len(result.own_lines) == 1


@pytest.mark.parametrize("script", ["json", "table"])
def test_the_word_behind_it_is_the_script(
    script: str, launcher: Launcher, folder: Path
) -> None:
    result = launcher.ours(["--hpc-dry-run", script, SCRIPT], cwd=folder)
    _assert_dry(result, folder)
    assert _last_words(result)[-2:] == [script, SCRIPT]


# --- what it finds ----------------------------------------------------------------

# Variables, arguments, the code of what a launch would say.
REFUSED = [
    ({"PET_HPC_DRY_RUN": "2"}, [SCRIPT], "HPC014 PET_HPC_DRY_RUN=2: type one of table"),
    ({"PET_HPC_DRY_RUN": "yes"}, [SCRIPT], "HPC014 PET_HPC_DRY_RUN=yes: type one of"),
    ({"PET_HPC_DRY_RUN": "JSON"}, [SCRIPT], "HPC014 PET_HPC_DRY_RUN=JSON: type one of"),
    ({}, ["--hpc-dry-run=yaml", SCRIPT], "HPC010 argument --hpc-dry-run"),
    ({}, ["--hpc-dry-run"], "HPC010 the following arguments are required"),
    ({}, ["--hpc-dry-run", "--nnodes=3:2", SCRIPT], "HPC063 --nnodes=3:2"),
    ({}, ["--hpc-dry-run", "--max-restarts=-1", SCRIPT], "HPC014 "),
    ({}, ["--hpc-dry-run", "--tee=x", SCRIPT], "HPC015 "),
    ({}, ["--hpc-dry-run=json", "--no-python", "./none"], "HPC016 ./none: "),
    ({}, ["--hpc-dry-run=json", "--nnodes=2", SCRIPT], "HPC066 --nnodes=2, but no"),
]


@pytest.mark.parametrize(("environ", "argv", "message"), REFUSED)
def test_what_a_launch_would_refuse(
    environ: dict[str, str],
    argv: list[str],
    message: str,
    launcher: Launcher,
    folder: Path,
) -> None:
    result = launcher.ours(argv, environ=environ, cwd=folder)
    assert (result.code, result.out) == (2, "")
    (line,) = result.err.splitlines()
    assert line.startswith(f"torchrun_hpc: error: {message}")


def test_what_a_launch_would_say(launcher: Launcher, folder: Path) -> None:
    """To stdout: nothing is wrong with the dry run."""
    argv = ["--hpc-dry-run", "--nproc-per-node=2", SCRIPT]
    result = launcher.ours(argv, environ={"OMP_NUM_THREADS": "5"}, cwd=folder)
    _assert_dry(result, folder)
    assert "\nHPC094 OMP_NUM_THREADS=5 times 2 workers is 10 threads" in result.out


def test_every_value_has_its_source(launcher: Launcher, folder: Path) -> None:
    argv = ["--hpc-dry-run", "--nproc-per-node=2", "--max-restarts=1", SCRIPT]
    result = launcher.ours(argv, environ={"PET_ROLE": "trainer"}, cwd=folder)
    rows = [" ".join(line.split()) for line in result.out.splitlines()]
    for row in (
        "workers 2 --nproc_per_node=2",
        "listens on 127.0.0.1:0 this node is the host",
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


def test_what_it_proposes_is_what_would_run(launcher: Launcher, folder: Path) -> None:
    """Its exports and its command, given to torchrun itself."""
    argv = ["--nproc-per-node=2", SCRIPT, "--lr", "two words", "$HOME"]
    dry = launcher.ours(["--hpc-dry-run=json", *argv], cwd=folder)
    _assert_dry(dry, folder)
    node = _node(dry)
    name, *words = node["command"]
    assert name == "torchrun"
    stock, ours = launcher.many(
        [(STOCK, words), (OURS, argv)], environs=[node["exports"], {}], cwd=folder
    )
    assert stock.code == ours.code == 0, stock.err + ours.err
    assert sorted(stock.out.splitlines()) == sorted(ours.out.splitlines())
    if not capabilities.WARNS_OF_DEFAULT.present:
        assert stock.err == ""  # no banner: the exports have been enough
    assert "OMP_NUM_THREADS" not in stock.err
    assert (folder / "trace-1").exists()


def test_of_a_program_that_calls_torchrun_itself(folder: Path) -> None:
    program = "import torchrun_hpc.auto, torch.distributed.run as run; run.main()"
    result = run(
        [sys.executable, "-c", program, "--hpc-dry-run=json", SCRIPT], cwd=folder
    )
    _assert_dry(result, folder)
    assert _node(result)["command"][-1] == SCRIPT


# --- the page of all options ------------------------------------------------------


def test_the_page_of_options_is_what_the_parser_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in set(os.environ).difference(clean_environ()):
        monkeypatch.delenv(name)
    path = ROOT / "docs" / "write_options.py"
    spec = importlib.util.spec_from_file_location("write_options", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.text()
    written = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    pinned = f"torch=={capabilities.RELEASE}\n"
    if pinned in (ROOT / "requirements-dev.txt").read_text(encoding="utf-8"):
        assert page == written
    # Those of torchrun are others.
    assert page.partition(module.TORCH)[0] == written.partition(module.TORCH)[0]
    assert "\n### `--hpc-dry-run=json`\n" in page

"""The options of torchrun, and ours."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from torchrun_hpc.options import command_line as options


@pytest.mark.parametrize(
    ("dest", "expected"),
    [
        ("nnodes", ("--nnodes",)),
        ("rdzv_id", ("--rdzv-id", "--rdzv_id")),
        ("module", ("-m", "--module")),
    ],
)
def test_names(dest, expected):
    assert options.names_of(dest) == expected


def ours(environ, *words):
    parser = argparse.ArgumentParser()
    options.add_ours(parser, environ)
    return vars(parser.parse_args(words))


def test_ours_are_not_set_by_default():
    found = ours({"PET_HPC_SITE_X": "y"})
    assert found.pop("hpc_debug") is False
    assert found == dict.fromkeys({*options.OURS} - {"hpc_debug"})


def test_ours_are_in_the_documentation():
    page = (Path(__file__).parents[3] / "docs" / "options.md").read_text("utf-8")
    parser = argparse.ArgumentParser(add_help=False)
    options.add_ours(parser, {})
    found = parser._actions
    for action in found:
        text = action.help.replace("|", r"\|")
        variable = f"`{options.variable_of(action.dest)}`"
        shown = "" if action.dest in options.WITHOUT_VARIABLE else variable
        assert f"| {text} | {shown} |\n" in page


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PET_HPC_SITE": "jsc"}, {"hpc_site": "jsc"}),
        ({"PET_HPC_DEBUG": "1"}, {"hpc_debug": True}),
        ({"PET_HPC_DEBUG": ""}, {"hpc_debug": False}),
        ({"PET_HPC_DRY_RUN": "1"}, {"hpc_dry_run": "table"}),
        ({"PET_HPC_DRY_RUN": "0"}, {"hpc_dry_run": None}),
        ({"PET_HPC_DRY_RUN": "json"}, {"hpc_dry_run": "json"}),
    ],
)
def test_variables_of_ours(environ, expected):
    assert ours(environ).items() >= expected.items()


@pytest.mark.parametrize("form", ["", "=table", "=json"])
@pytest.mark.parametrize("name", ["--hpc-dry-run", "--hpc_dry_run"])
def test_a_dry_run_takes_no_word_behind_it(name, form):
    found = ours({"PET_HPC_DRY_RUN": "x"}, f"{name}{form}", "--hpc-debug")
    assert found["hpc_dry_run"] == (form[1:] or "table")
    assert found["hpc_debug"]


def test_a_flag_that_is_no_number():
    with pytest.raises(ValueError, match="yes") as caught:
        ours({"PET_HPC_DEBUG": "yes"})
    environ = {"HOME": "/root", "PET_HPC_DEBUG": "yes", "PET_MODULE": "1"}
    refused = options.wrong_variable(caught.value, environ)
    assert (refused.code, refused.everywhere) == ("HPC011", True)
    assert "PET_HPC_DEBUG=yes, PET_MODULE=1. Set a flag" in str(refused)


@pytest.mark.parametrize(
    ("run_id", "expected"),
    [("", True), ("x" * 246, True), ("x" * 247, False), ("ü" * 124, False)],
)
def test_names_of_folders(run_id, expected):
    assert options.names_folder(run_id) is expected
    assert not options.names_folder(f"a/{run_id}")

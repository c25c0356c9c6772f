"""The command line, parsed without torch."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import ROOT
from torchrun_hpc.options import command_line
from torchrun_hpc.options.options import Options

# --- what is set --------------------------------------------------------------------

EXPLICIT = {
    "--rdzv-endpoint=n9:1 --rdzv_id x a": {"rdzv_endpoint": "n9:1", "rdzv_id": "x"},
    "--log-dir logs --nproc-per-node=gpu --nnodes 2:3 a": {
        "log_dir": "logs",
        "nproc_per_node": "gpu",
        "nnodes": "2:3",
    },
    "--node-rank=0 a": {"node_rank": 0},
    "-m main -r 3": {"module": True},
    "--hpc-dry-run --hpc_site jsc --hpc-debug a": {
        "hpc_dry_run": "table",
        "hpc_site": "jsc",
        "hpc_debug": True,
    },
    # the script's own, also after a value, and after a flag
    "--rdzv-id=x a --standalone --nnodes x": {"rdzv_id": "x"},
    "--nproc-per-node 4 a --master_port=29500": {"nproc_per_node": "4"},
    "--rdzv-id=x --no-python a --nnodes x": {"rdzv_id": "x", "no_python": True},
    # a value that is wrong, or missing
    "--master-port=x --rdzv-id=y": {},
    "--rdzv-id": {},
}


def values_of(line, environ):
    found = command_line.parse(line.split(), environ).options.given
    return {name: option.value for name, option in found.items()}


@pytest.mark.parametrize("line", EXPLICIT)
def test_options(line):
    assert values_of(line, {}) == EXPLICIT[line]


def test_variables_beside_an_option():
    environ = {"PET_NNODES": "3", "PET_RDZV_ID": "", "PET_STANDALONE": "1"}
    expected = {"nnodes": "3", "master_port": 1, "standalone": True}
    assert values_of("--master-port=1", environ) == expected
    assert values_of("--master-port=1", {"PET_STANDALONE": "yes"}) == {}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PET_STANDALONE": "0", "PET_MODULE": "", "PET_ROLE": ""}, {}),
        ({"PET_LOGS_SPECS": "x", "PET_NUMA_BINDING": "node", "PET_X": "y"}, {}),
        ({"PET_MONITOR_INTERVAL": ".5"}, {"monitor_interval": 0.5}),
        ({"PET_NO_PYTHON": "2", "PET_HPC_DEBUG": " 1 "}, {"no_python": True}),
    ],
)
def test_variables(environ, expected):
    found = command_line.parse(["main.py"], environ)
    values = {k: v.value for k, v in found.options.given.items() if k != "hpc_debug"}
    assert (values, found.problem) == (expected, None)
    assert {v.source for v in found.options.given.values()} <= environ.keys()


def test_an_option_beats_its_variable():
    environ = {"PET_NODE_RANK": "x", "PET_ROLE": "b"}
    found = command_line.parse(["--node-r=1", "--role=a", "main.py"], environ)
    assert {k: str(v) for k, v in found.options.given.items()} == {
        "node_rank": "--node_rank=1",
        "role": "--role=a",
    }


@pytest.mark.parametrize(
    ("argv", "script", "arguments", "unknown"),
    [
        ([], "", (), ()),
        (["--standalone"], "", (), ()),
        (["--"], "", (), ()),
        (["-"], "-", (), ()),
        (["--", "--odd.py", "-h"], "--odd.py", ("-h",), ()),
        (["a", "--rdzv", "--nnodes"], "a", ("--rdzv", "--nnodes"), ()),
        (["a", "--", "b", "--", "c"], "a", ("b", "--", "c"), ()),
        (["--hpc-dry-run", "a", "b"], "a", ("b",), ()),
        (["--bogus", "3", "a"], "3", ("a",), ("--bogus",)),
        (["--bogus=3", "-x", "-m", "a"], "a", (), ("--bogus=3", "-x")),
        (["--bogus", "--"], "", (), ("--bogus",)),
    ],
)
def test_script(argv, script, arguments, unknown):
    found = command_line.parse(argv, {})
    assert found.options.words == (script, *arguments)
    assert (found.unknown, found.problem) == (unknown, None)


@pytest.mark.parametrize(
    "argv", [["-h"], ["--h"], ["--print-completion", "zsh"], ["--bogus", "-mh"]]
)
def test_help_is_wanted(argv):
    assert command_line.parse(argv, {}).wants_help


@pytest.mark.parametrize(
    ("argv", "environ", "code"),
    [
        (["--nnodes"], {}, "HPC010"),
        (["--nnodes", "-h"], {}, "HPC010"),
        (["--hpc-site=--", "a"], {}, "HPC010"),
        (["--master-port=x", "a", "--rdzv-id=y"], {}, "HPC010"),
        (["a"], {"PET_MASTER_PORT": "x"}, "HPC010"),
        (["-h"], {"PET_STANDALONE": "yes"}, "HPC011"),
    ],
)
def test_problem(argv, environ, code):
    problem = command_line.parse(argv, environ).problem
    assert problem is not None
    assert (problem.code, problem.everywhere) == (code, True)


NAMES = [name for dest in command_line.TORCHRUN for name in command_line.names_of(dest)]
WORDS = st.one_of(
    st.text(max_size=5),
    st.sampled_from([*NAMES, "--hpc", "--hpc-site", "-h", "--", "-", "-1", "main.py"]),
    st.builds("{}={}".format, st.sampled_from(NAMES), st.text(max_size=3)),
    st.sampled_from(NAMES).flatmap(
        lambda name: st.integers(1, len(name)).map(lambda end: name[:end])
    ),
)
VARIABLES = st.sampled_from(
    [command_line.variable_of(dest) for dest in command_line.TORCHRUN]
)


@given(st.lists(WORDS), st.dictionaries(VARIABLES, st.sampled_from(["", "1", "x"])))
def test_no_command_line_is_too_wrong(argv, environ):
    found = command_line.parse(argv, environ)
    if found.problem or found.wants_help:
        assert found.options == Options()
        assert found.unknown == ()
    assert found.options.given.keys() <= {*command_line.TORCHRUN, "hpc_site"}
    _, *rest = found.options.words or [""]
    assert argv[len(argv) - len(rest) :] == rest


# --- the versions -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "is_wanted"),
    [
        ("--version", True),
        ("--ver", True),
        ("--nnodes=2 --version a.py", True),
        ("--bogus --version", True),
        ("a.py --version", False),
        ("--nnodes=2", False),
    ],
)
@pytest.mark.parametrize("environ", [{}, {"PET_VERSION": "3"}])
def test_version(words, is_wanted, environ):
    found = command_line.parse(words.split(), environ)
    assert found.wants_version is is_wanted
    assert found.problem is None


# --- the options: torchrun's, and ours ------------------------------------------------


@pytest.mark.parametrize(
    ("dest", "expected"),
    [
        ("nnodes", ("--nnodes",)),
        ("rdzv_id", ("--rdzv-id", "--rdzv_id")),
        ("module", ("-m", "--module")),
    ],
)
def test_names(dest, expected):
    assert command_line.names_of(dest) == expected


def ours(environ, *words):
    parser = argparse.ArgumentParser()
    command_line.add_ours(parser, environ)
    return vars(parser.parse_args(words))


def test_ours_are_not_set_by_default():
    found = ours({"PET_HPC_SITE_X": "y"})
    assert found.pop("hpc_debug") is False
    assert found == dict.fromkeys({*command_line.OURS} - {"hpc_debug"})


def test_ours_are_in_the_documentation():
    page = (ROOT / "docs" / "options.md").read_text("utf-8")
    parser = argparse.ArgumentParser(add_help=False)
    command_line.add_ours(parser, {})
    found = parser._actions
    for action in found:
        text = (action.help or "").replace("|", r"\|")
        variable = f"`{command_line.variable_of(action.dest)}`"
        shown = "" if action.dest in command_line.WITHOUT_VARIABLE else variable
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
    refused = command_line.wrong_variable(caught.value, environ)
    assert (refused.code, refused.everywhere) == ("HPC011", True)
    assert "PET_HPC_DEBUG=yes, PET_MODULE=1. Set a flag" in str(refused)


@pytest.mark.parametrize(
    ("run_id", "expected"),
    [("", True), ("x" * 246, True), ("x" * 247, False), ("ü" * 124, False)],
)
def test_names_of_folders(run_id, expected):
    assert command_line.names_folder(run_id) is expected
    assert not command_line.names_folder(f"a/{run_id}")

"""The command line, parsed without torch."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc.commandline import command_line, options
from torchrun_hpc.commandline.command_line import direct_mode_problem
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.planning import mode

# --- what is set --------------------------------------------------------------------

EXPLICIT = {
    "nothing": (["main.py"], {}, {}),
    "both spellings": (
        ["--rdzv-endpoint=n9:1", "--rdzv_id", "x", "main.py"],
        {},
        {"rdzv_endpoint": "n9:1", "rdzv_id": "x"},
    ),
    "behind others": (
        ["--log-dir", "logs", "--nproc-per-node=gpu", "--nnodes", "2:3", "main.py"],
        {},
        {"log_dir": "logs", "nproc_per_node": "gpu", "nnodes": "2:3"},
    ),
    "variables": (
        ["--master-port=1"],
        {"PET_NNODES": "3", "PET_RDZV_ID": "", "PET_STANDALONE": "1"},
        {"nnodes": "3", "master_port": 1, "standalone": True},
    ),
    "the script's own": (
        ["--rdzv-id=x", "main.py", "--standalone", "--nnodes", "x"],
        {},
        {"rdzv_id": "x"},
    ),
    "the script's own, behind a value": (
        ["--nproc-per-node", "4", "main.py", "--master_port=29500"],
        {},
        {"nproc_per_node": "4"},
    ),
    "the script's own, behind a flag": (
        ["--rdzv-id=x", "--no-python", "main.sh", "--nnodes", "x"],
        {},
        {"rdzv_id": "x", "no_python": True},
    ),
    "node rank 0": (["--node-rank=0", "main.py"], {}, {"node_rank": 0}),
    "a wrong value": (["--master-port=x", "--rdzv-id=y"], {}, {}),
    "a wrong variable": (["--rdzv-id=y"], {"PET_STANDALONE": "yes"}, {}),
    "no value": (["--rdzv-id"], {}, {}),
}


@pytest.mark.parametrize(
    ("argv", "environ", "expected"), EXPLICIT.values(), ids=EXPLICIT
)
def test_options(argv, environ, expected):
    found = command_line.parse(argv, environ).options
    assert {name: option.value for name, option in found.items()} == expected


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
    values = {k: v.value for k, v in found.options.items() if k != "hpc_debug"}
    assert (values, found.problem, found.words) == (expected, None, {})
    assert {v.source for v in found.options.values()} <= environ.keys()


def test_what_was_typed_beats_its_variable():
    environ = {"PET_NODE_RANK": "x", "PET_ROLE": "b"}
    found = command_line.parse(["--node-r=1", "--role=a", "main.py"], environ)
    assert {k: str(v) for k, v in found.options.items()} == {
        "node_rank": "--node_rank=1",
        "role": "--role=a",
    }
    assert found.words == {"node_rank": "--node-rank=1", "role": "--role=a"}


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
        (["--bogus", "3", "a"], "3", ("a",), ("--bogus",)),
        (["--bogus=3", "-x", "-m", "a"], "a", (), ("--bogus=3", "-x")),
        (["--bogus", "--"], "", (), ("--bogus",)),
    ],
)
def test_script(argv, script, arguments, unknown):
    found = command_line.parse(argv, {})
    assert (found.script, found.arguments) == (script, arguments)
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
    assert (problem.code, problem.everywhere) == (code, True)


NAMES = [name for dest in options.TORCHRUN for name in options.names_of(dest)]
WORDS = st.one_of(
    st.text(max_size=5),
    st.sampled_from([*NAMES, "--hpc", "--hpc-site", "-h", "--", "-", "-1", "main.py"]),
    st.builds("{}={}".format, st.sampled_from(NAMES), st.text(max_size=3)),
    st.sampled_from(NAMES).flatmap(
        lambda name: st.integers(1, len(name)).map(lambda end: name[:end])
    ),
)
VARIABLES = st.sampled_from([options.variable_of(dest) for dest in options.TORCHRUN])


@given(st.lists(WORDS), st.dictionaries(VARIABLES, st.sampled_from(["", "1", "x"])))
def test_no_command_line_is_too_wrong(argv, environ):
    found = command_line.parse(argv, environ)
    if found.problem or found.wants_help:
        assert found.options == {}
        assert (found.script, found.unknown) == ("", ())
    assert found.options.keys() <= {*options.TORCHRUN, "hpc_site"}
    rest = len(found.arguments)
    assert tuple(argv[len(argv) - rest :]) == found.arguments


# --- direct mode --------------------------------------------------------------------


def direct(line, environ=None):
    """Parse a command line of direct mode, as it has to be."""
    environ = environ or {}
    found = command_line.parse(line.split(), environ)
    problem = direct_mode_problem(found, environ, "srun launcher")
    if problem is not None:
        raise problem
    return found


# What is typed: the options, what is run, its arguments.
LINES = {
    "train.py": ({}, "train.py", ()),
    "train.py --lr 0.1": ({}, "train.py", ("--lr", "0.1")),
    "-- train.py --lr 0.1": ({}, "train.py", ("--lr", "0.1")),
    "train.py -- --lr": ({}, "train.py", ("--lr",)),  # as torchrun does
    "train.py -h": ({}, "train.py", ("-h",)),
    "train.py --standalone --nnodes=2": (
        {},
        "train.py",
        ("--standalone", "--nnodes=2"),
    ),
    "train.py --max-restarts=3 -r 3": ({}, "train.py", ("--max-restarts=3", "-r", "3")),
    "-m package.train --lr 0.1": (
        {"module": (True, "--module")},
        "package.train",
        ("--lr", "0.1"),
    ),
    "--module package.train": ({"module": (True, "--module")}, "package.train", ()),
    "--no-python ./program -m": (
        {"no_python": (True, "--no_python")},
        "./program",
        ("-m",),
    ),
    "--no_python -- program": ({"no_python": (True, "--no_python")}, "program", ()),
    "--nproc-per-node=1 train.py": (
        {"nproc_per_node": ("1", "--nproc_per_node")},
        "train.py",
        (),
    ),
    "--nproc_per_node gpu train.py": (
        {"nproc_per_node": ("gpu", "--nproc_per_node")},
        "train.py",
        (),
    ),
    "--virtual-local-rank train.py": (
        {"virtual_local_rank": (True, "--virtual_local_rank")},
        "train.py",
        (),
    ),
    "--hpc-site=jsc --hpc_debug train.py": (
        {"hpc_site": ("jsc", "--hpc_site"), "hpc_debug": (True, "--hpc_debug")},
        "train.py",
        (),
    ),
    "--hpc-omp-threads auto train.py": (
        {"hpc_omp_threads": ("auto", "--hpc_omp_threads")},
        "train.py",
        (),
    ),
    "--hpc-rendezvous c10d train.py": (
        {"hpc_rendezvous": ("c10d", "--hpc_rendezvous")},
        "train.py",
        (),
    ),
}


def texts(options):
    return {name: (option.value, option.source) for name, option in options.items()}


@pytest.mark.parametrize("line", LINES)
def test_line(line):
    found = direct(line)
    assert (texts(found.options), found.script, found.arguments) == LINES[line]


@pytest.mark.parametrize(
    ("line", "form"), [("--hpc-dry-run", "table"), ("--hpc_dry_run=json", "json")]
)
def test_dry_run(line, form):
    found = direct(f"{line} train.py")
    assert found.options["hpc_dry_run"].value == form
    assert found.script == "train.py"


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("PET_HPC_SITE", "jsc", {"hpc_site": ("jsc", "PET_HPC_SITE")}),
        ("PET_NPROC_PER_NODE", "4", {"nproc_per_node": ("4", "PET_NPROC_PER_NODE")}),
        ("PET_HPC_DEBUG", "1", {"hpc_debug": (True, "PET_HPC_DEBUG")}),
        ("PET_HPC_DEBUG", "0", {}),
        ("PET_STANDALONE", "0", {}),
        (
            "PET_VIRTUAL_LOCAL_RANK",
            "1",
            {"virtual_local_rank": (True, "PET_VIRTUAL_LOCAL_RANK")},
        ),
        ("PET_HPC_DRY_RUN", "1", {"hpc_dry_run": ("table", "PET_HPC_DRY_RUN")}),
    ],
)
def test_variables_of_options(variable, value, expected):
    found = direct("train.py", {variable: value})
    assert texts(found.options) == expected


def test_what_is_typed_beats_its_variable():
    found = direct("--hpc-site none train.py", {"PET_HPC_SITE": "jsc"})
    assert texts(found.options) == {"hpc_site": ("none", "--hpc_site")}


ONE_NODE = [
    "--standalone train.py",
    "--nnodes=1 train.py",
    "--nnodes 1 train.py",
    "--nnodes=1:1 train.py",
    "--nnodes=01 train.py",
    "--standalone --nproc_per_node=4 --max-restarts=3 train.py",
    "--max-restarts 3 --nnodes 1 train.py",
    "-h",
    "--help",
    "--hpc-debug -h train.py",
]


@pytest.mark.parametrize("line", ONE_NODE)
def test_one_node_and_help_are_seen(line):
    found = command_line.parse(line.split(), {})
    assert found.wants_help or mode.asks_for_one_node(found.options)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PET_STANDALONE", "1"), ("PET_NNODES", "1"), ("PET_NNODES", "1:1")],
)
def test_one_node_by_a_variable(variable, value):
    environ = {variable: value, "PET_MAX_RESTARTS": "3"}
    found = command_line.parse(["train.py"], environ)
    assert mode.asks_for_one_node(found.options)


# torchrun's options that are for its agent; with a value, if they take one.
AGENTS = [
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=jwb0001:29400",
    "--rdzv-id=1",
    "--rdzv-conf=is_host=1",
    "--max-restarts=3",
    "--monitor-interval=1",
    "--start-method=spawn",
    "--event-log-handler=null",
    "--role=trainer",
    "--run-path",
    "--log-dir=logs",
    "--log-line-prefix-template=x",
    "-r",
    "--redirects=3",
    "-t",
    "--tee=3",
    "--local-ranks-filter=0",
    "--duplicate-stdout-filters=x",
    "--duplicate-stderr-filters=x",
    "--node-rank=0",
    "--master-addr=jwb0001",
    "--master-port=29500",
    "--local-addr=jwb0001",
    "--logs-specs=x",
    "--numa-binding=node",
    "--signals-to-handle=SIGTERM",
    "--shutdown-timeout=30",
]
AND_VALUES = [option.replace("=", " ", 1) for option in AGENTS if "=" in option]


@pytest.mark.parametrize("option", [*AGENTS, "-r 3", "-t 3", *AND_VALUES])
@pytest.mark.parametrize("spelled", ["-", "_"])
@pytest.mark.parametrize("before", ["", "--nproc-per-node=1 ", "-m "])
def test_an_option_of_the_agent_is_refused_by_name(before, spelled, option):
    name, separator, value = re.fullmatch("([^= ]+)([= ]?)(.*)", option).groups()
    name = name[:2] + name[2:].replace("-", spelled)
    with pytest.raises(LaunchError) as caught:
        direct(f"{before}{name}{separator}{value} train.py")
    assert caught.value.code == "HPC134"
    assert caught.value.everywhere
    assert str(caught.value).startswith(name)
    assert str(caught.value).endswith("once on each node: srun launcher")


def test_every_option_of_torchrun_is_allowed_or_refused():
    allowed = "nnodes standalone module no_python virtual_local_rank nproc_per_node"
    here = {option.partition("=")[0].lstrip("-").replace("-", "_") for option in AGENTS}
    here -= {"r", "t"}
    assert set(options.TORCHRUN) == here | {*allowed.split(), "print_completion"}


@pytest.mark.parametrize("value", ["2", "3", "1:3", "2:2"])
def test_a_number_of_nodes_is_refused(value):
    with pytest.raises(LaunchError, match=f"^--nnodes={value} is no option") as caught:
        direct(f"--nnodes={value} train.py")
    assert caught.value.code == "HPC134"


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PET_MAX_RESTARTS", "3"), ("PET_RDZV_ENDPOINT", "a:1"), ("PET_TEE", "3")],
)
def test_a_variable_of_the_agent_is_refused_by_name(variable, value):
    environ = {"HOME": "/root", variable: value}
    with pytest.raises(
        LaunchError, match=f"^{variable}={value} is no option"
    ) as caught:
        direct("train.py", environ)
    assert caught.value.code == "HPC134"


def test_a_number_of_nodes_by_a_variable_is_refused():
    with pytest.raises(LaunchError, match=r"^PET_NNODES=2 is no option") as caught:
        direct("train.py", {"PET_NNODES": "2"})
    assert caught.value.code == "HPC134"


BAD_LINES = {
    "": "the script is missing",
    "--": "the script is missing",
    "--hpc-debug": "the script is missing",
    "--no-python": "the script is missing",
    "-m": "the script is missing",
    "--hpc-site": "expected one argument",
    "--nproc-per-node": "expected one argument",
    "--standalone=1 train.py": "ignored explicit argument '1'",
    "--hpc train.py": "ambiguous option: --hpc could match",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_line_that_is_wrong(line):
    with pytest.raises(LaunchError, match=re.escape(BAD_LINES[line])) as caught:
        direct(line)
    assert (caught.value.code, caught.value.everywhere) == ("HPC010", True)
    assert str(caught.value).endswith("--help lists all options")


@pytest.mark.parametrize("variable", ["PET_STANDALONE", "PET_HPC_DEBUG", "PET_MODULE"])
def test_a_variable_of_a_flag_that_is_no_number(variable):
    with pytest.raises(LaunchError, match=f"{variable}=yes") as caught:
        direct("train.py", {variable: "yes"})
    assert caught.value.code == "HPC011"

"""The command line, option by option, against the parser of the installed torch."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
import time
import zipfile
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import run as torch_run
from torch.distributed.argparse_util import env
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from tests.support.patience import START
from tests.support.stock.parsers import (
    ACTIONS,
    FLAGS,
    FROM_ENVIRON,
    KNOWN,
    SCRIPT,
    STORED,
    assert_same,
    name_of,
    other,
    ours,
    outcome,
    parsed,
    sample,
)
from tests.support.stock.side_by_side import OURS, STOCK, Command, bare, words_of
from torchrun_hpc import main
from torchrun_hpc.agent import patches, signals
from torchrun_hpc.errors import LaunchError, Setting
from torchrun_hpc.options import command_line, torchrun_parser
from torchrun_hpc.options.options import READERS, Options, read
from torchrun_hpc.reporting import streams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


pytestmark = pytest.mark.usefixtures("outside_of_jobs")


@pytest.fixture
def as_new():
    """Put back what a launch in this process changes."""
    environ = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environ)
    signals.uninstall()
    streams.forget_at_exit()
    patches.restore()


# Options of newer releases than the installed one.
NEWER = {
    name for dest in command_line.TORCHRUN for name in command_line.names_of(dest)
} - KNOWN


# --- spellings --------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling",
    [s for a in torch_run.get_args_parser()._actions for s in a.option_strings],
)
def test_abbreviations(spelling, capsys):
    """Every beginning of every option: what it stands for, or why it is refused."""
    action = torch_run.get_args_parser()._option_string_actions[spelling]
    value = sample(action)
    for end in range(2, len(spelling) + 1):
        short = spelling[:end]
        if short == "--":
            continue
        assert_same([short, value, SCRIPT], capsys)
        assert_same([f"{short}={value}", SCRIPT], capsys)
        if not isinstance(action, env):
            assert_same([short, SCRIPT], capsys)


@pytest.mark.parametrize(
    "argv",
    [
        [SCRIPT],
        ["-r3", "-t1", SCRIPT],
        ["-r", "0:1,1:2", "-t=3", SCRIPT],
        ["-m", "-r", "3", SCRIPT],
        ["-mr3", SCRIPT],
        ["--nproc_per-node=2", SCRIPT],  # neither spelling
        ["--standalone", "--no-standalone", SCRIPT],
        ["--max-restarts", "-1", SCRIPT],
        ["--max-restarts=0x3", SCRIPT],
        ["--max-restarts= 3", SCRIPT],
        ["--monitor-interval", "1e-1", SCRIPT],
        ["--start-method", "thread", SCRIPT],
        ["--duplicate-stdout-filters", "a,,b,c", SCRIPT],
        ["-h"],
        ["--help", SCRIPT],
        ["--nnodes", "2", "--help"],
        ["--nnodes", "--help"],
        [],
        [""],
        ["--"],
        ["-"],
        ["--standalone"],
        ["--bogus", SCRIPT],
        ["--bogus", "3", SCRIPT, "--nnodes", "2"],
        ["-x", SCRIPT],
        ["--nnodes", SCRIPT],
        # Words after two dashes.
        [SCRIPT, "--"],
        [SCRIPT, "--", "a"],
        [SCRIPT, "--", "--nnodes", "2"],
        ["--nnodes=2", SCRIPT, "--", "--", "a"],
        ["--", SCRIPT, "--", "a"],
        ["--nnodes", "2", "--", "--nnodes", "3"],
    ],
)
def test_other_lines(argv, capsys):
    assert_same(argv, capsys)


def test_help_is_that_of_torchrun_and_more(capsys):
    texts = []
    for parse in (torch_run.parse_args, ours):
        with pytest.raises(SystemExit):
            parse(["--help"])
        texts.append(capsys.readouterr().out)
    # The usage differs. Ours breaks no line at a hyphen.
    stock, own = (
        "".join(text.partition("\npositional arguments:\n")[2].split())
        for text in texts
    )
    assert stock in own
    assert "--hpc-site" in texts[1]
    assert "--hpc-site" not in stock


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_our_options(shell, capsys):
    with pytest.raises(SystemExit) as ended:
        ours(["--print-completion", shell])
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    # The second name is that of the program, also with torch's own option.
    for name in ("--hpc-site", "--nproc-per-node", "_shtab_torchrun_hpc"):
        assert name in out


@pytest.mark.parametrize(
    ("shell", "code", "text"),
    [
        ("basch", "HPC010", "(choose from"),
        ("bash", "HPC246", "pip install shtab"),
    ],
)
def test_a_shell_that_cannot_complete(shell, code, text, monkeypatch):
    if code == "HPC246":
        monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(LaunchError, match=re.escape(text)) as raised:
        ours([f"--print_completion={shell}"])
    assert raised.value.code == code


# --- PET_* ------------------------------------------------------------------------


def _values(settings: Mapping[str, Setting]) -> dict[str, Any]:
    return {name: each.value for name, each in settings.items()}


def _sourced(settings: Mapping[str, Setting]) -> dict[str, tuple[Any, str]]:
    return {name: (each.value, each.source) for name, each in settings.items()}


@pytest.mark.parametrize("action", FROM_ENVIRON, ids=name_of)
def test_variable(action, monkeypatch, capsys):
    """It counts as with torch, and is named as the source; the option beats it."""
    option, variable = action.option_strings[-1], f"PET_{action.dest.upper()}"
    if action in FLAGS:
        values, line = ["0", " 1 ", "-1", "0_1", "2", "1"], [option, SCRIPT]
    else:
        values = ["", other(action), sample(action)]
        line = [option, other(action), SCRIPT]
    for value in values:
        monkeypatch.setenv(variable, value)
        assert_same([SCRIPT], capsys)
        assert_same(line, capsys)
        if value:
            args, settings = parsed([SCRIPT])
            expected = {action.dest: (getattr(args, action.dest), variable)}
            assert _sourced(settings) == expected
            # Of a program that parses its own: the variable is torch's default.
            args = torch_run.parse_args([SCRIPT])
            assert _sourced(torchrun_parser.changed(args, os.environ)) == expected
    args, settings = parsed(line)
    assert _sourced(settings) == {action.dest: (getattr(args, action.dest), option)}
    # The command for plain torchrun does not need the variable.
    args, settings = parsed([SCRIPT])
    words = torchrun_parser.plain_command(args, settings, os.environ)
    monkeypatch.delenv(variable)
    assert vars(torch_run.parse_args(words[1:])) == _of_torchrun(args)
    assert len(words) == 3


# --- the script's own arguments ---------------------------------------------------

SCRIPT_ARGS = [
    ["--rdzv", "x", "--nnodes", "7", "--hpc-site", "foo", "-h", "--standalone"],
    ["--rdzv", "x", "--", "a"],
    ["--lr", "1", "--", "a", "--", "b"],
    ["a", "--h", "--hpc", "--n=3", "--no", "-r", "-t9", "-m"],
    ["other.py", "--nnodes=1"],
    ["--hpc-site=none"],
    ["--no-python", "--help", "--bogus", "-1", "", " ", "a b"],
    ["-"],
    [],
]


@pytest.mark.parametrize("script_args", SCRIPT_ARGS, ids=" ".join)
@pytest.mark.parametrize(
    "own", [[], ["--nnodes=2"], ["--"], ["-r", "3", "--"], ["-m"], ["--hpc-site", "x"]]
)
def test_script_arguments_are_left_alone(own, script_args, capsys):
    args, settings = parsed([*own, SCRIPT, *script_args])
    assert (args.training_script, args.training_script_args) == (SCRIPT, script_args)
    assert settings == parsed([*own, SCRIPT])[1]
    if own[:1] == ["--hpc-site"]:
        return
    # Stock refuses arguments of the script that would be ambiguous for it, with the
    # argparse of Python 3.11 and before; whatever it takes, it takes as we do.
    stock = outcome(torch_run.parse_args, [*own, SCRIPT, *script_args], capsys)
    if "exit" in stock:
        assert "ambiguous option" in stock["message"]
    else:
        assert outcome(ours, [*own, SCRIPT, *script_args], capsys) == stock


def test_many_script_arguments_after_a_mistake():
    """A wrong option before ``data/*`` is reported at once."""
    start = time.process_time()
    with pytest.raises(LaunchError, match="--bogus"):
        torchrun_parser.parse(["--bogus", SCRIPT, *["file"] * 5000], os.environ)
    assert time.process_time() - start < 1.5


# --- what the user set ------------------------------------------------------------


@pytest.mark.parametrize("action", STORED, ids=name_of)
def test_explicit_although_it_is_the_default(action):
    default = vars(torch_run.parse_args([SCRIPT]))[action.dest]
    value = str(default) if default or default == 0 else sample(action)
    line = [action.option_strings[0], *([] if action in FLAGS else [value])]
    assert set(parsed([*line, SCRIPT])[1]) == {action.dest}


CHANGEABLE = [action for action in ACTIONS if action.dest != "node_rank"]


def test_the_rank_of_a_node_is_not_looked_at():
    """It is the default on the head node: on all others it would be explicit."""
    args = torch_run.parse_args(["--node_rank=1", SCRIPT])
    assert torchrun_parser.changed(args, os.environ) == {}


@pytest.mark.parametrize("action", CHANGEABLE, ids=name_of)
def test_changed(action):
    """Programs that make the arguments themselves, as accelerate does."""
    args = torch_run.parse_args([SCRIPT, "--lr", "1"])
    assert torchrun_parser.changed(args, os.environ) == {}
    value: Any = True if action in FLAGS else sample(action)
    setattr(args, action.dest, value)
    found = torchrun_parser.changed(args, os.environ)
    if isinstance(value, str) and callable(action.type):
        value = action.type(value)
    assert _values(found) == {action.dest: value}
    assert found[action.dest].source in action.option_strings


def test_changed_as_text():
    """accelerate leaves the port as text, and sets to None what nobody has set."""
    args = torch_run.parse_args([SCRIPT])
    args.master_port, args.module, args.master_addr = "29600", None, None
    found = torchrun_parser.changed(args, os.environ)
    assert _values(found) == {"master_port": 29600}
    args.master_port = "a port"
    with pytest.raises(LaunchError, match="--master_port=a port") as refused:
        torchrun_parser.changed(args, os.environ)
    assert refused.value.code == "HPC010"


def test_changed_with_few_attributes():
    """accelerate leaves out what it does not know."""
    args = argparse.Namespace(nnodes="2", training_script=SCRIPT)
    found = torchrun_parser.changed(args, os.environ)
    assert _values(found) == {"nnodes": "2"}


# --- without torch ----------------------------------------------------------------


# Lines that are parsed with torch and without; each with arguments of the script.
PARSED = [
    *([], ["--"], ["-"], ["-1"], ["--nnodes"], [""], ["-m"], ["--standalone"]),
    *(["--nnod=4"], ["--nn", "4:5"], ["--standa"], ["--rdzv-e", "a:1"], ["--nod=1"]),
    *(["--max-r=0"], ["--max", "0"], ["--st"], ["--no-p"], ["--hpc-s=jsc"], ["--hpc"]),
    *(["--hpc-si=jsc"], ["--hpc-site", "none"], ["-m", "--nproc_per-node=2"]),
    *(["-h"], ["--nnodes=2", "--h"], ["-mh"], ["--bogus", "-h"]),
    *(["-r3"], ["-t", "0:1,1:2", "-r=3"], ["-mr3"], ["-mr", "3"], ["-x"], ["-mx"]),
    *(["--nnodes", "-1"], ["--node-rank", "-1"], ["--node-rank=-1"], ["-r", "-1"]),
    *(["--nnodes", "--standalone"], ["--nnodes", "--", "2"]),
    *(["--nnodes", "2", "--"], ["--", "--nnodes", "2"], ["--role", "a b"], ["--a b"]),
    *(["--node-rank=x"], ["--master_port=29_500"], ["--monitor-interval=1e-1"]),
    *(["--rdzv-id="], ["--rdzv-id", ""], ["--nnodes=2", "--nnodes=3", "--nnodes="]),
    *(["--standalone=1"], ["--bogus"], ["--bogus", "3"], ["--bogus=3", "-m"]),
    *(["--hpc-dry-run=json"], ["--hpc_dry_run", "--hpc-debug"]),
    *(["--rdzv_backend", "c10d", "--rdzv-conf", "a=1,b=2", "--local_addr=::1"],),
    *(["--run-path", "--no_python", "--module", "--log-dir=x", "--start_method=fork"],),
]
AND_VARIABLES: list[dict[str, str]] = [
    {},
    {"PET_NNODES": "3", "PET_STANDALONE": "1", "PET_HPC_DEBUG": "1", "PET_X": "y"},
    {"PET_MASTER_PORT": "3", "PET_NODE_RANK": "0", "PET_MODULE": "0", "PET_TEE": ""},
    {"PET_NODE_RANK": "x", "PET_HPC_DRY_RUN": "1", "PET_HPC_SITE": "jsc"},
    {"PET_RUN_PATH": "yes"},
]


_Parsed = tuple[str, list[str], dict[str, tuple[Any, str]]]


def _with_torch(argv: Sequence[str]) -> _Parsed | LaunchError | None:
    """Return script, arguments and options, or why there are none; None for help."""
    try:
        args, settings = parsed(argv)
    except LaunchError as refused:
        return refused
    except SystemExit:
        return None
    found = {
        dest: (setting.value, setting.source.partition("=")[0])
        for dest, setting in settings.items()
        if setting.value is not False
    }
    return args.training_script, args.training_script_args, found


@pytest.mark.parametrize("environ", AND_VARIABLES, ids=str)
@pytest.mark.parametrize("own", PARSED, ids=" ".join)
def test_parsed_as_torch_does(own, environ, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for rest in ([], [SCRIPT], *([SCRIPT, *words] for words in SCRIPT_ARGS)):
        expected = _with_torch([*own, *rest])
        line = command_line.parse([*own, *rest], environ)
        assert line.wants_help is (expected is None)
        if isinstance(expected, LaunchError):
            refused = (expected.code, str(expected))
            if line.problem is None:  # left to torch's parser
                assert line.unknown or not line.options.script
            else:
                assert (line.problem.code, str(line.problem)) == refused
        elif expected is not None:
            found = _sourced(line.options.given)
            script, *arguments = line.options.words
            assert (script, arguments, found) == expected


# --- the same with plain torchrun -------------------------------------------------

OPTIONS = [
    [],
    ["--nnodes", "2:3", "--nproc-per-node=gpu"],
    ["--standalone", "--no-python"],
    ["-m", "-r", "3", "-t0:1,1:2"],
    ["--rdzv-backend=c10d", "--rdzv-endpoint=[fd00::1]:29400", "--rdzv-id= a b "],
    ["--rdzv-conf", "a=b, c = $d,e=it's", "--role=*"],
    ["--max-restarts=-1", "--monitor-interval", "1e-1", "--master_port=0"],
    ["--node-rank=1", "--master-addr", "n1", "--local-addr=-"],
    ["--duplicate-stdout-filters", "a,,b,c", "--duplicate_stderr_filters=x"],
    ["--start-method", "fork", "--run-path", "--log-dir=--tee"],
    ["--hpc-site=none", "--hpc-omp-threads", "4", "--hpc-dry-run", "--hpc-debug"],
    ["--"],
    ["--nnodes=2", "--"],
]
OPTIONS = [line for line in OPTIONS if not NEWER & {w.partition("=")[0] for w in line}]
REST = [
    [],
    ["--lr", "1"],
    ["--nnodes=7", "-h", "--hpc-dry-run", "-m"],
    ["", " ", "a b", "$HOME", "it's", '"', "\n", "ü"],
    ["--", "a"],
    ["--", "--nnodes", "2"],
    ["--", "--", "a"],
    ["--lr", "1", "--", "a", "--", "b"],
    ["--"],
    ["-"],
    ["-1"],
]


def _of_torchrun(args: argparse.Namespace) -> dict[str, Any]:
    return {k: v for k, v in vars(args).items() if not k.startswith("hpc_")}


def _assert_again_the_same(argv: Sequence[str]) -> None:
    """Write a line for plain torchrun, and let both parsers read it."""
    args, settings = parsed(argv)
    words = torchrun_parser.plain_command(args, settings, os.environ)
    assert words[0] == "torchrun"
    own = words[: len(words) - len(args.training_script_args)]
    assert not [word for word in own if word.startswith("--hpc")]
    again, settings_again = parsed(words[1:])
    assert _of_torchrun(again) == _of_torchrun(args)
    torchs = {k: v for k, v in settings.items() if not k.startswith("hpc_")}
    assert _values(settings_again) == _values(torchs)
    assert vars(torch_run.parse_args(words[1:])) == _of_torchrun(args)


@pytest.mark.parametrize("rest", REST, ids=lambda words: " ".join(words) or "nothing")
@pytest.mark.parametrize("own", OPTIONS, ids=" ".join)
def test_plain_command_is_read_as_the_original(own, rest):
    for script in (SCRIPT, "a b.py", "-"):
        _assert_again_the_same([*own, script, *rest])
    if own[-1:] == ["--"]:
        _assert_again_the_same([*own, "--odd.py", *rest])


def test_options_of_ours_that_variables_switch_off_are_not_set(monkeypatch):
    for name in ("PET_HPC_DRY_RUN", "PET_HPC_DEBUG"):
        monkeypatch.setenv(name, "0")
    args, settings = parsed([SCRIPT])
    assert settings == torchrun_parser.changed(args, os.environ) == {}


def test_numbers_that_a_program_sets_where_torchrun_has_texts():
    args, _ = parsed([SCRIPT])
    args.nnodes, args.master_port, args.rdzv_conf = 2, "7", "a=1"
    found = torchrun_parser.changed(args, os.environ)
    expected = {"nnodes": "2", "master_port": 7, "rdzv_conf": "a=1"}
    assert _values(found) == expected
    assert read(found).nnodes == (2, 2)


def test_plain_command_has_what_was_derived():
    args, settings = parsed(["--nnodes=2", SCRIPT, "--lr=1"])
    options = {
        **settings,
        "rdzv_id": Setting("19.0", ""),
        "standalone": Setting(value=False, source=""),
    }
    assert torchrun_parser.plain_command(args, options, os.environ) == [
        *("torchrun", "--nnodes=2", "--rdzv_id=19.0"),
        *(SCRIPT, "--lr=1"),
    ]


# --- wrong command lines, through the whole launcher, in this process --------------

# As in a shell: variables and arguments. The code, and what the message must contain.
WRONG = {
    "--bogus train.py": "HPC010 --bogus",
    "": "HPC010 no script",
    "--standalone": "HPC010 no script",
    "--max-restarts=abc train.py": "HPC010 'abc'",
    "--start-method=thread train.py": "HPC010 'thread'",
    "--node-rank=x train.py": "HPC010 'x'",
    "--master-port=x train.py": "HPC010 'x'",
    "--shutdown-timeout=x train.py": "HPC010 'x'",
    "--monitor-interval=x train.py": "HPC010 'x'",
    "--numa-binding=all train.py": "HPC010 'all'",
    "--nnodes": "HPC010 --nnodes",
    "--nnodes=abc train.py": "HPC014 --nnodes=abc",
    "--nnodes=3:2 train.py": "HPC014 --nnodes=3:2",
    "--nnodes=0 train.py": "HPC014 --nnodes=0",
    "--nnodes=-1 train.py": "HPC014 --nnodes=-1",
    "--nnodes=1:2:3 train.py": "HPC014 --nnodes=1:2:3",
    "--nproc_per_node=foo train.py": "HPC012 --nproc_per_node=foo",
    "CUDA_VISIBLE_DEVICES='' --nproc_per_node=gpu train.py": "HPC012 =gpu",
    "--nproc_per_node=0 train.py": "HPC014 --nproc_per_node=0",
    "--nproc_per_node=-2 train.py": "HPC014 --nproc_per_node=-2",
    "--rdzv-conf=garbage train.py": "HPC019 garbage",
    "--rdzv-conf=is_host=maybe --rdzv-backend=c10d train.py": "HPC019 maybe",
    "--rdzv-conf=join_timeout=x train.py": "HPC019 join_timeout",
    "--rdzv-conf=endpoint=x train.py": "HPC019 endpoint is set by",
    "--rdzv-conf=timeout=0 --master-port=0 train.py": "HPC019 timeout=0 is not",
    "--rdzv-conf=read_timeout=0 --rdzv-backend=c10d train.py": "HPC019 read_timeout",
    "--rdzv-conf=store_type=x --rdzv-backend=c10d train.py": "HPC019 store_type",
    "--rdzv_backend=nonsense train.py": "HPC014 nonsense",
    "--rdzv_backend=scheduler train.py": "HPC014 =scheduler: torch has no such",
    "--nnodes=2 --rdzv_backend=direct --rdzv_endpoint=n:1 train.py": "HPC014 direct",
    "--max-restarts=-1 train.py": "HPC014 max_restarts=-1",
    "--monitor-interval=-1 train.py": "HPC014 monitor",
    "--tee=x train.py": "HPC015 x",
    "--redirects=0:9 train.py": "HPC015 9",
    "--local-ranks-filter=x train.py": "HPC015 local_ranks_filter",
    "--no-python -m train.py": "HPC015 --no-python",
    "--log-dir={file} train.py": "HPC015 {file}",
    "--log-dir={file}/below train.py": "HPC015 {file}",
    "--logs-specs=nonsense train.py": "HPC015 nonsense",
    "--event-log-handler=nonsense train.py": "HPC014 nonsense",
    "PET_STANDALONE=yes train.py": "HPC011 PET_STANDALONE=yes",
    "PET_NNODES=many train.py": "HPC014 PET_NNODES=many",
    "PET_MAX_RESTARTS=many train.py": "HPC010 many",
    "PET_NPROC_PER_NODE=many train.py": "HPC012 many",
    "--rdzv-endpoint=localhost:99999 train.py": "HPC014 localhost:99999",
    "--rdzv-backend=c10d --rdzv-endpoint=localhost:99999 train.py": "HPC014 :99999",
    "--rdzv-backend=c10d '--rdzv-endpoint=a b:1' train.py": "HPC014 a b:1",
    "--master-port=99999 train.py": "HPC014 99999",
    "--hpc-site=nonsense train.py": "HPC040 nonsense",
    "--rdzv-backend=c10d --rdzv-endpoint=no.invalid:1 train.py": "HPC067 no.invalid",
    "PET_TEE=x --nnodes=2 --master-addr=::1 train.py --rdzv": "HPC015 x",
    "--no-python ./missing": "HPC016 ./missing: there is no such program",
    "--monitor-interval=nan train.py": "HPC014 --monitor_interval=nan",
    "--monitor-interval=inf train.py": "HPC014 --monitor_interval=inf",
    "--signals-to-handle=SIGTERM,SIGKILL train.py": "HPC014 SIGKILL cannot",
    "--signals-to-handle=signal train.py": "HPC014 signal cannot be handled",
    "--monitor-interval=1e10 train.py": "HPC014 --monitor_interval=1",
    "missing.py": "HPC150 missing.py cannot be run: ",
    "missing.py/ x": "HPC150 missing.py/ cannot be run: ",
    ".": "HPC150 a folder without __main__.py",
    "--run-path ./missing.py": "HPC150 ./missing.py cannot be run: ",
    "--rdzv-conf=keep_alive_interval=x train.py": "HPC019 keep_alive_interval=x",
    "--log-dir=/proc train.py": "HPC015 /proc",
    "--local-addr=nonsense train.py": "HPC052 --local_addr=nonsense is not an address",
    "PET_NNODES=2 --standalone train.py": "HPC065 PET_NNODES=2 and --standalone",
    "PET_HPC_SITE=abc train.py": "HPC040 PET_HPC_SITE=abc",
    "PET_HPC_DRY_RUN=2 train.py": "HPC014 PET_HPC_DRY_RUN=2: There are: table",
    "PET_HPC_DRY_RUN=yes train.py": "HPC014 PET_HPC_DRY_RUN=yes: There are",
    "PET_HPC_DRY_RUN=JSON train.py": "HPC014 PET_HPC_DRY_RUN=JSON: Did you mean json",
    "--hpc-dry-run=yaml train.py": "HPC014 --hpc-dry-run=yaml: There are",
    "--hpc-dry-run": "HPC010 no script",
    "--hpc-dry-run --nnodes=3:2 train.py": "HPC014 --nnodes=3:2",
    "--hpc-dry-run --max-restarts=-1 train.py": "HPC014 max_restarts=-1",
    "--hpc-dry-run --tee=x train.py": "HPC015 x",
    "--hpc-dry-run=json --no-python ./none": "HPC016 ./none: ",
    "--hpc-dry-run=json --nnodes=2 train.py": "HPC066 --nnodes=2, but no",
    "PET_HPC_DEBUG=true train.py": "HPC011 PET_HPC_DEBUG=true",
    "--hpc-site=-- train.py": "HPC010 hpc_site has no value",
    "--nnodes=-- train.py": "HPC010 nnodes has no value",
    "--hpc-omp-threads=-- train.py": "HPC010 hpc_omp_threads has no value",
    "--hpc-site=/dev/zero train.py": "HPC041 /dev/zero cannot be read",
}


# Torch says so from 2.13 on.
IGNORED_RANK = "node_rank is only used"
if IGNORED_RANK not in inspect.getsource(torch_run):
    IGNORED_RANK = ""
# What torchrun warns of, or ignores: a part of its warning, and of ours.
RIGHT = {
    "--signals-to-handle=SIGTERM,SIGFOO train.py": ("SIGFOO", "SIGFOO"),
    "--signals-to-handle=, train.py": ("Failed to reg", "Failed to reg"),
    "--node-rank=1 train.py": (IGNORED_RANK, "HPC075"),
    "--standalone --node-rank=-1 train.py": (IGNORED_RANK, "HPC075"),
    "--standalone --rdzv-backend=x train.py": ("", ""),
    "--standalone --rdzv-id=a/b train.py": ("", ""),
    "--rdzv-id=a/b train.py": ("", ""),
    f"--rdzv-id={'x' * 246} train.py": ("", ""),
    f"--rdzv-id={'x' * 300} train.py": ("", ""),
    "'--nnodes= +1' '--nproc-per-node= 1' train.py": ("", ""),
    "PET_FOO=1 MASTER_PORT=x train.py": ("", ""),
    "PYTHON_EXEC={folder}/python inside.py": ("", ""),
    "program": ("", ""),
    "archive.pyz": ("", ""),
    "-- -c \"print('started')\"": ("", ""),
}


@pytest.mark.skipif(
    "--signals-to-handle" not in KNOWN or bool(bare(STOCK)),
    reason="an older torch has not all of these, or takes its static rendezvous",
)
def test_what_torchrun_starts_is_started(launcher, tmp_path):
    (tmp_path / SCRIPT).write_text("print('started')\n")
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__main__.py").write_text("print('started')\n")
    with zipfile.ZipFile(tmp_path / "archive.pyz", "w") as archive:
        archive.writestr("__main__.py", "print('started')\n")
    (tmp_path / "python").write_text("#!/bin/sh\necho started\n")
    (tmp_path / "python").chmod(0o755)
    lines = [words_of(line.format(folder=tmp_path)) for line in RIGHT]
    commands = [Command(which, *line) for line in lines for which in (OURS, STOCK)]
    results = launcher.launch_all(commands, cwd=tmp_path, at_once=4)
    for line, mine, stock in zip(RIGHT, results[::2], results[1::2], strict=True):
        theirs, own = RIGHT[line]
        for result in (mine, stock):
            assert (result.code, result.out) == (0, "started\n"), (line, result.err)
        assert theirs in stock.err, line
        assert own in mine.err, line
        assert own or mine.err.splitlines() == mine.own_lines[:1], line


def _on_this_torch(argv: list[str], code: str, expected: str) -> tuple[str, str]:
    """Return the code, and a text, of the message on the torch that is installed."""
    # A value that we read ourselves is refused before torch is imported, unless it is
    # of another type.
    readers = () if code == "HPC010" else READERS
    read = {name for dest in readers for name in command_line.names_of(dest)}
    names = {word.partition("=")[0] for word in argv if word.startswith("--")}
    newer = names & NEWER - read
    return ("HPC010", min(newer)) if newer else (code, expected)


@pytest.mark.usefixtures("as_new")
@pytest.mark.parametrize("line", WRONG)
def test_wrong_line(line, monkeypatch, capsys, tmp_path):
    for name in (SCRIPT, "file"):
        (tmp_path / name).write_text("print('started')\n")
    monkeypatch.chdir(tmp_path)
    argv, variables = words_of(line.format(file=tmp_path / "file"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, _, expected = WRONG[line].partition(" ")
    code, expected = _on_this_torch(argv, code, expected)
    with pytest.raises(SystemExit) as ended:
        main.main(argv)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, ""), err
    (written,) = err.splitlines()
    assert written.startswith(f"torchrun_hpc: error[{code}]: ")
    assert expected.format(file=tmp_path / "file") in written


@pytest.mark.parametrize(
    ("value", "cuda", "is_everywhere"),
    [("foo", None, True), ("gpu", None, True), ("gpu", "12.8", False)],
)
def test_whose_fault_a_number_of_workers_is(value, cuda, is_everywhere, monkeypatch):
    """Nodes have the same word and the same build, but not the same GPUs."""
    for name, version in (("cuda", cuda), ("hip", None)):
        monkeypatch.setattr(torch.version, name, version, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LaunchError) as refused:
        torchrun_parser.number_of_workers(Options(), value)
    fault = refused.value
    assert (fault.code, fault.everywhere) == ("HPC012", is_everywhere)


def test_stock_does_not_start_them_either(launcher, tmp_path):
    """A line that is right for torchrun would be wrong in the table: a sample."""
    (tmp_path / SCRIPT).write_text("print('started')\n")
    # Stock torchrun waits a minute and more for a host that does not exist.
    left_out = re.compile(r"^[A-Z]|{file}|--hpc|\.invalid")
    some = [words_of(line)[0] for line in WRONG if not left_out.search(line)][::4]
    read = dynamic_rendezvous.create_handler.__code__.co_consts
    newer = [key for key in ("keep_alive_interval",) if key not in read]
    lines = [argv for argv in some if not any(key in str(argv) for key in newer)]
    commands = [
        Command(STOCK, [*([] if "--master-port" in str(argv) else bare(STOCK)), *argv])
        for argv in lines
    ]
    results = launcher.launch_all(commands, cwd=tmp_path)
    assert [r for r in results if r.code == 0 or "started" in r.out] == []


@pytest.mark.parametrize(
    ("backend", "package"), [("etcd", "etcd"), ("etcd-v2", "urllib3")]
)
def test_a_package_that_torch_wants(backend, package, launcher):
    """Torch imports, or misses, it only when the rendezvous is made."""
    if find_spec(package) is not None:
        pytest.skip(f"the package {package} is installed here")
    argv = [f"--rdzv_backend={backend}", "--rdzv_endpoint=localhost:1", __file__]
    result = launcher.launch(OURS, argv)
    assert result.code == 2
    start, error = result.err.splitlines()
    assert start.startswith(START)
    text = f"--rdzv_backend={backend} needs a package that is not installed"
    assert error.startswith(f"torchrun_hpc: error[HPC017]: {text}")

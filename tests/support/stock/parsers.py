"""The parser of the installed torch and ours, side by side."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING, Any

from torch.distributed import run as torch_run
from torch.distributed.argparse_util import check_env, env

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.options import torchrun_parser
from torchrun_hpc.options.command_line import NO_SCRIPT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from torchrun_hpc.errors import Setting

SCRIPT = "train.py"


def _actions() -> list[argparse.Action]:
    parser = torch_run.get_args_parser()
    return [a for a in parser._actions if a.option_strings and a.dest != "help"]


ACTIONS = _actions()
# It prints something and ends, as --help does.
STORED = [a for a in ACTIONS if a.dest != "print_completion"]
FLAGS = [a for a in ACTIONS if isinstance(a, check_env)]
FROM_ENVIRON = [a for a in ACTIONS if isinstance(a, env | check_env)]
SPELLINGS = [(a, spelling) for a in ACTIONS for spelling in a.option_strings]
KNOWN = {spelling for _, spelling in SPELLINGS}


def sample(action: argparse.Action) -> str:
    """Return a value that is neither the default nor wrong."""
    if action.choices:
        return str(list(action.choices)[-1])
    return "3" if action.type in (int, float) else "some,text=3"


def other(action: argparse.Action) -> str:
    if action.choices:
        return str(next(iter(action.choices)))
    return "4" if action.type in (int, float) else "other"


def name_of(item: Any) -> str:
    return item.dest if isinstance(item, argparse.Action) else str(item)


def outcome(
    parse: Callable[[Sequence[str]], argparse.Namespace],
    argv: Sequence[str],
    capsys: pytest.CaptureFixture[str],
) -> dict[str, Any]:
    """Return all arguments of torchrun, or how the parser ended the process."""
    try:
        args = parse(argv)
    except LaunchError as error:
        return _as_stock_says(error)
    except SystemExit as end:
        message = "".join(capsys.readouterr().err.splitlines()[-1:])
        message = re.sub(r"^.*?: error: ", "", message)
        message = re.sub("unrecognized arguments: ([^ =]*).*", r"unknown \1", message)
        message = re.sub("the following arguments are required.*", NO_SCRIPT, message)
        return {"exit": end.code, "message": message}
    found = {k: v for k, v in vars(args).items() if not k.startswith("hpc_")}
    return {key: (type(value), value) for key, value in found.items()}


def _as_stock_says(error: LaunchError) -> dict[str, Any]:
    """Return what stock torchrun says below its usage; of an unknown option, which."""
    assert (error.code, error.everywhere) == ("HPC010", True)
    message = re.sub(r"unknown option (.*?)\. .*", r"unknown \1", str(error))
    message = message.removesuffix(". --help lists all options")
    # --h, an abbreviation for stock, is an option of its own here.
    message = message.replace("argument --h:", "argument -h/--help:")
    message = message.replace(", --version", "")  # --v is ambiguous in any case
    return {"exit": 2, "message": message}


def ours(argv: Sequence[str]) -> argparse.Namespace:
    return torchrun_parser.parse(argv, os.environ)


def parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Setting]]:
    """Return the arguments, and of these what the user set."""
    args = ours(argv)
    return args, torchrun_parser.explicit(args, argv, os.environ)


def assert_same(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    stock = outcome(torch_run.parse_args, argv, capsys)
    assert outcome(ours, argv, capsys) == stock, argv

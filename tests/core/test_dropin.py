"""What torchrun does, we do: options, environment, output, exit codes, failures."""

from __future__ import annotations

import signal

import pytest

from tests.support.stock.compared import (
    ADDRESS,
    C10D,
    RUN,
    ComparedLine,
    assert_fails_alike,
    assert_same,
)
from tests.support.stock.side_by_side import STOCK

pytestmark = pytest.mark.xdist_group("side by side")

# Launched by us, in both forms, and by stock torchrun. More are in tests/more/dropin.
LINES = {
    "two workers": ComparedLine("--nproc-per-node=2", workers=2),
    "module": ComparedLine("-m", "package.module"),
    "no python": ComparedLine("--no-python --nproc-per-node=2", "./program", workers=2),
    "c10d": ComparedLine(f"{C10D} --rdzv-id=my-job", same=(RUN,)),
    "endpoint, host": ComparedLine(
        "--rdzv-backend=c10d --rdzv-endpoint=localhost:{port} --rdzv-conf=is_host=true"
    ),
    "static": ComparedLine(
        "--master-port={port} --master-addr=127.0.0.1 --node-rank=0 --nproc-per-node=2",
        workers=2,
        same=(ADDRESS,),
    ),
    "variables": ComparedLine(
        "PET_NPROC_PER_NODE=2 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=localhost:0 "
        "PET_RDZV_ID=abc PET_STANDALONE=0",
        workers=2,
        same=(RUN,),
    ),
    "threads, too many": ComparedLine(
        "OMP_NUM_THREADS=3 --nproc-per-node=2",
        workers=2,
        warning="HPC094]: OMP_NUM_THREADS=3 times 2 workers is 6 threads on 2 CPUs.",
    ),
}

FAILURES = {
    "exit 3, one of two": ComparedLine("THEN=exit:3:1 --nproc-per-node=2"),
    "exception": ComparedLine("THEN=raise"),
    "killed": ComparedLine(f"THEN=kill:{int(signal.SIGKILL)}"),
    "second attempt": ComparedLine(
        "THEN=fail-first --max-restarts=1 --nproc-per-node=2"
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_it_is_launched_as_by_torchrun(name, launch):
    launched = launch(LINES[name])
    assert_same(LINES[name], launched)
    if name == "two workers":  # without it, nothing shows that ours is kept away
        assert "Setting OMP_NUM_THREADS" in launched[STOCK].result.err


@pytest.mark.parametrize("name", FAILURES)
def test_it_fails_as_with_torchrun(name, launch):
    assert_fails_alike(name, launch(FAILURES[name], with_error_file=True))


@pytest.mark.usefixtures("outside_of_jobs")
def test_every_option_in_every_spelling(capsys):
    """Its value, or why it is refused; and that it is not just ignored."""
    # Here, so that not all workers of pytest import torch.
    from tests.support.stock.parsers import (  # noqa: PLC0415
        FLAGS,
        SCRIPT,
        SPELLINGS,
        STORED,
        assert_same,
        other,
        ours,
        outcome,
        sample,
    )

    for action, spelling in SPELLINGS:
        if action in FLAGS:
            lines = [[spelling], [f"{spelling}=1"], [spelling, spelling]]
        else:
            value = sample(action)
            lines = [
                [spelling, value],
                [f"{spelling}={value}"],
                [f"{spelling}{value}"],  # -r3; of a long option, another option
                [spelling, other(action), spelling, value],
                [f"{spelling}="],
                [spelling, ""],
                [spelling, "-1"],
                [spelling],
            ]
        for line in lines:
            assert_same([*line, SCRIPT, "--lr", "1"], capsys)
            assert_same(["--nnodes", "2", *line, "--role=r", SCRIPT], capsys)
    default = outcome(ours, [SCRIPT], capsys)
    for action in STORED:
        values = [] if action in FLAGS else [sample(action)]
        words = [action.option_strings[0], *values, SCRIPT]
        found = outcome(ours, words, capsys)
        assert found[action.dest] != default[action.dest], words


def test_the_table_has_the_options_of_this_torch():
    """It stands for torch's parser when torch is not imported."""
    from tests.support.stock.parsers import ACTIONS, FROM_ENVIRON  # noqa: PLC0415
    from torchrun_hpc.options import command_line as options  # noqa: PLC0415

    for action in ACTIONS:
        kind = options.TORCHRUN[action.dest]
        assert options.names_of(action.dest) == tuple(action.option_strings)
        assert (kind is bool) is (action.nargs == 0), action.dest
        assert action.nargs in (0, None)
        if kind in (int, float) or action.type in (int, float):
            assert kind is action.type
        has_variable = action.dest not in options.WITHOUT_VARIABLE
        assert has_variable is (action in FROM_ENVIRON), action.dest

"""The level of torch's C++ log can be changed after its import."""

from __future__ import annotations

import pytest

from tests.support.processes import run_python

STORES = """
import os, sys, torch
from torchrun_hpc.preload import hidden
for level in sys.argv[1:]:
    os.environ["TORCH_CPP_LOG_LEVEL"] = level
    hidden.read_log_level()
    print(level, file=sys.stderr, flush=True)
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
"""


@pytest.mark.parametrize("levels", [("INFO", "ERROR"), ("ERROR", "INFO")])
def test_the_level_of_the_log(levels):
    done = run_python("-c", STORES, *levels)
    assert done.code == 0, done.err
    _, _, first = done.err.partition(f"{levels[0]}\n")
    first, _, second = first.partition(f"{levels[1]}\n")
    logged = dict(zip(levels, (first, second), strict=True))
    assert "[c10d]" in logged["INFO"]
    assert logged["ERROR"] == ""

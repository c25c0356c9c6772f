"""Variables that a script sets before its own import of torch, by fork and by exec."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tests.support.processes import run_launcher

if TYPE_CHECKING:
    from pathlib import Path

# The launcher cannot see in the script's text which variables these are.
SCRIPT = """
import json, os, sys
variables = json.loads(sys.argv[1])
for name, value in variables.items():
    os.environ[name] = value
    if value is variables["last before numpy"]:
        import numpy
import logging, torch, torch.distributed as dist
seen = torch.get_num_threads(), str(dist.get_debug_level())
seen += logging.getLogger("torch.distributed").level, logging.getLogger("torch").level
print(json.dumps(seen))
"""
READ_AGAIN = {
    "OMP_NUM_THREADS": "1",
    "last before numpy": "",
    "MKL_NUM_THREADS": "1",
    "TORCH_LOGS": "+distributed",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
}
LOST = {
    "OMP_SCHEDULE": "static",
    "last before numpy": "",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "NCCL_DEBUG": "WARN",
}


def launch(form: str, variables: dict[str, str], script: Path) -> tuple[Any, str]:
    done = run_launcher(f"--hpc-preload={form}", script, json.dumps(variables))
    assert done.code == 0, done.err
    return json.loads(done.out), done.err


def test_none_is_lost_without_a_word(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    by_exec, _ = launch("none", READ_AGAIN, script)
    assert by_exec == [1, "DebugLevel.DETAIL", 10, 30]
    by_fork, said = launch("auto", READ_AGAIN, script)
    assert by_fork == by_exec
    # NumPy's own library for matrices cannot read it again.
    assert re.findall(r"HPC249\]: (\w+) changed", said) == ["OMP_NUM_THREADS"]
    _, said = launch("auto", LOST, script)
    told = re.findall(r"HPC249\]: (.*) changed after the launcher", said)
    assert told == ["OMP_SCHEDULE", "OMP_SCHEDULE, TORCH_SHOW_CPP_STACKTRACES"]

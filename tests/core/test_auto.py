"""Programs that call torchrun themselves, and import ``torchrun_hpc.auto`` before."""

from __future__ import annotations

import pytest

from tests.support.processes import ANY_RESOLVER, clean_environ, run_python
from tests.support.stock.compared import is_kept, reports

pytestmark = pytest.mark.xdist_group("side by side")

AUTO = """
import os, sys
from torch.distributed import run
from torch.distributed.elastic.rendezvous import (
    c10d_rendezvous_backend, dynamic_rendezvous, static_tcp_rendezvous,
)
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.launcher import api

def names():
    modules = [
        run, api, dynamic_rendezvous, dynamic_rendezvous.DynamicRendezvousHandler,
        c10d_rendezvous_backend, static_tcp_rendezvous, local_elastic_agent,
    ]
    return {
        (m.__name__, k): id(v) for m in modules for k, v in dict(vars(m)).items()
        if not k.startswith("__")
    }

before, environ, argv = names(), dict(os.environ), list(sys.argv)
import torchrun_hpc.auto
after = names()
changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
expected = {("torch.distributed.run", name) for name in ("run", "parse_args")}
expected.add((dynamic_rendezvous.__name__, "pickle"))
from torchrun_hpc.host import capabilities
if capabilities.SHARED_STORE.present:
    expected.add(("DynamicRendezvousHandler", "next_rendezvous"))
assert changed == expected, changed
assert dict(os.environ) == environ
assert sys.argv == argv
print("imported", flush=True)
for launch in range(int(sys.argv[1])):
    print("launch", file=sys.stderr, flush=True)
    run.main(sys.argv[2:])
"""


def test_a_program_launches_twice(folder, tmp_path):
    """It runs as without us. Its `PET_*` variables count; nothing else is changed."""
    result = run_python(
        *("-c", AUTO, "2", "--nproc-per-node=2", "report.py", "a"),
        environ={
            **clean_environ(),
            **ANY_RESOLVER,
            "REPORT": str(tmp_path),
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": "localhost:0",
            "PET_RDZV_ID": "my-job",
        },
        cwd=folder,
    )
    assert result.code == 0, result.err
    out = sorted(result.out.splitlines())
    assert out == ["imported", *["out 0 ['a']"] * 2, *["out 1 ['a']"] * 2]
    lines = result.err.splitlines()
    assert [x == "launch" for x in lines] == [True, False, True, False], lines
    assert lines[1::2] == result.own_lines
    assert lines[1].partition(" at ")[0] == lines[3].partition(" at ")[0]
    # Here, so that not all workers of pytest import torch.
    from torchrun_hpc.host import capabilities  # noqa: PLC0415

    found = reports(tmp_path)
    assert [worker["environ"]["RANK"] for worker in found] == ["0", "0", "1", "1"]
    for worker in found:
        assert worker["environ"]["TORCHELASTIC_RUN_ID"] == "my-job"
        assert worker["environ"]["MASTER_ADDR"] == "127.0.0.1"
        assert worker["environ"]["OMP_NUM_THREADS"] == "1"
        if capabilities.LISTENING_SOCKET.present:
            assert set(worker["listening"]) == {"127.0.0.1"}, worker
        assert (worker["reachable"] is True) is is_kept(worker), worker

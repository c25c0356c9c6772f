"""What a failure's text says about its cause."""

from __future__ import annotations

import pytest

from tests.support.simulated_job import worker_failure
from torchrun_hpc.failures.failure import Failure, Kind

# From torch: csrc/distributed/c10d, and gloo's transport/tcp; `0` to `15` are the minor
# releases in which it was read. Those of NCCL were not seen in a run of ours.
HANGS = {
    "gloo, 0 to 15, receiving": (
        "RuntimeError: Timed out waiting 1800000ms for recv operation to complete"
    ),
    "gloo, 0 to 15, sending": (
        "RuntimeError: Timed out waiting 1800000ms for send operation to complete"
    ),
    "gloo, of another rank": ("RuntimeError: Application timeout caused pair closure"),
    "gloo, a rank is gone": "RuntimeError: Connection closed by peer [10.0.0.1]:6311",
    "gloo, a rank was killed": (
        "RuntimeError: Read error [10.20.0.2]:34962: Connection reset by peer"
    ),
    "gloo, shapes differ": (
        "what(): [enforce fail at /gloo/transport/tcp/pair.cc:456] op.preamble.length "
        "<= op.nbytes. 1024 vs 512"
    ),
    "NCCL, 0": (
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, "
        "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 milliseconds before "
        "timing out."
    ),
    "NCCL, 15": (
        "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread "
        "terminated with exception: [Rank 1] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=1024)"
    ),
    "monitored barrier, rank 0": (
        "RuntimeError: [Rank 0]: Rank 3 failed to pass monitoredBarrier in 8000 ms"
    ),
    "monitored barrier, others": (
        "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received "
        "errors while waiting for send/recv from rank 0."
    ),
    "a store, 0 and 1": "RuntimeError: Socket Timeout",
    "a store, 2 to 15": (
        "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /a/0"
    ),
    "a store in a file": "RuntimeError: Timeout waiting for key: a after 5000 ms",
    "a store that waits for others": (
        "DistStoreError: Timed out after 61 seconds waiting for clients. 3/4 clients "
        "joined."
    ),
    "the barrier after the start": (
        "DistStoreError: Timed out initializing process group in store based barrier "
        "on rank: 0, for key: store_based_barrier_key:1 (world_size=2)"
    ),
}

OTHERS = (
    "",
    "ValueError: bad shape",
    "TimeoutError: timed out reading shard 12",
    "requests.exceptions.ReadTimeout: HTTPSConnectionPool: Read timed out.",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB",
)


@pytest.mark.parametrize("name", HANGS)
def test_another_rank_may_be_the_reason(name):
    failure = worker_failure(5, text=HANGS[name])
    assert failure.is_hang


@pytest.mark.parametrize("text", OTHERS)
def test_this_rank_is_the_reason(text):
    """Its other workers are stopped without a delay."""
    assert not worker_failure(5, text=text).is_hang


def test_only_workers_hang():
    assert not Failure(Kind.EXCLUDED, (1,), text="Socket Timeout").is_hang

"""Workers that are looked at, and agents that answer who asks for their stacks."""

from __future__ import annotations

import contextlib
import itertools
import json
import os

import pytest

from tests.support.patience import PATIENCE
from torchrun_hpc import wire
from torchrun_hpc.failures.worker import Worker
from torchrun_hpc.stacks import service
from torchrun_hpc.stacks.sampling import WorkerStack, sample
from torchrun_hpc.stacks.service import Service

_NUMBERS = itertools.count()


def worker(pid, rank=5):
    """Return a worker of node 1."""
    return Worker(rank, 8, 1, rank % 2, pid, lambda: None)


def problem_of(pid):
    """Look at a process of which there is no stack, and return why."""
    (found,) = sample([worker(pid)], PATIENCE)
    assert found == WorkerStack(5, 1, problem=found.problem)
    assert found.problem.isprintable()
    assert 0 < len(found.problem) <= 250
    return found.problem


def as_sent(*stacks):
    """Return stacks as another node gets them."""
    return json.loads(json.dumps([wire.encode(stack) for stack in stacks]))


@pytest.fixture
def own_names(monkeypatch):
    """Keep away from other launches that run on this machine meanwhile."""
    prefix = f"torchrun_hpc.test{os.getpid()}.{next(_NUMBERS)}"
    monkeypatch.setattr(service, "_PREFIX", prefix)
    return prefix


@pytest.fixture
def serve():
    """Start services that end with the test; their names are those of `own_names`."""
    with contextlib.ExitStack() as ending:

        def serve(launch_id, collect):
            made = Service(launch_id, collect)
            ending.callback(made.close)
            made.start()
            return made

        yield serve


def entry(number, name="all_reduce", group="0", record=None, **changes):
    """Return a flight recorder's entry for gloo, without what is not read."""
    about = {
        "record_id": number - 1 if record is None else record,
        "process_group": [group, "default_pg" if group == "0" else "undefined"],
        "collective_seq_id": number,
        "is_p2p": False,
        "profiling_name": f"gloo:{name}",
        "input_sizes": [[1024]],
        "input_dtypes": ["Float"],
    }
    return about | changes

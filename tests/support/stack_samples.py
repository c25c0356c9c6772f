"""Workers whose stacks are read, and agents that answer questions about them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.patience import PATIENCE
from torchrun_hpc import wire
from torchrun_hpc.failures.worker import Worker
from torchrun_hpc.stacks import service
from torchrun_hpc.stacks.sampling import WorkerStack, sample
from torchrun_hpc.stacks.service import Service

Serve = Callable[[str, Callable[[], object]], Service]

_NUMBERS = itertools.count()


def worker(pid: int, rank: int = 5) -> Worker:
    """Return a worker of node 1."""
    return Worker(rank, 8, 1, rank % 2, pid, lambda: None)


def problem_of(pid: int) -> str:
    """Return why a process has no stack."""
    (found,) = sample([worker(pid)], PATIENCE)
    assert found == WorkerStack(5, 1, problem=found.problem)
    assert found.problem.isprintable()
    assert 0 < len(found.problem) <= 250
    return found.problem


def as_sent(*stacks: WorkerStack) -> list[dict[str, Any]]:
    """Return stacks as another node gets them."""
    sent: list[dict[str, Any]] = json.loads(
        json.dumps([wire.encode(stack) for stack in stacks])
    )
    return sent


@pytest.fixture
def own_names(monkeypatch: pytest.MonkeyPatch) -> str:
    """Give sockets names that no other launch on this machine has."""
    prefix = f"torchrun_hpc.test{os.getpid()}.{next(_NUMBERS)}"
    monkeypatch.setattr(service, "_PREFIX", prefix)
    return prefix


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start services with the names of `own_names`; they end with the test."""
    with contextlib.ExitStack() as ending:

        def serve(launch_id: str, collect: Callable[[], object]) -> Service:
            made = Service(launch_id, collect)
            ending.callback(made.close)
            made.start()
            return made

        yield serve


def entry(
    number: int,
    name: str = "all_reduce",
    group: str = "0",
    record: int | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Return a flight recorder's entry for gloo, with the fields that are read."""
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

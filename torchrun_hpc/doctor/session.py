"""The steps of a worker that runs `torchrun_hpc.doctor.collectives`."""

from __future__ import annotations

import itertools
import os
import re
import time
from typing import TYPE_CHECKING, Any

import torch

from torchrun_hpc import wire
from torchrun_hpc.doctor import operations
from torchrun_hpc.doctor.operations import World
from torchrun_hpc.doctor.product import kind, multiply
from torchrun_hpc.doctor.results import Worker
from torchrun_hpc.environment import with_variables
from torchrun_hpc.host import procfs
from torchrun_hpc.variables import AGENT_STORE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta

    from torchrun_hpc.doctor.product import Product

    Write = Callable[[str, Any], None]

distributed: Any = torch.distributed  # does not export all that it documents

# Gloo's threads release the last tensor a moment after its result is there. If the
# group is destroyed by then, a worker can hang (up to torch 2.4) or abort (2.13).
_GLOO_REST = 0.2  # seconds

# NCCL's src/init.cc writes this, from 2.14 to 2.28. A plugin's name may have spaces.
_NETWORK = re.compile(r"NCCL INFO Using network (.*\S)")
_LONGEST = 80  # characters of such a name
_DEBUG, _FILE = "NCCL_DEBUG", "NCCL_DEBUG_FILE"


def run(
    environ: Mapping[str, str], max_bytes: int, timeout: timedelta, write: Write
) -> None:
    """Run all steps; `write` gets the kind of each result, and its plain data."""
    rank, numbers = int(environ["RANK"]), itertools.count()

    def announce(step: str) -> None:
        write("at", [rank, next(numbers), step])

    def compute() -> Product:
        announce("the compute test")
        return multiply(device)

    def begin(operation: str) -> None:
        announce(f"{operation} {world.scope}".rstrip())
        waits.append(operations.wait(world))

    announce("the first meeting")
    store, backend, everyone = _meet(environ, timeout, write)
    waits, late_s = list[float](), 0.0
    device, variables = everyone.device, for_nccl(environ) if backend == "nccl" else {}
    tests = [compute()]
    for world in worlds(environ, store, backend, everyone):
        announce(f"the start of {backend} {world.scope}".rstrip())
        with with_variables(variables):
            # No new_group(): each would be a barrier for the workers of all nodes.
            own = distributed.PrefixStore(world.scope or "all", store)
            place = {"rank": world.rank, "world_size": world.size}
            distributed.init_process_group(backend, store=own, timeout=timeout, **place)
            for row in operations.measure(world, max_bytes, begin):
                if world.rank == 0:
                    write("row", wire.encode(row))
        if not world.scope:
            late_s = operations.lateness(world, waits)
        if backend == "gloo":
            time.sleep(_GLOO_REST)
        distributed.destroy_process_group()
    tests.append(compute())
    flops, digests, norms, wrong = zip(*tests, strict=True)
    network = transport(procfs.read(variables.get(_FILE, "")) or "")
    worker = Worker(
        rank, -1, *kind(device), flops, digests, norms[0], sum(wrong), late_s, network
    )
    write("worker", wire.encode(worker))
    _count(store, "ended", everyone.size)
    if rank == 0:  # which can keep the store of the others
        store.wait(["all ended"])


def _meet(
    environ: Mapping[str, str], timeout: timedelta, write: Write
) -> tuple[Any, str, World]:
    # The worker with the store, and earlier ones, can already wait here.
    store, rank, size = next(distributed.rendezvous("env://", timeout=timeout))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    store.add("GPUs", int(has_gpu(environ, gpus)))
    _count(store, "started", size)
    store.wait(["all started"])
    backend, device = "gloo", torch.device("cpu")
    if store.add("GPUs", 0) >= size:
        backend = "nccl"
        device = torch.device("cuda", int(environ["LOCAL_RANK"]) % gpus)
        torch.cuda.set_device(device)
    if rank == 0:
        write("backend", backend)
    return store, backend, World("", rank, size, device)


def _count(store: Any, event: str, size: int) -> None:
    """Count this worker; the last one sets the key that all wait for."""
    if store.add(event, 1) == size:
        store.set(f"all {event}", "")


def has_gpu(environ: Mapping[str, str], gpus: int) -> bool:
    """Return whether a worker has its own GPU, of the `gpus` that it sees.

    Without an agent, the scheduler can have bound one GPU to each worker.
    """
    is_task = AGENT_STORE not in environ
    return gpus >= int(environ["LOCAL_WORLD_SIZE"]) or (is_task and gpus == 1)


def worlds(
    environ: Mapping[str, str], store: Any, backend: str, everyone: World
) -> list[World]:
    """Return the groups for the operations: all workers; on GPUs, also this node's."""
    found = [everyone] if everyone.size > 1 else []
    size = int(environ["LOCAL_WORLD_SIZE"])
    if backend == "nccl" and everyone.size > size > 1:  # a node has its own links
        scope = f"node {environ['GROUP_RANK']}"
        rank = store.add(scope, 1) - 1  # LOCAL_RANK can be 0 in all of them
        found.append(World(scope, rank, size, everyone.device))
    return found


def for_nccl(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that let NCCL write a log, unless the user has set them."""
    if environ.get(_DEBUG) or environ.get(_FILE):
        return {}
    log = os.memfd_create("NCCL")
    os.dup2(log, 1)  # NCCL before 2.24 also writes its version to stdout
    file = f"/proc/self/fd/{log}"
    return {_DEBUG: "INFO", f"{_DEBUG}_SUBSYS": "INIT,NET", _FILE: file}


def transport(log: str) -> str:
    """Return NCCL's transport from its log, for example ``IB``; empty if unknown."""
    found = _NETWORK.search(log)
    return wire.printable(found[1], _LONGEST) if found else ""

"""A worker that runs torch's collective operations, as a process of its own.

`torchrun_hpc.doctor.workers` starts it, with ``python -m``, and talks with it in lines
of JSON. It imports torch, and writes a `Torch`. It gets `Settings`, runs the operations
with the workers of all nodes, writes a `Collective` after each if it is the one to do
so, and in the end ``{"done": BACKEND}``. At the end of its stdin it ends at once:
whoever has started it is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import queue
import threading
import time
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict

from torchrun_hpc import wire
from torchrun_hpc.doctor.results import no_torch, of_launcher
from torchrun_hpc.rendezvous.server import listen
from torchrun_hpc.wire import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrun_hpc.doctor.results import Finding, Torch

_LONGEST = 240  # characters of a problem
# Gloo's threads let go of the last tensor a moment after its result is there. Up to
# torch 2.4 a worker may hang if the group is gone by then, in 2.13 abort.
_GLOO_REST = 0.2  # seconds


class Settings(TypedDict):
    """What a worker has to know.

    Attributes:
        host: Name of its node.
        address: Where rank 0 listens: a number, without brackets.
        max_bytes: The largest size.
        task_size: How many workers its task has.
        timeout: Seconds that anything may take.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    task_size: int
    node_rank: int
    nodes: int
    host: str
    address: str
    port: int
    max_bytes: int
    timeout: float


def main() -> None:
    """Run as a worker, to the end of the process."""
    # Whatever else prints, on import of torch or later, goes to stderr.
    output = os.dup(1)
    os.dup2(2, 1)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_stdin, args=(lines,), daemon=True).start()

    def write(message: Any) -> None:
        os.write(output, wire.to_line(message))

    code = 0
    try:
        _import_torch(write)
        write({"done": _run(wire.from_json(lines.get()), write)})
    except BaseException:  # noqa: BLE001 - whatever it is, it is shown
        traceback.print_exc()
        code = 1
    os._exit(code)  # at a usual end, threads of NCCL and gloo may wait for others


def _read_stdin(lines: queue.SimpleQueue[bytes]) -> None:
    for line in io.FileIO(0, closefd=False):
        lines.put(line)
    os._exit(1)


def _import_torch(write: Callable[[Torch], None]) -> None:
    """Import torch, and write what is found; raise what the import has raised."""
    found = no_torch("")
    start = time.perf_counter()
    try:
        torch = importlib.import_module("torch")
        found["import_s"] = time.perf_counter() - start
        known = {"cuda": torch.version.cuda, "hip": torch.version.hip}
        with contextlib.suppress(AttributeError, RuntimeError):  # a torch for CPUs
            known["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            known["cudnn"] = torch.backends.cudnn.version()
        found["libraries"] = {name: str(v) for name, v in known.items() if v}
        found["gpus"] = torch.cuda.device_count()
        found["version"] = str(torch.__version__)
        with contextlib.suppress(Exception):  # the collectives will fail, and say so
            found["findings"] = _findings()
    except BaseException as error:
        found["problem"] = printable(f"{type(error).__name__}: {error}", _LONGEST)
        raise
    finally:
        write(found)


def _findings() -> list[Finding]:
    """Return what the launcher would say of this torch."""
    registry = importlib.import_module("torchrun_hpc.torch_compat.patches.registry")
    always = [patch for patch in registry.PATCHES if patch is not registry.fork_workers]
    return [
        of_launcher(message.code, message.text, [])
        for message in registry.left_out(registry.examine(always))
    ]


def _run(settings: Settings, write: Callable[[Any], None]) -> str:
    """Run the operations; return the backend that did."""
    # These import torch.
    from torchrun_hpc.doctor import operations  # noqa: PLC0415
    from torchrun_hpc.torch_compat import capabilities  # noqa: PLC0415

    torch: Any = importlib.import_module("torch")
    rank, size = settings["rank"], settings["size"]
    timeout = timedelta(seconds=settings["timeout"])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    address = settings["address"], settings["port"]
    listening = {}
    if rank == 0 and capabilities.LISTENING_SOCKET.present:
        listening = capabilities.listening_on(listen(*address))
    store = torch.distributed.TCPStore(*address, size, rank == 0, timeout, **listening)
    # A worker sees all GPUs of its node; or its own one, where each is a task.
    has_own = gpus == settings["task_size"] == 1
    store.add("GPUs", int(has_own or gpus >= settings["local_size"]))
    _count(store, "started", size)
    store.wait(["all started"])
    backend, device = "gloo", torch.device("cpu")
    if store.add("GPUs", 0) == size:
        backend, device = "nccl", torch.device("cuda", settings["local_rank"] % gpus)
        torch.cuda.set_device(device)
    for key, scope, own_rank, own_size in _groups(settings, backend):
        # Without new_group(): each would be a barrier of the workers of all nodes.
        torch.distributed.init_process_group(
            backend,
            store=torch.distributed.PrefixStore(key, store),
            rank=own_rank,
            world_size=own_size,
            timeout=timeout,
        )
        world = operations.World(scope, own_rank, own_size, device)
        for row in operations.measure(world, settings["max_bytes"]):
            if own_rank == 0:
                write(row)
        if backend == "gloo":
            time.sleep(_GLOO_REST)
        torch.distributed.destroy_process_group()
    _count(store, "ended", size)
    if rank == 0:  # the others' store
        store.wait(["all ended"])
    return backend


def _groups(settings: Settings, backend: str) -> list[tuple[str, str, int, int]]:
    """Return names, scopes, and sizes of the groups of this worker, and its ranks."""
    groups = [("all", "", settings["rank"], settings["size"])]
    # On GPUs within the node too, which have links of their own.
    if backend == "nccl" and settings["nodes"] > 1 and settings["local_size"] > 1:
        name, scope = f"node {settings['node_rank']}", settings["host"]
        groups.append((name, scope, settings["local_rank"], settings["local_size"]))
    return groups


def _count(store: Any, event: str, size: int) -> None:
    """Count this worker; the last one says that all have been counted."""
    if store.add(event, 1) == size:
        store.set(f"all {event}", "")


if __name__ == "__main__":
    main()

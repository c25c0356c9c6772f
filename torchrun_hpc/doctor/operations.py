"""The steps of a worker that runs `torchrun_hpc.doctor.collectives`.

The worker multiplies matrices, and runs PyTorch's collective operations. Sizes and
bandwidths are defined as in nccl-tests (its doc/PERFORMANCE.md), so the figures can be
compared with published ones.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import platform
import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchrun_hpc import limits, wire
from torchrun_hpc.doctor.results import Collective, WorkerReport
from torchrun_hpc.environment import with_variables
from torchrun_hpc.host import procfs
from torchrun_hpc.variables import (
    AGENT_STORE,
    GROUP_RANK,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    NCCL_DEBUG,
    NCCL_DEBUG_FILE,
    NCCL_DEBUG_SUBSYS,
    RANK,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import timedelta

    from torchrun_hpc.doctor.results import Write

    Environ = Mapping[str, str]

distributed: Any = torch.distributed  # does not export all that it documents

# NCCL's src/init.cc writes this, from 2.14 to 2.28. A plugin's name may have spaces.
_NETWORK = re.compile(r"NCCL INFO Using network (.*\S)")
_LONGEST = 80  # characters of such a name


def run(environ: Environ, max_bytes: int, timeout: timedelta, write: Write) -> None:
    """Run all steps, and write their results."""
    rank, numbers = int(environ[RANK]), itertools.count()

    def announce(step: str) -> None:
        write("at", [[rank, [next(numbers), step]]])

    def compute() -> Product:
        announce("the compute test")
        return multiply(device)

    def begin(operation: str) -> None:
        announce(f"{operation} {world.scope}".rstrip())
        waits.append(wait(world))

    announce("the first meeting")
    store, backend, everyone = _meet(environ, timeout, write)
    waits, late_s, device = list[float](), 0.0, everyone.device
    variables = for_nccl(environ) if backend == "nccl" else {}
    first = compute()
    for world in worlds(environ, store, backend, everyone):
        announce(f"the start of {backend} {world.scope}".rstrip())
        with with_variables(variables):
            # No new_group(): each would be a barrier for the workers of all nodes.
            group = {"rank": world.rank, "world_size": world.size, "timeout": timeout}
            group["store"] = distributed.PrefixStore(world.scope or "all", store)
            distributed.init_process_group(backend, **group)
            for row in measure(world, max_bytes, begin):
                if world.rank == 0:
                    write("rows", [wire.encode(row)])
        if not world.scope:
            late_s = lateness(world, waits)
        if backend == "gloo":
            time.sleep(limits.GLOO_PAUSE)
        distributed.destroy_process_group()
    second, (model, dtype) = compute(), kind(device)
    worker = WorkerReport(
        rank=rank,
        node=-1,
        device=model,
        dtype=dtype,
        flops=(first.flops, second.flops),
        digests=(first.digest, second.digest),
        norm=first.norm,
        wrong=first.wrong + second.wrong,
        late_s=late_s,
        transport=transport(procfs.read(variables.get(NCCL_DEBUG_FILE, "")) or ""),
    )
    write("workers", [wire.encode(worker)])
    _count(store, "ended", everyone.size)
    if rank == 0:  # its process can serve the store of the others
        store.wait(["all ended"])


def _meet(environ: Environ, timeout: timedelta, write: Write) -> tuple[Any, str, World]:
    # The worker with the store, and earlier ones, can already wait for the others.
    store, rank, size = next(distributed.rendezvous("env://", timeout=timeout))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    store.add("GPUs", int(has_gpu(environ, gpus)))
    _count(store, "started", size)
    store.wait(["all started"])
    backend, device = "gloo", torch.device("cpu")
    if store.add("GPUs", 0) >= size:
        backend = "nccl"
        device = torch.device("cuda", int(environ[LOCAL_RANK]) % gpus)
        torch.cuda.set_device(device)
    if rank == 0:
        write("backend", backend)
    return store, backend, World("", rank, size, device)


def _count(store: Any, event: str, size: int) -> None:
    """Count this worker; the last one sets the key that all wait for."""
    if store.add(event, 1) == size:
        store.set(f"all {event}", "")


def has_gpu(environ: Environ, gpus: int) -> bool:
    """Return whether a worker has its own GPU, of the ``gpus`` that it sees.

    Without an agent, the scheduler can have bound one GPU to each worker.
    """
    is_task = AGENT_STORE not in environ
    return gpus >= int(environ[LOCAL_WORLD_SIZE]) or (is_task and gpus == 1)


def worlds(environ: Environ, store: Any, backend: str, everyone: World) -> list[World]:
    """Return the groups for the operations: all workers; on GPUs, also this node's."""
    groups = [everyone] if everyone.size > 1 else []
    size = int(environ[LOCAL_WORLD_SIZE])
    if backend == "nccl" and everyone.size > size > 1:  # a node has its own links
        scope = f"node {environ[GROUP_RANK]}"
        rank = store.add(scope, 1) - 1  # LOCAL_RANK can be 0 in all of them
        groups.append(World(scope, rank, size, everyone.device))
    return groups


def for_nccl(environ: Environ) -> dict[str, str]:
    """Return variables that let NCCL write a log, unless the user has set them."""
    if environ.get(NCCL_DEBUG) or environ.get(NCCL_DEBUG_FILE):
        return {}
    log = os.memfd_create("NCCL")
    os.dup2(log, 1)  # NCCL before 2.24 also writes its version to stdout
    file = f"/proc/self/fd/{log}"
    return {NCCL_DEBUG: "INFO", NCCL_DEBUG_SUBSYS: "INIT,NET", NCCL_DEBUG_FILE: file}


def transport(log: str) -> str:
    """Return NCCL's transport from its log, for example ``IB``; empty if unknown."""
    match = _NETWORK.search(log)
    return wire.printable(match[1], _LONGEST) if match else ""


# --- collective operations --------------------------------------------------------

# Values are integers: position and rank modulo these numbers. They are primes, so no
# number of ranks or elements is a multiple of both. Float32 has exact sums of up to
# 59,000 ranks.
_POSITIONS, _RANKS = 31, 251

_ELEMENT = 4  # bytes
_SMALLEST, _STEP = 8, 4  # bytes of a message; factor to the next size
_MOST = 20  # repetitions of an operation

# Of gloo: ``ProcessGroupGloo does not support reduce_scatter``, ``no support for
# _allgather_base in Gloo process group``.
_MISSING = re.compile("does not support|no support for")

# Whether the elements of all ranks count together; busbw / algbw by number of ranks.
OPERATIONS: dict[str, tuple[bool, Callable[[int], float]]] = {
    "all_reduce": (False, lambda n: 2 * (n - 1) / n),
    "all_gather": (True, lambda n: (n - 1) / n),
    "reduce_scatter": (True, lambda n: (n - 1) / n),
    "broadcast": (False, lambda _: 1.0),
}


class World(NamedTuple):
    """The workers of the default process group; ``scope`` is as in `Collective`."""

    scope: str
    rank: int
    size: int
    device: torch.device


class Trial(NamedTuple):
    """An operation on tensors, and the expected result of its first run."""

    run: Callable[[], object]
    result: torch.Tensor
    expected: torch.Tensor


def prepare(operation: str, world: World, count: int) -> Trial:
    """Prepare an operation on ``count`` elements, as `OPERATIONS` counts them."""
    ranks = torch.arange(world.size, device=world.device) % _RANKS
    positions = torch.arange(count, device=world.device).remainder_(_POSITIONS).float()
    data, sums = positions + ranks[world.rank], positions * world.size + ranks.sum()
    if operation == "all_reduce":
        return Trial(lambda: distributed.all_reduce(data), data, sums)
    if operation == "broadcast":
        return Trial(lambda: distributed.broadcast(data, 0), data, positions)
    size = count // world.size
    part = slice(world.rank * size, (world.rank + 1) * size)
    if operation == "all_gather":
        run = _renamed("all_gather_into_tensor", "all_gather_single")
        result = torch.zeros_like(data)
        expected = positions + ranks.repeat_interleave(size)
        return Trial(lambda: run(result, data[part]), result, expected)
    run = _renamed("reduce_scatter_tensor", "reduce_scatter_single")
    result = torch.zeros_like(data[part])
    return Trial(lambda: run(result, data), result, sums[part])


def _renamed(old: str, new: str) -> Any:
    return getattr(distributed, new, None) or getattr(distributed, old)


def counts(max_bytes: int, parts: int = 1) -> list[int]:
    """Return numbers of elements up to a size, each a multiple of ``parts``."""
    sizes = [max_bytes]
    while (size := _SMALLEST * _STEP ** (len(sizes) - 1)) < max_bytes:
        sizes.append(size)
    return sorted({max(size // _ELEMENT // parts, 1) * parts for size in sizes})


def measure(
    world: World, max_bytes: int, begin: Callable[[str], None]
) -> Iterator[Collective]:
    """Run all operations on all ranks; ``begin`` gets the name of each before it."""
    for name, (is_split, bus) in OPERATIONS.items():
        for count in counts(max_bytes, world.size if is_split else 1):
            size = count * _ELEMENT
            trial = prepare(name, world, count)
            begin(f"{name} of {size} B")
            try:
                wrong, time_s = _measure(world, trial)
            except RuntimeError as error:
                if not _MISSING.search(str(error)):
                    raise
                size, wrong, time_s = 0, -1, 0.0
            algbw = size / time_s if time_s else 0.0
            busbw, number = algbw * bus(world.size), size // _ELEMENT
            figures = time_s, algbw, busbw, wrong
            yield Collective(name, world.scope, size, number, *figures)
            if wrong < 0 or time_s > limits.SLOW_OPERATION:
                break


def _measure(world: World, trial: Trial) -> tuple[int, float]:
    trial.run()  # the first one also opens connections
    wrong = int((trial.result != trial.expected).sum())
    all_wrong = _of_all(world, wrong, distributed.ReduceOp.SUM)
    time_s = _slowest(world, trial, 1)
    if repetitions := min(int(limits.REPEAT_TIME / time_s), _MOST):
        time_s = _slowest(world, trial, repetitions)
    return int(all_wrong), time_s


def _slowest(world: World, trial: Trial, repetitions: int) -> float:
    """Return the seconds of one run, on the rank that took the longest."""
    start = time.perf_counter()  # GPUs are idle, because a number was read
    for _ in range(repetitions):
        trial.run()
    synchronize(world.device)
    seconds = (time.perf_counter() - start) / repetitions
    return _of_all(world, seconds, distributed.ReduceOp.MAX)


def wait(world: World) -> float:
    """Wait for all ranks; return the seconds."""
    synchronize(world.device)
    start = time.perf_counter()
    _of_all(world, 0.0, distributed.ReduceOp.SUM)
    return time.perf_counter() - start


def lateness(world: World, waits: Sequence[float]) -> float:
    """Return the seconds that the others waited for this rank: the median.

    ``waits`` are this rank's seconds. Each of at least two ranks has as many.
    """
    seconds = torch.tensor(waits, dtype=torch.float64, device=world.device)
    others = [torch.empty_like(seconds) for _ in range(world.size)]
    distributed.all_gather(others, seconds)
    del others[world.rank]
    medians = torch.stack(others).cpu().quantile(0.5, dim=0)
    return float((medians - seconds.cpu()).clamp(min=0).quantile(0.5))


def _of_all(world: World, value: float, reduction: Any) -> float:
    tensor = torch.tensor(value, dtype=torch.float64, device=world.device)
    distributed.all_reduce(tensor, reduction)
    return float(tensor)


# --- the compute test: the product of two matrices, equal on all devices ----------

# Rows of a matrix, enough to keep the device busy; type of its elements.
_MATRICES = {"cpu": (512, torch.float32), "cuda": (4096, torch.bfloat16)}
_FACTORS = 0.6180339887498949, 0.4142135623730951  # no simple fractions
_LEAST = 5  # repetitions
# For x86, POWER, and ARM, whose kernel writes numbers.
_MODEL = re.compile(r"(?m)^(?:model name|cpu|CPU implementer|CPU part)\s*: (.+)")


class Product(NamedTuple):
    """The result of one compute test, as in `WorkerReport`."""

    flops: float
    digest: str
    norm: float
    wrong: int


def kind(device: torch.device) -> tuple[str, str]:
    """Return a device's model, which decides how it rounds, and the type of elements.

    The library's choice of instructions does not count: if it differs on one node, the
    test must find that.
    """
    dtype = str(_MATRICES[device.type][1]).removeprefix("torch.")
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), dtype
    names = dict.fromkeys(_MODEL.findall(procfs.read("/proc/cpuinfo") or ""))
    return " ".join(names) or platform.machine(), dtype


def multiply(device: torch.device) -> Product:
    """Multiply the matrices several times."""
    size, dtype = _MATRICES[device.type]
    # IEEE 754 defines the rounding.
    numbers = torch.arange(size * size, dtype=torch.float64).reshape(size, size)
    pair = [(numbers * each % 1 - 0.5).to(device, dtype) for each in _FACTORS]
    threads = torch.get_num_threads()
    if device.type == "cpu":  # waiting threads would also use time
        torch.set_num_threads(1)
    # Other programs on a shared machine are not the fault of its CPU.
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds: list[float] = []
    product = torch.matmul(*pair)  # also loads libraries
    while len(seconds) < _LEAST or sum(seconds) < limits.REPEAT_TIME:
        synchronize(device)
        start = clock()
        product = torch.matmul(*pair)
        synchronize(device)
        seconds.append(clock() - start)
    torch.set_num_threads(threads)
    wrong = product.numel() - int(product.isfinite().sum())
    norm = 0.0 if wrong else float(product.double().norm())
    data = product.cpu()
    content = ctypes.string_at(data.data_ptr(), data.numel() * data.element_size())
    digest = hashlib.sha256(content).hexdigest()[:16]
    return Product(2 * size**3 / min(seconds), digest, norm, wrong)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

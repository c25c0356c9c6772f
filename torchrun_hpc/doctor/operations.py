"""PyTorch's collective operations: their results and their speed.

Sizes and bandwidths are defined as in nccl-tests (its doc/PERFORMANCE.md), so the
figures can be compared with published ones.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from torchrun_hpc.doctor.product import synchronize
from torchrun_hpc.doctor.results import Collective

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Values are integers: position and rank modulo these numbers. They are primes, so no
# number of ranks or elements is a multiple of both. Float32 has exact sums of up to
# 59,000 ranks.
_POSITIONS, _RANKS = 31, 251

_ELEMENT = 4  # bytes
_SMALLEST, _STEP = 8, 4  # bytes of a message; factor to the next size
_LONG_ENOUGH, _MOST = 0.1, 20  # seconds to repeat an operation; repetitions
_SLOW = 1.0  # seconds of one operation, above which larger sizes are skipped

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
    """The workers of the default process group; `scope` is as in `Collective`."""

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
    """Prepare an operation on `count` elements, as `OPERATIONS` counts them."""
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
    """Return numbers of elements up to a size, each a multiple of `parts`."""
    sizes = [max_bytes]
    while (size := _SMALLEST * _STEP ** (len(sizes) - 1)) < max_bytes:
        sizes.append(size)
    return sorted({max(size // _ELEMENT // parts, 1) * parts for size in sizes})


def measure(
    world: World, max_bytes: int, begin: Callable[[str], None]
) -> Iterator[Collective]:
    """Run all operations on all ranks; `begin` gets the name of each before it."""
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
            number, rate = size // _ELEMENT, size / time_s if time_s else 0.0
            rates = rate, rate * bus(world.size)
            yield Collective(name, world.scope, size, number, time_s, *rates, wrong)
            if wrong < 0 or time_s > _SLOW:
                break


def _measure(world: World, trial: Trial) -> tuple[int, float]:
    trial.run()  # the first one also opens connections
    wrong = int((trial.result != trial.expected).sum())
    all_wrong = _of_all(world, wrong, distributed.ReduceOp.SUM)
    time_s = _slowest(world, trial, 1)
    if repetitions := min(int(_LONG_ENOUGH / time_s), _MOST):
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
    """Wait until all ranks are here; return the seconds of this."""
    synchronize(world.device)
    start = time.perf_counter()
    _of_all(world, 0.0, distributed.ReduceOp.SUM)
    return time.perf_counter() - start


def lateness(world: World, waits: Sequence[float]) -> float:
    """Return the seconds that the others waited for this rank: the median.

    `waits` are this rank's own seconds. Each of at least two ranks has as many.
    """
    own = torch.tensor(waits, dtype=torch.float64, device=world.device)
    others = [torch.empty_like(own) for _ in range(world.size)]
    distributed.all_gather(others, own)
    del others[world.rank]
    medians = torch.stack(others).cpu().quantile(0.5, dim=0)
    return float((medians - own.cpu()).clamp(min=0).quantile(0.5))


def _of_all(world: World, value: float, reduction: Any) -> float:
    tensor = torch.tensor(value, dtype=torch.float64, device=world.device)
    distributed.all_reduce(tensor, reduction)
    return float(tensor)

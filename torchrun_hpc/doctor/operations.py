"""Torch's collective operations: whether their results are right, and how fast it is.

Sizes and bandwidths are those of nccl-tests (its doc/PERFORMANCE.md), so the figures
can be compared with what others have published.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchrun_hpc.doctor.results import Collective

# Values are whole numbers that depend on position and rank, by the rest of a division.
# The divisors are primes: no number of ranks, or of elements, is a multiple of both.
# Float32 has the sums of up to 59,000 ranks exactly.
_POSITIONS, _RANKS = 31, 251

_ELEMENT = 4  # bytes
_SMALLEST = 8  # bytes of a message; each next one is larger by this factor:
_STEP = 4
_LONG_ENOUGH = 0.1  # seconds to repeat an operation
_MOST = 20  # repetitions
_SLOW = 1.0  # seconds of one operation: larger sizes are left out

# Of gloo: ``ProcessGroupGloo does not support reduce_scatter``, ``no support for
# _allgather_base in Gloo process group``.
_MISSING = re.compile("does not support|no support for")


class World(NamedTuple):
    """The workers of torch's default process group.

    Attributes:
        scope: As in `Collective`.
        rank: Rank of this worker among them.
        size: How many there are.
        device: Where this one's tensors are.
    """

    scope: str
    rank: int
    size: int
    device: torch.device


class _Trial(NamedTuple):
    """An operation on tensors, and what comes out of it the first time."""

    run: Callable[[], object]
    result: torch.Tensor
    expected: torch.Tensor


def _positions(world: World, first: int, count: int) -> torch.Tensor:
    """Return the part of all values that depends on the position."""
    period = torch.arange(_POSITIONS, dtype=torch.float32, device=world.device)
    start = first % _POSITIONS
    end = start + count
    return period.repeat(end // _POSITIONS + 1)[start:end]


def _own(world: World, first: int, count: int) -> torch.Tensor:
    """Return the values of this rank."""
    return _positions(world, first, count) + world.rank % _RANKS


def _sums(world: World, first: int, count: int) -> torch.Tensor:
    """Return the sums of the values of all ranks."""
    ranks = sum(rank % _RANKS for rank in range(world.size))
    return _positions(world, first, count) * world.size + ranks


def _all_reduce(world: World, count: int) -> _Trial:
    data = _own(world, 0, count)
    expected = _sums(world, 0, count)
    return _Trial(lambda: distributed.all_reduce(data), data, expected)


def _all_gather(world: World, count: int) -> _Trial:
    part = count // world.size
    data = _own(world, world.rank * part, part)
    result = torch.zeros(count, device=world.device)
    ranks = torch.arange(world.size, device=world.device) % _RANKS
    expected = _positions(world, 0, count) + ranks.repeat_interleave(part)
    gather = _function("all_gather_single", "all_gather_into_tensor")
    return _Trial(lambda: gather(result, data), result, expected)


def _reduce_scatter(world: World, count: int) -> _Trial:
    part = count // world.size
    data = _own(world, 0, count)
    result = torch.zeros(part, device=world.device)
    expected = _sums(world, world.rank * part, part)
    scatter = _function("reduce_scatter_single", "reduce_scatter_tensor")
    return _Trial(lambda: scatter(result, data), result, expected)


def _broadcast(world: World, count: int) -> _Trial:
    data = _own(world, 0, count)
    expected = _own(world._replace(rank=0), 0, count)
    return _Trial(lambda: distributed.broadcast(data, 0), data, expected)


def _function(name: str, old_name: str) -> Callable[..., object]:
    """Return a function of torch's, which has been renamed."""
    found = getattr(distributed, name, None) or getattr(distributed, old_name)
    return cast("Callable[..., object]", found)


class Operation(NamedTuple):
    """A collective operation.

    Attributes:
        prepare: Gets the world and the number of elements.
        bus: busbw / algbw, by the number of ranks.
        is_split: Whether the elements are those of all ranks together.
    """

    prepare: Callable[[World, int], _Trial]
    bus: Callable[[int], float]
    is_split: bool


OPERATIONS = {
    "all_reduce": Operation(_all_reduce, lambda n: 2 * (n - 1) / n, is_split=False),
    "all_gather": Operation(_all_gather, lambda n: (n - 1) / n, is_split=True),
    "reduce_scatter": Operation(_reduce_scatter, lambda n: (n - 1) / n, is_split=True),
    "broadcast": Operation(_broadcast, lambda _: 1.0, is_split=False),
}


def counts(max_bytes: int, parts: int = 1) -> list[int]:
    """Return how many elements to take, from 8 bytes to the largest size.

    Args:
        max_bytes: The largest size.
        parts: They are divided into so many equal parts, of one element at least.
    """
    sizes = [max_bytes]
    size = _SMALLEST
    while size < max_bytes:
        sizes.append(size)
        size *= _STEP
    return sorted({max(size // _ELEMENT // parts, 1) * parts for size in sizes})


def measure(world: World, max_bytes: int) -> Iterator[Collective]:
    """Run all operations, and yield the same results on all ranks.

    Args:
        world: All its workers call this.
        max_bytes: The largest size.
    """
    for name, operation in OPERATIONS.items():
        for count in counts(max_bytes, world.size if operation.is_split else 1):
            try:
                wrong, time_s = _measure(world, operation.prepare(world, count))
            except RuntimeError as error:
                if not _MISSING.search(str(error)):
                    raise
                yield _result(name, world, count=0, time_s=0.0, wrong=-1)
                break
            yield _result(name, world, count, time_s, wrong)
            if time_s > _SLOW:
                break


def _result(
    name: str, world: World, count: int, time_s: float, wrong: int
) -> Collective:
    algbw = count * _ELEMENT / time_s if time_s else 0.0
    return {
        "operation": name,
        "scope": world.scope,
        "size": count * _ELEMENT,
        "count": count,
        "time_s": time_s,
        "algbw": algbw,
        "busbw": algbw * OPERATIONS[name].bus(world.size),
        "wrong": wrong,
    }


def _measure(world: World, trial: _Trial) -> tuple[int, float]:
    """Return the number of wrong elements, of all ranks, and the seconds of one run."""
    trial.run()  # the first one also opens connections
    wrong = count_wrong(trial.result, trial.expected)
    all_wrong = _of_all(world, wrong, distributed.ReduceOp.SUM)
    time_s = _slowest(world, trial, 1)
    repetitions = min(int(_LONG_ENOUGH / time_s), _MOST)
    if repetitions > 1:
        time_s = _slowest(world, trial, repetitions)
    return int(all_wrong), time_s


def count_wrong(result: torch.Tensor, expected: torch.Tensor) -> int:
    """Return how many elements are not what they should be."""
    return int((result != expected).sum())


def _slowest(world: World, trial: _Trial, repetitions: int) -> float:
    """Return the seconds of one run, on the rank that took the longest."""
    _synchronize(world)
    start = time.perf_counter()
    for _ in range(repetitions):
        trial.run()
    _synchronize(world)
    seconds = (time.perf_counter() - start) / repetitions
    return _of_all(world, seconds, distributed.ReduceOp.MAX)


def _synchronize(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _of_all(
    world: World, value: float, reduction: distributed.ReduceOp.RedOpType
) -> float:
    """Return what the values of all ranks give: the same number on each."""
    tensor = torch.tensor(value, dtype=torch.float64, device=world.device)
    distributed.all_reduce(tensor, reduction)
    return float(tensor)

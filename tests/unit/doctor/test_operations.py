"""What is measured of torch's collective operations, and how."""

from __future__ import annotations

import time

import pytest
import torch

from torchrun_hpc.doctor import operations
from torchrun_hpc.doctor.operations import OPERATIONS, Operation, World, counts
from torchrun_hpc.doctor.results import Collective
from torchrun_hpc.reporting.description import check_form

CPU = torch.device("cpu")


def world_of(size, rank=0):
    return World("", rank, size, CPU)


@pytest.mark.parametrize(
    ("max_bytes", "parts", "found"),
    [
        (8, 1, [2]),
        (1, 1, [1]),
        (32, 1, [2, 8]),
        (33, 1, [2, 8]),
        (100, 1, [2, 8, 25]),
        (2**20, 1, [2, 8, 32, 128, 512, 2048, 8192, 32768, 131072, 262144]),
        (128, 3, [3, 6, 30]),
        (128, 64, [64]),
        (1024, 64, [64, 128, 256]),
    ],
)
def test_the_counts_go_by_powers_of_four(max_bytes, parts, found):
    assert counts(max_bytes, parts) == found


@pytest.mark.parametrize(
    ("name", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("broadcast", 4, 1.0),
    ],
)
def test_the_bandwidths_are_those_of_nccl_tests(name, ranks, factor):
    row = operations._result(name, world_of(ranks), count=100, time_s=0.5, wrong=0)
    check_form(row, Collective)
    assert row["size"] == 400
    assert row["algbw"] == 800
    assert row["busbw"] == 800 * factor


@pytest.mark.parametrize(
    ("result", "wrong"),
    [
        ([1.0, 2.0, 3.0], 0),
        ([1.0, 2.0, 4.0], 1),
        ([0.0, 0.0, 0.0], 3),
        ([1.0, float("nan"), float("inf")], 2),
    ],
)
def test_wrong_elements_are_counted(result, wrong):
    expected = torch.tensor([1.0, 2.0, 3.0])
    assert operations.count_wrong(torch.tensor(result), expected) == wrong


@pytest.mark.parametrize("size", [1, 2, 3, 8, 251, 300])
@pytest.mark.parametrize("first", [0, 5, 31, 70])
def test_sums_are_exact(size, first):
    own = [operations._own(world_of(size, r), first, 100) for r in range(size)]
    total = torch.stack(own).double().sum(0)
    assert torch.equal(operations._sums(world_of(size), first, 100).double(), total)


def test_sums_of_many_ranks_are_exact():
    total = operations._sums(world_of(59_000), 0, 31)
    assert total.max() < 2**24


def test_ranks_and_positions_differ():
    first, second = (operations._own(world_of(8, rank), 0, 31) for rank in (0, 1))
    assert len(set(first.tolist())) == 31
    assert not (first == second).any()


class Runs:
    """An operation that counts how often it is run."""

    def __init__(self, seconds=0.0, error=None, wrong=0):
        self.number = 0
        self._seconds = seconds
        self._error = error
        self._wrong = wrong

    def prepare(self, _world, count):
        result = torch.zeros(count)
        expected = result.clone()
        expected[: self._wrong] = 1
        return operations._Trial(self.run, result, expected)

    def run(self):
        self.number += 1
        if self._error is not None:
            raise self._error
        time.sleep(self._seconds)


@pytest.fixture
def measured(monkeypatch):
    """Measure operations that are given, in a world of one worker."""
    monkeypatch.setattr(operations, "_of_all", lambda _world, value, _: value)

    def measure(max_bytes=8, **runs):
        table = {
            name: Operation(each.prepare, lambda _: 1.0, is_split=False)
            for name, each in runs.items()
        }
        monkeypatch.setattr(operations, "OPERATIONS", table)
        return list(operations.measure(world_of(1), max_bytes))

    return measure


@pytest.mark.parametrize(
    ("seconds", "number"),
    [
        (0.0, 1 + 1 + 20),
        (0.03, 1 + 1 + 3),
        (0.06, 1 + 1),  # the first one that is timed is all
    ],
)
def test_it_is_repeated_for_a_tenth_of_a_second(measured, seconds, number):
    runs = Runs(seconds)
    (row,) = measured(one=runs)
    assert runs.number == number
    assert row["time_s"] >= seconds


def test_what_is_wrong_is_reported(measured):
    rows = measured(max_bytes=32, one=Runs(wrong=2))
    assert [row["wrong"] for row in rows] == [2, 2]


def test_a_slow_operation_is_not_run_at_larger_sizes(measured, monkeypatch):
    monkeypatch.setattr(operations, "_SLOW", 0.05)
    rows = measured(max_bytes=2048, slow=Runs(0.06), fast=Runs())
    assert [(row["operation"], row["size"]) for row in rows] == [
        ("slow", 8),
        *(("fast", size) for size in (8, 32, 128, 512, 2048)),
    ]


MISSING = [
    "ProcessGroupGloo does not support reduce_scatter",
    "Backend gloo does not support _reduce_scatter_base",
    "no support for _allgather_base in Gloo process group",
]


@pytest.mark.parametrize("text", MISSING)
def test_an_operation_that_the_backend_does_not_have(measured, text):
    rows = measured(max_bytes=32, none=Runs(error=RuntimeError(text)), one=Runs())
    zeros = {"size": 0, "count": 0, "time_s": 0.0, "algbw": 0.0, "busbw": 0.0}
    assert rows[0] == {"operation": "none", "scope": "", "wrong": -1} | zeros
    check_form(rows[0], Collective)
    assert [row["operation"] for row in rows[1:]] == ["one", "one"]


@pytest.mark.parametrize(
    "text", ["Connection closed by peer", "CUDA error: operation not supported"]
)
def test_an_operation_that_fails(measured, text):
    with pytest.raises(RuntimeError, match=text):
        measured(one=Runs(error=RuntimeError(text)))


def test_all_four_are_there():
    assert [*OPERATIONS] == ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]

"""Torch's collective operations, and the compute test."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest
import torch

from torchrun_hpc import limits, wire
from torchrun_hpc.doctor import operations
from torchrun_hpc.doctor.operations import (
    OPERATIONS,
    Trial,
    World,
    counts,
    lateness,
    prepare,
)
from torchrun_hpc.doctor.results import Collective
from torchrun_hpc.host import procfs


def world_of(size, rank=0):
    return World("", rank, size, torch.device("cpu"))


def test_the_counts_go_by_powers_of_four():
    expected = {
        (1, 1): [1],
        (33, 1): [2, 8],
        (2**20, 1): [2, 8, 32, 128, 512, 2048, 8192, 32768, 131072, 262144],
        (128, 3): [3, 6, 30],
        (1024, 64): [64, 128, 256],
    }
    assert {each: counts(*each) for each in expected} == expected


def test_the_bandwidths_are_those_of_nccl_tests(monkeypatch):
    monkeypatch.setattr(operations, "_measure", lambda *_: (0, 0.5))
    factors = {"all_reduce": 1.5, "all_gather": 0.75, "reduce_scatter": 0.75}
    factors["broadcast"] = 1.0
    steps: list[str] = []
    rows = [*operations.measure(world_of(4), 400, steps.append)]
    largest = {row.operation: row for row in rows}
    for name, factor in factors.items():
        row = largest[name]
        assert wire.decode(Collective, wire.encode(row)) == row
        assert (row.size, row.count, row.algbw) == (400, 100, 800)
        assert row.busbw == 800 * factor, name
    assert steps == [f"{row.operation} of {row.size} B" for row in rows]


@pytest.mark.parametrize("size", [2, 3, 251, 300])
def test_what_is_expected(size):
    """The sums are exact, and no rank has the values of the next one."""
    trials = [prepare("all_reduce", world_of(size, r), 100) for r in range(size)]
    total = torch.stack([trial.result for trial in trials]).double().sum(0)
    assert torch.equal(trials[0].expected.double(), total)
    assert not (trials[0].result == trials[1].result).any()


def test_sums_of_many_ranks_are_exact():
    assert prepare("all_reduce", world_of(59_000), 31).expected.max() < 2**24


@pytest.fixture
def measured(monkeypatch):
    """Measure operations that are functions, in a world of one worker."""
    monkeypatch.setattr(operations, "_of_all", lambda _world, value, _: value)

    def measure(max_bytes=8, result=(1.0, 2.0), **runs):
        table = dict.fromkeys(runs, OPERATIONS["broadcast"])
        monkeypatch.setattr(operations, "OPERATIONS", table)
        tensors = torch.tensor(result), torch.tensor([1.0, 2.0])
        trials = {name: Trial(run, *tensors) for name, run in runs.items()}
        monkeypatch.setattr(operations, "prepare", lambda name, *_: trials[name])
        return list(operations.measure(world_of(1), max_bytes, lambda _: None))

    return measure


@pytest.mark.parametrize(
    ("seconds", "number"),
    [
        (1e-6, 1 + 1 + 20),
        (0.03, 1 + 1 + 3),
        (0.11, 1 + 1),  # the first one that is timed is all
    ],
)
def test_it_is_repeated_for_a_tenth_of_a_second(measured, seconds, number, monkeypatch):
    runs: list[int] = []
    clock = SimpleNamespace(perf_counter=lambda: len(runs) * seconds)
    monkeypatch.setattr(operations, "time", clock)
    (row,) = measured(one=lambda: runs.append(1))
    assert len(runs) == number
    assert row.time_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("result", "wrong"),
    [([1.0, 2.0], 0), ([1.0, 3.0], 1), ([float("nan"), float("inf")], 2)],
)
def test_wrong_elements_are_counted(measured, result, wrong):
    (row,) = measured(result=result, one=lambda: None)
    assert row.wrong == wrong


def test_a_slow_operation_is_not_run_at_larger_sizes(measured, monkeypatch):
    seconds: list[float] = []
    clock = SimpleNamespace(perf_counter=lambda: sum(seconds))
    monkeypatch.setattr(operations, "time", clock)
    monkeypatch.setattr(limits, "SLOW_OPERATION", 0.3)
    rows = measured(
        max_bytes=32,
        slow=lambda: seconds.append(0.35),
        fast=lambda: seconds.append(0.06),
    )
    found = [(row.operation, row.size) for row in rows]
    assert found == [("slow", 8), ("fast", 8), ("fast", 32)]


@pytest.mark.parametrize(
    "text",
    [
        "ProcessGroupGloo does not support reduce_scatter",
        "no support for _allgather_base in Gloo process group",
    ],
)
def test_an_operation_that_the_backend_does_not_have(measured, text):
    def fail():
        raise RuntimeError(text)

    rows = measured(max_bytes=32, none=fail, one=lambda: None)
    assert rows[0] == Collective("none", "", 0, 0, 0.0, 0.0, 0.0, -1)
    assert [row.operation for row in rows[1:]] == ["one", "one"]


def test_an_operation_that_fails(measured):
    def fail():
        raise RuntimeError("CUDA error: operation not supported")

    with pytest.raises(RuntimeError, match="CUDA error"):
        measured(one=fail)


@pytest.mark.parametrize(
    ("waits", "late"),
    [
        ([0.3, 0.0], [0, 0.3]),
        ([0.3, 0.0, 0.3], [0, 0.3, 0]),
        ([0.0, 0.1, 0.3, 0.4], [0.3, 0.2, 0, 0]),
        ([0.3, 0.3, 0.0, 0.0], [0, 0, 0.3, 0.3]),  # one of two nodes
        ([0.1, 0.1, 0.1], [0, 0, 0]),
    ],
)
def test_who_is_late(monkeypatch, waits, late):
    """Each waits three times; the third time all come at once."""

    def all_gather(tensors, own):
        for rank, tensor in enumerate(tensors):
            tensor.copy_(torch.tensor([waits[rank], waits[rank], 0.5]))
        assert torch.equal(tensors[len(found)], own)

    monkeypatch.setattr(operations.distributed, "all_gather", all_gather)
    found = []
    for rank, seconds in enumerate(waits):
        own = torch.tensor([seconds, seconds, 0.5]).tolist()
        found.append(lateness(world_of(len(waits), rank), own))
    assert found == pytest.approx(late)


CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Multiply small matrices."""
    monkeypatch.setattr(operations, "_MATRICES", {"cpu": (16, torch.float32)})


@pytest.fixture
def by_hand(monkeypatch):
    """Let a product take so many seconds; return all that were computed."""
    matmul, made = torch.matmul, []

    def take(seconds):
        def multiply(first, second):
            made.append(matmul(first, second))
            return made[-1]

        def process_time():
            return sum(seconds(number) for number in range(len(made)))

        monkeypatch.setattr(torch, "matmul", multiply)
        clock = SimpleNamespace(process_time=process_time, perf_counter=None)
        monkeypatch.setattr(operations, "time", clock)
        return made

    return take


@pytest.mark.parametrize(
    ("seconds", "number"), [(1.0, 1 + 5), (0.03, 1 + 5), (0.01, 1 + 10)]
)
def test_how_often(by_hand, seconds, number):
    made = by_hand(lambda _: seconds + 1e-9)
    flops, *_ = operations.multiply(CPU)
    assert len(made) == number
    assert flops == pytest.approx(2 * 16**3 / seconds)


def test_the_best_one_counts(by_hand):
    by_hand(lambda number: 0.5 if number == 3 else 2.0)
    assert operations.multiply(CPU)[0] == pytest.approx(2 * 16**3 / 0.5)


def test_what_comes_out(by_hand):
    made = by_hand(lambda _: 1.0)
    _, digest, norm, wrong = operations.multiply(CPU)
    assert all(torch.equal(each, made[0]) for each in made)
    assert norm == pytest.approx(float(made[0].double().norm()))
    assert 0 < norm < 16 * 16
    assert wrong == 0
    assert operations.multiply(CPU)[1:] == (digest, norm, wrong)
    assert len(digest) == 16


def test_one_wrong_bit(monkeypatch):
    monkeypatch.setattr(limits, "REPEAT_TIME", 0)
    digest = operations.multiply(CPU)[1]
    matmul = torch.matmul

    def multiply(first, second):
        found = matmul(first, second)
        found[3, 4] = found[3, 4].nextafter(found[0, 0])
        return found

    monkeypatch.setattr(torch, "matmul", multiply)
    assert operations.multiply(CPU)[1] != digest


def test_what_is_not_finite(monkeypatch):
    monkeypatch.setattr(limits, "REPEAT_TIME", 0)

    def multiply(first, _):
        found = first.clone()
        found[0, 0], found[3, 4] = float("nan"), float("-inf")
        return found

    monkeypatch.setattr(torch, "matmul", multiply)
    assert operations.multiply(CPU)[2:] == (0.0, 2)


X86 = """\
processor	: 0
vendor_id	: GenuineIntel
cpu family	: 6
model		: 143
model name	: Intel(R) Xeon(R) Platinum 8480+
cpu MHz		: 2000.000
cpu cores	: 56
"""
ARM = """\
processor	: 0
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x0
CPU part	: 0xd4f
"""
POWER = "processor	: 0\ncpu		: POWER9, altivec supported\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (X86 * 2, "Intel(R) Xeon(R) Platinum 8480+"),
        (ARM * 2, "0x41 0xd4f"),
        (POWER, "POWER9, altivec supported"),
        ("", "z16"),
        (None, "z16"),
    ],
)
def test_the_model(monkeypatch, text, expected):
    monkeypatch.setattr(procfs, "read", lambda _: text)
    monkeypatch.setattr(platform, "machine", lambda: "z16")
    assert operations.kind(CPU) == (expected, "float32")


def test_one_thread_multiplies(by_hand, monkeypatch):
    """Then there are as many as before."""
    monkeypatch.setattr(limits, "REPEAT_TIME", 0)
    before, numbers = torch.get_num_threads(), set()

    def second(_):
        numbers.add(torch.get_num_threads())
        return 1.0

    by_hand(second)
    operations.multiply(CPU)
    assert (numbers, torch.get_num_threads()) == ({1}, before)

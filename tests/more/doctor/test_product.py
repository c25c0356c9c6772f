"""The compute test: the same everywhere, and how fast it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from torchrun_hpc.doctor import product

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Multiply small matrices."""
    monkeypatch.setattr(product, "_MATRICES", {"cpu": (16, torch.float32)})


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

        monkeypatch.setattr(product.torch, "matmul", multiply)
        clock = SimpleNamespace(process_time=process_time, perf_counter=None)
        monkeypatch.setattr(product, "time", clock)
        return made

    return take


@pytest.mark.parametrize(
    ("seconds", "number"), [(1.0, 1 + 5), (0.03, 1 + 5), (0.01, 1 + 10)]
)
def test_how_often(by_hand, seconds, number):
    made = by_hand(lambda _: seconds + 1e-9)
    flops, *_ = product.multiply(CPU)
    assert len(made) == number
    assert flops == pytest.approx(2 * 16**3 / seconds)


def test_the_best_one_counts(by_hand):
    by_hand(lambda number: 0.5 if number == 3 else 2.0)
    assert product.multiply(CPU)[0] == pytest.approx(2 * 16**3 / 0.5)


def test_what_comes_out(by_hand):
    made = by_hand(lambda _: 1.0)
    _, digest, norm, wrong = product.multiply(CPU)
    assert all(torch.equal(each, made[0]) for each in made)
    assert norm == pytest.approx(float(made[0].double().norm()))
    assert 0 < norm < 16 * 16
    assert wrong == 0
    assert product.multiply(CPU)[1:] == (digest, norm, wrong)
    assert len(digest) == 16


def test_one_wrong_bit(monkeypatch):
    monkeypatch.setattr(product, "_LONG_ENOUGH", 0)
    digest = product.multiply(CPU)[1]
    matmul = torch.matmul

    def multiply(first, second):
        found = matmul(first, second)
        found[3, 4] = found[3, 4].nextafter(found[0, 0])
        return found

    monkeypatch.setattr(product.torch, "matmul", multiply)
    assert product.multiply(CPU)[1] != digest


def test_what_is_not_finite(monkeypatch):
    monkeypatch.setattr(product, "_LONG_ENOUGH", 0)

    def multiply(first, _):
        found = first.clone()
        found[0, 0], found[3, 4] = float("nan"), float("-inf")
        return found

    monkeypatch.setattr(product.torch, "matmul", multiply)
    assert product.multiply(CPU)[2:] == (0.0, 2)


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
    monkeypatch.setattr(product.procfs, "read", lambda _: text)
    monkeypatch.setattr(product.platform, "machine", lambda: "z16")
    assert product.kind(CPU) == (expected, "float32")


def test_one_thread_multiplies(by_hand, monkeypatch):
    """Then there are as many as before."""
    monkeypatch.setattr(product, "_LONG_ENOUGH", 0)
    before, seen = torch.get_num_threads(), set()
    by_hand(lambda _: seen.add(torch.get_num_threads()) or 1.0)
    product.multiply(CPU)
    assert (seen, torch.get_num_threads()) == ({1}, before)

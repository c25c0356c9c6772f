"""Names are wrapped, and put back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import SimpleNamespace

import pytest

from torchrun_hpc.agent import patches


class Agent:
    def greet(self, name):
        return [f"agent {name}"]


class Abstract(ABC):
    @abstractmethod
    def greet(self, name): ...


def double(number):
    return 2 * number


@pytest.fixture
def module():
    yield SimpleNamespace(double=double)
    patches.restore()


def test_a_wrapper_gets_the_original_first(module):
    patches.wrap(module, "double", lambda original, number: original(number) + 1)
    patches.wrap(module, "double", lambda original, number: original(number) * 10)
    assert module.double(3) == 70
    assert module.double.__name__ == "double"
    assert patches.takes(module, "double", "number")
    patches.restore()
    assert module.double is double


@pytest.mark.parametrize(
    ("owner", "name", "parameters", "expected"),
    [
        (Agent, "greet", ("self", "name"), True),
        (Agent, "greet", ("self",), False),
        (Agent, "leave", (), False),
        (type("Heir", (Agent,), {}), "greet", ("self", "name"), False),
        (Abstract, "greet", ("self", "name"), False),
    ],
)
def test_what_a_class_defines_itself(owner, name, parameters, expected):
    assert patches.takes(owner, name, *parameters) is expected

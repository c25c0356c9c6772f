"""Names are wrapped and extended, and put back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import SimpleNamespace

import pytest

from torchrun_hpc.agent.patches import replacing


class Agent:
    def greet(self, name):
        return [f"agent {name}"]


class Abstract(ABC):
    @abstractmethod
    def greet(self, name): ...


class Loud(Agent):
    def greet(self, name):
        return ["loud", *super().greet(name)]


class Quiet(Agent):
    def greet(self, name):
        return ["quiet", *super().greet(name)]


def double(number):
    return 2 * number


@pytest.fixture
def module():
    yield SimpleNamespace(Agent=Agent, double=double)
    replacing.restore()


def test_a_wrapper_gets_the_original_first(module):
    replacing.wrap(module, "double", lambda original, number: original(number) + 1)
    replacing.wrap(module, "double", lambda original, number: original(number) * 10)
    assert module.double(3) == 70
    assert module.double.__name__ == "double"
    assert replacing.takes(module, "double", "number")
    replacing.restore()
    assert module.double is double


def test_extensions_add_up_and_leave_the_class_alone(module):
    for extension in (Loud, Quiet):
        replacing.extend(module, "Agent", extension)
    extended = module.Agent
    assert extended().greet("x") == ["quiet", "loud", "agent x"]
    assert extended.__name__ == "Agent"
    assert Agent().greet("x") == ["agent x"]
    replacing.restore()
    assert module.Agent is Agent


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
    assert replacing.takes(owner, name, *parameters) is expected

"""The only place that writes ``os.environ``."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchrun_hpc.errors import Setting


def remove(name: str) -> None:
    """Remove a variable, if it is set."""
    os.environ.pop(name, None)


def update(settings: Mapping[str, Setting]) -> None:
    """Set variables."""
    os.environ.update({name: str(value.value) for name, value in settings.items()})


@contextlib.contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the duration of the context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)  # a module may have done so
            else:
                os.environ[name] = value


def drop_empty_options() -> dict[str, str]:
    """Remove the empty ``PET_*`` variables, and return them.

    Torch's parser takes an empty one as a value. Here it means unset.
    """
    names = [name for name in os.environ if name.startswith("PET_")]
    return {name: os.environ.pop(name) for name in names if not os.environ[name]}


@contextlib.contextmanager
def without_empty_options() -> Iterator[None]:
    """Remove the empty ``PET_*`` variables for the duration of the context."""
    empty = drop_empty_options()
    try:
        yield
    finally:
        os.environ.update(empty)

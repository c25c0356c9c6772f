"""Replacement of names in torch, and restoration of the originals."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MISSING = object()
_originals: list[tuple[Any, str, Any]] = []


def has(owner: Any, *names: str) -> bool:
    """Return whether a module or class itself defines these names.

    Abstract methods do not count: nobody would call the wrapped one.
    """
    found = [vars(owner).get(name, _MISSING) for name in names]
    return not any(
        value is _MISSING or getattr(value, "__isabstractmethod__", False)
        for value in found
    )


def takes(owner: Any, name: str, *parameters: str) -> bool:
    """Return whether an owner itself defines a function with these parameters."""
    return has(owner, name) and parameters == tuple(
        inspect.signature(vars(owner)[name]).parameters
    )


def replace(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute of a module or class."""
    _originals.append((owner, name, vars(owner)[name]))
    setattr(owner, name, value)


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by one that gets the original as its first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        return wrapper(original, *args, **options)

    replace(owner, name, wrapped)


def extend(owner: Any, name: str, extension: type) -> None:
    """Replace a class, where torch looks it up, by a subclass of the same name.

    The extension's methods come first. Their ``super()`` is the replaced class, so
    several extensions are possible.
    """
    base = getattr(owner, name)
    replace(owner, name, type(base.__name__, (extension, base), {}))


def restore() -> None:
    """Restore all originals, the last one first."""
    while _originals:
        owner, name, value = _originals.pop()
        setattr(owner, name, value)

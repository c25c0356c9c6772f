"""Putting something in the place of a name of torch, and putting the original back."""

from __future__ import annotations

from typing import Any

_originals: list[tuple[Any, str, Any]] = []


def has(owner: Any, *names: str) -> bool:
    """Say whether a module or class defines these names itself."""
    return all(name in vars(owner) for name in names)


def replace(owner: Any, name: str, value: Any) -> None:
    """Put a value in the place of an attribute of a module or class."""
    _originals.append((owner, name, vars(owner)[name]))
    setattr(owner, name, value)


def restore() -> None:
    """Put all originals back, the last one first."""
    while _originals:
        owner, name, value = _originals.pop()
        setattr(owner, name, value)

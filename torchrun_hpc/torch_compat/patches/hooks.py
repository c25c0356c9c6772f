"""What torch's agent asks of the launcher, once it is patched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Hooks:
    """Functions of the launcher.

    Attributes:
        forward: Delivers signals of this process to its workers, which it gets as local
            ranks and process numbers.
        fork: Starts a worker, which it gets as command line, environment, stdout and
            stderr, as a fork; returns ``None`` if it cannot.
    """

    forward: Callable[[Mapping[int, int]], None] = lambda _workers: None
    fork: Callable[..., Any] = lambda *_worker: None

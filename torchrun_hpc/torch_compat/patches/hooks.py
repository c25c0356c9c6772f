"""What the launcher does at the places of torch's agent that are patched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.failures.relay import Relay
    from torchrun_hpc.failures.watch import Watch
    from torchrun_hpc.rendezvous.handler import SchedulerRendezvous


@dataclass(frozen=True)
class Hooks:
    """What the patches call.

    Attributes:
        forward: Delivers signals of this process to its workers, which it gets as local
            ranks and process numbers.
        relay: Passes on what workers write to stderr.
        watch: Finds out which workers fail.
        fork: Starts a worker as a fork, of which it gets command line, environment,
            stdout and stderr; returns ``None`` if it cannot.
        rendezvous: What torch finds instead of its own; ``None`` if that stays.
    """

    forward: Callable[[Mapping[int, int]], None]
    relay: Relay
    watch: Watch
    fork: Callable[..., Any] = lambda *_: None
    rendezvous: SchedulerRendezvous | None = None

"""The launcher's hooks in the patched parts of torch's agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.agent.death_signals import DeathSignals
    from torchrun_hpc.failures.relay import Relay
    from torchrun_hpc.failures.watch import Watch
    from torchrun_hpc.rendezvous.handler import SchedulerRendezvous


@dataclass(frozen=True)
class Hooks:
    """The functions and objects that the patches call.

    Attributes:
        forward: Delivers signals to the workers, by local rank and process number.
        relay: Passes on the workers' stderr.
        watch: Finds out which workers fail.
        death_signals: Holds signals while workers are started or ended.
        fork: Forks a worker, from command line, environment, stdout and stderr; returns
            ``None`` if it cannot.
        rendezvous: What torch finds instead of its own; ``None`` to keep its own.
    """

    forward: Callable[[Mapping[int, int]], None]
    relay: Relay
    watch: Watch
    death_signals: DeathSignals
    fork: Callable[..., Any] = lambda *_: None
    rendezvous: SchedulerRendezvous | None = None

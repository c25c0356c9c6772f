"""The exceptions of a node that cannot take part, or no longer can."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrun_hpc.failures.failure import Failure
    from torchrun_hpc.rendezvous.protocol import Refusal


class CoordinatorNotFoundError(Exception):
    """No coordinator was found in time. The text names what was found instead."""


class RefusedError(Exception):
    """The coordinator refuses this agent."""

    def __init__(self, reason: Refusal, port: int) -> None:
        super().__init__(reason.value)
        self.reason = reason
        self.port = port


class JobFailedError(Exception):
    """The job has failed, here or on another node. This agent must stop its workers."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.kind.value)
        self.failure = failure


class RoundOverError(Exception):
    """The round ended before the workers could start. Join the next one."""


class NotNeededError(Exception):
    """The job has ended well, and this node has no workers."""

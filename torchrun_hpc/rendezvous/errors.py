"""The errors that end a search or a round; `messages` and `protocol` share them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrun_hpc.failures.failure import Failure


class Refused(Enum):
    """Why the coordinator refuses an agent."""

    VERSION = "version"  # of the protocol
    RUN_ID = "run_id"  # --rdzv-id
    NODES = "nodes"  # number of nodes
    TAKEN = "taken"  # another agent has its node rank
    SPARES = "spares"  # --hpc-spares
    STARTED = "started"  # another command started it
    UNPROVED = "unproved"  # one side has no proof; never sent


class CoordinatorNotFoundError(Exception):
    """No coordinator was found in time. For the arguments, see `messages.Looking`."""

    def __init__(self, problem: str, *, is_reached: bool = False) -> None:
        super().__init__(problem)
        self.is_reached = is_reached


class RefusedError(Exception):
    """The coordinator refuses this agent."""

    def __init__(self, reason: Refused, port: int) -> None:
        super().__init__(reason.value)
        self.reason = reason
        self.port = port


class JobFailedError(Exception):
    """The job has failed, on this or another node. The agent must stop its workers."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.kind.value)
        self.failure = failure


class RoundOverError(Exception):
    """The round ended before the workers could start. Join the next one."""


class NotNeededError(Exception):
    """The job has ended well, and this node has no workers."""

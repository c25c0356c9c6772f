"""The phases of a coordinator, and which may follow which."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """The event that a coordinator waits for."""

    STANDBY = "standby"  # this node may have to take over
    SEEK = "seek"  # too few nodes have joined; it looks for another coordinator
    GATHER = "gather"  # enough nodes have joined, but not all are ready
    CONFIRM = "confirm"  # the round is formed; the active nodes confirm it
    RUN = "run"  # workers run
    FINISHED = "finished"  # all active nodes have finished
    FAILED = "failed"  # the job has failed


# Without spares the first one is GATHER, and there is no SEEK, CONFIRM or STANDBY.
NEXT = {
    Phase.STANDBY: (Phase.SEEK,),
    Phase.SEEK: (Phase.GATHER, Phase.CONFIRM, Phase.FAILED, Phase.STANDBY),
    Phase.GATHER: (Phase.SEEK, Phase.CONFIRM, Phase.RUN, Phase.FAILED, Phase.STANDBY),
    Phase.CONFIRM: (Phase.GATHER, Phase.RUN, Phase.FAILED),
    Phase.RUN: (Phase.GATHER, Phase.FINISHED, Phase.FAILED),
    Phase.FINISHED: (),
    Phase.FAILED: (),
}

BETWEEN_ROUNDS = (Phase.SEEK, Phase.GATHER, Phase.CONFIRM)
ENDED = (Phase.FINISHED, Phase.FAILED)

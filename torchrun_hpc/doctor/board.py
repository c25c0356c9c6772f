"""Where the tasks of an examination meet, and what they tell each other there.

They meet in the coordinator of the job's own rendezvous, which keeps texts by key.

=====================  =============================================================
key                    what the tasks tell each other
=====================  =============================================================
``task/RANK``          what a task shows of itself, and of its node
``torch/RANK``         what torch is there
``members``            the nodes that are there, and how to reach them
``link/TURN/A/B``      what two nodes have measured
``measured/TURN/RANK`` a node is through with all pairs of this turn
``again/TURN``         the pairs to be looked at once more
``silent/NODE``        how many nodes have got no answer of this one
``progress``           a number that grows as long as anything goes on
``workers/RANK``       what its workers are to run
``worked/RANK``        what became of that
``failed``             how many tasks have found that it has failed
``end``                there is no more
=====================  =============================================================
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torchrun_hpc import wire
from torchrun_hpc.rendezvous import messages
from torchrun_hpc.rendezvous.connection import Connection
from torchrun_hpc.rendezvous.protocol import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torchrun_hpc.errors import Message
    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.rendezvous.client import Client

# Seconds of an examination: a coordinator on task 0 gives up nobody for being silent,
# because task 0 has a limit for each wait. Whoever is silent for so long at least is
# given up elsewhere: the coordinator by others, and task 0 by a coordinator.
_LONGEST = 3600
_SILENCE = 15

# Bytes: so the tasks meet also where packets of the size of the MTU are lost, and can
# say so.
_SEGMENT = 1000


class Board:
    """What the tasks tell each other. Each question may raise `JobFailedError`.

    Args:
        client: The connection to the coordinator.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def put(self, key: str, value: Any) -> None:
        """Set a value."""
        self._client.ask({"set": {key: wire.to_line(value).decode()}}, _LONGEST)

    def get(self, key: str) -> Any:
        """Wait for a value, and return it."""
        return wire.from_json(self._client.ask({"get": [key]}, _LONGEST)[0])

    def find(self, key: str) -> Any:
        """Return a value; ``None`` if there is none yet."""
        return self.get(key) if self.has(key) else None

    def has(self, *keys: str) -> bool:
        """Say whether all of these exist."""
        return bool(self._client.ask({"check": keys}, _LONGEST))

    def add(self, key: str, number: int = 1) -> int:
        """Add to a number, 0 at first, and return it."""
        return int(self._client.ask({"add": key, "by": number}, _LONGEST))


@contextlib.contextmanager
def met(
    meeting: Meeting,
    environ: Mapping[str, str],
    timeout: float,
    tell: Callable[[Message], None],
) -> Iterator[Board]:
    """Meet the others.

    Args:
        meeting: Where the tasks meet.
        environ: Environment of this process.
        timeout: Seconds to look for the coordinator.
        tell: Shows a person what is waited for.

    Raises:
        LaunchError: This task cannot take part.
        CoordinatorNotFoundError: The coordinator was not found in time.
        JobFailedError: The examination has ended elsewhere.
    """

    def show(event: Mapping[str, Any]) -> None:
        message = messages.render(event, meeting) if "looking" in event else None
        if message is not None:
            tell(message)

    settings = Settings(
        run_id="doctor",
        nodes=meeting.nodes,
        coordinator=meeting.coordinator or 0,
        max_restarts=0,
        join_timeout=_LONGEST,
        silence_timeout=_LONGEST
        if meeting.is_coordinator and meeting.node_rank == 0
        else max(_SILENCE, int(timeout)),
    )
    connection = Connection(meeting, settings, environ, show, segment=_SEGMENT)
    try:
        yield Board(connection.open(timeout))
    finally:
        connection.close()

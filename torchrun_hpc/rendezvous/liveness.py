"""The coordinator's signs of life, and what follows without them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torchrun_hpc.rendezvous.loop import now
from torchrun_hpc.rendezvous.members import SILENCE_REPORT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrun_hpc.rendezvous.search import Channel


class Silence:
    """Counts the seconds without a message. A suspended process does not age."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seconds = 0

    def begin(self) -> None:
        """Start again from 0."""
        self._seconds = 0

    @property
    def ended_after(self) -> int:
        """The seconds after which the connection was ended; 0 if it was not."""
        return self._limit if self._seconds >= self._limit else 0

    def tick(self, channel: Channel) -> Iterator[dict[str, Any]]:
        """Count one more second; yield events to report. Abort at the limit."""
        self._seconds += 1
        if channel.has_received:
            if self._seconds > SILENCE_REPORT:
                yield {"coordinator_answers": self._seconds}
            channel.has_received = False
            self._seconds = 0
        if self._seconds == SILENCE_REPORT:
            left = self._limit - SILENCE_REPORT
            yield {"coordinator_silent": SILENCE_REPORT, "left": left}
        if self._seconds >= self._limit:
            channel.abort()


class Lease:
    """The seconds for which workers may run without hearing from the coordinator."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._since = math.inf

    def begin(self) -> None:
        """Begin: a coordinator has just accepted this member."""
        self._since = now()

    def renew(self, sent: float) -> None:
        """Count from when this member sent an answer that has arrived."""
        self._since = max(self._since, min(sent, now()))

    def end(self) -> float | None:
        """End it if its time is up; return for how many seconds it has been."""
        late = now() - self._since - self.length
        if late < 0:
            return None
        self._since = math.inf
        return late

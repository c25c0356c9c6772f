"""A task of the doctor, which replies to the questions of task 0."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrun_hpc import wire
from torchrun_hpc.doctor import node, results
from torchrun_hpc.doctor.launch import Ended, Launch, Part
from torchrun_hpc.doctor.link import Links, Peer
from torchrun_hpc.doctor.results import Node  # noqa: TC001 - for wire.decode
from torchrun_hpc.host import network

if TYPE_CHECKING:
    from torchrun_hpc.doctor.place import Place, Wishes
    from torchrun_hpc.rendezvous.key import Key

# The questions.
SHOW, PEERS, MEASURE, END = "show", "peers", "measure", "end"
LAUNCH, STOP = "launch", "stop"

_AT_ONCE = 0.5  # seconds for a launcher whose user waits


@dataclass(frozen=True)
class Shown:
    """The reply of a task: its node's rank; and the node, from its first task."""

    node_rank: int
    node: Node | None = None


@dataclass(frozen=True)
class Turn:
    """Pairs that measure at the same time: a name, and each node's partner by rank."""

    name: str
    partners: Mapping[int, int]


class Member:
    """One task of the examination.

    Attributes:
        ended: Set after the last question.
        was_late: Whether it joined too late for all other questions.
        key: This node's key, set before the first question.
        replies: See `Connection`.
    """

    def __init__(self, here: Place, wishes: Wishes, environ: Mapping[str, str]) -> None:
        self.here = here
        self.wishes = wishes
        self.ended = threading.Event()
        self.was_late = False
        self.replies = {
            SHOW: self._show,
            PEERS: self._meet,
            MEASURE: self._measure,
            LAUNCH: self._run,
            STOP: self._stop,
            END: self._end,
        }
        self.key: Key
        self._environ = environ
        self._links: Links | None = None
        self._peers: dict[int, Peer] = {}
        self._launch: Launch | None = None

    def close(self) -> None:
        """End what this task has started."""
        if self._launch is not None:
            self._launch.end(_AT_ONCE)
        if self._links is not None:
            self._links.close()

    def look(self) -> Node:
        """Examine this node."""
        port = self._links.port if self._links else 0
        found = node.examine(self.here, port, network.this_node(), self._environ)
        return results.printable(found)

    def _show(self, _: object) -> Any:
        here, own = self.here, None
        if here.task.local_rank == 0:
            if here.meeting.nodes > 1:
                self._links = Links(self.key, here.address, here.meeting.nodes)
            own = self.look()
        return wire.encode(Shown(here.node_rank, own))

    def _meet(self, about: Any) -> Any:
        peers = wire.decode(tuple[Peer, ...], about)
        self._peers = {peer.rank: peer for peer in peers}
        return True

    def _measure(self, about: Any) -> Any:
        turn, rank = wire.decode(Turn, about), self.here.node_rank
        if self._links is None or rank not in turn.partners:
            return None
        own, other = self._peers[rank], self._peers[turn.partners[rank]]
        return wire.encode(self._links.measure(own, other, turn.name))

    def _run(self, about: Any) -> Any:
        part = wire.decode(Part, about)
        if self.here.task.rank not in part.tasks:
            return None
        arguments = [str(self.wishes.max_bytes), f"{self.wishes.limit:g}"]
        try:
            self._launch = Launch(self.here, part, arguments)
            end = self._launch.run(self.wishes.limit)
        except (OSError, ValueError) as error:  # no process, or a wrong line
            end = Ended(1, cause=f"{type(error).__name__}: {error}")
        return wire.encode(results.printable(end))

    def _stop(self, _: object) -> Any:
        if self._launch is not None:
            self._launch.end()

    def _end(self, missing: Any) -> Any:
        self.was_late = self.here.task.rank in wire.decode(tuple[int, ...], missing)
        self.ended.set()

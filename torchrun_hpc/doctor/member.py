"""What each task does: it answers the questions of task 0."""

from __future__ import annotations

import queue
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc import wire
from torchrun_hpc.doctor import node, results
from torchrun_hpc.doctor.launch import Launch, Part
from torchrun_hpc.doctor.link import Links, Peer
from torchrun_hpc.doctor.results import Node  # noqa: TC001 - for wire.decode
from torchrun_hpc.host import network
from torchrun_hpc.rendezvous import messages
from torchrun_hpc.rendezvous.errors import JobFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.doctor.place import Place, Wishes
    from torchrun_hpc.errors import Message
    from torchrun_hpc.rendezvous.client import Client
    from torchrun_hpc.rendezvous.key import Key

# The questions.
SHOW, PEERS, MEASURE, LAUNCH, END = "show", "peers", "measure", "launch", "end"

# Seconds for a launch to import torch, and to start; of torch's collectives, if the
# user has not passed more.
IMPORT_TIMEOUT = 120.0
_COLLECTIVES_TIMEOUT = 60.0

_POLL = 0.5  # seconds


@dataclass(frozen=True)
class TaskRecord:
    """What a task shows of itself.

    Attributes:
        rank: Its rank.
        node_rank: Rank of its node.
        workers: How many workers it would start, or be.
        host: Name of its node.
        address: Address of its node for the job; empty if it is not known.
        node: Its node, if it is the first task there.
    """

    rank: int
    node_rank: int
    workers: int
    host: str
    address: str
    node: Node | None = None


@dataclass(frozen=True)
class Turn:
    """Pairs that are measured at the same time.

    Attributes:
        name: Names this turn.
        pairs: Ranks of the two nodes of each.
        all_networks: Whether to try other interfaces, too.
    """

    name: str
    pairs: tuple[tuple[int, int], ...]
    all_networks: bool = False


class Member:
    """One task of the examination.

    Args:
        here: Where it is.
        wishes: What the user chose.
        environ: The environment of the job.
        tell: Shows a person what is waited for.

    Attributes:
        here: Where it is.
        wishes: What the user chose.
    """

    def __init__(
        self,
        here: Place,
        wishes: Wishes,
        environ: Mapping[str, str],
        tell: Callable[[Message], None],
    ) -> None:
        self.here = here
        self.wishes = wishes
        self._environ = environ
        self._tell = tell
        self._asked: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._links: Links | None = None
        self._peers: dict[int, Peer] = {}
        self._launch: Launch | None = None

    @property
    def launch_timeout(self) -> float:
        """Seconds for the collectives of a launch."""
        return max(_COLLECTIVES_TIMEOUT, self.wishes.timeout)

    def listen(self, key: Key) -> None:
        """Let the other nodes measure what is between them and this one."""
        if self.here.meeting.nodes > 1 and self.here.task.local_rank == 0:
            self._links = Links(key, self.here.address, self.here.meeting.nodes)

    def close(self) -> None:
        """End what this task has started."""
        if self._launch is not None:
            self._launch.end()
        if self._links is not None:
            self._links.close()

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take what the coordinator sends, or the search for it."""
        if "question" in event:
            self._asked.put(event)
        elif "looking" in event:
            message = messages.render(event, self.here.tasks_meeting)
            if message is not None:
                self._tell(message)

    def follow(self, client: Client) -> None:
        """Answer until there is no other question.

        Raises:
            JobFailedError: The examination has ended elsewhere.
        """
        while True:
            try:
                event = self._asked.get(timeout=_POLL)
            except queue.Empty:
                event = {}
            if client.failure is not None:
                raise JobFailedError(client.failure)
            if event.get("what") == END:
                return
            if event and self._asked.empty():  # otherwise, it has stopped meanwhile
                reply = self.answer(event["what"], event.get("with"))
                client.send({"reply": event["question"], "of": reply})

    def answer(self, what: str, about: Any) -> Any:
        """Return the reply to a question, as plain data."""
        if what == SHOW:
            return wire.encode(self.show())
        if what == PEERS:
            peers = wire.decode(tuple[Peer, ...], about)
            self._peers = {peer.rank: peer for peer in peers}
        elif what == MEASURE:
            return self._measure(wire.decode(Turn, about))
        elif what == LAUNCH:
            return self._run(wire.decode(Part, about))
        return None

    def show(self) -> TaskRecord:
        """Look at this task, and, if it is the first one there, at its node."""
        here, shown = self.here, None
        if here.task.local_rank == 0:
            fast = here.meeting.fast_hosts or (here.hostname,)
            following = fast[(here.node_rank + 1) % len(fast)]
            shown = node.examine(
                rank=here.node_rank,
                host=here.host,
                fast_host=here.fast_host,
                address=here.address,
                workers=here.workers * here.task.local_size,
                names=[
                    *dict.fromkeys(filter(None, (here.fast_host, fast[0], following)))
                ],
                network=network.this_node(),
                environ=self._environ,
            )
            port = self._links.port if self._links else 0
            wants_gpus = here.asked.nproc_per_node == "gpu"
            shown = replace(shown, port=port, wants_gpus=wants_gpus)
        rank, workers, address = here.task.rank, here.workers, here.address
        record = TaskRecord(rank, here.node_rank, workers, here.host, address, shown)
        return results.printable(record)  # names and values are whatever is set

    def _measure(self, turn: Turn) -> Any:
        """Measure the pair of this node, if it has one in this turn."""
        rank = self.here.node_rank
        others = [*{r for pair in turn.pairs for r in pair if rank in pair} - {rank}]
        if self._links is None or not others:
            return None
        own, other = self._peers[rank], self._peers[others[0]]
        seen = self._links.measure(
            own, other, turn.name, all_networks=turn.all_networks
        )
        return wire.encode(seen)

    def _run(self, part: Part) -> Any:
        """Run torch's collectives, if this task takes part."""
        if self.here.task.rank not in part.tasks:
            return None
        timeout = self.launch_timeout
        arguments = [str(self.wishes.max_bytes), f"{timeout:g}"]
        self._launch = Launch(self.here, part, arguments)
        return wire.encode(self._launch.run(IMPORT_TIMEOUT + timeout))

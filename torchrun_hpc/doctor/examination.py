"""The examination: all tasks of a step meet, and each replies to task 0."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc import limits, wire
from torchrun_hpc.doctor import node, summary
from torchrun_hpc.doctor.conductor import (
    END,
    LAUNCH,
    MEASURE,
    PEERS,
    SHOW,
    STOP,
    Conductor,
    Shown,
    Turn,
)
from torchrun_hpc.doctor.launch import LaunchEnd, LaunchPart, LaunchProcess
from torchrun_hpc.doctor.link import Links, Peer
from torchrun_hpc.doctor.results import NotMetError, printable
from torchrun_hpc.errors import Message
from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Kind
from torchrun_hpc.host import network
from torchrun_hpc.rendezvous import messages
from torchrun_hpc.rendezvous.client import Listener
from torchrun_hpc.rendezvous.connection import Connection, settings_of
from torchrun_hpc.rendezvous.errors import CoordinatorNotFoundError, JobFailedError
from torchrun_hpc.rendezvous.messages import Looking

if TYPE_CHECKING:
    from torchrun_hpc.doctor.output import Tell
    from torchrun_hpc.doctor.place import Place
    from torchrun_hpc.doctor.results import DoctorReport, NodeReport
    from torchrun_hpc.rendezvous.key import Key
    from torchrun_hpc.rendezvous.messages import News

# Bytes: so the tasks also meet if packets of the MTU's size are lost, and report it.
_SEGMENT = 1000


def examine(place: Place, tell: Tell) -> DoctorReport | None:
    """Examine the nodes of this step; see `torchrun_hpc.doctor.examine`."""
    meeting, timeout = place.tasks_meeting, place.wishes.timeout
    examinee = Examinee(place)

    def hear(news: News) -> None:
        if isinstance(news, Looking) and (message := news.words(meeting)):
            tell(message)

    conductor = Conductor(place, tell)  # keeps the start time
    longest = silence_timeout = limits.EXAMINATION_TIMEOUT
    if not (meeting.is_coordinator and place.is_first):
        silence_timeout = max(limits.DOCTOR_SILENCE_LIMIT, int(timeout))
    settings = settings_of(meeting, "doctor", silence_timeout)
    connection = Connection(
        meeting,
        replace(settings, join_timeout=longest),
        place.facts.environ,
        Listener(hear),
        segment=_SEGMENT,
        replies=examinee.replies,
    )
    examinee.key = connection.key
    try:
        client = connection.open(timeout)
        if place.is_first:
            return conductor.conduct(client)
        client.until(examinee.ended.is_set)
        if not examinee.was_late:
            return None
        why = _alone("the other nodes did not wait for this one")
    except (CoordinatorNotFoundError, JobFailedError, TimeoutError) as error:
        why = _why(error, place)
    finally:
        examinee.close()
        connection.close()
    records = summary.Records(nodes={place.node_rank: examinee.look()})
    raise NotMetError(why, summary.report(records, place))


def _why(error: Exception, place: Place) -> Message:
    meeting, timeout = place.tasks_meeting, place.wishes.timeout
    if isinstance(error, CoordinatorNotFoundError):
        return messages.coordinator_missing(error, timeout, meeting, "--timeout")
    if isinstance(error, JobFailedError) and error.failure.kind is not Kind.COORDINATOR:
        return report.failed(error.failure, meeting)
    return _alone(f"node {meeting.coordinator} stopped answering")


def _alone(why: str) -> Message:
    return Message("HPC198", f"{why}, so only this node was examined")


class Examinee:
    """One task of the examination.

    Attributes:
        ended: Set after the last question.
        was_late: Whether it joined too late for all other questions.
        key: This node's key, set before the first question.
        replies: See `Connection`.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.ended = threading.Event()
        self.was_late = False
        self.replies = {
            SHOW.name: self._show,
            PEERS.name: self._meet,
            MEASURE.name: self._measure,
            LAUNCH.name: self._run,
            STOP: self._stop,
            END: self._end,
        }
        self.key: Key
        self._links: Links | None = None
        self._peers: dict[int, Peer] = {}
        self._launch: LaunchProcess | None = None

    def close(self) -> None:
        """End what this task has started."""
        if self._launch is not None:
            self._launch.end(limits.LAUNCH_ABORT_TIMEOUT)
        if self._links is not None:
            self._links.stop()

    def look(self) -> NodeReport:
        """Examine this node."""
        port = self._links.port if self._links else 0
        return printable(node.examine(self.place, port, network.this_node()))

    def _show(self, _: object) -> Any:
        place = self.place
        if place.task.local_rank > 0:
            return wire.encode(Shown(place.node_rank))
        if place.meeting.nodes > 1:
            self._links = Links(self.key, place.address, place.meeting.nodes)
        return wire.encode(Shown(place.node_rank, self.look()))

    def _meet(self, about: Any) -> Any:
        peers = wire.decode(tuple[Peer, ...], about)
        self._peers = {peer.rank: peer for peer in peers}
        return True

    def _measure(self, about: Any) -> Any:
        turn, rank = wire.decode(Turn, about), self.place.node_rank
        if self._links is None or rank not in turn.partners:
            return None
        other = self._peers[turn.partners[rank]]
        return wire.encode(self._links.measure(self._peers[rank], other, turn.name))

    def _run(self, about: Any) -> Any:
        part = wire.decode(LaunchPart, about)
        if self.place.task.rank not in part.tasks:
            return None
        try:
            self._launch = LaunchProcess(self.place, part)
            end = self._launch.run(self.place.wishes.limit)
        except (OSError, ValueError) as error:  # no process, or a wrong line
            end = LaunchEnd(1, cause=f"{type(error).__name__}: {error}")
        return wire.encode(printable(end))

    def _stop(self, _: object) -> Any:
        if self._launch is not None:
            self._launch.end()

    def _end(self, missing: Any) -> Any:
        self.was_late = self.place.task.rank in wire.decode(tuple[int, ...], missing)
        self.ended.set()

"""What the agents of a job say to each other: lines of JSON, of limited length.

An agent says hello, and is welcomed or refused; then either side speaks whenever it
has something to say. Nothing in a message is ever run or unpickled.

==================================  ====================================================
from an agent to the head            meaning
==================================  ====================================================
``hello`` and the fields of `JoinRequest` the first line of a connection
``join: ROUND``                     ready for the next round; ``store`` from node 0 only
``died: FAILURE``                   a worker has ended with an error
``failed: FAILURE``                 this agent gives up
``done: ROUND``                     all workers of this node have finished
``read: true``                      the failure has arrived here
``bye: true``                       this agent leaves, as it should
``beat: true``                      the answer to ``beat``
``ask: NUMBER``                     ``set``, ``add``, ``get`` or ``check`` of the store
==================================  ====================================================

==================================  ====================================================
from the head to an agent            meaning
==================================  ====================================================
``welcome: VERSION``                with the job's identity and the next ``round``
``refused: REASON``                 see `Refusal`
``go: ROUND``                       all have joined; where the workers meet
``over: ROUND``                     join the next one
``finished: ROUND``                 all nodes are done
``failed: FAILURE``                 the job has failed, why, and who was first
``waiting``, ``silent``, ``lost``,  for the node that speaks to the user
``finishing``, ``restart``,
``answering``, ``sites``
``beat: true``                      are you there?
``answer: NUMBER``                  to an ``ask``
==================================  ====================================================
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = 1

# Bytes. The longest line is node 0's, with the ranks of all nodes' workers.
JOIN_REQUEST_LIMIT = 4096
LINE_LIMIT = 16 * 2**20

_TEXT_LIMIT = 500


class ProtocolError(Exception):
    """The other side does not speak this protocol, or says what it must not."""


class Refusal(Enum):
    """Why an agent is not let in."""

    STRANGER = "stranger"  # of another job
    VERSION = "version"  # of the protocol
    RUN_ID = "run_id"  # --rdzv-id
    NODES = "nodes"  # number of nodes
    TAKEN = "taken"  # another agent has its node rank


class Kind(Enum):
    """How a job fails."""

    WORKER = "worker"  # a worker ended with an error, for good
    SIGNAL = "signal"  # an agent was told to end
    AGENT = "agent"  # an agent cannot go on
    LOST = "lost"  # an agent is gone without a word
    SILENT = "silent"  # an agent does not answer
    MISSING = "missing"  # nodes were not there in time
    REFUSED = "refused"  # an agent of this job was not let in
    HEAD = "head"  # the head is gone, or silent


@dataclass(frozen=True)
class JoinRequest:
    """Who an agent is.

    Attributes:
        job: The launch's identity, as the scheduler gives it.
        run_id: Torch's rendezvous id: the same, or typed.
        nodes: Number of nodes.
        rank: Its node rank.
        host: Its node's name.
        pid: Its process.
        release: Of torchrun_hpc.
        site: Name of the computing centre whose rules it uses; empty without.
    """

    job: str
    run_id: str
    nodes: int
    rank: int
    host: str
    pid: int
    release: str
    site: str = ""


@dataclass(frozen=True)
class Failure:
    """Why a job failed.

    Attributes:
        kind: How.
        nodes: Ranks of the nodes that it is about.
        rank: Of a worker, its global rank.
        code: Exit code of a worker (negative: the signal that killed it); number of
            the signal that an agent got; seconds that were waited.
        text: More about it, in one line.
        finished: How many nodes had finished, so that there was no restart.
    """

    kind: Kind
    nodes: tuple[int, ...] = ()
    rank: int = -1
    code: int = 0
    text: str = ""
    finished: int = 0


def packed(failure: Failure) -> dict[str, Any]:
    """Write a failure as plain data."""
    text = "".join(c if c.isprintable() else " " for c in failure.text)
    return {**asdict(failure), "kind": failure.kind.value, "text": text[:_TEXT_LIMIT]}


def unpacked(value: Any) -> Failure:
    """Read a failure.

    Raises:
        ProtocolError: It is none.
    """
    try:
        failure = Failure(
            kind=Kind(value["kind"]),
            nodes=tuple(value["nodes"]),
            rank=value["rank"],
            code=value["code"],
            text=value["text"],
            finished=value["finished"],
        )
    except (KeyError, TypeError, ValueError):
        raise ProtocolError("not a failure") from None
    numbers = (*failure.nodes, failure.rank, failure.code, failure.finished)
    if not all(type(number) is int for number in numbers):
        raise ProtocolError("not a failure")
    if not isinstance(failure.text, str) or not failure.text.isprintable():
        raise ProtocolError("not a failure")
    return failure


def hello(message: Mapping[str, Any]) -> JoinRequest:
    """Read the fields of a first line.

    Raises:
        ProtocolError: It is none.
    """
    try:
        said = JoinRequest(
            **{field.name: message[field.name] for field in fields(JoinRequest)}
        )
    except KeyError:
        raise ProtocolError("not a hello") from None
    texts, numbers = (
        (said.job, said.run_id, said.host, said.release, said.site),
        (said.nodes, said.rank, said.pid),
    )
    if not all(isinstance(text, str) for text in texts) or not all(
        type(number) is int for number in numbers
    ):
        raise ProtocolError("not a hello")
    return said


def encode(message: Mapping[str, Any]) -> bytes:
    """Write a message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Lines:
    """Cuts what arrives into messages.

    Args:
        limit: The longest line, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that are complete.

        Raises:
            ProtocolError: A line is too long, or no message.
        """
        self._rest += data
        *complete, rest = self._rest.split(b"\n")
        if any(len(line) > self.limit for line in (*complete, rest)):
            raise ProtocolError(f"a line of more than {self.limit} bytes")
        self._rest = rest
        return [_decode(line) for line in complete]


def _decode(line: bytearray) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise ProtocolError("not JSON") from None
    if not isinstance(message, dict):
        raise ProtocolError("not an object")
    return message

"""The messages between agents and coordinator: lines of JSON, of limited length.

An agent's first line says who it is, and is answered by ``welcome``, ``refused`` or
``failed``. After that, each side sends a message whenever there is something to send.
Nothing in a message is ever run or unpickled.

============================  ==========================================================
from an agent                 meaning
============================  ==========================================================
``protocol: VERSION``         first line of a connection, with all of `JoinRequest`
``join: ROUND``               it is ready for this round; node 0 adds the ``store`` of
                              the workers
``died: WORKER FAILURE``      one of its workers has ended with an error, in ``round``
``failed: FAILURE``           it gives up
``done: ROUND``               all workers of its node have finished this round
``read: true``                it has received the failure
``report: true``              node 0 wants to report the failures of workers
``printed: true``             it has done so
``stacks: NUMBER``            it asks all agents for the stacks of their workers
``sampled: [RANK, NUMBER]``   the answer, ``of`` its workers, for the node that asks
``bye: true``                 it closes the connection; that is no fault
``heartbeat: SECONDS``        the answer to ``heartbeat``: with spares, its clock;
                              otherwise ``true``
``ask: NUMBER``               ``set``, ``add``, ``get`` or ``check`` of the store that
                              torch's agents share
============================  ==========================================================

============================  ==========================================================
from the coordinator          meaning
============================  ==========================================================
``welcome: VERSION``          the agent is accepted; with ``job`` and the next ``round``
``refused: REASON``           it is not, see `Refusal`, and hears no more than that; the
                              connection is closed
``go: ROUND``                 all nodes have joined this round; with the ``store``
``over: ROUND``               this round has ended; join the next one
``finished: ROUND``           all nodes have finished
``failed: FAILURE``           the job has failed, and this was the first failure; with
                              ``reports`` for the node that reports it
``report: SUMMARY``           the failures of workers; nothing if none has failed
``printed: true``             node 0 has reported them
``stacks: [RANK, NUMBER]``    an agent asks for the stacks of the workers
``sampled: NUMBER``           the answer of a ``node``
``heartbeat: SECONDS``        to be answered by ``heartbeat``; what the last answer said
``answer: NUMBER``            the answer to ``ask``
``waiting``, ``finishing``,   for the user, on the node that reports: see
``silent``, ``answering``,    `messages.render`
``lost``, ``restart``,
``sites``, ``stranger``
============================  ==========================================================
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from torchrun_hpc.failures.collection import Summary, WorkerFailure
from torchrun_hpc.reporting.console import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = 5

# Bytes. The longest line is node 0's, with the ranks of all nodes' workers.
JOIN_REQUEST_LIMIT = 4096
LINE_LIMIT = 16 * 2**20

_DIGITS = 20  # of 64 bits, with the sign
_TEXT_LIMIT = 500
_LINES = 50
_WORKERS, _CODES = 2**24, 2**32  # at most
_LATEST = 2**36  # seconds since 1970, of a failure
_TEXTS = ("cause", "log", "unread")  # of how a worker failed


class ProtocolError(Exception):
    """What was received does not follow the protocol."""


class Refusal(Enum):
    """Why the coordinator refuses an agent."""

    UNKNOWN = "unknown"  # it is of another job
    VERSION = "version"  # of the protocol
    RUN_ID = "run_id"  # --rdzv-id
    NODES = "nodes"  # number of nodes
    TAKEN = "taken"  # another agent has its node rank
    SPARES = "spares"  # --hpc-spares
    STARTED = "started"  # it was started by another command


class Kind(Enum):
    """How a job fails."""

    WORKER = "worker"  # a worker ended with an error, and no restart is left
    SIGNAL = "signal"  # an agent received a signal
    AGENT = "agent"  # an agent cannot go on
    LOST = "lost"  # an agent's connection ended without ``bye``
    SILENT = "silent"  # an agent does not answer
    MISSING = "missing"  # nodes did not join in time
    REFUSED = "refused"  # an agent of this job was refused
    UNFIT = "unfit"  # a node is out, by its health check or by its failures
    COORDINATOR = "coordinator"  # the connection to it ended, or it does not answer


@dataclass(frozen=True)
class JoinRequest:
    """Who an agent is.

    Attributes:
        job: The launch id.
        run_id: Torch's rendezvous id: the same, or what the user set.
        nodes: Number of nodes.
        rank: Its node rank.
        host: Its node's name, to be shown.
        pid: Its process id, for messages. It identifies no process: two containers on
            one host may use the same one.
        release: Of torchrun_hpc.
        agent: A random number in hexadecimal, and the process id. It identifies the
            process. The coordinator sends it to nobody.
        site: Name of the computing centre whose rules it uses; empty without.
        spares: How many of the nodes wait to take the place of another one.
        started: The command, in short, with a digest of all of it, if the launch id
            does not tell two launches apart; otherwise empty.
    """

    job: str
    run_id: str
    nodes: int
    rank: int
    host: str
    pid: int
    release: str
    agent: str
    site: str = ""
    spares: int = 0
    started: str = ""


@dataclass(frozen=True)
class Failure:
    """Why a job failed.

    Attributes:
        kind: How.
        nodes: Ranks of the nodes that it is about.
        rank: Of a worker, its global rank.
        code: Exit code of a worker (negative: the signal that killed it); number of
            the signal that an agent received; seconds that were waited.
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
    text = printable(failure.text, _TEXT_LIMIT)
    return {**asdict(failure), "kind": failure.kind.value, "text": text}


def unpacked(value: Any) -> Failure:
    """Read a failure.

    Raises:
        ProtocolError: It is none.
    """
    try:
        values = {field.name: value[field.name] for field in fields(Failure)}
        values |= {"kind": Kind(values["kind"]), "nodes": tuple(values["nodes"])}
        failure = Failure(**values)
    except (KeyError, TypeError, ValueError):
        raise ProtocolError("not a failure") from None
    numbers = (*failure.nodes, failure.rank, failure.code, failure.finished)
    _check("not a failure", int, *numbers)
    _check("not a failure", str, failure.text)
    return failure


def failure_of(worker: WorkerFailure) -> Failure:
    """Return how a job failed, of which this worker was the first."""
    nodes, code = (worker.node,), worker.code
    return Failure(Kind.WORKER, nodes, worker.rank, code, worker.cause)


def packed_worker(failure: WorkerFailure) -> dict[str, Any]:
    """Write how a worker failed as plain data."""
    texts = {name: printable(getattr(failure, name), _TEXT_LIMIT) for name in _TEXTS}
    lines = [printable(line, _TEXT_LIMIT) for line in failure.lines]
    return {**asdict(failure), **texts, "lines": lines}


def unpacked_worker(value: Any) -> WorkerFailure:
    """Read how a worker failed.

    Raises:
        ProtocolError: It is not that.
    """
    what = "not a failure of a worker"
    try:
        values = {field.name: value[field.name] for field in fields(WorkerFailure)}
        _check(what, list, values["lines"])
        failure = WorkerFailure(**{**values, "lines": tuple(values["lines"])})
        is_time = type(failure.time) is not bool and 0 <= failure.time < _LATEST
        is_small = len(failure.lines) <= _LINES and all(
            len(text) <= _TEXT_LIMIT for text in (failure.cause, *failure.lines)
        )
    except (KeyError, TypeError):
        raise ProtocolError(what) from None
    numbers = (failure.rank, failure.size, failure.node, failure.local_rank)
    _check(what, int, *numbers, failure.code)
    _check(what, str, *(values[name] for name in _TEXTS), *failure.lines)
    if not (is_time and is_small):
        raise ProtocolError("not a time, or too much text")
    if not 0 <= failure.rank < failure.size <= _WORKERS or abs(failure.code) > _CODES:
        raise ProtocolError("not a rank, or not an exit code")
    return failure


def packed_summary(summary: Summary | None) -> dict[str, Any] | None:
    """Write the failures of workers as plain data."""
    if summary is None:
        return None
    return {**asdict(summary), "first": packed_worker(summary.first)}


def unpacked_summary(value: Any) -> Summary | None:
    """Read the failures of workers, as the coordinator has written them.

    Raises:
        ProtocolError: It is not that.
    """
    if value is None:
        return None
    what = "not a summary"
    try:
        first, alike = unpacked_worker(value["first"]), tuple(value["alike"])
        others = tuple((cause, tuple(ranks)) for cause, ranks in value["others"])
        unlisted = value["unlisted"]
    except (KeyError, TypeError, ValueError):
        raise ProtocolError(what) from None
    ranks = (rank for _, group in others for rank in group)
    _check(what, int, unlisted, *alike, *ranks)
    _check(what, str, *(cause for cause, _ in others))
    return Summary(first, alike, others, unlisted)


def _check(what: str, kind: type, *values: Any) -> None:
    """See that values are of a type, and texts printable.

    Raises:
        ProtocolError: They are not; it says what.
    """
    if not _are(kind, *values):
        raise ProtocolError(what)
    if kind is str and not all(map(str.isprintable, values)):
        raise ProtocolError(what)


def join_request(message: Mapping[str, Any]) -> JoinRequest:
    """Read the first line of a connection.

    Raises:
        ProtocolError: Something is missing, or of another type, or no node rank.
    """
    values: Any = {field.name: message.get(field.name) for field in fields(JoinRequest)}
    request = JoinRequest(**values)
    numbers = (request.nodes, request.rank, request.pid, request.spares)
    texts = (request.job, request.run_id, request.host, request.release, request.site)
    more = request.agent, request.started
    is_right = _are(int, *numbers) and _are(str, *texts, *more)
    if not (is_right and 0 <= request.rank < request.nodes):
        raise ProtocolError("not a join request")
    return request


def _are(kind: type, *values: Any) -> bool:
    return all(type(value) is kind for value in values)  # True is no number here


def encode(message: Mapping[str, Any]) -> bytes:
    """Write a message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _integer(text: str) -> int:
    """Read an integer of limited size.

    Python reads 4,300 digits, but does not write a sum that has more.

    Raises:
        ValueError: It has too many digits.
    """
    if len(text) > _DIGITS:
        raise ValueError
    return int(text)


class Lines:
    """Splits received bytes into messages.

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
        first, *others = data.split(b"\n")
        self._rest += first  # it has no end of a line: no byte is looked at twice
        *complete, self._rest = [self._rest, *map(bytearray, others)]
        if any(len(line) > self.limit for line in (*complete, self._rest)):
            raise ProtocolError(f"a line of more than {self.limit} bytes")
        try:
            messages = [json.loads(line, parse_int=_integer) for line in complete]
        except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
            raise ProtocolError("not JSON") from None
        if not all(isinstance(message, dict) for message in messages):
            raise ProtocolError("not an object")
        return messages

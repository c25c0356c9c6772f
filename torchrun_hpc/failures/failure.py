"""The record of a failure of a job or a worker, and all failures of a round."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated

from torchrun_hpc.wire import WireError, short_text

_SHELL = 128  # a shell adds this to the number of a signal

# Limits of what other nodes may send.
ShortText = Annotated[str, short_text(500)]
_LINES = 50
_WORKERS, _CODES = 2**24, 2**32  # at most
_LATEST = 2**36  # seconds since 1970

# Errors of a worker that has lost a peer: from gloo, NCCL, and torch's stores.
_FOLLOWS = re.compile(
    r"connection (was )?(closed|reset|refused)|peer closed|broken pipe"
    r"|failed to recv|(recv|send)\w+ failed|failed to connect to any network address"
    r"|connectFullMesh|remote process exited|unhandled system error|ncclRemoteError"
    r"|ncclSystemError|communicator was aborted|connect timeout"
    r"|client socket has timed out|successfully reached monitoredBarrier",
    re.IGNORECASE,
)
# Errors of a collective, or of a store: another rank may be the reason. From gloo's
# transport/tcp (also without a time-out), ProcessGroupNCCL.cpp, ProcessGroupGloo.cpp,
# and the stores' time-outs since torch 2.0.
_COLLECTIVE = re.compile(
    r"Timed out (waiting \d+ms for|initializing process group|after \d+ seconds wait)"
    r"|Application timeout caused pair closure"
    r"|Connection closed by peer \[|Read error \[.*: Connection reset by peer"
    r"|op\.preamble\.length"
    r"|Watchdog caught collective operation timeout|monitoredBarrier"
    r"|wait timeout after \d+ms|Timeout waiting for key|Socket Timeout"
)
# Python's exit code after any exception, and after an abort in C++.
_VAGUE = (1, -signal.SIGABRT, _SHELL + signal.SIGABRT)
# Parts that differ between equal failures.
_VARIES = re.compile(r"0x[0-9a-f]+|\d+")
_ADDRESS = re.compile(r" \[?[0-9a-f]*[:.][0-9a-f:.%\w]*\]?:\d+")  # gloo: [::1]:1234


class Kind(Enum):
    """How a job fails."""

    WORKER = "worker"  # a worker ended with an error, and no restart is left
    SIGNAL = "signal"  # an agent received a signal
    AGENT = "agent"  # an agent cannot continue
    LOST = "lost"  # an agent's connection ended without `Bye`
    SILENT = "silent"  # an agent does not answer
    MISSING = "missing"  # nodes did not join in time
    REFUSED = "refused"  # an agent of this job was refused
    EXCLUDED = "excluded"  # a node, for its health check or its failures
    COORDINATOR = "coordinator"  # its connection ended, or it does not answer


@dataclass(frozen=True)
class WorkerPart:
    """The part of a failure that describes a worker."""

    rank: int
    size: int = 0  # number of all workers; 0 if unknown
    local_rank: int = -1  # -1 if unknown
    lines: tuple[ShortText, ...] = ()  # the traceback, or what it wrote last
    log: ShortText = ""  # the file with its whole stderr; empty without one
    unread: ShortText = ""  # why its stderr was not read; empty if it was

    def check(self) -> None:
        """Raise ``ValueError`` if no other node can have sent this."""
        size = self.size or _WORKERS
        if len(self.lines) > _LINES or not 0 <= self.rank < size <= _WORKERS:
            raise ValueError("too many lines, or not a rank")


@dataclass(frozen=True)
class Failure:
    """How a job, or one of its workers, has failed.

    ``code`` is a worker's exit code (negative: the signal that killed it), an agent's
    signal number, or the seconds of a wait.
    """

    kind: Kind
    nodes: tuple[int, ...] = ()  # ranks of the nodes where it happened
    code: int = 0
    text: ShortText = ""  # the cause, in one line; empty if unknown
    finished: int = 0  # how many nodes had finished, which prevented a restart
    time: float = 0.0  # seconds since 1970; 0 from the coordinator, which has no clock
    worker: WorkerPart | None = None
    absent: ShortText = ""  # which ranks did not come to a collective; empty if unknown

    def check(self) -> None:
        """Raise ``ValueError`` if no other node can have sent this."""
        if not 0 <= self.time < _LATEST or abs(self.code) > _CODES:
            raise ValueError("not a time, or not a code")

    @property
    def rank(self) -> int:
        """Global rank of the worker; -1 if it is not about a worker."""
        return -1 if self.worker is None else self.worker.rank

    @property
    def brief(self) -> Failure:
        """This failure without the worker's lines, for nodes that do not report it."""
        return replace(self, worker=self.worker and replace(self.worker, lines=()))

    @property
    def is_doubtful(self) -> bool:
        """Whether another worker may be why the job has failed.

        This one was stopped, has lost a peer, or does not say why it ended.
        """
        part = self.worker
        if part is None or part.size == 1 or self.absent:
            return False
        is_silent = part.unread and not self.text and self.code in _VAGUE
        has_lost_peer = self.is_hang or _FOLLOWS.search(self.text)
        return bool(self.was_stopped or is_silent or has_lost_peer)

    @property
    def is_hang(self) -> bool:
        """Whether a collective failed because of another rank, perhaps a hung one."""
        return self.kind is Kind.WORKER and is_of_collective(self.text)

    @property
    def was_stopped(self) -> bool:
        """Whether torch's agent may have ended it, because another worker has failed.

        The agent sends SIGTERM, and a worker that dies of it writes nothing.
        """
        return signal_of(self.code) == signal.SIGTERM and not self.text

    @property
    def signature(self) -> tuple[int, str]:
        """The parts that are the same in equal failures."""
        return (0 if self.text else self.code), _VARIES.sub("#", self.plain)

    @property
    def plain(self) -> str:
        """The cause without addresses."""
        return _ADDRESS.sub("", self.text)


def is_consequence(error: str) -> bool:
    """Return whether torch's error says that another worker was lost or is late."""
    return is_of_collective(error) or bool(_FOLLOWS.search(error))


def is_of_collective(error: str) -> bool:
    """Return whether this is an error of a collective, or of a store."""
    return bool(_COLLECTIVE.search(error))


def ending(code: int) -> str:
    """Describe how a worker ended: its exit code, or its signal if that is negative."""
    how = f"was killed by {signal_name(-code)}"
    if code >= 0:
        how = f"ended with exit code {code}"
    is_killed = signal_of(code) == signal.SIGKILL
    return how + (": probably out of memory" if is_killed else "")


def signal_of(code: int) -> int:
    """Return the signal in an exit code: negative, or 128 plus it; 0 without one."""
    is_of_shell = _SHELL < code < _SHELL + signal.NSIG
    return code - _SHELL if is_of_shell else max(-code, 0)


def signal_name(number: int) -> str:
    """Return a signal's name and number, if it has a name."""
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"


# --- all failures of a round ----------------------------------------------------------

_CAUSES = 5  # that a report lists
_LONGEST = 150  # characters of a cause


@dataclass(frozen=True)
class Summary:
    """The content of a report."""

    first: Failure
    same_as_first: tuple[int, ...] = ()  # ranks of workers with the same failure
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()  # other causes, with ranks
    unlisted: int = 0  # number of workers that failed in yet other ways


class Collection:
    """The failures of one round."""

    def __init__(self) -> None:
        self._failures: dict[int, Failure] = {}

    def add(self, failure: Failure) -> None:
        """Add a failure; only the first one of a worker counts."""
        if failure.worker is None:
            raise WireError("not a worker's failure")
        self._failures.setdefault(failure.rank, failure)

    def clear(self) -> None:
        """Begin another round."""
        self._failures.clear()

    def summary(self) -> Summary | None:
        """Return what to report; ``None`` if nothing has failed."""
        if not self._failures:
            return None
        # In order of arrival, but possible consequences of other failures come last.
        first, *rest = sorted(self._failures.values(), key=lambda f: f.is_doubtful)
        others: dict[tuple[int, str], list[Failure]] = {}
        for failure in rest:
            others.setdefault(failure.signature, []).append(failure)
        same = others.pop(first.signature, [])
        groups = sorted(others.values(), key=len, reverse=True)
        return Summary(
            first,
            _ranks(same),
            tuple((_cause(group), _ranks(group)) for group in groups[:_CAUSES]),
            sum(map(len, groups[_CAUSES:])),
        )


def _ranks(group: list[Failure]) -> tuple[int, ...]:
    return tuple(sorted(failure.rank for failure in group))


def _cause(group: list[Failure]) -> str:
    first = group[0]
    text = first.plain or ending(first.code)
    if any(failure.text != first.text for failure in group):
        text = first.signature[1]
    sentence = text.partition(". ")[0]
    return sentence if len(sentence) <= _LONGEST else sentence[:_LONGEST] + " ..."

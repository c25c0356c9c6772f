"""The failures of workers: which was the first, and which others are equal."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Annotated

from torchrun_hpc.wire import short_text

# As the process ended, and as a shell says it of a process that it has started.
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)

_CAUSES = 5  # that a report lists
_LONGEST = 150  # characters of each

# What other nodes may send.
ShortText = Annotated[str, short_text(500)]
_LINES = 50
_WORKERS, _CODES = 2**24, 2**32  # at most
_LATEST = 2**36  # seconds since 1970

# What a worker reports whose peer has gone: gloo, NCCL, and torch's stores.
_FOLLOWS = re.compile(
    r"connection (was )?(closed|reset|refused)|peer closed|broken pipe"
    r"|failed to recv|(recv|send)\w+ failed|failed to connect to any network address"
    r"|connectFullMesh|remote process exited|unhandled system error|ncclRemoteError"
    r"|ncclSystemError|communicator was aborted|timed out|timeout",
    re.IGNORECASE,
)
# What differs between failures that are equal.
_VARIES = re.compile(r"0x[0-9a-f]+|\d+")
_ADDRESS = re.compile(r" \[?[0-9a-f]*[:.][0-9a-f:.%\w]*\]?:\d+")  # gloo: [::1]:1234


@dataclass(frozen=True)
class WorkerFailure:
    """How a worker failed.

    Attributes:
        rank: Its global rank.
        size: Number of all workers.
        node: Rank of its node.
        local_rank: Its rank there.
        code: Its exit code; below 0 the signal that killed it.
        time: When, in seconds since 1970.
        cause: Why, in one line; empty if nothing is known.
        lines: The traceback, or what it wrote last.
        log: The file that has all of it; empty without.
        unread: Why its stderr was not read; empty if it was.
    """

    rank: int
    size: int
    node: int
    local_rank: int
    code: int
    time: float
    cause: ShortText = ""
    lines: tuple[ShortText, ...] = ()
    log: ShortText = ""
    unread: ShortText = ""

    def check(self) -> None:
        """Raise ``ValueError`` if another node cannot have sent this."""
        if len(self.lines) > _LINES or not 0 <= self.time < _LATEST:
            raise ValueError("too many lines, or not a time")
        if not 0 <= self.rank < self.size <= _WORKERS or abs(self.code) > _CODES:
            raise ValueError("not a rank, or not an exit code")

    @property
    def follows(self) -> bool:
        """Whether it looks as if another worker had failed before."""
        return bool(_FOLLOWS.search(self.cause))

    @property
    def was_stopped(self) -> bool:
        """Whether it ended as torch's agent ends the others as soon as one has failed.

        It sends SIGTERM; what is killed by that writes nothing of it.
        """
        return self.code in TERMINATED and not self.cause

    @property
    def likeness(self) -> tuple[int, str]:
        """What is the same for failures that are equal."""
        same = _VARIES.sub("#", _ADDRESS.sub("", self.cause))
        return (0 if self.cause else self.code), same


@dataclass(frozen=True)
class Summary:
    """What there is to report.

    Attributes:
        first: The first failure.
        alike: Ranks of the other workers that failed in the same way.
        others: Causes of other failures, and the ranks that had them.
        unlisted: How many have failed in still other ways.
    """

    first: WorkerFailure
    alike: tuple[int, ...] = ()
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()
    unlisted: int = 0


class Collection:
    """The failures of one round."""

    def __init__(self) -> None:
        self._failures: dict[int, WorkerFailure] = {}

    def add(self, failure: WorkerFailure) -> None:
        """Add one; only the first of a worker counts."""
        self._failures.setdefault(failure.rank, failure)

    def clear(self) -> None:
        """Begin with another round."""
        self._failures.clear()

    def summary(self) -> Summary | None:
        """Return what there is to report; ``None`` if nothing has failed."""
        if not self._failures:
            return None
        # In the order in which they came, but for those that follow from others.
        first, *rest = sorted(self._failures.values(), key=lambda f: f.follows)
        alike_ones: dict[tuple[int, str], list[WorkerFailure]] = {}
        for failure in rest:
            alike_ones.setdefault(failure.likeness, []).append(failure)
        alike = alike_ones.pop(first.likeness, [])
        groups = sorted(alike_ones.values(), key=len, reverse=True)
        return Summary(
            first,
            _ranks(alike),
            tuple((_cause(group), _ranks(group)) for group in groups[:_CAUSES]),
            sum(map(len, groups[_CAUSES:])),
        )


def _ranks(group: list[WorkerFailure]) -> tuple[int, ...]:
    return tuple(sorted(failure.rank for failure in group))


def _cause(group: list[WorkerFailure]) -> str:
    """Return the cause of equal failures: without what differs between them."""
    first = group[0]
    text = _ADDRESS.sub("", first.cause) or ending(first.code)
    if any(failure.cause != first.cause for failure in group):
        text = _VARIES.sub("#", text)
    sentence = text.partition(". ")[0]
    return sentence if len(sentence) <= _LONGEST else sentence[:_LONGEST] + " ..."


def ending(code: int) -> str:
    """Say how a worker ended.

    Args:
        code: Its exit code; below 0 the signal that killed it.
    """
    how = f"was killed by {signal_name(-code)}"
    if code >= 0:
        how = f"ended with exit code {code}"
    return how + (": probably out of memory" if code in _KILLED else "")


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"

"""The messages between agents and coordinator: lines of JSON, of limited length.

Each connection begins with a proof from each side; see `key`. Then the agent sends a
`JoinRequest`, whose `Version` any release can read. The answer is `Welcome`, `Refused`
or `Ended`. It is `Standby` if the agent only asks, or the node does not coordinate.

After that, each side sends messages at any time: the agent `FromAgent`, the coordinator
`FromCoordinator`. `wire` checks them on arrival. Nothing in a message is ever run or
unpickled.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypeAlias, cast

from torchrun_hpc import wire
from torchrun_hpc.failures.failure import Failure, Summary
from torchrun_hpc.rendezvous.errors import Refused
from torchrun_hpc.rendezvous.messages import NewsOfCoordinator
from torchrun_hpc.rendezvous.record import Address, Age, Record, Term
from torchrun_hpc.wire import AnyText, Plain, short_text

VERSION = 10

# Bytes. The longest line is node 0's, with the ranks of all nodes' workers.
JOIN_REQUEST_LIMIT = 4096
LINE_LIMIT = 16 * 2**20


def _on_port(address: tuple[str, int]) -> tuple[str, int]:
    if not 0 < address[1] < 2**16:
        raise ValueError("not a port")
    return address


# Address and port of the workers' store. The address may be a name, or empty.
Store = Annotated[tuple[str, int], _on_port]

# --- both ways --------------------------------------------------------------------


@dataclass(frozen=True)
class Heartbeat:
    """The coordinator's question whether an agent lives, or the agent's answer.

    An answer has the agent's clock. A question repeats the last answer, 0 at first.
    """

    seconds: float = 0.0


@dataclass(frozen=True)
class Printed:
    """The coordinator's node has reported which workers have failed."""


@dataclass(frozen=True)
class Question:
    """A question to all agents. Agents that join before its `QuestionOver` also get it.

    `about` is data for the reply. The coordinator adds the node rank of the `asker`.
    """

    number: int
    what: Annotated[str, short_text(60)]
    about: Plain
    asker: int = -1


@dataclass(frozen=True)
class Reply:
    """A node's reply to a question; its content is ``None`` from a lost node.

    The coordinator adds the `node`.
    """

    asker: int
    number: int
    content: Plain
    node: int = -1


# --- from an agent ----------------------------------------------------------------


@dataclass(frozen=True)
class JoinRequest:
    """An agent's request to join: the first message of a connection.

    Attributes:
        run_id: PyTorch's rendezvous id: the launch id, or the user's.
        host: Its node's name, for messages.
        pid: Its process id, for messages. Containers on a host may use the same one.
        release: Its release of torchrun_hpc.
        agent: A random number in hexadecimal, and the process id. The coordinator sends
            it to nobody.
        compared: As in `Meeting`.
        started: The end of what must be equal in the command, and a digest of all of
            it, if the launch id does not distinguish two launches; otherwise empty.
        failed: Why the agent cannot start, if it joins only to report that.
        asks: Whether it only asks for a `Standby`.
        protocol: The version of the protocol.
    """

    run_id: AnyText
    nodes: int
    rank: int
    host: AnyText
    pid: int
    release: AnyText
    agent: AnyText
    compared: AnyText = ""
    spares: int = 0
    started: AnyText = ""
    failed: Failure | None = None
    asks: bool = False
    protocol: int = VERSION

    def check(self) -> None:
        """Raise ``ValueError`` if its node rank is not in the job."""
        if not 0 <= self.rank < self.nodes:
            raise ValueError("not a node rank")


@dataclass(frozen=True)
class Version:
    """The part of a join request that each version of the protocol has."""

    protocol: int
    rank: Plain
    release: Plain


@dataclass(frozen=True)
class Present:
    """A member's address, and its knowledge: with spares, the reply to a `Welcome`.

    Attributes:
        gone: The last coordinator that has ended, and in which round.
        record: The member's, if it is newer than the coordinator's.
    """

    address: Address
    done: bool
    term: Term
    round: int
    gone: tuple[int, int] | None = None
    record: Record | None = None


@dataclass(frozen=True)
class Join:
    """The agent is ready for the next round."""


@dataclass(frozen=True)
class Confirm:
    """The agent is ready for exactly this round. Node rank 0 has the store."""

    term: Term
    round: int
    store: Store | None = None


@dataclass(frozen=True)
class Unhealthy:
    """The agent's node is unhealthy."""

    reason: AnyText


@dataclass(frozen=True)
class Died:
    """One of the agent's workers has failed in this round."""

    failure: Failure
    round: int


@dataclass(frozen=True)
class GaveUp:
    """The agent cannot continue."""

    failure: Failure


@dataclass(frozen=True)
class Done:
    """All workers of the agent have finished this round."""

    round: int


@dataclass(frozen=True)
class Read:
    """The agent has received how the job ended."""


@dataclass(frozen=True)
class WantsReport:
    """The coordinator's node wants to report the failed workers."""


@dataclass(frozen=True)
class QuestionOver:
    """The agent needs no more replies to its question with this number."""

    number: int


@dataclass(frozen=True)
class Set:
    """Set these values in the agents' store."""

    values: Mapping[AnyText, AnyText]


@dataclass(frozen=True)
class Add:
    """Add to a number in the agents' store, 0 at first, and return it."""

    key: AnyText
    by: int


@dataclass(frozen=True)
class Get:
    """Return the values of these keys of the agents' store, once all exist."""

    keys: tuple[AnyText, ...]


@dataclass(frozen=True)
class Check:
    """Return whether all these keys exist in the agents' store."""

    keys: tuple[AnyText, ...]


StoreRequest: TypeAlias = Set | Add | Get | Check


@dataclass(frozen=True)
class Ask:
    """A request to the agents' store, with a number for its `Answer`."""

    number: int
    request: StoreRequest


@dataclass(frozen=True)
class Bye:
    """The agent closes the connection without a fault."""


FromAgent: TypeAlias = (
    Present | Join | Confirm | Unhealthy | Died | GaveUp | Done | Read | WantsReport
    | Printed | Question | QuestionOver | Reply | Heartbeat | Ask | Bye
)  # fmt: skip

# --- from the coordinator ---------------------------------------------------------


@dataclass(frozen=True)
class Welcome:
    """The agent is accepted, by this node's coordinator.

    `round` is the next one, `age` that of the coordinator's record.
    """

    round: int
    age: Age
    coordinator: int


@dataclass(frozen=True)
class Standby:
    """The reply of a member to one that looks for the coordinator.

    It tells whom the member `follows`, whether it coordinates, and whether it has a
    quorum.
    """

    follows: int | None = None
    coordinates: bool = False
    has_quorum: bool = False


@dataclass(frozen=True)
class Prepare:
    """A round is formed. Active nodes confirm it; without spares, node rank 0 does."""

    record: Record


@dataclass(frozen=True)
class Go:
    """This round is confirmed, and begins."""

    round: int
    store: Store


@dataclass(frozen=True)
class Over:
    """This round has ended. It `hangs` if a collective failed. Join the next one."""

    round: int
    hangs: bool


@dataclass(frozen=True)
class Ended:
    """The job has ended: all nodes have finished, or this was the first failure.

    Attributes:
        reports: Whether the agent's node reports the failure.
        out_at_end: Nodes that the next job should exclude.
        is_certain: Whether the job has ended for all nodes.
        takeovers: How often another node had become the coordinator.
    """

    failure: Failure | None = None
    reports: bool = False
    out_at_end: tuple[int, ...] = ()
    is_certain: bool = True
    takeovers: int = 0


@dataclass(frozen=True)
class Report:
    """The failed workers; ``None`` if none has failed."""

    summary: Summary | None


@dataclass(frozen=True)
class Answer:
    """The answer of the agents' store: what the request describes, or true."""

    number: int
    value: Plain


FromCoordinator: TypeAlias = (
    Welcome | Refused | Standby | Prepare | Record | Go | Over | Ended | Report
    | Printed | Question | Reply | Heartbeat | Answer | NewsOfCoordinator
)  # fmt: skip


def read_request(message: object) -> JoinRequest | Version:
    """Read a join request; of another version, only `Version`. Or raise `WireError`."""
    version = wire.decode(Version, message)
    return wire.decode(JoinRequest, message) if version.protocol == VERSION else version


# For `wire`, because mypy has no type for a union yet.
FROM_AGENT: type[FromAgent] = cast("Any", FromAgent)
FROM_COORDINATOR: type[FromCoordinator] = cast("Any", FromCoordinator)


class Close(Enum):
    """In an outbox: close the connection.

    A living process resets agents' connections: to an agent, an end of file means that
    the process at the other end is dead.
    """

    CLOSE = "close"
    RESET = "reset"


# The connection, and what to send.
Outgoing: TypeAlias = tuple[Hashable, FromCoordinator | Close]


# --- settings ---------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The values that all agents of a job agree on, and this node's rank.

    Times are in seconds.

    Attributes:
        coordinator: This node's rank, for a coordinator on this node.
        join_timeout: The time that a round waits for all nodes.
        silence_timeout: The time until a silent agent ends the job, or with spares is
            lost.
        started: As in `JoinRequest`.
        signals_on_loss: Whether the launcher sends SIGTERM to all agents when one is
            lost. PBS does not: it kills the agents of a deleted job.
        spare_after: The time after which a spare replaces a node that has not joined.
        kill: The time until a node's workers have ended after an order.
        health_check: The time that a node's health check may take.
        is_fixed: Whether all nodes must join, even with spares, as in a dry run.
    """

    run_id: str
    nodes: int
    coordinator: int
    silence_timeout: int
    max_restarts: int = 0
    join_timeout: int = 0
    spares: int = 0
    started: str = ""
    signals_on_loss: bool = True
    spare_after: int = 0
    kill: int = 0
    health_check: int = 0
    is_fixed: bool = False

    @property
    def has_spares(self) -> bool:
        """Whether the job continues without a lost node."""
        return self.spares > 0 and not self.is_fixed

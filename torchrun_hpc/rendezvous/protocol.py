"""The messages between agents and coordinator: lines of JSON, of limited length.

A connection begins with the proofs of both sides, see `proof`. Then the agent sends its
request, which is answered by ``welcome``, ``refused`` or ``failed``. After that, each
side sends messages at any time. Nothing in a message is ever run or unpickled.

============================  ==========================================================
from an agent                 meaning
============================  ==========================================================
``protocol: VERSION``         the request, with the fields of `JoinRequest`
``join: true``                ready for the next round; without spares, node 0 adds the
                              workers' ``store``
``present: MEMBER STATE``     with spares: its address and its knowledge
``confirm: [TERM, ROUND]``    with spares: ready for exactly this round; node rank 0
                              adds the ``store``
``unhealthy: REASON``         with spares: its node is unhealthy
``died: FAILURE``             one of its workers has failed, in ``round``
``failed: FAILURE``           it gives up
``done: ROUND``               all its workers have finished this round
``read: true``                it has received the failure
``report: true``              the coordinator's node wants to report failed workers
``printed: true``             it has reported them
``question: NUMBER``          a question to all agents, also to later ones: ``what``,
                              ``with`` data for the reply; without both, its end
``reply: [RANK, NUMBER]``     the reply to this agent's question: ``of`` its node
``bye: true``                 it closes the connection without a fault
``heartbeat: SECONDS``        the answer to ``heartbeat``: its clock
``ask: NUMBER``               ``set``, ``add``, ``get`` or ``check`` for the agents'
                              store
============================  ==========================================================

============================  ==========================================================
from the coordinator          meaning
============================  ==========================================================
``welcome: VERSION``          the agent is accepted; with the next ``round``, the
                              ``coordinator``, and the ``age`` of its record
``standby: [RANK, ...]``      with spares, to a node that looks for the coordinator:
                              whom this node follows, whether it coordinates, and
                              whether it has a quorum; closes the connection
``prepare: RECORD``           with spares: a round is formed; active nodes confirm it
``record: RECORD``            with spares: other nodes may take over
``out: REASON``               with spares: this node is excluded
``refused: REASON``           only a `Refusal`; closes the connection
``go: ROUND``                 all nodes have joined this round; with the ``store``
``over: ROUND``               this round has ended; join the next one
``finished: ROUND``           all nodes have finished
``failed: FAILURE``           the job's first failure; with ``reports`` for the node
                              that reports it
``report: SUMMARY``           the failed workers; nothing if none has failed
``printed: true``             the coordinator's node has reported them
``question: [RANK, NUMBER]``  an agent asks ``what``, ``with`` data for the reply
``replied: NUMBER``           a ``node``'s reply to its question
``heartbeat: SECONDS``        to answer by ``heartbeat``; repeats the last answer
``answer: NUMBER``            the answer to ``ask``
other keys                    for the user, on the node that reports: see
                              `messages.render`
============================  ==========================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torchrun_hpc.wire import AnyText, encode

VERSION = 9

# Bytes. The longest line is node 0's, with the ranks of all nodes' workers.
JOIN_REQUEST_LIMIT = 4096
LINE_LIMIT = 16 * 2**20

SUSPENDED = 2  # seconds: noticing the end of a lease later means a suspension

# In an outbox. A living process resets agents' connections: to an agent, an end of file
# means that the process at the other end is dead.
CLOSE: dict[str, Any] = {"close": True}
RESET: dict[str, Any] = {"reset": True}


class Refusal(Enum):
    """Why the coordinator refuses an agent."""

    VERSION = "version"  # of the protocol
    RUN_ID = "run_id"  # --rdzv-id
    NODES = "nodes"  # number of nodes
    TAKEN = "taken"  # another agent has its node rank
    SPARES = "spares"  # --hpc-spares
    STARTED = "started"  # another command started it
    UNPROVED = "unproved"  # one of the two has no proof; never sent


@dataclass(frozen=True)
class Settings:
    """The values that all agents of a job agree on. Times are in seconds.

    Attributes:
        coordinator: Node rank of the coordinator; -1 if it is another node.
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


@dataclass(frozen=True)
class JoinRequest:
    """An agent's request to join.

    Attributes:
        run_id: PyTorch's rendezvous id: the same, or the user's.
        host: Its node's name, for messages.
        pid: Its process id, for messages. Containers on a host may use the same one.
        release: Its release of torchrun_hpc.
        agent: A random number in hexadecimal, and the process id. The coordinator sends
            it to nobody.
        compared: As in `Meeting`.
        started: The end of what must be equal in the command, and a digest of all of
            it, if the launch id does not distinguish two launches; otherwise empty.
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

    @property
    def first_line(self) -> dict[str, Any]:
        """The first message of a connection."""
        return {"protocol": VERSION, **encode(self)}

    def check(self) -> None:
        """Raise ``ValueError`` if its node rank is not in the job."""
        if not 0 <= self.rank < self.nodes:
            raise ValueError("not a node rank")

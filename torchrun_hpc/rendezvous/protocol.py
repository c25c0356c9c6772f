"""The messages between agents and coordinator: lines of JSON, of limited length.

A connection begins with the proofs of both sides, see `proof`. Then the agent's
request says who it is, and is answered by ``welcome``, ``refused`` or ``failed``. After
that, each side sends a message whenever there is something to send.
Nothing in a message is ever run or unpickled.

============================  ==========================================================
from an agent                 meaning
============================  ==========================================================
``protocol: VERSION``         the request, with all of `JoinRequest`
``join: true``                it is ready for the next round; without spares, node 0
                              adds the ``store`` of the workers
``present: MEMBER STATE``     with spares: where it can be asked, and what it knows
``confirm: [TERM, ROUND]``    with spares: it is ready for this very round; node rank 0
                              adds the ``store``
``unfit: REASON``             with spares: its node is not well
``died: FAILURE``             one of its workers has ended with an error, in ``round``
``failed: FAILURE``           it gives up
``done: ROUND``               all workers of its node have finished this round
``read: true``                it has received the failure
``report: true``              node 0 wants to report the failures of workers
``printed: true``             it has done so
``question: NUMBER``          a question to all agents, those that are still to come,
                              too: ``what`` is asked, ``with`` what the reply needs; or
                              nothing any more
``reply: [RANK, NUMBER]``     the reply to it, ``of`` its node, for the one that asks
``bye: true``                 it closes the connection; that is no fault
``heartbeat: SECONDS``        the answer to ``heartbeat``: its clock
``ask: NUMBER``               ``set``, ``add``, ``get`` or ``check`` of the store that
                              torch's agents share
============================  ==========================================================

============================  ==========================================================
from the coordinator          meaning
============================  ==========================================================
``welcome: VERSION``          the agent is accepted; with the next ``round``,
                              the ``coordinator``, and the ``age`` of what it knows
``standby: [RANK, ...]``      with spares, to a node that looks for the coordinator:
                              whom this node follows, whether it coordinates, and
                              whether it has a quorum; the connection is closed
``prepare: RECORD``           with spares: a round is formed; active nodes confirm it
``record: RECORD``            with spares: who may take over has changed
``out: REASON``               with spares: this node takes part no more
``refused: REASON``           it is not, see `Refusal`, and hears no more than that; the
                              connection is closed
``go: ROUND``                 all nodes have joined this round; with the ``store``
``over: ROUND``               this round has ended; join the next one
``finished: ROUND``           all nodes have finished
``failed: FAILURE``           the job has failed, and this was the first failure; with
                              ``reports`` for the node that reports it
``report: SUMMARY``           the failures of workers; nothing if none has failed
``printed: true``             node 0 has reported them
``question: [RANK, NUMBER]``  an agent asks ``what``, ``with`` what the reply needs
``replied: NUMBER``           the reply of a ``node`` to its question
``heartbeat: SECONDS``        to be answered by ``heartbeat``; what the last answer said
``answer: NUMBER``            the answer to ``ask``
``waiting``, ``finishing``,   for the user, on the node that reports: see
``silent``, ``answering``,    `messages.render`
``lost``, ``restart``,
``sites``, ``stranger``,
``replaced``, ``excluded``,
``may_run``, ``suspended``,
``unproved``
============================  ==========================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torchrun_hpc.reporting.reporter import told_to_report
from torchrun_hpc.wire import AnyText, encode

VERSION = 8

# Bytes. The longest line is node 0's, with the ranks of all nodes' workers.
JOIN_REQUEST_LIMIT = 4096
LINE_LIMIT = 16 * 2**20

SUSPENDED = 2  # seconds: who notices later that a lease has ended was suspended

# In an outbox: close, or reset, this connection. A process that lives resets those of
# agents: an end of file means to them that it has ended.
CLOSE: dict[str, Any] = {"close": True}
RESET: dict[str, Any] = {"reset": True}


class Refusal(Enum):
    """Why the coordinator refuses an agent."""

    VERSION = "version"  # of the protocol
    RUN_ID = "run_id"  # --rdzv-id
    NODES = "nodes"  # number of nodes
    TAKEN = "taken"  # another agent has its node rank
    SPARES = "spares"  # --hpc-spares
    STARTED = "started"  # it was started by another command
    UNPROVED = "unproved"  # one of the two has no proof; nobody sends it


@dataclass(frozen=True)
class Settings:
    """What all agents of a job agree on.

    Attributes:
        run_id: Torch's rendezvous id.
        nodes: Number of nodes.
        coordinator: Node rank of the coordinator; -1 if it is another node.
        max_restarts: How often the job may restart.
        join_timeout: Seconds that a round waits for all nodes.
        silence_timeout: Seconds after which an agent that does not answer ends the
            job; with spares, after which it is lost.
        spares: How many of the nodes wait to take the place of another one.
        started: As in `JoinRequest`.
        signals_on_loss: Whether the launcher sends SIGTERM to all agents when one is
            lost. PBS does not: it kills the agents of a job that is deleted.
        spare_after: Seconds until a spare takes the place of a node that has not come.
        kill: Seconds until the workers of a node have ended that are told to.
        health_check: Seconds that the health check of a node may take.
        is_fixed: Whether all nodes have to be there, even with spares: as in a dry run.
    """

    run_id: str
    nodes: int
    coordinator: int
    max_restarts: int
    join_timeout: int
    silence_timeout: int
    spares: int = 0
    started: str = ""
    signals_on_loss: bool = True
    spare_after: int = 0
    kill: int = 0
    health_check: int = 0
    is_fixed: bool = False

    @property
    def has_spares(self) -> bool:
        """Whether the job goes on without a node that is lost."""
        return self.spares > 0 and not self.is_fixed

    @property
    def reporter(self) -> int:
        """Rank of the node that reports."""
        return told_to_report(self.coordinator, has_spares=self.has_spares)


@dataclass(frozen=True)
class JoinRequest:
    """Who an agent is.

    Attributes:
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

    run_id: AnyText
    nodes: int
    rank: int
    host: AnyText
    pid: int
    release: AnyText
    agent: AnyText
    site: AnyText = ""
    spares: int = 0
    started: AnyText = ""

    @property
    def first_line(self) -> dict[str, Any]:
        """The first message of a connection."""
        return {"protocol": VERSION, **encode(self)}

    def check(self) -> None:
        """Raise ``ValueError`` if it has no node rank of the job."""
        if not 0 <= self.rank < self.nodes:
            raise ValueError("not a node rank")

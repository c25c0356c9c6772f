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
``died: FAILURE``             one of its workers has ended with an error, in ``round``
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

from dataclasses import dataclass
from enum import Enum

from torchrun_hpc.wire import AnyText

VERSION = 6

# Bytes. The longest line is node 0's, with the ranks of all nodes' workers.
JOIN_REQUEST_LIMIT = 4096
LINE_LIMIT = 16 * 2**20


class Refusal(Enum):
    """Why the coordinator refuses an agent."""

    UNKNOWN = "unknown"  # it is of another job
    VERSION = "version"  # of the protocol
    RUN_ID = "run_id"  # --rdzv-id
    NODES = "nodes"  # number of nodes
    TAKEN = "taken"  # another agent has its node rank
    SPARES = "spares"  # --hpc-spares
    STARTED = "started"  # it was started by another command


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

    job: AnyText
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

    def check(self) -> None:
        """Raise ``ValueError`` if it has no node rank of the job."""
        if not 0 <= self.rank < self.nodes:
            raise ValueError("not a node rank")

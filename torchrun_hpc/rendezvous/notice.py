"""The notice of a node that cannot start, to the others through the coordinator."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.rendezvous.connection import Connection
from torchrun_hpc.rendezvous.coordinator import Coordinator
from torchrun_hpc.rendezvous.errors import CoordinatorNotFoundError, JobFailedError
from torchrun_hpc.rendezvous.key import Key
from torchrun_hpc.rendezvous.loop import Loop
from torchrun_hpc.rendezvous.members import SILENCE_REPORT
from torchrun_hpc.rendezvous.protocol import Settings
from torchrun_hpc.rendezvous.server import CoordinatorServer, listen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.failures.failure import Failure
    from torchrun_hpc.planning.meeting import Meeting


def inform(
    meeting: Meeting,
    failure: Failure,
    limit: float,
    on_event: Callable[[Mapping[str, Any]], None],
) -> Failure | None:
    """Inform the other nodes why this one cannot start, within `limit` seconds.

    Return the coordinator's reason for the job's failure; ``None`` if it was not found,
    or is this node.
    """
    settings = Settings(
        run_id="",
        nodes=meeting.nodes,
        coordinator=meeting.node_rank,
        silence_timeout=SILENCE_REPORT if meeting.is_coordinator else int(limit),
        spares=meeting.spares.number,
        is_fixed=True,
    )
    if meeting.is_coordinator:
        with suppress(LaunchError):  # with an unusable key, anybody could read it
            _serve(meeting, settings, failure, limit)
        return None
    agent = Connection(meeting, settings, {}, on_event, own_failure=failure)
    with (
        closing(agent),
        suppress(JobFailedError, CoordinatorNotFoundError, LaunchError),
    ):
        # Once more, if it was accepted as a returning agent.
        agent.open(limit).fail(failure)
    return agent.client.failure


def _serve(
    meeting: Meeting, settings: Settings, failure: Failure, limit: float
) -> None:
    """Accept the other nodes only to inform them, on the first free port."""
    key = Key(meeting.key, meeting.launch_id)
    key.load()
    address = meeting.listen[0] if meeting.listen else None
    for port in (*meeting.ports, *meeting.notice_ports):
        with suppress(OSError):
            opened = listen(address, port)
            break
    else:
        return
    with closing(Loop()) as loop:
        loop.start()
        coordinator = Coordinator(settings)
        coordinator.fail(failure)  # before any node is accepted
        server = CoordinatorServer(loop, opened, coordinator, key)
        server.start()
        server.close(late_timeout=limit)

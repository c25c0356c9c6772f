"""What torch's elastic agent asks of a rendezvous with spares."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrun_hpc import waiting
from torchrun_hpc.failures.failure import Kind
from torchrun_hpc.rendezvous.client import RoundOverError
from torchrun_hpc.rendezvous.connection import Connection
from torchrun_hpc.rendezvous.handler import SchedulerRendezvous, workers_address
from torchrun_hpc.rendezvous.server import listen
from torchrun_hpc.rendezvous.store import AgentStore
from torchrun_hpc.reporting import console
from torchrun_hpc.spares import messages, record
from torchrun_hpc.spares.client import MemberClient
from torchrun_hpc.spares.coordinator import Limits
from torchrun_hpc.spares.health import HealthCheck
from torchrun_hpc.spares.member import Member
from torchrun_hpc.spares.standby import Standby
from torchrun_hpc.torch_compat import capabilities

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from torchrun_hpc.planning.meeting import Spares
    from torchrun_hpc.rendezvous.protocol import JoinRequest
    from torchrun_hpc.rendezvous.search import CoordinatorAddress

# Seconds that an agent may take to see that its workers are to end, and to kill them.
_MARGIN = 10


class MemberConnection(Connection):
    """What a member answers, and its connection to the coordinator.

    Args:
        limits: How long things may take.
        others: The arguments of `Connection`.
    """

    def __init__(self, limits: Limits, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._standby: Standby

    def _listen(self, request: JoinRequest) -> socket.socket:
        """Listen where others look for this member, or where it is possible.

        Raises:
            LaunchError: It is the first coordinator, and cannot listen.
        """
        opened = super()._listen(request)
        where = self._meeting
        for port in () if opened else (where.ports[0], 0):
            with suppress(OSError):
                return listen(where.local_address, port)
        return opened or listen(where.local_address, 0)

    def _coordinator(self, port: int) -> Standby:
        world, where = self._meeting, self._meeting
        own, first_port = world.node_rank, where.ports[0]
        member = Member(
            own,
            (where.local_address or world.fast_hosts[own], port),
            record.first_record(
                world.nodes, world.spares.number, where.coordinator or 0
            ),
            {r: (host, first_port) for r, host in enumerate(world.fast_hosts) if host},
        )
        settings = replace(self._settings, coordinator=own)
        self._standby = Standby(settings, self._limits, member)
        if where.is_coordinator:
            self._standby.coordinate(member.record)
        return self._standby

    def _client(
        self, request: JoinRequest, address: CoordinatorAddress
    ) -> MemberClient:
        if self._server is None:
            raise TypeError("not listening")
        return MemberClient(
            request, address, self._on_event, self._server, self._standby
        )


class SparesRendezvous(SchedulerRendezvous):
    """The rendezvous of a job with spares.

    Args:
        spares: What is planned for that.
        kill: Seconds within which torch's agent has ended workers.
        end_workers: Kills the workers of this node at once.
        others: The arguments of `SchedulerRendezvous`.
    """

    def __init__(
        self,
        spares: Spares,
        kill: float,
        end_workers: Callable[[], None],
        *arguments: Any,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        check = spares.health_check
        timeout = spares.health_check_timeout if check else 0
        self._limits = Limits(spares.after, int(kill) + _MARGIN, timeout)
        self._new_connection = partial(MemberConnection, self._limits)
        self._health_check = check
        self._end_workers = end_workers

    def next_rendezvous(self) -> Any:
        """Wait for a round in which this node has workers.

        Raises:
            NotNeededError: The job has ended well without it.
            JobFailedError: There is no next round.
            LaunchError: This node cannot take part.
        """
        self.connect()
        client = self._member
        while True:
            self._check_health(client)
            try:
                go, rank, nodes = client.take_part(self._open_workers_store)
                break
            except RoundOverError:
                continue
        address, port = workers_address(go)
        known = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        store = AgentStore(client, known)
        return capabilities.rendezvous_info(store, rank, nodes, address, port)

    @property
    def reports(self) -> bool:
        """Whether this node reports how the job has ended: as the last coordinator."""
        client = self._member
        failure = client.failure
        is_alone = failure is not None and failure.kind is Kind.COORDINATOR
        return client.reports or is_alone

    @property
    def is_first(self) -> bool:
        """Whether this node does what one of them does: it has the coordinator."""
        client = self._client
        return isinstance(client, MemberClient) and client.member.coordinates

    @property
    def is_certain(self) -> bool:
        """Whether the job cannot go on without this node, when that gives up."""
        return self._member.is_certain

    @property
    def out_at_end(self) -> Sequence[int]:
        """Ranks of the nodes that were lost, or out."""
        return self._member.out_at_end

    @property
    def _member(self) -> MemberClient:
        client = self._client
        if not isinstance(client, MemberClient):
            raise TypeError("not connected")
        return client

    def _check_health(self, client: MemberClient) -> None:
        """Run the health check; a node that is not well takes part no more."""
        if not self._health_check or client.member.unfit:
            return
        try:
            check = HealthCheck(self._health_check, self._limits.health_check)
        except OSError as error:
            client.be_unfit(f"its health check cannot be started: {error.strerror}")
            return
        try:
            waiting.until(lambda: check.has_ended or client.failure is not None)
        finally:
            problem = check.end()
        if problem and client.failure is None:
            client.be_unfit(problem)

    def _report(self, event: Any) -> None:
        if "suspended" in event:
            self._end_workers()
        message = messages.render(event, self._meeting)
        if message is None:
            super()._report(event)
        else:
            console.write(message, "warning")

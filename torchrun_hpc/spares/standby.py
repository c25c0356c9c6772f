"""What a member answers: as the coordinator, or that it is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrun_hpc.rendezvous.coordinator import CLOSE, RESET
from torchrun_hpc.spares.coordinator import Limits, SparesCoordinator
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from torchrun_hpc.failures.failure import Failure
    from torchrun_hpc.rendezvous.coordinator import Settings
    from torchrun_hpc.rendezvous.key_value_store import Answer
    from torchrun_hpc.spares.member import Member
    from torchrun_hpc.spares.record import Address, Record


class Standby:
    """Has what a server asks of a coordinator, whether this member is one or not.

    Args:
        settings: What all agents agree on; its ``coordinator`` is this member.
        limits: How long things may take.
        member: This member.

    Attributes:
        limits: How long things may take.
        member: This member.
        coordinator: What it is as the coordinator; ``None`` while it is none.
    """

    def __init__(self, settings: Settings, limits: Limits, member: Member) -> None:
        self.settings = settings
        self.limits = limits
        self.member = member
        self._outbox: list[Answer] = []
        self._connections: set[Hashable] = set()  # of the coordinator
        self.coordinator: SparesCoordinator | None = None

    def coordinate(self, record: Record) -> None:
        """Become the coordinator."""
        if self.coordinator is None:
            self.coordinator = SparesCoordinator(self.settings, self.limits, record)

    def give_way(self) -> None:
        """Be the coordinator no longer: all look for another one."""
        if self.coordinator is not None:
            self._outbox += [(each, RESET) for each in self._connections]
            self._connections.clear()
            self.coordinator = None

    def absent(self, ask_all: bool) -> dict[int, Address] | None:  # noqa: FBT001
        """Return where to look for other members; ``None`` if enough are here.

        Args:
            ask_all: Whether also for those that have not come yet.
        """
        coordinator = self.coordinator
        if coordinator is None or coordinator.is_strong:
            return None
        addresses = {**self.member.addresses, **coordinator.addresses}
        absent = coordinator.absent
        if ask_all:
            absent = addresses.keys() - coordinator.here
        return {member: addresses[member] for member in absent if member in addresses}

    # --- what the server asks -----------------------------------------------------

    @property
    def outbox(self) -> list[Answer]:
        """Pairs of a connection and a message to send there, in order."""
        return self._outbox + (self.coordinator.outbox if self.coordinator else [])

    @outbox.setter
    def outbox(self, value: list[Answer]) -> None:
        self._outbox = value
        if self.coordinator is not None:
            self.coordinator.outbox = []

    @property
    def all_informed(self) -> bool:
        """Whether every agent that is connected here knows how the job ended."""
        return self.coordinator is None or self.coordinator.all_informed

    @property
    def expects_nodes(self) -> bool:
        """Whether the job failed while some nodes had not connected yet."""
        return self.coordinator is not None and self.coordinator.expects_nodes

    def receive(self, connection: Hashable, message: Mapping[str, Any]) -> None:
        """Handle a message.

        Raises:
            WireError: It is not valid; the connection is to be closed.
        """
        coordinator = self.coordinator
        if coordinator is not None and not message.get("asks"):
            self._connections.add(connection)
            coordinator.receive(connection, message)
            return
        if message.get("job") != self.settings.job:
            raise WireError("not a member of this job")
        is_strong = coordinator is not None and coordinator.is_strong
        standby = [self.member.follows, coordinator is not None, is_strong]
        self._outbox += [(connection, {"standby": standby}), (connection, CLOSE)]

    def disconnected(self, connection: Hashable, *, ended: bool = False) -> None:
        """Handle the end of a connection; see `Coordinator.disconnected`."""
        if connection in self._connections:
            self._connections.remove(connection)
            if self.coordinator is not None:
                self.coordinator.disconnected(connection, ended=ended)

    def tick(self, seconds: int = 1) -> None:
        """Handle that a second has passed; see `SparesCoordinator.tick`."""
        if self.coordinator is not None:
            self.coordinator.tick(seconds)

    def fail(self, failure: Failure) -> None:
        """End the job, if this member coordinates it."""
        if self.coordinator is not None:
            self.coordinator.fail(failure)

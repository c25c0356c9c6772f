"""The rendezvous handler that PyTorch's elastic agent uses."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import distributed
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.utils.distributed import get_free_port

from torchrun_hpc import wire
from torchrun_hpc.errors import Message
from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.names import placed
from torchrun_hpc.preflight import JOIN_TIMEOUT
from torchrun_hpc.rendezvous import health, messages
from torchrun_hpc.rendezvous.client import never
from torchrun_hpc.rendezvous.connection import Connection
from torchrun_hpc.rendezvous.errors import (
    CoordinatorNotFoundError,
    JobFailedError,
    RoundOverError,
)
from torchrun_hpc.rendezvous.protocol import Settings
from torchrun_hpc.rendezvous.server import listen
from torchrun_hpc.rendezvous.store import AgentStore
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.reporter import is_reporter, reports_wait_for
from torchrun_hpc.torch_compat import capabilities

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrun_hpc.failures.report import Explain
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.rendezvous.client import Client

_torch: Any = distributed
# Options of the workers' store, which node rank 0 opens.
_SERVER = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}

# Seconds in which an agent notices that its workers must end, and kills them.
_MARGIN = 10

# Seconds to wait at the end for the workers' store, without a message.
_PATIENCE = 5


class CoordinatorMissingError(rendezvous.RendezvousConnectionError):
    """The coordinator was not found in time. `message` is for the user."""

    def __init__(self, message: Message) -> None:
        super().__init__(message.text)
        self.message = message


class SchedulerRendezvous(rendezvous.RendezvousHandler):
    """The rendezvous of a job. `address` is where its workers' store is, if here.

    For `explain`, see `report.Explain`.
    """

    def __init__(  # noqa: PLR0913 - the last three are of few
        self,
        meeting: Meeting,
        settings: Settings,
        environ: Mapping[str, str],
        *,
        address: str = "",
        replies: Mapping[str, Callable[[Any], Any]] | None = None,
        end_workers: Callable[[], None] = lambda: None,
        explain: Explain = lambda first: (first, ()),
    ) -> None:
        self._explain = explain
        self.run_id = settings.run_id
        self._meeting = meeting
        self._settings = settings
        self._address = address
        # As in PyTorch's c10d.
        self._shares_store = (
            capabilities.RENDEZVOUS_INFO.present
            and capabilities.LISTENING_SOCKET.present
            and environ.get(capabilities.UNSHARED) != "1"
        )
        self._connection = Connection(
            meeting,
            settings,
            environ,
            self._report,
            replies=replies,
            end_workers=end_workers,
        )
        self.client = self._connection.client
        self._workers_store: list[Any] = []
        self._opening: threading.Thread | None = None

    # --- what torch asks ----------------------------------------------------------

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return self._meeting.backend

    def get_run_id(self) -> str:
        """Return the user's id, or the launch id."""
        return self.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether node 0 opens a store for the workers, instead of worker 0."""
        return self._shares_store

    def next_rendezvous(self) -> Any:
        """Wait for a round in which this node has workers.

        Raise `NotNeededError` or `JobFailedError` if there is none, or `LaunchError`.
        """
        client = self.connect()
        while True:
            self._check_health()
            with suppress(RoundOverError):
                go, rank, nodes = client.take_part(self._open_workers_store)
                break
        address, port = workers_address(go)
        known = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        store = AgentStore(client, known)
        return capabilities.rendezvous_info(store, rank, nodes, address, port)

    def num_nodes_waiting(self) -> int:
        """Return whether another round must begin, without network traffic.

        Raise `JobFailedError` if the job has failed elsewhere.
        """
        failure, own = self.failure, (self._meeting.node_rank,)
        # PyTorch's agent reports its own workers' failures itself.
        if failure is not None and not (failure.rank >= 0 and failure.nodes == own):
            raise JobFailedError(failure)
        return int(self.client.is_over)

    def is_closed(self) -> bool:
        """Return whether no other round will follow."""
        return self.failure is not None

    def set_closed(self) -> None:
        """Do nothing: a job ends when all have finished, or one has failed."""

    def shutdown(self) -> bool:
        """Leave, unless an error is raised: the launcher informs the others of it."""
        if sys.exc_info()[0] is None:
            self.leave()
        return True

    # --- what the launcher and the agent ask --------------------------------------

    @property
    def meeting(self) -> Meeting:
        """The meeting, on the coordinator's node with the names of all that came."""
        server = self._connection.server
        known = server.coordinator.members.hosts.copy() if server else {}
        return replace(self._meeting, hosts=placed(self._meeting.hosts, known))

    @property
    def has_spares(self) -> bool:
        """Whether the job continues without a lost node."""
        return self._settings.has_spares

    @property
    def failure(self) -> Failure | None:
        """Why the job failed."""
        return self.client.failure

    @property
    def hangs(self) -> bool:
        """Whether the round has ended because a collective failed."""
        client, failure = self.client, self.failure
        return client.is_over and client.hangs if failure is None else failure.is_hang

    @property
    def reports(self) -> bool:
        """Whether this node reports how the job has ended."""
        failure, meeting = self.failure, self._meeting
        is_alone = failure is not None and failure.kind is Kind.COORDINATOR
        if self.has_spares:
            return is_alone or (self.is_first and bool(self.client.ending))
        if is_alone:
            return reports_wait_for(meeting.node_rank, meeting.coordinator)
        return self.is_first

    @property
    def is_first(self) -> bool:
        """Whether this node does what only one node does while the job runs."""
        if self.has_spares:  # the one with the coordinator
            peers = self.client.peers
            return peers is not None and peers.member.coordinates
        return self._meeting.is_coordinator

    @property
    def is_certain(self) -> bool:
        """Whether the job cannot continue if this node gives up."""
        if self._meeting.in_process:  # each task may have such a world
            return is_reporter(self._meeting.report_rank)
        return not self.has_spares or bool(self.client.ending.get("is_certain"))

    @property
    def out_at_end(self) -> Sequence[int]:
        """Ranks of the nodes that the next job should exclude."""
        return tuple(self.client.ending.get("out_at_end", ()))

    @property
    def takeovers(self) -> int:
        """How often another node had become the coordinator that ended the job."""
        return int(self.client.ending.get("takeovers", 0))

    @property
    def took_part(self) -> bool:
        """Whether the coordinator has accepted this agent."""
        return self.client.is_accepted

    @property
    def is_unreported(self) -> bool:
        """Whether a worker has failed, and nobody has reported it."""
        return self.client.is_unreported

    @property
    def restarts(self) -> int:
        """How often the job has been restarted, up to the current round."""
        return max(self.client.next_round - 1, 0)

    def connect(self, timeout: float | None = None) -> Client:
        """Start the coordinator, if this is its node, and connect to it.

        Raise `LaunchError`, `CoordinatorMissingError` or `JobFailedError`.
        """
        if self.took_part:
            return self.client
        limit = self._settings.join_timeout if timeout is None else timeout
        try:
            return self._connection.open(limit)
        except CoordinatorNotFoundError as error:
            message = messages.coordinator_missing(str(error), limit, self._meeting)
            raise CoordinatorMissingError(message) from None

    def finish(self) -> None:
        """Wait until all nodes have finished, or the job has failed."""
        if self.took_part:
            with suppress(JobFailedError):
                self.client.finish()

    def give_up(self, failure: Failure) -> None:
        """Inform the others that this agent gives up, and why."""
        self.client.fail(replace(failure, nodes=(self._meeting.node_rank,)))

    def leave(self, is_urgent: Callable[[], bool] = never) -> None:
        """Disconnect. The coordinator ends once all others know how the job ended.

        The others end after it. They stop waiting when this `is_urgent`.
        """
        # With spares, a job may continue without this node.
        may_end = self.reports or self.has_spares
        self._connection.close(0 if may_end else self._settings.kill, is_urgent)
        self._workers_store = []
        if self._opening is not None:
            self._opening.join(_PATIENCE)
            if self._opening.is_alive():
                text = "waiting for the name server before exit: PyTorch is still "
                text += "looking up the name of this node's address"
                console.write(Message("HPC176", text))
            self._opening = None

    # --- parts --------------------------------------------------------------------

    def _check_health(self) -> None:
        peers, spares = self.client.peers, self._meeting.spares
        if peers is None or peers.member.unhealthy or not spares.health_check:
            return
        limit = spares.health_check_timeout
        problem = health.check(spares.health_check, limit, lambda: self.failure)
        if problem and self.failure is None:
            peers.member.unhealthy = problem
            self.client.send({"unhealthy": problem})

    def _open_workers_store(self) -> tuple[str, int]:
        """Open a new store, so that no worker finds values of the previous round."""
        opening: list[Any] = []
        self._workers_store = opening
        if not self._shares_store:
            return self._address, int(get_free_port())  # type: ignore[no-untyped-call]
        own = self._meeting.local_address
        opened = listen(own, 0)
        port = opened.getsockname()[1]
        # It serves before it returns, which takes long if no name server answers.
        # No daemon: C++ would abort this process if it returned while Python ends.
        self._opening = threading.Thread(
            target=self._serve,
            args=[opening, own or "127.0.0.1", port, capabilities.listening_on(opened)],
            name="workers' store",
        )
        self._opening.start()
        return self._address, port

    def _serve(
        self, opening: list[Any], host: str, port: int, options: Mapping[str, Any]
    ) -> None:
        try:
            store = _torch.TCPStore(host, port, **_SERVER, **options)
        except Exception as error:  # noqa: BLE001 - the other nodes wait for it
            self.give_up(Failure(Kind.AGENT, text=f"the workers' store: {error}"))
        else:
            opening.append(store)

    def _report(self, event: Mapping[str, Any]) -> Failure | None:
        summary = event.get("report")
        cause = summary.first if summary else messages.cause_of(event)
        cause, lines = self._explain(cause) if cause else (None, ())
        if summary is not None:
            report.write(summary, self.meeting, lines)
            return cause
        key = self._connection.key.name
        because = {"because": wire.encode(cause)} if cause else {}
        message = messages.render({**event, "key": key, **because}, self.meeting)
        if message is not None:
            kind = "warning" if messages.is_warning(event, self._meeting) else "note"
            console.write(message, kind, report.indented(lines))
        return None


def settings_of(
    meeting: Meeting, run_id: str, asked: Options, shutdown: float = 0
) -> Settings:
    """Return what all agents agree on. `shutdown` is torch's limit in seconds."""
    spares, conf = meeting.spares, asked.rdzv_conf
    return Settings(
        run_id=run_id,
        nodes=meeting.nodes,
        coordinator=meeting.node_rank if meeting.is_coordinator else -1,
        max_restarts=asked.max_restarts,
        join_timeout=conf.join_timeout or JOIN_TIMEOUT,
        silence_timeout=conf.silence_timeout,
        spares=spares.number,
        started=meeting.started,
        signals_on_loss=meeting.started_by is None or meeting.started_by.ends_others,
        spare_after=spares.after,
        kill=int(shutdown) + _MARGIN,
        health_check=spares.health_check_timeout if spares.health_check else 0,
    )


def workers_address(go: Mapping[str, Any]) -> tuple[str, int]:
    """Return address and port of the workers' store, or raise `RendezvousError`."""
    match go.get("store"):
        case [str(address), int(port)] if 0 < port < 2**16:
            return address, port
    text = "the head node did not send the address of the workers' store"
    raise rendezvous.RendezvousError(text)

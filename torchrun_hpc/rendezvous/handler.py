"""What torch's elastic agent asks of a rendezvous."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import distributed
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.utils.distributed import get_free_port

from torchrun_hpc.errors import Message
from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.options.values import SCHEDULER
from torchrun_hpc.rendezvous import messages, search
from torchrun_hpc.rendezvous.client import JobFailedError
from torchrun_hpc.rendezvous.connection import Connection
from torchrun_hpc.rendezvous.protocol import Settings
from torchrun_hpc.rendezvous.server import listen
from torchrun_hpc.rendezvous.store import AgentStore
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.reporter import (
    is_reporter,
    reports_failure,
    reports_wait_for,
)
from torchrun_hpc.torch_compat import capabilities

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.rendezvous.client import Client

_torch: Any = distributed

# Seconds that an agent may be silent: where --rdzv-conf has nothing of it, and where
# it has very little.
SILENCE_TIMEOUT = 120
_SHORTEST_SILENCE = 5

_SAMPLES = 4  # of the stacks of the workers here, that are taken at once

_WARNINGS = {"sites", "stranger"}

# Seconds to wait at the end for the workers' store, without a message.
_PATIENCE = 5


class CoordinatorMissingError(rendezvous.RendezvousConnectionError):
    """The coordinator was not found in time; `message` is for the user."""

    def __init__(self, message: Message) -> None:
        super().__init__(message.text)
        self.message = message


class SchedulerRendezvous(rendezvous.RendezvousHandler):
    """The rendezvous of a job whose nodes are known.

    Args:
        meeting: Where the nodes meet.
        parameters: Torch's: the id, ``join_timeout``, and, if set, the two numbers
            that say how long an agent may be silent.
        max_restarts: How often the job may restart.
        environ: Environment of this process.
        sample: Returns the stacks of this node's workers, for other nodes.
    """

    def __init__(
        self,
        meeting: Meeting,
        parameters: RendezvousParameters,
        max_restarts: int,
        environ: Mapping[str, str],
        sample: Callable[[], Any] = list,
    ) -> None:
        self._meeting = meeting
        self._sample = sample
        self._parameters = parameters
        self._settings = _settings(meeting, parameters, max_restarts)
        self._environ = environ
        # As torch's c10d does it.
        self._shares_store = (
            capabilities.RENDEZVOUS_INFO.present
            and capabilities.LISTENING_SOCKET.present
            and environ.get(capabilities.UNSHARED) != "1"
        )
        self._new_connection: Callable[..., Connection] = Connection
        self._connection: Connection | None = None
        self._workers_store: list[Any] = []
        self._opening: threading.Thread | None = None
        self._samples = threading.Semaphore(_SAMPLES)

    # --- what torch asks ----------------------------------------------------------

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return SCHEDULER

    def get_run_id(self) -> str:
        """Return the id that the user set, or that of the launch."""
        return str(self._parameters.run_id)

    @property
    def use_agent_store(self) -> bool:
        """Whether node 0 opens a store for the workers, instead of worker 0."""
        return self._shares_store

    def next_rendezvous(self) -> Any:
        """Wait until all nodes are ready for the next round.

        Raises:
            JobFailedError: There is no next round.
            LaunchError: This node cannot take part.
        """
        client, world = self.connect(), self._meeting
        own = self._open_workers_store() if world.node_rank == 0 else None
        address, port = workers_address(client.join(own))
        known = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        store = AgentStore(client, known)
        return capabilities.rendezvous_info(
            store, world.node_rank, world.nodes, address, port
        )

    def num_nodes_waiting(self) -> int:
        """Say whether there is to be another round; this costs nothing.

        Raises:
            JobFailedError: The job has failed on another node, or for all.
        """
        failure, own = self.failure, (self._meeting.node_rank,)
        # Torch's agent itself reports the failure of its own workers.
        if failure is not None and not (failure.rank >= 0 and failure.nodes == own):
            raise JobFailedError(failure)
        return int(self._client is not None and self._client.is_over)

    def is_closed(self) -> bool:
        """Say whether there will be no other round."""
        return self.failure is not None

    def set_closed(self) -> None:
        """Do nothing: a job ends when all have finished, or one has failed."""

    def shutdown(self) -> bool:
        """Leave, unless there is an error, of which the launcher informs the others."""
        if sys.exc_info()[0] is None:
            self.leave()
        return True

    # --- what the launcher and the agent ask --------------------------------------

    @property
    def failure(self) -> Failure | None:
        """Why the job failed."""
        return None if self._client is None else self._client.failure

    @property
    def reports(self) -> bool:
        """Whether this node reports how the job has ended."""
        failure, meeting = self.failure, self._meeting
        if failure is None:
            return self.is_first
        if failure.kind is Kind.COORDINATOR:
            return reports_wait_for(meeting.node_rank, meeting.coordinator)
        return reports_failure(meeting.node_rank, meeting.nodes, failure.unaware)

    @property
    def is_first(self) -> bool:
        """Whether this node does what one of them does while the job runs."""
        return is_reporter(self._meeting.node_rank)

    @property
    def is_certain(self) -> bool:
        """Whether the job cannot go on without this node, when that gives up."""
        return True

    @property
    def out_at_end(self) -> Sequence[int]:
        """Ranks of the nodes that the next job had better do without."""
        return ()

    @property
    def is_unreported(self) -> bool:
        """Whether a worker has failed, and nobody has reported it."""
        return self._client is not None and self._client.is_unreported

    @property
    def took_part(self) -> bool:
        """Whether the coordinator has accepted this agent."""
        return self._client is not None and self._client.is_accepted

    @property
    def restarts(self) -> int:
        """How often the job has been restarted, up to the round that runs."""
        return 0 if self._client is None else max(self._client.next_round - 1, 0)

    def connect(self, timeout: float | None = None) -> Client:
        """Start the coordinator, if this is its node, and connect to it.

        Args:
            timeout: Seconds to look for it; by default those of ``join_timeout``.

        Raises:
            LaunchError: The coordinator cannot listen, or refuses this agent.
            CoordinatorMissingError: It was not found in time.
            JobFailedError: The job has failed already.
        """
        if self._client is not None:
            return self._client
        self._connection = self._new_connection(
            self._meeting, self._settings, self._environ, self._report
        )
        limit = self._settings.join_timeout if timeout is None else timeout
        try:
            return self._connection.open(limit)
        except search.CoordinatorNotFoundError as error:
            message = messages.coordinator_missing(str(error), limit, self._meeting)
            raise CoordinatorMissingError(message) from None

    def worker_failed(self, failure: Failure) -> None:
        """Inform the others that a worker of this node has failed."""
        if self._client is not None:
            self._client.worker_failed(failure)

    def stacks(self, timeout: float) -> dict[int, Any]:
        """Return the stacks of all workers by node, see `Client.stacks`."""
        return {} if self._client is None else self._client.stacks(timeout)

    def finish(self) -> bool:
        """Wait until all nodes have finished; say whether they did."""
        try:
            if self._client is not None:
                self._client.finish()
        except JobFailedError:
            return False
        return True

    def give_up(self, failure: Failure) -> None:
        """Inform the others that this agent gives up, and why."""
        if self._client is not None:
            rank = self._meeting.node_rank
            self._client.fail(replace(failure, nodes=(rank,), by=rank))

    def leave(self) -> None:
        """Disconnect; the coordinator ends once all others know how the job ended."""
        if self._connection is not None:
            self._connection.close()
        self._workers_store = []
        if self._opening is not None:
            self._opening.join(_PATIENCE)
            if self._opening.is_alive():
                text = (
                    "torch asks for the name of this node's address: this process "
                    "ends when a name server has answered, or the resolver gives up"
                )
                console.write(Message("HPC176", text))
            self._opening = None

    # --- parts --------------------------------------------------------------------

    @property
    def _client(self) -> Client | None:
        return None if self._connection is None else self._connection.client

    def _open_workers_store(self) -> tuple[str, int]:
        """Open a store for the workers of one round; return its address and port.

        Each round has its own, so that no worker finds values of the round before.
        """
        opening: list[Any] = []
        self._workers_store = opening
        address = str(self._parameters.local_addr)
        if not self._shares_store:
            return address, int(get_free_port())  # type: ignore[no-untyped-call]
        own = self._meeting.local_address
        opened = listen(own, 0)
        port = opened.getsockname()[1]
        # It serves before it returns: where no name server answers, that takes long.
        # No daemon: if it returned while Python ends, C++ would abort this process.
        self._opening = threading.Thread(
            target=self._serve,
            args=[opening, own or "127.0.0.1", port, capabilities.listening_on(opened)],
            name="workers' store",
        )
        self._opening.start()
        return address, port

    def _serve(
        self, opening: list[Any], host: str, port: int, options: Mapping[str, Any]
    ) -> None:
        """Open the store of the workers, and keep it."""
        try:
            store = _torch.TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                **options,
            )
        except Exception as error:  # noqa: BLE001 - the other nodes wait for it
            self.give_up(Failure(Kind.AGENT, text=f"the workers' store: {error}"))
        else:
            opening.append(store)

    def _answer(self, question: Any) -> None:
        """Send the stacks of this node's workers to the one that asks."""
        try:
            answer = {"sampled": question, "of": self._sample()}
        finally:
            self._samples.release()
        if self._client is not None:
            self._client.send(answer)

    def _report(self, event: Mapping[str, Any]) -> None:
        if "report" in event:
            report.write(event["report"], self._meeting)
            return
        if (asks := event.get("stacks")) is not None:
            if self._samples.acquire(blocking=False):
                threading.Thread(target=self._answer, args=[asks], daemon=True).start()
            return
        message = messages.render(event, self._meeting)
        if message is not None:
            console.write(message, "warning" if event.keys() & _WARNINGS else "")


def _settings(
    meeting: Meeting, parameters: RendezvousParameters, max_restarts: int
) -> Settings:
    interval = parameters.get_as_int("keep_alive_interval")
    attempts = parameters.get_as_int("keep_alive_max_attempt")
    silence = SILENCE_TIMEOUT
    if interval is not None or attempts is not None:
        # Torch's defaults; and agents must have time to answer.
        silence = max((interval or 5) * (attempts or 3), _SHORTEST_SILENCE)
    return Settings(
        job=meeting.launch_id,
        run_id=str(parameters.run_id),
        nodes=meeting.nodes,
        coordinator=meeting.node_rank if meeting.is_coordinator else -1,
        max_restarts=max_restarts,
        join_timeout=parameters.get_as_int("join_timeout") or 0,
        silence_timeout=silence,
        spares=meeting.spares.number,
        started=meeting.started,
        signals_on_loss=meeting.started_by is None or meeting.started_by.ends_others,
    )


def workers_address(go: Mapping[str, Any]) -> tuple[str, int]:
    """Return address and port of the workers' store.

    Raises:
        RendezvousError: The coordinator did not send them.
    """
    match go.get("store"):
        case [str(address), int(port)] if 0 < port < 2**16:
            return address, port
    raise rendezvous.RendezvousError("the head node did not say where the workers meet")


@dataclass(eq=False)
class Creator:
    """Makes the handler when torch asks for it, and keeps it for the launcher.

    Torch's ``--rdzv-conf`` has no room for a plan, and its registry keeps the first
    creator of a name, unless the other one is equal: all of ours are.
    """

    meeting: Meeting
    max_restarts: int
    environ: Mapping[str, str]
    sample: Callable[[], Any] = list
    kind: Callable[..., SchedulerRendezvous] = SchedulerRendezvous
    handler: SchedulerRendezvous | None = None

    def worker_failed(self, failure: Failure, _attempt: object) -> None:
        """Inform the others that a worker of this node has failed."""
        if self.handler is not None:
            self.handler.worker_failed(failure)

    def is_first(self) -> bool:
        """Say whether this node does what one of them does while the job runs."""
        return self.handler is not None and self.handler.is_first

    def stacks(self, timeout: float) -> dict[int, Any]:
        """Return the stacks of all workers by node."""
        return {} if self.handler is None else self.handler.stacks(timeout)

    def __call__(self, parameters: RendezvousParameters) -> SchedulerRendezvous:
        """Make the handler."""
        self.handler = self.kind(
            self.meeting, parameters, self.max_restarts, self.environ, self.sample
        )
        return self.handler

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Creator)

    __hash__ = object.__hash__


def register(
    meeting: Meeting,
    max_restarts: int,
    environ: Mapping[str, str],
    sample: Callable[[], Any] = list,
    kind: Callable[..., SchedulerRendezvous] = SchedulerRendezvous,
) -> Creator:
    """Let torch find this rendezvous, of some kind, under its name."""
    creator = Creator(meeting, max_restarts, environ, sample, kind)
    rendezvous.rendezvous_handler_registry.register(SCHEDULER, creator)
    return creator


def parameters(
    args: argparse.Namespace, meeting: Meeting, conf: Mapping[str, object]
) -> RendezvousParameters:
    """Return what torch makes of its arguments, and of the pairs of ``--rdzv-conf``."""
    endpoint, local = args.rdzv_endpoint, getattr(args, "local_addr", None)
    nodes = meeting.nodes
    return rendezvous.RendezvousParameters(
        SCHEDULER, endpoint, args.rdzv_id, nodes, nodes, local, **conf
    )

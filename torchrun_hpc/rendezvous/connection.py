"""How a node takes part: the coordinator, if it is here, and the connection to it."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
from typing import TYPE_CHECKING, Any

from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.host.network import join_endpoint, port_holder
from torchrun_hpc.rendezvous import messages, search
from torchrun_hpc.rendezvous.client import Client, JobFailedError, request_of
from torchrun_hpc.rendezvous.coordinator import Coordinator
from torchrun_hpc.rendezvous.protocol import Refusal
from torchrun_hpc.rendezvous.server import CoordinatorServer, listen
from torchrun_hpc.reporting import console

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.rendezvous.protocol import Settings
    from torchrun_hpc.rendezvous.protocol import JoinRequest
    from torchrun_hpc.rendezvous.search import CoordinatorAddress
    from torchrun_hpc.rendezvous.server import Answering

# Seconds to find out which program has a port.
_CHECK_TIMEOUT = 2


class Connection:
    """The coordinator, if this is its node, and this node's connection to it.

    Args:
        meeting: Where the nodes meet.
        settings: What all agents agree on.
        environ: Environment of this process.
        on_event: See `Client`.
        segment: Bytes of TCP's segments at most; 0 for what the interface takes.

    Attributes:
        client: The connection, once it is opened.
    """

    def __init__(
        self,
        meeting: Meeting,
        settings: Settings,
        environ: Mapping[str, str],
        on_event: Callable[[Mapping[str, Any]], None],
        *,
        segment: int = 0,
    ) -> None:
        self.client: Client | None = None
        self._meeting = meeting
        self._settings = settings
        self._environ = environ
        self._on_event = on_event
        self._segment = segment
        self._server: CoordinatorServer | None = None

    def open(self, timeout: float) -> Client:
        """Start the coordinator, if this is its node, and connect to it.

        Args:
            timeout: Seconds to look for it.

        Raises:
            LaunchError: The coordinator cannot listen, or refuses this agent.
            CoordinatorNotFoundError: It was not found in time.
            JobFailedError: The job has failed already.
        """
        meeting, settings, where = self._meeting, self._settings, self._meeting
        request = request_of(meeting, settings.run_id)
        _allow_open_files()
        opened, ports = self._listen(request), where.ports
        if opened is not None:
            if self._segment:  # for both sides of each connection
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, self._segment)
            port = opened.getsockname()[1]
            if where.is_coordinator:
                ports = (port,)
            self._server = CoordinatorServer(
                opened, self._coordinator(port), on_problem=_report_problem
            )
            self._server.start()
        address = search.CoordinatorAddress(
            host=where.connect_host,
            ports=ports,
            timeout=timeout,
            silence_timeout=settings.silence_timeout,
            notice_ports=where.notice_ports,
        )
        self.client = self._client(request, address)
        try:
            self.client.connect()
        except search.RefusedError as refused:
            raise messages.refusal(refused, meeting, request, self._environ) from None
        return self.client

    def close(self) -> None:
        """Disconnect; the coordinator ends once all others know how the job ended."""
        if self.client is not None:
            self.client.leave()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _coordinator(self, _port: int) -> Answering:
        """Return what decides what this node answers, which listens on a port."""
        return Coordinator(self._settings)

    def _client(self, request: JoinRequest, address: CoordinatorAddress) -> Client:
        """Return the connection to the coordinator, which is not open yet."""
        return Client(request, address, self._on_event)

    def _listen(self, request: JoinRequest) -> socket.socket | None:
        """Listen for agents on the first port that is free, if this is their node.

        Raises:
            LaunchError: There is none, or the job has a coordinator already.
        """
        where, problems, opened = self._meeting, {}, None
        if not where.is_coordinator:
            return None
        address = where.listen[0] if where.listen else None
        for port in where.ports:
            try:
                opened = listen(address, port)
                break
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise  # whichever the port
                problems[port] = error
        taken = [p for p, e in problems.items() if e.errno == errno.EADDRINUSE]
        if taken:
            self._check_no_coordinator(taken, request)
        if opened is not None:
            return opened
        first, *others = where.ports
        holder = "" if others else f", taken by {port_holder(first)}"
        listed = "; ".join(f"port {p}: {e.strerror}" for p, e in problems.items())
        endpoint = join_endpoint(where.connect_host, "PORT")
        raise LaunchError(
            "HPC111",
            f"cannot listen on {address or 'any address'}: {listed}{holder}. Type "
            f"another port: --rdzv_endpoint={endpoint}",
        )

    def _check_no_coordinator(self, ports: Sequence[int], request: JoinRequest) -> None:
        """Find out whether one of the ports is taken by the coordinator of this job.

        Raises:
            LaunchError: It is, and this agent is the second one of its node.
        """
        meeting, timeout = self._meeting, _CHECK_TIMEOUT
        host = meeting.connect_host
        address = search.CoordinatorAddress(host, ports, timeout, timeout)
        client = Client(request, address, lambda _: None)
        # If it accepts this agent, its own one has not connected yet.
        refused = search.RefusedError(Refusal.TAKEN, ports[0])
        try:
            client.connect()
        except search.RefusedError as error:
            refused = error
        except (search.CoordinatorNotFoundError, JobFailedError):
            return
        finally:
            client.leave()
        if refused.reason is not Refusal.UNKNOWN:
            raise messages.refusal(refused, meeting, request, self._environ)


def _allow_open_files() -> None:
    """Allow this process as many open files as the system does.

    The head node has a connection to each node, node 0 one to each worker.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):  # the kernel allows fewer by now
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _report_problem(reason: str) -> None:
    """Report that a connection to the coordinator has to wait."""
    text = (
        f"cannot take a connection of another node: {reason} (ulimit -n is "
        f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}); trying on"
    )
    console.write(Message("HPC162", text), "warning")

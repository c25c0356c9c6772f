"""A node's connection: the coordinator, if it is here, and the client."""

from __future__ import annotations

import errno
import os
import resource
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrun_hpc import __version__
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.host.network import join_endpoint, port_holder
from torchrun_hpc.rendezvous import messages, search
from torchrun_hpc.rendezvous.client import Client, never
from torchrun_hpc.rendezvous.coordinator import Coordinator
from torchrun_hpc.rendezvous.errors import (
    CoordinatorNotFoundError,
    JobFailedError,
    RefusedError,
)
from torchrun_hpc.rendezvous.key import LATE, REMEDY, Key
from torchrun_hpc.rendezvous.loop import Loop
from torchrun_hpc.rendezvous.member import Member
from torchrun_hpc.rendezvous.peers import Peers
from torchrun_hpc.rendezvous.policy import first_record
from torchrun_hpc.rendezvous.protocol import JoinRequest, Refusal
from torchrun_hpc.rendezvous.server import CoordinatorServer, listen
from torchrun_hpc.reporting import console

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrun_hpc.failures.failure import Failure
    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.rendezvous.protocol import Settings

# Seconds to find out which program has a port.
_CHECK_TIMEOUT = 2

# Seconds by which the coordinator gives up before the others, and reports.
_HEAD_START = 10

_REPLIES = 4  # made at once

# Identifies this process. A fork of it has another process id.
_AGENT = secrets.token_hex(16)


def request_of(meeting: Meeting, run_id: str) -> JoinRequest:
    """Return this node's join request."""
    rank = meeting.node_rank
    return JoinRequest(
        run_id=run_id,
        nodes=meeting.nodes,
        rank=rank,
        host="" if meeting.in_process else meeting.hosts[rank],
        pid=os.getpid(),
        release=__version__,
        agent=f"{_AGENT}.{os.getpid()}",
        compared=meeting.compared,
        spares=meeting.spares.number,
        started=meeting.started,
    )


class Connection:
    """The coordinator, if this is its node, and this node's connection to it.

    `segment` is the largest TCP segment in bytes; 0 means the interface's own.
    `own_failure` is why this agent cannot start, if it connects only to report that.
    `replies` has functions that reply to questions to all nodes, by name. They get and
    return plain data. For `on_event`, see `Client`.
    """

    def __init__(  # noqa: PLR0913 - the last four are of few
        self,
        meeting: Meeting,
        settings: Settings,
        environ: Mapping[str, str],
        on_event: Callable[[Mapping[str, Any]], Failure | None],
        *,
        segment: int = 0,
        own_failure: Failure | None = None,
        replies: Mapping[str, Callable[[Any], Any]] | None = None,
        end_workers: Callable[[], None] = lambda: None,
    ) -> None:
        self._meeting = meeting
        self._settings = settings
        self._environ = environ
        self._segment = segment
        self._own_failure = own_failure
        self._on_event = on_event
        self._replies = replies or {}
        self._making_replies = threading.Semaphore(_REPLIES)
        self._end_workers = end_workers
        self._loop = Loop()
        self._request = request_of(meeting, settings.run_id)
        self.server: CoordinatorServer | None = None
        self.key = Key(meeting.key, meeting.launch_id)
        silence = settings.silence_timeout + _HEAD_START * (not settings.has_spares)
        self.client = Client(self._loop, self._request, silence, self._hear)

    def open(self, timeout: float) -> Client:
        """Start the coordinator, if this is its node, and connect to it.

        Raise `LaunchError` if this is impossible, or one of `errors`. `timeout` is the
        search's limit in seconds.
        """
        meeting, ports = self._meeting, self._meeting.ports
        self._loop.start()
        if meeting.in_process:
            server = self._start(None, Coordinator(self._settings))
            self.client.connect(partial(search.find_within, self._request, server))
            return self.client
        _allow_open_files()
        self._load_key()
        opened = self._listen()
        if opened is not None and meeting.is_coordinator:
            ports = (opened.getsockname()[1],)
        # Later, the search asks other members. Another key on the head node is certain
        # only after LATE seconds, and agents start at different times.
        settings = self._settings
        first = min(timeout, settings.spare_after) if settings.has_spares else timeout
        where = (meeting.connect_host, ports, first, meeting.notice_ports)
        address = search.CoordinatorAddress(*where, min(timeout, 2 * LATE))
        tell, own_failure = self.client.tell, self._own_failure
        finder = search.Search(self._request, address, self.key, tell, own_failure)
        peers = None if opened is None else self._serve(opened, finder, timeout)
        try:
            self.client.connect(finder.find, peers)
        except RefusedError as refused:
            raise self._refusal(refused) from None
        return self.client

    def close(self, timeout: float = 0, is_urgent: Callable[[], bool] = never) -> None:
        """Disconnect. The coordinator ends once all others know how the job ended.

        For `timeout` and `is_urgent`, see `Client.leave`.
        """
        self.client.leave(timeout, is_urgent)
        if self.server is not None:
            self.server.close()
        self._loop.close()

    def _hear(self, event: Mapping[str, Any]) -> Failure | None:
        if "question" not in event:
            return self._on_event(event)
        make = self._replies.get(event.get("what", ""))
        if make is not None and self._making_replies.acquire(blocking=False):
            threading.Thread(
                target=self._reply, args=[event, make], daemon=True
            ).start()
        return None

    def _reply(self, event: Mapping[str, Any], make: Callable[[Any], Any]) -> None:
        try:
            reply = {"reply": event["question"], "of": make(event.get("with"))}
        finally:
            self._making_replies.release()
        self.client.send(reply)

    def _load_key(self) -> None:
        if not self.key.load() and self._own_failure is None:
            host = self._request.host or socket.gethostname()
            text = f"on {host}: anybody who knows this job's number can join it, or "
            text += f"pretend to be its head node. Key here: {self.key.name}. {REMEDY}"
            console.write(Message("HPC236", text), "warning")

    def _refusal(self, refused: RefusedError) -> LaunchError:
        where, request = self._meeting, self._request
        return messages.refusal(refused, where, request, self._environ, self.key.name)

    def _serve(
        self, opened: socket.socket, finder: search.Search, timeout: float
    ) -> Peers | None:
        meeting = self._meeting
        if self._segment:  # for both sides of each connection
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, self._segment)
        if not self._settings.has_spares:
            self._start(opened, Coordinator(self._settings))
            return None
        member = self._member(opened.getsockname()[1])
        settings = replace(self._settings, coordinator=meeting.node_rank)
        coordinator = Coordinator(settings, member)
        if meeting.is_coordinator:
            coordinator.coordinate(member.record)
        server = self._start(opened, coordinator)
        return Peers(server, member, finder, timeout, self._end_workers)

    def _start(
        self, opened: socket.socket | None, coordinator: Coordinator
    ) -> CoordinatorServer:
        server = self.server = CoordinatorServer(
            self._loop, opened, coordinator, self.key, on_problem=_report_problem
        )
        server.start()
        return server

    def _member(self, port: int) -> Member:
        where, own = self._meeting, self._meeting.node_rank
        first_port = where.ports[0]
        first = own if where.is_coordinator else where.coordinator or 0
        return Member(
            own,
            (where.local_address or where.fast_hosts[own], port),
            first_record(where.nodes, where.spares.number, first),
            {r: (host, first_port) for r, host in enumerate(where.fast_hosts) if host},
        )

    def _listen(self) -> socket.socket | None:
        where = self._meeting
        if where.is_coordinator:
            return self._listen_as_coordinator()
        if not self._settings.has_spares:
            return None
        with suppress(OSError):
            return listen(where.local_address, where.ports[0])
        return listen(where.local_address, 0)

    def _listen_as_coordinator(self) -> socket.socket:
        """Listen on the first free port, unless the job already has a coordinator."""
        where, problems, opened = self._meeting, {}, None
        address = where.listen[0] if where.listen else None
        for port in where.ports:
            try:
                opened = listen(address, port)
                break
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise  # on any port
                problems[port] = error
        taken = [p for p, e in problems.items() if e.errno == errno.EADDRINUSE]
        if taken:
            self._check_no_coordinator(taken)
        if opened is not None:
            return opened
        first, *others = where.ports
        holder = "" if others else f", taken by {port_holder(first)}"
        listed = "; ".join(f"port {p}: {e.strerror}" for p, e in problems.items())
        endpoint = join_endpoint(where.connect_host, "PORT")
        raise LaunchError(
            "HPC055",
            f"cannot listen on {address or 'any address'}: {listed}{holder}. Set "
            f"another port: --rdzv_endpoint={endpoint}",
        )

    def _check_no_coordinator(self, ports: Sequence[int]) -> None:
        """Raise `LaunchError` if this job's coordinator has one of the ports."""
        meeting, request = self._meeting, self._request
        host, timeout = meeting.connect_host, _CHECK_TIMEOUT
        address = search.CoordinatorAddress(host, ports, timeout)
        client = Client(self._loop, request, timeout, lambda _: None)
        # If it accepts this agent, its own agent has not connected yet.
        refused = RefusedError(Refusal.TAKEN, ports[0])
        try:
            client.connect(search.Search(request, address, self.key, client.tell).find)
        except RefusedError as error:
            refused = error
        except (CoordinatorNotFoundError, JobFailedError):
            return
        finally:
            client.leave()
        raise self._refusal(refused)


def _allow_open_files() -> None:
    """Allow as many open files as possible: each node or worker is a connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):  # the kernel now allows fewer
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _report_problem(reason: str) -> None:
    text = (
        f"cannot accept a connection from another node: {reason} (ulimit -n is "
        f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}). Trying again every second"
    )
    console.write(Message("HPC162", text), "warning")

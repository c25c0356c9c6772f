"""A node's connection to its job: the client, and perhaps the coordinator."""

from __future__ import annotations

import errno
import os
import resource
import secrets
import socket
import threading
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrun_hpc import __version__, limits
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.host.network import join_endpoint, port_holder
from torchrun_hpc.rendezvous import messages
from torchrun_hpc.rendezvous.client import Client, Listener, never
from torchrun_hpc.rendezvous.coordinator import Coordinator
from torchrun_hpc.rendezvous.errors import (
    CoordinatorNotFoundError,
    JobFailedError,
    Refused,
    RefusedError,
)
from torchrun_hpc.rendezvous.key import REMEDY, Key
from torchrun_hpc.rendezvous.loop import Loop
from torchrun_hpc.rendezvous.member import Member
from torchrun_hpc.rendezvous.peers import Peers
from torchrun_hpc.rendezvous.protocol import JoinRequest, Reply, Settings
from torchrun_hpc.rendezvous.record import first_record
from torchrun_hpc.rendezvous.search import CoordinatorAddress, Search, find_within
from torchrun_hpc.rendezvous.server import CoordinatorServer, listen
from torchrun_hpc.reporting import console

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrun_hpc.failures.failure import Failure
    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.rendezvous.messages import News
    from torchrun_hpc.rendezvous.protocol import Question

_REPLIES = 4  # at most, at the same time

# Identifies this process. A fork of it has another process id.
_AGENT = secrets.token_hex(16)


def settings_of(meeting: Meeting, run_id: str, silence_timeout: int) -> Settings:
    """Return what all agents agree on, without the limits of rounds."""
    spares, launcher = meeting.spares, meeting.started_by
    return Settings(
        run_id=run_id,
        nodes=meeting.nodes,
        coordinator=meeting.node_rank,
        silence_timeout=silence_timeout,
        spares=spares.number,
        started=meeting.started,
        signals_on_loss=launcher is None or launcher.ends_others,
        spare_after=spares.after,
        health_check=spares.health_check_timeout if spares.health_check else 0,
    )


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
    return plain data. A given `key` has already been loaded and reported.
    """

    def __init__(  # noqa: PLR0913 - the last four are of few
        self,
        meeting: Meeting,
        settings: Settings,
        environ: Mapping[str, str],
        listener: Listener,
        *,
        segment: int = 0,
        own_failure: Failure | None = None,
        replies: Mapping[str, Callable[[Any], Any]] | None = None,
        key: Key | None = None,
    ) -> None:
        self._meeting = meeting
        self._settings = settings
        self._environ = environ
        self._segment = segment
        self._is_notice = own_failure is not None
        self._replies = replies or {}
        self._making_replies = threading.Semaphore(_REPLIES)
        self._loop = Loop()
        request = request_of(meeting, settings.run_id)
        self._request = replace(request, failed=own_failure)
        self.server: CoordinatorServer | None = None
        self._has_key = key is not None
        self.key = key or Key(meeting.key, meeting.launch_id)
        self.member = self._member()
        silence = settings.silence_timeout
        if not settings.has_spares:
            silence += limits.SILENCE_HEAD_START
        listener = replace(listener, reply=self._reply)
        self.client = Client(self._loop, self._request, self.member, silence, listener)

    def open(self, timeout: float) -> Client:
        """Start the coordinator, if this is its node, and connect to it.

        Raise `LaunchError` if this is impossible, or one of `errors`. `timeout` is the
        search's limit in seconds.
        """
        meeting, ports = self._meeting, self._meeting.ports
        self._loop.start()
        if meeting.in_process:
            self.client.connect(partial(find_within, self._request, self._start(None)))
            return self.client
        _allow_open_files()
        self._load_key()
        opened, peers = self._listen(), None
        if opened is not None and meeting.is_coordinator:
            ports = (opened.getsockname()[1],)
        settings, limit = self._settings, timeout
        if settings.has_spares:  # then the agent asks the other members
            limit = min(timeout, settings.spare_after)
        # Another key on the head node is certain only after KEY_FILE_TIMEOUT, and
        # agents start at different times.
        proof_limit = min(timeout, 2 * limits.KEY_FILE_TIMEOUT)
        host, notice_ports = meeting.connect_host, meeting.notice_ports
        address = CoordinatorAddress(host, ports, limit, notice_ports, proof_limit)
        search = Search(self._request, address, self.key, self.client.tell)
        if opened is not None:
            self._can_be_asked(opened)
            server = self._start(opened)
            if settings.has_spares:
                late = timeout - settings.spare_after
                peers = Peers(server, self.member, search, timeout, late)
        try:
            self.client.connect(search.find, peers)
        except RefusedError as refused:
            raise self._refusal(refused) from None
        return self.client

    def inform(self, failure: Failure, limit: float) -> None:
        """Accept the other nodes only to inform them, for up to `limit` seconds.

        The first free port will do. Without one, or with an unusable key, do nothing.
        """
        ports = (*self._meeting.ports, *self._meeting.notice_ports)
        with suppress(LaunchError):  # with an unusable key, anybody could read it
            self.key.load()
            opened, _ = self._first_free(ports)
            if opened is not None:
                self._loop.start()
                try:
                    self._start(opened, failure).close(late_timeout=limit)
                finally:  # at once, if the user ends the wait
                    self._loop.close()

    def close(self, timeout: float = 0, is_urgent: Callable[[], bool] = never) -> None:
        """Disconnect. The coordinator ends once all others know how the job ended.

        For `timeout` and `is_urgent`, see `Client.leave`.
        """
        self.client.leave(timeout, is_urgent)
        if self.server is not None:
            self.server.close()
        self._loop.close()

    def _reply(self, question: Question) -> None:
        make = self._replies.get(question.what)
        if make is not None and self._making_replies.acquire(blocking=False):
            self._loop.call_apart(partial(self._make_reply, question, make))

    def _make_reply(self, question: Question, make: Callable[[Any], Any]) -> None:
        try:
            reply = Reply(question.asker, question.number, make(question.about))
        finally:
            self._making_replies.release()
        self.client.send(reply)

    def _load_key(self) -> None:
        if self._has_key or self.key.load() or self._is_notice:
            return
        host = self._request.host or socket.gethostname()
        text = "anybody who knows this job's number can join it, or "
        text += f"pretend to be its head node. Key here: {self.key.name}. {REMEDY}"
        console.write(Message("HPC236", text), "warning", host=host)

    def _refusal(self, refused: RefusedError) -> LaunchError:
        run_id, key = self._request.run_id, self.key.name
        return messages.refusal(refused, self._meeting, run_id, self._environ, key)

    def _start(
        self, opened: socket.socket | None, failure: Failure | None = None
    ) -> CoordinatorServer:
        coordinator = Coordinator(self._settings, self.member)
        if self._meeting.is_coordinator:
            coordinator.coordinate(self.member.record)
        if failure is not None:  # before any node is accepted
            coordinator.fail(failure)
        server = self.server = CoordinatorServer(
            self._loop, opened, coordinator, self.key, on_problem=_report_problem
        )
        server.start()
        return server

    def _member(self) -> Member:
        meeting, settings, rank = self._meeting, self._settings, self._request.rank
        first = rank if meeting.is_coordinator else meeting.coordinator or 0
        spares = settings.spares if settings.has_spares else 0
        member = Member(rank, first_record(meeting.nodes, spares, first))
        member.coordinates = meeting.is_coordinator
        return member

    def _listen(self) -> socket.socket | None:
        meeting, opened = self._meeting, None
        if meeting.is_coordinator:
            opened = self._listen_as_coordinator()
        elif self._settings.has_spares:
            address = meeting.local_address
            with suppress(OSError):
                opened = listen(address, meeting.ports[0])
            opened = opened or listen(address, 0)
        return opened

    def _can_be_asked(self, opened: socket.socket) -> None:
        if not self._settings.has_spares:
            return
        meeting, hosts = self._meeting, self._meeting.fast_hosts
        address = meeting.local_address or hosts[self.member.number]
        port = meeting.ports[0]
        hints = {rank: (host, port) for rank, host in enumerate(hosts) if host}
        self.member.listens((address, opened.getsockname()[1]), hints)

    def _listen_as_coordinator(self) -> socket.socket:
        """Listen on the first free port, unless the job already has a coordinator."""
        meeting = self._meeting
        opened, problems = self._first_free(meeting.ports)
        taken = [p for p, e in problems.items() if e.errno == errno.EADDRINUSE]
        if taken:
            self._check_no_coordinator(taken)
        if opened is not None:
            if self._segment:  # for both sides of each connection
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, self._segment)
            return opened
        first, *others = meeting.ports
        holder = "" if others else f", taken by {port_holder(first)}"
        listed = "; ".join(f"port {p}: {e.strerror}" for p, e in problems.items())
        endpoint = join_endpoint(meeting.connect_host, "PORT")
        raise LaunchError(
            "HPC055",
            f"cannot listen on {self._address or 'any address'}: {listed}{holder}. Set "
            f"another port: --rdzv_endpoint={endpoint}",
        )

    @property
    def _address(self) -> str | None:
        return self._meeting.listen[0] if self._meeting.listen else None

    def _first_free(
        self, ports: Sequence[int]
    ) -> tuple[socket.socket | None, dict[int, OSError]]:
        """Listen on the first free port; return why the ports before it are not."""
        problems: dict[int, OSError] = {}
        for port in ports:
            try:
                return listen(self._address, port), problems
            except OSError as error:  # noqa: PERF203 - each has its own
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise  # no port can be opened
                problems[port] = error
        return None, problems

    def _check_no_coordinator(self, ports: Sequence[int]) -> None:
        """Raise `LaunchError` if this job's coordinator has one of the ports."""
        meeting = replace(
            self._meeting, is_coordinator=False, ports=tuple(ports), notice_ports=()
        )
        settings = replace(self._settings, is_fixed=True)
        other = Connection(meeting, settings, self._environ, Listener(), key=self.key)
        with closing(other), suppress(CoordinatorNotFoundError, JobFailedError):
            other.open(limits.PORT_CHECK_TIMEOUT)
            # It has accepted this agent, so its node's agent has not connected yet.
            raise self._refusal(RefusedError(Refused.TAKEN, ports[0]))


def inform(
    meeting: Meeting, failure: Failure, limit: float, tell: Callable[[News], None]
) -> Failure | None:
    """Inform the other nodes why this one cannot start, within `limit` seconds.

    Return the coordinator's reason for the job's failure; ``None`` if it was not found,
    or runs on this node.
    """
    silence = limits.SILENCE_REPORT if meeting.is_coordinator else int(limit)
    # This node may have planned with fewer options than the others.
    meeting = replace(meeting, started="")
    settings = replace(settings_of(meeting, "", silence), is_fixed=True)
    connection = Connection(meeting, settings, {}, Listener(tell), own_failure=failure)
    with (
        closing(connection),
        suppress(JobFailedError, CoordinatorNotFoundError, LaunchError),
    ):
        if meeting.is_coordinator:
            connection.inform(failure, limit)
        else:  # the coordinator reads it only in an agent's first request
            connection.open(limit).fail(failure)
    return connection.client.state.failure


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

"""An agent's search for the coordinator, on a few ports of the expected host."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrun_hpc import limits, waiting, wire
from torchrun_hpc.rendezvous.errors import (
    CoordinatorNotFoundError,
    Refused,
    RefusedError,
)
from torchrun_hpc.rendezvous.key import NO_PROOF, NOWHERE, UnprovedError
from torchrun_hpc.rendezvous.loop import End, within
from torchrun_hpc.rendezvous.messages import Looking
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    LINE_LIMIT,
    Ended,
    Welcome,
)
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from torchrun_hpc.rendezvous.key import Key, Secret, Steps
    from torchrun_hpc.rendezvous.messages import News
    from torchrun_hpc.rendezvous.protocol import FromAgent, FromCoordinator, JoinRequest
    from torchrun_hpc.rendezvous.server import CoordinatorServer

    # A connection to the coordinator, and its answer to the join request.
    Answered = tuple["Channel", Welcome | Ended]
    Find = Callable[[], Awaitable[Answered]]

_ALL_PORTS_EVERY = 8  # turns

# What is on a port. A refused connection has reached the node.
_NOBODY = "nobody listens (not started there yet, or ended)"
_SILENT = "a program that sends nothing"


@dataclass(frozen=True)
class CoordinatorAddress:
    """The coordinator's host, and the ports in the order in which it tries them.

    On `notice_ports`, it only reports that it cannot start. `timeout` is the search's
    limit in seconds. While a port gives no proof, `proof_timeout` is the limit if it is
    longer.
    """

    host: str
    ports: Sequence[int]
    timeout: float
    notice_ports: Sequence[int] = ()
    proof_timeout: float = 0


class Channel(End):
    """A connection to the coordinator.

    The `request` is sent once the other side has proved itself. `on_message` takes all
    messages after the answer. The loop's exception handler gets the faults of both.
    """

    def __init__(self, request: JoinRequest, secret: Secret) -> None:
        super().__init__()
        self.closed = asyncio.Event()
        self.on_message: Callable[[FromCoordinator], None] | None = None
        self._request, self._secret = wire.encode(request), secret
        self._steps: Steps | None = None  # until the other side has proved
        self._problem: UnprovedError | None = None
        self._messages: list[FromCoordinator] = []
        self._arrived = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        """Begin the proof."""
        super().connection_made(transport)
        # None if already reset, or within a process.
        to = transport.get_extra_info("peername") or NOWHERE
        self._steps = self._secret.call(to[:2], self._request)
        self._write(next(self._steps))

    def data_received(self, data: bytes) -> None:
        """Handle received data: first the proof, then messages."""
        self.has_received = True
        try:
            for message in self.lines.feed(data):
                if self._steps is None:
                    self._messages.append(wire.decode(FROM_COORDINATOR, message))
                else:
                    self._write(self._steps.send(message))
                    self._steps, self.lines.limit = None, LINE_LIMIT
        except UnprovedError as problem:
            self._problem = problem
            self._write({})  # so that the other side notices the caller
            self.close()
        except WireError:
            self.abort()
        if self._messages:
            self._arrived.set()
        self.deliver()

    def deliver(self) -> None:
        """Pass on the messages that have arrived, once `on_message` is set."""
        try:
            while self.on_message is not None and self._messages:
                self.on_message(self._messages.pop(0))
        except WireError:
            self.abort()
        except Exception as error:  # noqa: BLE001 - the loop's handler has it
            fault = {"message": "a message of the coordinator", "exception": error}
            asyncio.get_running_loop().call_exception_handler(fault)

    async def open(
        self, host: str, port: int, on_connect: Callable[[], Any] = lambda: None
    ) -> FromCoordinator | None:
        """Connect; return the answer to the request, see `answer`.

        If there is no such host or port, or nobody listens, raise `OSError`,
        `ValueError` or `OverflowError`.
        """
        opening = asyncio.get_running_loop().create_connection(lambda: self, host, port)
        try:
            await within(limits.CONNECT_TIMEOUT, opening)
            on_connect()
            return await self.answer()
        except BaseException:
            self.abort()
            raise

    async def answer(self) -> FromCoordinator | None:
        """Return the answer to the request; ``None`` if the connection ends.

        Raise `UnprovedError`, or `asyncio.TimeoutError` without an answer.
        """
        await within(limits.WELCOME_TIMEOUT, self._arrived.wait())
        if self._problem is not None:
            raise self._problem
        return self._messages.pop(0) if self._messages else None

    def connection_lost(self, error: Exception | None) -> None:
        """Wake the tasks that wait for the end, or for the answer."""
        super().connection_lost(error)
        self.closed.set()
        self._arrived.set()

    def send(self, message: FromAgent) -> None:
        """Send a message, unless the connection has ended."""
        self._write(wire.encode(message, FROM_AGENT))

    def _write(self, message: Mapping[str, Any]) -> None:
        if not self.transport.is_closing():
            self.transport.write(wire.to_line(message))


async def find_within(request: JoinRequest, server: CoordinatorServer) -> Answered:
    """Connect to the coordinator of this process, which has no port."""
    channel = Channel(request, server.key.secret)
    ours, theirs = socket.socketpair()
    server.take(theirs)
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: channel, sock=ours)
    answer = accepted(await channel.answer())
    assert answer is not None  # noqa: S101 - of the same process
    return channel, answer


def accepted(answer: FromCoordinator | None) -> Welcome | Ended | None:
    """Return the answer if it is a coordinator's, and no refusal."""
    return answer if isinstance(answer, (Welcome, Ended)) else None


class Search:
    """Looks for the coordinator at its expected address; tells the news each second."""

    def __init__(
        self,
        request: JoinRequest,
        address: CoordinatorAddress,
        key: Key,
        tell: Callable[[News], None],
    ) -> None:
        self.request = request
        self._address = address
        self.key = key
        self.tell = tell
        self._attempts: dict[int, asyncio.Task[Answered | None]] = {}  # by port
        self._programs: dict[int, str] = {}  # what is on each port instead
        self._unproved: dict[int, float] = {}  # since when, on each port

    async def find(self) -> Answered:
        """Try the ports until the coordinator answers on one; return its answer."""
        clock = asyncio.get_running_loop().time
        start = clock()
        turn = reported = 0
        try:
            while True:
                answered = await self._try_ports(all_ports=turn % _ALL_PORTS_EVERY == 0)
                if answered is not None:
                    return answered
                turn += 1
                waited, limit = clock() - start, self._address.timeout
                if NO_PROOF in self._programs.values():
                    limit = max(limit, self._address.proof_timeout)
                problem, is_reached = self._problem()
                if waited > limit:
                    raise CoordinatorNotFoundError(problem, is_reached=is_reached)
                while reported + 1 < waited:
                    reported += 1
                    self.tell(Looking(reported, problem, is_reached))
                await asyncio.sleep(waiting.backoff(waited))
        finally:
            for task in self._attempts.values():
                task.cancel()
            await asyncio.gather(*self._attempts.values(), return_exceptions=True)

    async def _try_ports(self, *, all_ports: bool) -> Answered | None:
        """Try the ports in their order. Earlier attempts without an answer continue.

        Without `all_ports`, stop at a port where nobody listens: the coordinator takes
        the first free port.
        """
        ports = (*self._address.ports, *self._address.notice_ports)
        delay = min(limits.PORT_DELAY, self._address.timeout / len(ports))
        attempts = self._attempts
        for port in ports:
            is_new = port not in attempts
            if is_new:
                attempts[port] = asyncio.create_task(self._attempt(port))
            await asyncio.wait(
                attempts.values(),
                timeout=delay if is_new else 0,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for each in [each for each, task in attempts.items() if task.done()]:
                answered = attempts.pop(each).result()
                if answered is not None:
                    return answered
            is_free = port not in attempts and self._programs[port] == _NOBODY
            if is_free and not all_ports:
                break
        return None

    def _problem(self) -> tuple[str, bool]:
        """Return what is on the ports, and whether the node has refused a connection.

        On the ports for notices, there may rightly be nobody.
        """
        programs: dict[str, list[int]] = {}
        for port in self._address.ports:
            if port in self._programs:
                programs.setdefault(self._programs[port], []).append(port)
        texts = (
            f"port {', '.join(map(str, ports))}: {program}"
            for program, ports in programs.items()
        )
        return "; ".join(texts), _NOBODY in programs

    async def _attempt(self, port: int) -> Answered | None:  # noqa: C901 - each ending
        channel = Channel(self.request, self.key.secret)
        now = asyncio.get_running_loop().time()
        since = self._unproved.pop(port, now)
        # A report may be due before the time-out of a silent program.
        silent = functools.partial(self._programs.setdefault, port, _SILENT)
        try:
            answer = await channel.open(self._address.host, port, silent)
        except UnprovedError as error:
            self._unproved[port] = since
            if now - since > limits.KEY_FILE_TIMEOUT and port in self._address.ports:
                raise RefusedError(Refused.UNPROVED, port) from None
            await asyncio.to_thread(self.key.attempt)  # the key may exist now
            program = str(error)
        except asyncio.TimeoutError:
            program = _SILENT if channel.transport else "no answer to the connection"
        except ConnectionRefusedError:
            program = _NOBODY
        except (OverflowError, ValueError) as error:  # no such port or host
            program = str(error)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # this node's own fault
                raise
            number = error.errno or 0  # asyncio's text repeats address and port
            program = (
                os.strerror(number) if number > 0 else error.strerror or str(error)
            )
        else:
            if (welcome := accepted(answer)) is not None:
                return channel, welcome
            channel.abort()
            if isinstance(answer, Refused):
                raise RefusedError(answer, port)
            program = "another program, or an older torchrun_hpc"
        self._programs[port] = program
        return None

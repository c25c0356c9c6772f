"""Processes on a simulated network: their clocks, sockets and threads are virtual.

Only one thread runs at a time: the test's, or the main thread of one process while the
test's thread waits for it. So a seed decides everything. A process is real but for its
`Loop`, `now`, its sockets, and the locks in which its main thread waits.

Each host has a number. Each connection delivers in order. A message may be late. A cut
keeps it until the cut ends, and a firewall rejects it with a reset. A process's kernel
closes its connections when it ends. If a host loses power, nothing is sent.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import selectors
import socket
import threading
from collections import deque
from contextlib import ExitStack
from errno import ECONNREFUSED, ECONNRESET
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from torchrun_hpc import limits, waiting
from torchrun_hpc.rendezvous import client, connection, loop, server

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

    from torchrun_hpc.rendezvous.client import Client, JobState

    Place = tuple[int, int]  # host and port
    Way = tuple[int, int]  # hosts: from, to

# Seconds.
LATE = 2.0  # a message, at most
_SOON = 0.02  # most messages
_STEP = 0.002  # of a process, at most
_FINE = 1e-6  # of clocks
_INTERRUPTED = 0.1  # share of a loop's turns

_OPEN, _OPENED, _END = "open", "opened", "end"
# One of these, the number of an error, or data.
Packet = str | int | bytes


def address_of(host: int) -> str:
    """Return the address of a host."""
    return f"10.0.0.{host}"


class Network:
    """All processes, and the time that passes for them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - no secret
        random.seed(seed)  # the pauses of a search
        self.now = 0.0
        self.current: Process  # the one that runs
        self.processes: list[Process] = []
        self.listening: dict[Place, Socket] = {}
        self.cut: set[Way] = set()
        self.rejecting: set[Way] = set()
        self.off: set[int] = set()  # hosts
        self.late = self.random.choice((0, 0.01, 0.1))  # share of messages
        self._stuck: list[Socket] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        """Replace what is not real in a process."""
        for module, name, value in (
            (loop, "now", self._now),
            (client, "now", self._now),
            (server, "now", self._now),
            (connection, "Loop", lambda: Loop(self.current)),
            (connection, "listen", self._listen),
            (limits, "CLIENT_SIGNAL_TIMEOUT", math.inf),
            (limits, "SERVER_SIGNAL_TIMEOUT", 0),
            (waiting, "time", SimpleNamespace(monotonic=self._now, sleep=self._sleep)),
        ):
            self._patches.enter_context(mock.patch.object(module, name, value))
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        for process in [*self.processes]:
            process.end()
        self._patches.close()

    def _now(self) -> float:
        return self.current.boot_time

    def _sleep(self, seconds: float) -> None:
        self.current.wait(max(seconds, 0.1))

    def _listen(self, _address: str, port: int) -> Socket:
        server = Socket(self.current, (self.current.host, port))
        assert self.listening.setdefault(server.place, server) is server
        return server

    # --- time ---------------------------------------------------------------------

    def at(self, when: float, function: Callable[[], None]) -> None:
        """Call a function at a time."""
        heapq.heappush(self._due, (when, next(self._numbers), function))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while True:
            first, when = None, end
            for process in self.processes:
                if (due := process.due()) < when:
                    first, when = process, due
            if self._due and self._due[0][0] <= when:
                self.now, _, function = heapq.heappop(self._due)
                function()
            elif first is None:
                break
            else:
                self.now = max(self.now, when)
                first.step()
        self.now = end

    # --- packets ------------------------------------------------------------------

    def is_cut(self, one: int, other: int) -> bool:
        """Return whether nothing arrives from one host at another."""
        return one in self.off or other in self.off or (one, other) in self.cut

    def heal(self) -> None:
        """End all cuts, and stop all firewalls."""
        self.cut.clear()
        self.rejecting.clear()
        self._send_again()

    def _send_again(self) -> None:
        stuck, self._stuck = self._stuck, []
        for each in stuck:
            each.send_again()

    def keep(self, stuck: Socket) -> None:
        """Keep what a socket has sent until the cut ends."""
        self._stuck.append(stuck)

    def delay(self) -> float:
        """Return after how many seconds a message arrives."""
        most = LATE if self.random.random() < self.late else _SOON
        return self.random.random() * most

    def break_between(self, one: int, other: int) -> None:
        """Let both ends of the connections of two hosts get a reset."""
        sockets = [each for p in self.processes for each in p.sockets.values()]
        for each in sockets:
            if each.peer and {each.host, each.peer.host} == {one, other}:
                each.fail(ECONNRESET)

    def power_on(self, host: int) -> None:
        """Let a host have power again."""
        self.off.discard(host)
        self._send_again()

    def power_off(self, host: int) -> None:
        """Let a host lose power: nobody is told."""
        self.off.add(host)
        for process in [p for p in self.processes if p.host == host]:
            process.end()


class Socket:
    """One end of a connection, or a listening socket. Its place is host and port."""

    family, type, proto = socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    _numbers = itertools.count(1)

    def __init__(
        self, process: Process | None, place: Place, network: Network | None = None
    ) -> None:
        self.place, self.host = place, place[0]
        self.peer: Any = None  # but a listening socket has none
        self.error = 0
        self._number = next(self._numbers)
        self._arrived = bytearray()
        self._waiting: deque[Socket] = deque()  # connections to accept
        self._sent: deque[Packet] = deque()  # what is under way
        self._is_under_way = self._is_open = self._is_at_end = False
        self._is_closed = self._resets = False
        if process is not None:
            self._belong(process)
        self.network = network or self._process.network

    def _belong(self, process: Process) -> None:
        self._process = process
        process.sockets[self._number] = self

    # --- for a process ------------------------------------------------------------

    def fileno(self) -> int:
        return self._number

    def settimeout(self, _seconds: object) -> None:
        """Never block, in any case."""

    setblocking = settimeout

    def setsockopt(self, _level: int, option: int, _value: object) -> None:
        self._resets |= option == socket.SO_LINGER

    def getsockopt(self, *_: int) -> int:
        return self.error

    def getsockname(self) -> tuple[str, int]:
        return address_of(self.host), self.place[1]

    def getpeername(self) -> tuple[str, int]:
        return self.peer.getsockname()

    def connect(self, address: tuple[str, int]) -> None:
        host = int(address[0].rpartition(".")[2])
        self.peer = Socket(None, (host, address[1]), self.network)
        self.peer.peer = self
        self._emit(_OPEN)
        raise BlockingIOError

    def accept(self) -> tuple[Socket, tuple[str, int]]:
        if not self._waiting:
            raise BlockingIOError
        opened = self._waiting.popleft()
        return opened, opened.getpeername()

    def recv(self, size: int) -> bytes:
        if self._arrived:
            data = bytes(self._arrived[:size])
            del self._arrived[:size]
            return data
        if self.error:
            raise OSError(self.error, "connection reset")
        if not self._is_at_end:
            raise BlockingIOError
        return b""

    def send(self, data: bytes) -> int:
        if self.error:
            raise OSError(self.error, "connection reset")
        self._emit(bytes(data))
        return len(data)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        del self._process.sockets[self._number]
        if self.network.listening.get(self.place) is self:
            del self.network.listening[self.place]
            for each in self._waiting:
                each._resets = True
                each.close()
        elif self.host in self.network.off or not self._is_open:
            self._sent.clear()
        elif self._resets or self._arrived:  # as Linux does if something is unread
            if self.network.random.random() < 0.5:
                self._sent.clear()
            self._emit(ECONNRESET)
        elif not self.error:
            self._emit(_END)

    @property
    def ready(self) -> int:
        """The events that a selector sees."""
        can_read = self._arrived or self._waiting or self._is_at_end or self.error
        can_write = self._is_open or self.error
        reads = selectors.EVENT_READ if can_read else 0
        return reads | (selectors.EVENT_WRITE if can_write else 0)

    # --- for its kernel -----------------------------------------------------------

    def fail(self, error: int) -> None:
        """End it: with an error for the process."""
        self.error = self.error or error
        self._sent.clear()
        self._wake()

    def _wake(self) -> None:
        if not self._is_closed:
            self._process.has_input = True

    def _emit(self, message: Packet) -> None:
        self._sent.append(message)
        self.transmit()

    def transmit(self) -> None:
        """Send the next packet, unless one is under way."""
        if self._sent and not self._is_under_way:
            self._is_under_way = True
            network = self.network
            network.at(network.now + network.delay(), self._arrive)

    def send_again(self) -> None:
        """Send what a cut has kept."""
        self._is_under_way = False
        self.transmit()

    def _arrive(self) -> None:
        network, way = self.network, (self.host, self.peer.host)
        if way[0] != way[1] and network.is_cut(*way):
            network.keep(self)
            return
        self._is_under_way = False
        if not self._sent:
            pass
        elif way[0] != way[1] and way in network.rejecting:
            self.fail(ECONNRESET if self._is_open else ECONNREFUSED)
        else:
            self.peer.receive(self._sent.popleft())
            self.transmit()

    def receive(self, packet: Packet) -> None:
        """Take a packet that has arrived."""
        if packet is _OPEN:
            self._called()
        elif self._is_closed:
            if packet is _OPENED or isinstance(packet, bytes):
                self._emit(ECONNRESET)
        elif packet is _OPENED:
            self._is_open = True
        elif packet is _END:
            self._is_at_end = True
        elif isinstance(packet, bytes):
            self._arrived += packet
        elif isinstance(packet, int):
            self.fail(packet)
        self._wake()

    def _called(self) -> None:
        listening = self.network.listening.get(self.place)
        if listening is None:
            self._is_closed = True
            self._emit(ECONNREFUSED)
            return
        self._belong(listening._process)
        self._is_open = True
        listening._waiting.append(self)
        listening._wake()
        self._emit(_OPENED)


class _Ended(BaseException):
    """Raised in the main thread of a process that is killed."""


class Process:
    """A process with a clock of its own. It ends when `main` returns in its thread."""

    def __init__(
        self, network: Network, host: int, main: Callable[[], None], starts: float = 0.0
    ) -> None:
        self.network, self.host = network, host
        self.is_alive, self.is_suspended = True, False
        self.late = 0.0  # its timers, at most
        self.resumed = -math.inf
        self.events: Any = None  # once it has a loop
        self.has_input = False  # for its loop, perhaps
        self.sleeps = math.inf  # until when its loop does
        self.sockets: dict[int, Socket] = {}
        self.errors: list[Exception] = []
        self._main: Callable[[], None] | None = main
        self._thread: threading.Thread | None = None
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._wakes = network.now + starts
        self._listens = False
        self._interruption: BaseException | None = None
        self._error: BaseException | None = None
        self._free = 0.0  # from when on its loop does something
        self.rate = network.random.uniform(0.99, 1.01)
        self._stopped = self._stops = 0.0  # seconds for which its clock did not run
        network.processes.append(self)

    # --- its clocks ---------------------------------------------------------------

    @property
    def boot_time(self) -> float:
        """Seconds of `now`."""
        return self.network.now * self.rate + 1000 * self.host

    @property
    def time(self) -> float:
        """Seconds of its loop: not those while its host was suspended."""
        return (self.network.now - self._stopped) * self.rate

    # --- for its main thread ------------------------------------------------------

    def wait(self, seconds: float, *, listens: bool = False) -> None:
        """Wait in its main thread, also for a notification if it listens."""
        if self._interruption is None:
            self._wakes = self.network.now + seconds / self.rate + _FINE
            self._listens = listens
            self._back.release()
            self._turn.acquire()
        if self._interruption is not None:
            error = self._interruption
            if self.is_alive:
                self._interruption = None
            raise error

    def notify(self) -> None:
        """Wake its main thread, if it listens."""
        if self._listens:
            self._wakes = self.network.now + self.network.random.random() * _STEP

    def interrupt(self, error: BaseException) -> None:
        """Raise an error in its main thread, as the handler of a signal does."""
        self._interruption, self._wakes = error, 0.0

    def _run(self) -> None:
        self._turn.acquire()
        assert self._main is not None
        try:
            self._main()
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the test
            self._error = error
        self._thread = self._main = None
        self._back.release()

    def _run_main(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._wakes, self._listens = math.inf, False
        self._turn.release()
        self._back.acquire()

    # --- for the network ----------------------------------------------------------

    def due(self) -> float:
        """Return when it next does something."""
        if self.is_suspended:
            return math.inf
        loop_due = max(0.0 if self.has_input else self.sleeps, self._free)
        return min(self._wakes, loop_due)

    def step(self) -> None:
        """Do something that is due."""
        network = self.network
        network.current, now = self, network.now
        if self._wakes <= now:
            self._run_main()
        else:
            self.events.run_forever()
            self._free = now + network.random.random() * _STEP
        if self._main is None:
            self.end()
        for error in (self._error, *self.errors):
            if error is not None:
                raise error

    def suspend(self, *, stops_clock: bool) -> None:
        """Suspend it, or its host, whose clock stops."""
        if not self.is_suspended:
            self.is_suspended = True
            self._stops = self.network.now if stops_clock else math.inf

    def resume(self) -> None:
        """Let it run again."""
        if self.is_suspended:
            self.is_suspended, self.resumed = False, self.network.now
            self._stopped += max(self.network.now - self._stops, 0)
            self.late = 0

    def end(self) -> None:
        """End it now."""
        if not self.is_alive:
            return
        self.is_alive, self.network.current = False, self
        self.network.processes.remove(self)
        for each in [*self.sockets.values()]:
            each.close()
        if self._thread is not None:
            self.interrupt(_Ended())
            self._run_main()
        if self.events is not None:
            self.events.end()
            self.events = None


class _Selector(selectors.BaseSelector):
    """Stops a loop that would wait, and now and then one that would not."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(
        self, fileobj: Any, events: int, data: Any = None
    ) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, number, events, data)
        self._keys[fileobj] = key
        self._process.has_input = True
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        process, network = self._process, self._process.network
        ready: list[tuple[selectors.SelectorKey, int]] = []
        if process.has_input:
            for key in self._keys.values():
                opened = process.sockets.get(key.fd)
                if opened is not None and (events := opened.ready & key.events):
                    ready.append((key, events))
            process.has_input = bool(ready)
            network.random.shuffle(ready)
        seconds = 0 if ready else math.inf if timeout is None else timeout
        if seconds or network.random.random() < _INTERRUPTED:
            process.events.stop()
            late = network.random.uniform(0.2, 1) * process.late + _FINE
            process.sleeps = network.now + seconds / process.rate + late
        return ready


class _Events(asyncio.SelectorEventLoop):
    """A loop that stops when it would wait."""

    _transports: Mapping[int, asyncio.Transport]

    def __init__(self, process: Process) -> None:
        super().__init__(_Selector(process))
        self._process = process

    def _make_self_pipe(self) -> None:
        """Need none."""

    _close_self_pipe = _make_self_pipe

    def _write_to_self(self) -> None:
        self._process.has_input = True

    def time(self) -> float:
        return self._process.time

    def end(self) -> None:
        """End all tasks, after the process's end."""
        for transport in [*self._transports.values()]:
            transport.abort()
        self.end_tasks()
        self.close()

    def end_tasks(self) -> None:
        """Cancel all tasks, and wait for their ends."""
        end_tasks: Any = loop.Loop._end_tasks
        ending = self.create_task(end_tasks(None))
        while not ending.done():
            self.run_forever()

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        if self._process.is_alive:
            self._process.errors.append(
                context.get("exception") or RuntimeError(context["message"])
            )

    # Both methods have only the parameters that the launcher passes.

    def run_in_executor(  # type: ignore[override]  # see above
        self, _executor: None, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        later = self.create_future()
        later.set_result(function(*args))
        return later

    async def create_connection(  # type: ignore[override]  # see above
        self, make: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        opened: Any = Socket(self._process, (self._process.host, 0))
        try:
            await self.sock_connect(opened, (host, port))
            return await super().create_connection(make, sock=opened)
        except BaseException:
            opened.close()
            raise


class Loop:
    """What stands in for a `loop.Loop`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def start(self) -> None:
        self.events = self._process.events = _Events(self._process)

    def call(self, function: Callable[..., object], *args: Any) -> None:
        self.events.call_soon_threadsafe(function, *args)

    def call_aside(self, function: Callable[[], object]) -> None:
        self.call(function)

    call_apart = call_aside

    def close(self) -> None:
        self.events.end_tasks()


class Changed:
    """The condition of a client's state, in which its main thread waits."""

    def __init__(self, process: Process, client: Client) -> None:
        self._process, self._client = process, client
        self._last: JobState | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float) -> None:
        self._process.wait(timeout, listens=True)

    def notify_all(self) -> None:
        if self._client.state is not self._last:
            self._last = self._client.state
            self._process.notify()

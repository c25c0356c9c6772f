"""Processes on a simulated network: their clocks, sockets and threads are virtual.

Only one thread runs at a time: the test's, or the main thread of one process while the
test's thread waits for it. So a seed decides everything. Of a process, the real ones
are all but `Loop`, `now`, sockets, and the locks in which a main thread waits.

A network has `hosts`, each with a number. Each connection delivers in order. What is
sent may be late. A cut keeps it until the cut ends, and a firewall rejects it with a
reset. A process's kernel closes its connections when it ends. If a host loses power,
nothing is sent.
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
from unittest import mock

from torchrun_hpc import limits, waiting
from torchrun_hpc.rendezvous import client, connection, loop, server

# Seconds.
LATE = 2.0  # a message, at most
_SOON = 0.02  # most messages
_STEP = 0.002  # of a process, at most
_FINE = 1e-6  # of clocks
_INTERRUPTED = 0.1  # share of a loop's turns

_OPEN, _OPENED, _END = "open", "opened", "end"


def address_of(host):
    return f"10.0.0.{host}"


class Network:
    """All processes, and the time that passes for them."""

    def __init__(self, seed):
        self.random = random.Random(seed)  # noqa: S311 - no secret
        random.seed(seed)  # the pauses of a search
        self.now = 0.0
        self.current = None  # the process that runs
        self.processes = []
        self.listening = {}  # by host and port
        self.cut, self.rejecting = set(), set()  # pairs of hosts: from, to
        self.off = set()  # hosts
        self.late = self.random.choice((0, 0.01, 0.1))  # share of messages
        self._stuck = []  # sockets
        self._due, self._numbers = [], itertools.count()
        self._patches = ExitStack()

    def __enter__(self):
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

    def __exit__(self, *_):
        for process in [*self.processes]:
            process.end()
        self._patches.close()

    def _now(self):
        return self.current.boot_time

    def _sleep(self, seconds):
        self.current.wait(max(seconds, 0.1))

    def _listen(self, _address, port):
        made = Socket(self.current, (self.current.host, port))
        assert self.listening.setdefault(made.place, made) is made
        return made

    # --- time ---------------------------------------------------------------------

    def at(self, when, function):
        heapq.heappush(self._due, (when, next(self._numbers), function))

    def run(self, seconds):
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

    def is_cut(self, one, other):
        return one in self.off or other in self.off or (one, other) in self.cut

    def heal(self):
        self.cut.clear()
        self.rejecting.clear()
        self._send_again()

    def _send_again(self):
        stuck, self._stuck = self._stuck, []
        for each in stuck:
            each.send_again()

    def keep(self, stuck):
        self._stuck.append(stuck)

    def delay(self):
        most = LATE if self.random.random() < self.late else _SOON
        return self.random.random() * most

    def break_between(self, one, other):
        """Let both ends of the connections of two hosts get a reset."""
        sockets = [each for p in self.processes for each in p.sockets.values()]
        for each in sockets:
            if each.peer and {each.host, each.peer.host} == {one, other}:
                each.fail(ECONNRESET)

    def power_on(self, host):
        self.off.discard(host)
        self._send_again()

    def power_off(self, host):
        """Let a host lose power: nobody is told."""
        self.off.add(host)
        for process in [p for p in self.processes if p.host == host]:
            process.end()


class Socket:
    """One end of a connection, or a listening socket. Its place is host and port."""

    family, type, proto = socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    _numbers = itertools.count(1)

    def __init__(self, process, place, network=None):
        self.network = network or process.network
        self.place, self.host = place, place[0]
        self.peer = None
        self.error = 0
        self._number = next(self._numbers)
        self._arrived = bytearray()
        self._waiting = deque()  # connections to accept
        self._sent = deque()  # what is under way
        self._is_under_way = self._is_open = self._is_at_end = False
        self._is_closed = self._resets = False
        if process is not None:
            self._belong(process)

    def _belong(self, process):
        self._process = process
        process.sockets[self._number] = self

    # --- for a process ------------------------------------------------------------

    def fileno(self):
        return self._number

    def settimeout(self, _seconds):
        """Never block, in any case."""

    setblocking = settimeout

    def setsockopt(self, _level, option, _value):
        self._resets |= option == socket.SO_LINGER

    def getsockopt(self, *_):
        return self.error

    def getsockname(self):
        return address_of(self.host), self.place[1]

    def getpeername(self):
        return self.peer.getsockname()

    def connect(self, address):
        host = int(address[0].rpartition(".")[2])
        self.peer = Socket(None, (host, address[1]), self.network)
        self.peer.peer = self
        self._emit(_OPEN)
        raise BlockingIOError

    def accept(self):
        if not self._waiting:
            raise BlockingIOError
        opened = self._waiting.popleft()
        return opened, opened.getpeername()

    def recv(self, size):
        if self._arrived:
            data = bytes(self._arrived[:size])
            del self._arrived[:size]
            return data
        if self.error:
            raise OSError(self.error, "connection reset")
        if not self._is_at_end:
            raise BlockingIOError
        return b""

    def send(self, data):
        if self.error:
            raise OSError(self.error, "connection reset")
        self._emit(bytes(data))
        return len(data)

    def close(self):
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
    def ready(self):
        can_read = self._arrived or self._waiting or self._is_at_end or self.error
        can_write = self._is_open or self.error
        reads = selectors.EVENT_READ if can_read else 0
        return reads | (selectors.EVENT_WRITE if can_write else 0)

    # --- for its kernel -----------------------------------------------------------

    def fail(self, error):
        """End it: with an error for the process."""
        self.error = self.error or error
        self._sent.clear()
        self._wake()

    def _wake(self):
        if not self._is_closed:
            self._process.has_input = True

    def _emit(self, what):
        self._sent.append(what)
        self.transmit()

    def transmit(self):
        if self._sent and not self._is_under_way:
            self._is_under_way = True
            network = self.network
            network.at(network.now + network.delay(), self._arrive)

    def send_again(self):
        self._is_under_way = False
        self.transmit()

    def _arrive(self):
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

    def receive(self, what):
        if what is _OPEN:
            self._called()
        elif self._is_closed:
            if what is _OPENED or isinstance(what, bytes):
                self._emit(ECONNRESET)
        elif what is _OPENED:
            self._is_open = True
        elif what is _END:
            self._is_at_end = True
        elif isinstance(what, bytes):
            self._arrived += what
        else:
            self.fail(what)
        self._wake()

    def _called(self):
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

    def __init__(self, network, host, main, starts=0.0):
        self.network, self.host = network, host
        self.is_alive, self.is_suspended = True, False
        self.late = 0  # its timers, at most
        self.resumed = -math.inf
        self.events = None
        self.has_input = False  # for its loop, perhaps
        self.sleeps = math.inf  # until when its loop does
        self.sockets = {}
        self.errors = []
        self._main = main
        self._thread = None
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._wakes = network.now + starts
        self._listens = False
        self._interruption = None
        self._error = None
        self._free = 0.0  # from when on its loop does something
        self.rate = network.random.uniform(0.99, 1.01)
        self._stopped = self._stops = 0.0  # seconds for which its clock stood
        network.processes.append(self)

    # --- its clocks ---------------------------------------------------------------

    @property
    def boot_time(self):
        return self.network.now * self.rate + 1000 * self.host

    @property
    def time(self):
        return (self.network.now - self._stopped) * self.rate

    # --- for its main thread ------------------------------------------------------

    def wait(self, seconds, *, listens=False):
        """Wait in its main thread, for a notification, too, if it listens."""
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

    def notify(self):
        if self._listens:
            self._wakes = self.network.now + self.network.random.random() * _STEP

    def interrupt(self, error):
        """Raise an error in its main thread, as the handler of a signal does."""
        self._interruption, self._wakes = error, 0.0

    def _run(self):
        self._turn.acquire()
        try:
            self._main()
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the test
            self._error = error
        self._thread = self._main = None
        self._back.release()

    def _run_main(self):
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._wakes, self._listens = math.inf, False
        self._turn.release()
        self._back.acquire()

    # --- for the network ----------------------------------------------------------

    def due(self):
        """Return when it next does something."""
        if self.is_suspended:
            return math.inf
        loop_due = max(0.0 if self.has_input else self.sleeps, self._free)
        return min(self._wakes, loop_due)

    def step(self):
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

    def suspend(self, *, stops_clock):
        if not self.is_suspended:
            self.is_suspended = True
            self._stops = self.network.now if stops_clock else math.inf

    def resume(self):
        if self.is_suspended:
            self.is_suspended, self.resumed = False, self.network.now
            self._stopped += max(self.network.now - self._stops, 0)
            self.late = 0

    def end(self):
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

    def __init__(self, process):
        self._process, self._keys = process, {}

    def register(self, fileobj, events, data=None):
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, number, events, data)
        self._keys[fileobj] = key
        self._process.has_input = True
        return key

    def unregister(self, fileobj):
        return self._keys.pop(fileobj)

    def get_map(self):
        return self._keys

    def select(self, timeout=None):
        process, found = self._process, []
        network, sockets = process.network, process.sockets
        if process.has_input:
            for key in self._keys.values():
                opened = sockets.get(key.fd)
                if opened is not None and (ready := opened.ready & key.events):
                    found.append((key, ready))
            process.has_input = bool(found)
            network.random.shuffle(found)
        seconds = 0 if found else math.inf if timeout is None else timeout
        if seconds or network.random.random() < _INTERRUPTED:
            process.events.stop()
            late = network.random.uniform(0.2, 1) * process.late + _FINE
            process.sleeps = network.now + seconds / process.rate + late
        return found


class _Events(asyncio.SelectorEventLoop):
    """A loop that stops when it would wait."""

    def __init__(self, process):
        super().__init__(_Selector(process))
        self._process = process

    def _make_self_pipe(self):
        """Need none."""

    _close_self_pipe = _make_self_pipe

    def _write_to_self(self):
        self._process.has_input = True

    def time(self):
        return self._process.time

    def end(self):
        """End all tasks, after the process's end."""
        for transport in [*self._transports.values()]:
            transport.abort()
        self.end_tasks()
        self.close()

    def end_tasks(self):
        ending = self.create_task(loop.Loop._end_tasks(None))
        while not ending.done():
            self.run_forever()

    def default_exception_handler(self, context):
        if self._process.is_alive:
            self._process.errors.append(
                context.get("exception") or RuntimeError(context["message"])
            )

    def run_in_executor(self, _executor, function, *args):
        later = self.create_future()
        later.set_result(function(*args))
        return later

    async def create_connection(self, make, host, port):
        opened = Socket(self._process, (self._process.host, 0))
        try:
            await self.sock_connect(opened, (host, port))
            return await super().create_connection(make, sock=opened)
        except BaseException:
            opened.close()
            raise


class Loop:
    """What stands in for a `loop.Loop`."""

    def __init__(self, process):
        self._process = process

    def start(self):
        self.events = self._process.events = _Events(self._process)

    def call(self, function, *args):
        self.events.call_soon_threadsafe(function, *args)

    def call_aside(self, function):
        self.call(function)

    call_apart = call_aside

    def close(self):
        self.events.end_tasks()


class Changed:
    """The condition of a client's state, in which its main thread waits."""

    def __init__(self, process, client):
        self._process, self._client = process, client
        self._last = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self, timeout):
        self._process.wait(timeout, listens=True)

    def notify_all(self):
        if self._client.state is not self._last:
            self._last = self._client.state
            self._process.notify()

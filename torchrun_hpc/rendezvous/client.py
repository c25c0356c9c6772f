"""An agent's part: it finds the head, and waits for what the head says.

The connection lives in a thread of its own. The main thread waits for it in Python's
locks only, where a signal is acted on at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import random
import signal
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torchrun_hpc.rendezvous.coordinator import SILENCE
from torchrun_hpc.rendezvous.protocol import (
    LINE_LIMIT,
    VERSION,
    Failure,
    JoinRequest,
    Kind,
    Lines,
    ProtocolError,
    Refusal,
    encode,
    packed,
    unpacked,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_log = logging.getLogger(__name__)

# Seconds.
_TICK = 1.0
_LOOK = 0.1  # at the workers
_CONNECT_TIMEOUT = 10.0
_ANSWER_TIMEOUT = 30.0  # of a head that has thousands to answer
_PATIENCE = 0.5  # with one port, before the next is tried beside it
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_ALL_PORTS = 8  # every how many rounds all ports are tried
_FAREWELL = 1.0


class JobFailed(Exception):  # noqa: N818 - it is no error of this node
    """The job has failed, here or on another node."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.kind.value)
        self.failure = failure


class RoundOver(Exception):  # noqa: N818
    """The round is over before the workers could start."""


class Refused(Exception):  # noqa: N818
    """The head does not let this agent in."""

    def __init__(self, reason: Refusal, value: str, port: int) -> None:
        super().__init__(reason.value)
        self.reason = reason
        self.value = value
        self.port = port


class CoordinatorNotFound(Exception):  # noqa: N818
    """No head was found in time; its text says what was found instead."""


@dataclass(frozen=True)
class CoordinatorAddress:
    """Where the head is.

    Attributes:
        host: Its address, or its name.
        ports: The ports that it may be on, in the order in which it tries them.
        timeout: Seconds to look for it.
        silence_timeout: Seconds after which a silent head ends the job.
        notice_ports: Ports on which it may be only to say that it cannot start.
    """

    host: str
    ports: Sequence[int]
    timeout: float
    silence_timeout: int
    notice_ports: Sequence[int] = ()


class Client:
    """An agent's connection to the head.

    Args:
        said: Who this agent is.
        where: Where the head is.
        tell: Called from the thread with what the head tells the user through this
            node, and with ``looking``, ``head_silent`` and ``head_answers``.
        gives_up: Why this agent cannot start, if it comes only to say that.
    """

    def __init__(
        self,
        said: JoinRequest,
        where: CoordinatorAddress,
        tell: Callable[[Mapping[str, Any]], None],
        gives_up: Failure | None = None,
    ) -> None:
        self.said = said
        self._first_words: dict[str, Any] = {"hello": VERSION, **asdict(said)}
        if gives_up is not None:
            self._first_words["failed"] = packed(gives_up)
        self.where = where
        self.failure: Failure | None = None
        self.next_round = 0
        self.is_over = False  # the round that this agent is in
        self.finished = False
        self._tell = tell
        self._welcome = False
        self._has_joined = False
        self._is_leaving = False
        self._is_decided = False  # which failure is the first
        self._problem: Exception | None = None
        self._answered: set[int] = set()  # ports that took a connection
        self._go: Mapping[str, Any] | None = None
        self._answers: dict[int, Any] = {}
        self._asked = 0
        self._workers: dict[int, Callable[[], int | None]] = {}
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._channel: _Channel | None = None
        self._quiet = 0  # seconds
        self._life: asyncio.Task[None]
        self._thread = threading.Thread(target=self._run, name="member", daemon=True)

    @property
    def is_in(self) -> bool:
        """Whether the head let this agent in."""
        return self._welcome

    # --- for the main thread ------------------------------------------------------

    def connect(self) -> None:
        """Find the head, and be let in.

        Raises:
            NoHead: It was not there in time.
            Refused: It does not take this agent.
            JobFailed: The job has failed already.
        """
        self._thread.start()
        self._until(lambda: self._welcome)

    def join(self, store: tuple[str, int] | None) -> Mapping[str, Any]:
        """Wait for the next round.

        Args:
            store: Where the workers will meet, if this node decides it.

        Returns:
            The head's ``go``.

        Raises:
            JobFailed: There is no next round.
        """
        with self._changed:
            wanted = self.next_round
            self._has_joined = True
            self._go = None
            self.is_over = False
        self._workers = {}
        message: dict[str, Any] = {"join": wanted}
        if store is not None:
            message["store"] = store
        self.send(message)
        self._until(lambda: self._go is not None)
        return self._go or {}

    def ask(self, question: Mapping[str, Any], timeout: float) -> Any:
        """Ask the head's store.

        Raises:
            TimeoutError: No answer.
            RoundOver: The round that it is about is over.
            JobFailed: There will be none.
        """
        self._asked += 1
        number = self._asked
        self.send({"ask": number, **question})
        self._until(lambda: number in self._answers or self.is_over, timeout)
        if self.is_over:
            raise RoundOver
        return self._answers.pop(number)

    def finish(self) -> None:
        """Wait until all nodes have finished.

        Raises:
            JobFailed: They have not.
        """
        self._workers = {}
        self.send({"done": self.next_round - 1})
        self._until(lambda: self.finished)

    def watch(self, workers: Mapping[int, Callable[[], int | None]]) -> None:
        """Report the first worker that ends with an error.

        Args:
            workers: By global rank, a function that returns the exit code, or
                ``None`` for one that still runs.
        """
        self._workers = dict(workers)
        self._in_thread(self._keep_looking)

    def look(self) -> None:
        """Report a worker that has ended with an error, and no other after it."""
        codes = {rank: exit_code() for rank, exit_code in self._workers.items()}
        failed = {rank: code for rank, code in codes.items() if code}
        if failed:
            self._workers = {}
            # Torch's agent may have stopped the others already, by SIGTERM.
            rank = min(failed, key=lambda rank: failed[rank] == -signal.SIGTERM)
            failure = Failure(Kind.WORKER, (self.said.rank,), rank, failed[rank])
            self.send({"died": packed(failure), "round": self.next_round - 1})

    def fail(self, failure: Failure) -> None:
        """Let the others know that this agent gives up, and why."""
        self._workers = {}
        if self.failure is None and not self.finished:
            self.failure = failure
            self.send({"failed": packed(failure)})

    def leave(self) -> None:
        """Go, when the head has said which failure was the first, if any."""
        if self._thread.is_alive():
            if self._has_joined and not self.finished:
                text = "it left before the end"
                self.fail(Failure(Kind.AGENT, (self.said.rank,), text=text))
            if self.failure is not None and self._welcome:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_decided, _FAREWELL)
            self._in_thread(self._say_goodbye)
            self._thread.join(_FAREWELL)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send something to the head."""
        self._in_thread(self._send, message)

    def _in_thread(self, function: Callable[..., object], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(function, *args)

    def _until(
        self, condition: Callable[[], bool], timeout: float | None = None
    ) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not condition():
                if self.failure is not None:
                    raise JobFailed(self.failure)
                if self._problem is not None:
                    raise self._problem
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError
                self._changed.wait(left)

    # --- in the thread ------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._life = self._loop.create_task(self._live())
        try:
            self._loop.run_until_complete(self._life)
        except (CoordinatorNotFound, Refused, OSError) as problem:
            self._change(_problem=problem)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # noqa: BLE001 - the main thread waits for it
            text = f"{type(error).__name__}: {error}"
            failure = Failure(Kind.AGENT, (self.said.rank,), text=text)
            self._change(failure=failure, _is_decided=True)
        finally:
            self._loop.close()

    def _change(self, **values: Any) -> None:
        with self._changed:
            vars(self).update(values)
            self._changed.notify_all()

    async def _live(self) -> None:
        self._channel = channel = await self._find()
        channel.take = self._take
        self._change(_welcome=True)
        channel.feed()  # what came with the welcome, or in its place
        self._loop.call_later(_TICK, self._tick)
        await channel.closed.wait()
        self._lose(Failure(Kind.HEAD))

    def _tick(self) -> None:
        """Count one more second without the head, however long it really was.

        A process that was stopped meanwhile is not older than before.
        """
        channel = self._channel
        if channel is None or channel.closed.is_set():
            return
        self._loop.call_later(_TICK, self._tick)
        self._quiet += 1
        if channel.has_heard:
            if self._quiet > SILENCE:
                self._tell({"head_answers": self._quiet})
            channel.has_heard = False
            self._quiet = 0
        if self._quiet == SILENCE:
            left = self.where.silence_timeout - SILENCE
            self._tell({"head_silent": SILENCE, "left": left})
        if self._quiet >= self.where.silence_timeout:
            self._lose(Failure(Kind.HEAD, code=self.where.silence_timeout))
            channel.end()

    def _lose(self, failure: Failure) -> None:
        if not self.finished and not self._is_leaving:
            self._change(failure=self.failure or failure, _is_decided=True)

    def _keep_looking(self) -> None:
        self.look()
        if self._workers:
            self._loop.call_later(_LOOK, self._keep_looking)

    def _send(self, message: Mapping[str, Any]) -> None:
        _log.debug("to the head: %s", message)
        if self._channel is not None:
            self._channel.send(message)

    def _say_goodbye(self) -> None:
        self._is_leaving = True  # the end of the connection is no loss
        if self._channel is None:
            self._life.cancel()
            return
        self._channel.send({"bye": True})
        self._channel.end()

    def _take(self, message: Mapping[str, Any]) -> None:
        """Take a message of the head."""
        _log.debug("from the head: %s", message)
        if "beat" in message:
            self._send({"beat": True})
        elif "answer" in message:
            with self._changed:
                self._answers[message["answer"]] = message.get("value")
                self._changed.notify_all()
        elif "go" in message:
            self._change(_go=message, next_round=message["go"] + 1, is_over=False)
        elif "over" in message:
            self._workers = {}
            self._change(next_round=message["over"] + 1, is_over=True)
        elif "finished" in message:
            self._change(finished=True)
        elif "failed" in message:
            self._workers = {}
            self._send({"read": True})
            self._change(failure=unpacked(message["failed"]), _is_decided=True)
        else:
            self._tell(message)

    # --- finding the head ---------------------------------------------------------

    async def _find(self) -> _Channel:
        """Try the ports, until the head answers on one of them.

        Raises:
            NoHead: It does not, in time.
            Refused: It does, and does not take this agent.
        """
        start = time.monotonic()
        ports = (*self.where.ports, *self.where.notice_ports)
        patience = min(_PATIENCE, self.where.timeout / len(ports))
        found: dict[int, str] = {}
        attempts: dict[asyncio.Task[_Channel], int] = {}
        turn = 0
        reported = 0
        try:
            while True:
                for port in ports:
                    is_new = port not in attempts.values()
                    if is_new:
                        attempts[asyncio.create_task(self._attempt(port))] = port
                    done, _ = await asyncio.wait(
                        attempts,
                        timeout=patience if is_new else 0,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    for task in done:
                        answered = attempts.pop(task)
                        try:
                            return task.result()
                        except _NotHere as reason:
                            found[answered] = str(reason)
                    is_free = port not in attempts.values() and NOBODY in found[port]
                    if is_free and turn % _ALL_PORTS:
                        break  # the head takes the first port that is free
                turn += 1
                waited = time.monotonic() - start
                if waited > self.where.timeout:
                    raise CoordinatorNotFound(self._summary(found))
                while reported + 1 < waited:
                    reported += 1
                    summary = self._summary(found)
                    self._tell({"looking": reported, "found": summary})
                # Short at first, when all start together; spread among the nodes.
                pause = min(max(waited / 10, _SHORTEST_PAUSE), _LONGEST_PAUSE)
                await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311
        finally:
            for task in attempts:
                task.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)

    def _summary(self, found: Mapping[int, str]) -> str:
        """Say what was found on the head's ports, without repetition."""
        texts: dict[str, list[int]] = {}
        for port in self.where.ports:
            if port in found:
                texts.setdefault(found[port], []).append(port)
        return "; ".join(
            f"port {', '.join(map(str, ports))}: {text}"
            for text, ports in texts.items()
        )

    async def _attempt(self, port: int) -> _Channel:
        """Say hello on one port.

        Raises:
            _NotHere: The head is not there.
            Refused: It is, and does not take this agent.
        """
        loop = asyncio.get_running_loop()
        channel = _Channel()
        try:
            await asyncio.wait_for(
                loop.create_connection(lambda: channel, self.where.host, port),
                _CONNECT_TIMEOUT,
            )
        except asyncio.TimeoutError:
            raise _NotHere("no answer to the connection") from None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # it is no fault of the head
            # asyncio's own text repeats address and port.
            number = error.errno or 0
            text = os.strerror(number) if number > 0 else error.strerror or str(error)
            if error.errno == errno.ECONNREFUSED:
                text = _NO_MORE if port in self._answered else _NOT_YET
            raise _NotHere(text) from None
        self._answered.add(port)
        try:
            channel.send(self._first_words)
            try:
                answer = await asyncio.wait_for(channel.first(), _ANSWER_TIMEOUT)
            except asyncio.TimeoutError:
                raise _NotHere("somebody who says nothing") from None
            try:
                self._judge(answer, port)
            except (ProtocolError, KeyError):
                raise _NotHere("somebody else") from None
            if "failed" in answer:
                channel.put_back(answer)
        except BaseException:
            channel.end()
            raise
        return channel

    def _judge(self, answer: Mapping[str, Any], port: int) -> None:
        if answer.get("welcome") == VERSION and answer.get("job") == self.said.job:
            self.next_round = answer["round"]
        elif "failed" in answer:
            unpacked(answer["failed"])  # or it is somebody else
        elif "refused" in answer:
            with contextlib.suppress(ValueError):
                reason = Refusal(answer["refused"])
                value = "".join(c for c in str(answer.get("value")) if c.isprintable())
                if reason is not Refusal.STRANGER or tuple(self.where.ports) == (port,):
                    raise Refused(reason, value[:200], port)
                raise _NotHere("another job")
            raise _NotHere("somebody else")
        else:
            raise _NotHere("somebody else")


class _NotHere(Exception):  # noqa: N818 - never leaves this module
    """The head is not on this port."""


# A connection that is refused has reached the node.
NOBODY = "nobody listens"
_NOT_YET = f"{NOBODY} (not started there yet, or ended)"
_NO_MORE = f"{NOBODY} any more (it has ended there)"


class _Channel(asyncio.Protocol):
    """The connection to the head."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.has_heard = False
        self.take: Callable[[Mapping[str, Any]], None] | None = None
        self._messages: list[Mapping[str, Any]] = []
        self._came = asyncio.Event()
        self._lines = Lines(LINE_LIMIT)
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.has_heard = True
        try:
            self._messages += self._lines.feed(data)
        except ProtocolError:
            self._transport.abort()
            return
        self._came.set()
        self.feed()

    def feed(self) -> None:
        """Hand over what has come, once there is somebody to take it."""
        try:
            while self.take is not None and self._messages:
                self.take(self._messages.pop(0))
        except (ProtocolError, KeyError, TypeError):
            self._transport.abort()

    async def first(self) -> Mapping[str, Any]:
        """Wait for the first message.

        Raises:
            _NotHere: There will be none.
        """
        await self._came.wait()
        if not self._messages:
            raise _NotHere("somebody else")
        return self._messages.pop(0)

    def put_back(self, message: Mapping[str, Any]) -> None:
        """Let a message be handed over with those that come."""
        self._messages.insert(0, message)

    def connection_lost(self, _error: Exception | None) -> None:
        self.closed.set()
        self._came.set()

    def send(self, message: Mapping[str, Any]) -> None:
        if not self._transport.is_closing():
            self._transport.write(encode(message))

    def end(self) -> None:
        if self._transport is not None:
            self._transport.close()


def exit_code_of(pid: int) -> Callable[[], int | None]:
    """Return a function that looks at a child without collecting it.

    It returns ``None`` while the child runs, and when somebody has collected it.
    """

    def look() -> int | None:
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and ended.si_pid == pid:
                killed = ended.si_code != os.CLD_EXITED
                return -ended.si_status if killed else ended.si_status
        return None

    return look

"""An agent's connection to the coordinator.

It lives in a thread of its own. The main thread waits for it in Python's locks only,
where a signal is acted on within half a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc import __version__, wire
from torchrun_hpc.failures.collection import Summary
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.failures.report import COLLECT_TIMEOUT
from torchrun_hpc.rendezvous.members import SILENCE_REPORT
from torchrun_hpc.rendezvous.protocol import JoinRequest
from torchrun_hpc.rendezvous.search import (
    CoordinatorAddress,
    CoordinatorNotFoundError,
    RefusedError,
    Search,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.rendezvous.search import Channel

_log = logging.getLogger(__name__)

# Seconds.
_TICK = 1.0
_REPORT_TIMEOUT = 5.0  # for node 0 to report them
_LEAVE_TIMEOUT = 1.0
_DECIDED_TIMEOUT = 3.0  # for the coordinator to decide which failure was the first
# A signal that arrives just before a thread begins to wait for a lock does not end the
# wait, and is handled after it: so no wait is longer.
_SIGNAL_TIMEOUT = 0.5


# Of this process; a fork of it has another process id.
_AGENT = secrets.token_hex(16)


class JobFailedError(Exception):
    """The job has failed, here or elsewhere; this agent is to stop its workers."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.kind.value)
        self.failure = failure


class RoundOverError(Exception):
    """The round ended before the workers could start: join the next one."""


def request_of(meeting: Meeting, run_id: str) -> JoinRequest:
    """Return what the agent of this node tells of itself."""
    rank = meeting.node_rank
    return JoinRequest(
        job=meeting.launch_id,
        run_id=run_id,
        nodes=meeting.nodes,
        rank=rank,
        host=meeting.hosts[rank],
        pid=os.getpid(),
        release=__version__,
        agent=f"{_AGENT}.{os.getpid()}",
        site=str(meeting.site.value) if meeting.site else "",
        spares=meeting.spares.number,
        started=meeting.started,
    )


def send_failure(
    meeting: Meeting,
    failure: Failure,
    limit: float,
    on_event: Callable[[Mapping[str, Any]], None],
) -> Failure | None:
    """Connect to the coordinator only to inform it why this agent cannot start.

    Args:
        meeting: Where the nodes meet.
        failure: Why this agent cannot start.
        limit: Seconds to look for it.
        on_event: See `Client`.

    Returns:
        Why the job failed, as the coordinator has it; ``None`` if it was not found.
    """
    where = meeting
    address = CoordinatorAddress(
        host=where.connect_host,
        ports=where.ports,
        timeout=limit,
        silence_timeout=int(limit),
        notice_ports=where.notice_ports,
    )
    agent = Client(request_of(meeting, ""), address, on_event, own_failure=failure)
    try:
        agent.connect()
        agent.fail(failure)  # if it was let in as one that had been there before
    except (JobFailedError, CoordinatorNotFoundError, RefusedError):
        pass
    finally:
        agent.leave()
    return agent.failure


class Client:
    """An agent's connection to the coordinator.

    Args:
        request: Who this agent is.
        address: Where the coordinator is.
        on_event: Called from the thread with what the coordinator reports to the user
            through this node, and with ``looking``, ``coordinator_silent`` and
            ``coordinator_answers``.
        own_failure: Why this agent cannot start, if it connects only to say that.

    Attributes:
        failure: Why the job failed.
        next_round: The round to join.
        is_over: Whether the round that this agent is in has ended.
        finished: Whether all nodes have finished.
        is_accepted: Whether the coordinator has accepted this agent.
    """

    def __init__(
        self,
        request: JoinRequest,
        address: CoordinatorAddress,
        on_event: Callable[[Mapping[str, Any]], None],
        own_failure: Failure | None = None,
    ) -> None:
        self.request = request
        self.failure: Failure | None = None
        self.next_round = 0
        self.is_over = False
        self.finished = False
        self.is_accepted = False
        self._search = Search(request, address, on_event, own_failure)
        self._silence_timeout = address.silence_timeout
        self._on_event = on_event
        self._has_joined = False
        self._is_leaving = False
        self._is_decided = False  # which failure is the first
        self._problem: Exception | None = None
        self._go: Mapping[str, Any] | None = None
        self._answers: dict[int, Any] = {}
        self._asked = 0
        self._samples: dict[int, dict[int, Any]] = {}  # by question, and node
        self._round = 0  # that this agent has joined
        self._own_failure: Failure | None = None  # of a worker here, the first one
        self._is_reported = False  # which workers have failed
        self._is_lost = False  # the connection
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._channel: Channel | None = None
        self._silent_for = 0  # seconds without a message of the coordinator
        self._task: asyncio.Task[None]
        self._next_tick: asyncio.TimerHandle
        self._thread = threading.Thread(target=self._run, name="client", daemon=True)

    # --- for the main thread ------------------------------------------------------

    def connect(self) -> None:
        """Find the coordinator, and be accepted.

        Raises:
            CoordinatorNotFoundError: It was not found in time.
            RefusedError: It refuses this agent.
            JobFailedError: The job has failed already.
        """
        self._thread.start()
        self._until(lambda: self.is_accepted)

    def join(self, store: tuple[str, int] | None) -> Mapping[str, Any]:
        """Wait for the next round.

        Args:
            store: Address and port of the workers' store, if this node decides them.

        Returns:
            The coordinator's ``go``.

        Raises:
            JobFailedError: There is no next round.
        """
        with self._changed:
            wanted = self.next_round
            self._has_joined = True
            self._go = None
            self.is_over = False
        self._round = wanted
        self._own_failure = None
        message: dict[str, Any] = {"join": wanted}
        if store is not None:
            message["store"] = store
        self.send(message)
        self._until(lambda: self._go is not None)
        return self._go or {}

    def ask(self, question: Mapping[str, Any], timeout: float) -> Any:
        """Ask the coordinator's store.

        Raises:
            TimeoutError: No answer.
            RoundOverError: The round that it is about has ended.
            JobFailedError: The job has failed.
        """
        with self._changed:  # other threads ask for stacks
            self._asked = number = self._asked + 1
        self.send({"ask": number, **question})
        self._until(lambda: number in self._answers or self.is_over, timeout)
        if self.is_over:
            raise RoundOverError
        return self._answers.pop(number)

    def stacks(self, timeout: float) -> dict[int, Any]:
        """Ask all agents for the stacks of their workers; return the answers by node.

        Args:
            timeout: Seconds to wait for those of all nodes.
        """
        with self._changed:
            self._asked = number = self._asked + 1
            answers = self._samples[number] = {}
        self.send({"stacks": number})
        # None, where there is no coordinator, or no job any more.
        with contextlib.suppress(Exception):
            self._until(lambda: self._workers_nodes <= answers.keys(), timeout)
        with self._changed:
            del self._samples[number]
        return answers

    @property
    def _workers_nodes(self) -> set[int]:
        """Ranks of the nodes that have workers."""
        return set(range(self.request.nodes))

    def finish(self) -> None:
        """Wait until all nodes have finished.

        Raises:
            JobFailedError: They have not.
        """
        self.send({"done": self.next_round - 1})
        self._until(lambda: self.finished)

    def worker_failed(self, failure: Failure) -> None:
        """Inform the coordinator that a worker has failed; the first ends the round."""
        self._own_failure = self._own_failure or failure
        self.send({"died": wire.encode(failure), "round": self._round})

    def fail(self, failure: Failure) -> None:
        """Inform the others that this agent gives up, and why."""
        if self.failure is None and not self.finished:
            if failure.kind is Kind.WORKER:  # torch does not know why
                failure = self._own_failure or failure
            self.failure = failure
            self.send({"failed": wire.encode(failure.brief)})

    def leave(self) -> None:
        """Disconnect; after a failure, once it is known which one was the first."""
        if self._thread.is_alive():
            if self._has_joined and not self.finished:
                text, rank = "it left before the end", self.request.rank
                self.fail(Failure(Kind.AGENT, (rank,), text=text, by=rank))
            if self.failure is not None and self.is_accepted:
                with self._changed:
                    self._wait_for(lambda: self._is_decided, _DECIDED_TIMEOUT)
                    # Where one task ends with an error, some schedulers end all.
                    self._wait_for(
                        lambda: self._is_lost or not self.is_unreported, _REPORT_TIMEOUT
                    )
            self._in_thread(self._disconnect)
            self._thread.join(_LEAVE_TIMEOUT)

    @property
    def is_unreported(self) -> bool:
        """Whether a worker has failed, and nobody has reported it yet."""
        is_worker = self.failure is not None and self.failure.kind is Kind.WORKER
        return is_worker and not self._is_reported

    def send(self, message: Mapping[str, Any]) -> None:
        """Send something to the coordinator."""
        self._in_thread(self._send, message)

    def _in_thread(self, function: Callable[..., object], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(function, *args)

    def _until(self, condition: Callable[[], bool], timeout: float = math.inf) -> None:
        with self._changed:
            self._wait_for(
                lambda: condition() or bool(self.failure or self._problem), timeout
            )
            if condition():
                return
            if self.failure is not None:
                raise JobFailedError(self.failure)
            raise self._problem or TimeoutError

    def _wait_for(self, condition: Callable[[], bool], timeout: float) -> None:
        """Wait, with the lock, until this is so, or it takes too long."""
        end = self._loop.time() + timeout
        while not condition() and (left := end - self._loop.time()) > 0:
            self._changed.wait(min(left, _SIGNAL_TIMEOUT))

    # --- in the thread ------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._on_fault)
        self._task = self._loop.create_task(self._communicate())
        try:
            self._loop.run_until_complete(self._task)
        except (CoordinatorNotFoundError, RefusedError, OSError) as problem:
            self._change(_problem=problem)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # noqa: BLE001 - the main thread waits for it
            self._on_fault(self._loop, {"exception": error})
        finally:
            self._loop.close()

    def _on_fault(self, _loop: object, context: Mapping[str, Any]) -> None:
        """End this agent, which has a fault: an exception that nobody has caught."""
        error = context.get("exception")
        text = f"{type(error).__name__}: {error}" if error else context["message"]
        rank = self.request.rank
        Client._lose(self, Failure(Kind.AGENT, (rank,), text=text, by=rank))
        self._task.cancel()

    def _change(self, **values: Any) -> None:
        with self._changed:
            vars(self).update(values)
            self._changed.notify_all()

    async def _communicate(self) -> None:
        await self._follow(*await self._search.run())
        self._lose(Failure(Kind.COORDINATOR))

    async def _follow(self, channel: Channel, answer: Mapping[str, Any]) -> None:
        """Take part until the connection ends."""
        self._channel = channel
        self._silent_for = 0
        channel.on_message = self._handle
        self._change(next_round=answer.get("round", 0), is_accepted=True)
        self._accepted(answer)
        if "failed" in answer:
            self._handle(answer)
        channel.deliver()  # what arrived with the answer
        self._next_tick = self._loop.call_later(_TICK, self._tick)
        await channel.closed.wait()
        self._next_tick.cancel()

    def _accepted(self, answer: Mapping[str, Any]) -> None:
        """Do what is to be done as soon as the coordinator has accepted this agent."""

    def _tick(self) -> None:
        """Count one more second without the coordinator, however long it really was.

        So a process that was suspended has not aged meanwhile.
        """
        channel = self._channel
        if channel is None or channel.closed.is_set():
            return
        self._next_tick = self._loop.call_later(_TICK, self._tick)
        self._silent_for += 1
        if channel.has_received:
            if self._silent_for > SILENCE_REPORT:
                self._on_event({"coordinator_answers": self._silent_for})
            channel.has_received = False
            self._silent_for = 0
        if self._silent_for == SILENCE_REPORT:
            left = self._silence_timeout - SILENCE_REPORT
            self._on_event({"coordinator_silent": SILENCE_REPORT, "left": left})
        if self._silent_for >= self._silence_timeout:
            self._lose(Failure(Kind.COORDINATOR, code=self._silence_timeout))
            channel.abort()

    def _lose(self, failure: Failure) -> None:
        if not self.finished and not self._is_leaving:
            failure = self.failure or failure
            self._change(failure=failure, _is_decided=True, _is_lost=True)

    def _report(self, summary: Summary | None) -> None:
        """Report which workers have failed; now it is known which was the first."""
        if summary is not None and self.failure is not None:
            self._on_event({"report": summary})
            finished = self.failure.finished
            first = replace(summary.first, finished=finished)
            self._change(failure=first)
        self._change(_is_reported=True)
        self._send({"printed": True})

    def _send(self, message: Mapping[str, Any]) -> None:
        _log.debug("to the coordinator: %s", message)
        if self._channel is not None:
            self._channel.send(message)

    def _disconnect(self) -> None:
        self._is_leaving = True  # the end of the connection is no failure
        if self._channel is None:
            self._task.cancel()
            return
        self._channel.send({"bye": True})
        self._channel.close()

    def _handle(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the coordinator."""
        _log.debug("from the coordinator: %s", message)
        if "heartbeat" in message:
            self._send({"heartbeat": True})
        elif "answer" in message:
            with self._changed:
                self._answers[message["answer"]] = message.get("value")
                self._changed.notify_all()
        elif "go" in message:
            self._change(_go=message, next_round=message["go"] + 1, is_over=False)
        elif "over" in message:
            self._change(next_round=message["over"] + 1, is_over=True)
        elif "finished" in message:
            self._change(finished=True)
        elif "failed" in message:
            self._send({"read": True})
            failure = wire.decode(Failure, message["failed"])
            self._change(failure=failure, _is_decided=True)
            if "reports" in message and failure.kind is Kind.WORKER:
                self._loop.call_later(COLLECT_TIMEOUT, self._send, {"report": True})
        else:
            self._handle_workers(message)

    def _handle_workers(self, message: Mapping[str, Any]) -> None:
        """Handle a message about workers, or one for the user."""
        if "report" in message:
            found = message["report"]
            self._report(None if found is None else wire.decode(Summary, found))
        elif "printed" in message:
            self._change(_is_reported=True)
        elif "sampled" in message:
            number, node = message["sampled"], message.get("node")
            with self._changed:
                if type(number) is type(node) is int and number in self._samples:
                    self._samples[number][node] = message.get("of")
                self._changed.notify_all()
        else:
            self._on_event(message)

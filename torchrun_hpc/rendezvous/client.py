"""An agent's connection to the coordinator.

The main thread waits only in Python's locks. So it handles signals within 0.5 s.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrun_hpc import wire
from torchrun_hpc.failures.collection import Summary
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.failures.report import COLLECT_TIMEOUT
from torchrun_hpc.rendezvous.errors import (
    CoordinatorNotFoundError,
    JobFailedError,
    NotNeededError,
    RefusedError,
    RoundOverError,
)
from torchrun_hpc.rendezvous.liveness import Silence
from torchrun_hpc.rendezvous.loop import now

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrun_hpc.rendezvous.loop import Loop
    from torchrun_hpc.rendezvous.peers import Peers
    from torchrun_hpc.rendezvous.protocol import JoinRequest
    from torchrun_hpc.rendezvous.record import Record
    from torchrun_hpc.rendezvous.search import Channel, Find

_log = logging.getLogger(__name__)

# Seconds.
_TICK = 1.0
_REPORT_TIMEOUT = 6.0  # for the coordinator's node to report them
_LEAVE_TIMEOUT = 1.0
_DECIDED_TIMEOUT = 3.0  # for the coordinator to decide the first failure
# A signal just before a wait for a lock is handled only after the wait.
_SIGNAL_TIMEOUT = 0.5


def never() -> bool:
    """Return false: a condition that never holds."""
    return False


class Client:
    """An agent's connection to the coordinator.

    A coordinator that is silent for `silence_timeout` seconds counts as lost. Without
    `peers`, the job ends with it. `is_over` concerns this agent's round, `finished` all
    nodes. `on_event` is called aside, with events for `messages.render`, and with a
    report: then it can return what is known better of the first failure.
    """

    def __init__(
        self,
        loop: Loop,
        request: JoinRequest,
        silence_timeout: int,
        on_event: Callable[[Mapping[str, Any]], Failure | None],
    ) -> None:
        self.request = request
        self.peers: Peers | None = None
        self.failure: Failure | None = None
        self.ending: Mapping[str, Any] = {}
        self.next_round = 0
        self.is_over = False
        self.hangs = False  # why the latest round is over
        self.finished = False
        self.is_accepted = False
        self._loop = loop
        self._silence = Silence(silence_timeout)
        self._on_event = on_event
        self._is_running = False
        self._is_leaving = False
        self._problem: Exception | None = None
        self._wanted = -1  # the round that it joined last
        self._go: Mapping[str, Any] | None = None
        self._prepared: Record | None = None  # not confirmed yet
        self._round = 0  # of this agent
        self._own_failure: Failure | None = None  # the first one of a worker here
        self._wants_report = False
        self._is_reported = False  # which workers have failed
        self._numbers = itertools.count(1)  # of its questions
        self._answers: dict[int, Any] = {}  # of the coordinator's store
        self._replies: dict[int, dict[int, Any]] = {}  # by question and node
        self._changed = threading.Condition()
        self._channel: Channel | None = None
        self._task: asyncio.Task[None]

    # --- for the main thread ------------------------------------------------------

    def connect(self, find: Find, peers: Peers | None = None) -> None:
        """Find the coordinator, and be accepted; or raise one of `errors`."""
        self._is_running, self.peers = True, peers
        self._loop.call(self._begin, peers.find if peers else find)
        self.until(lambda: self.is_accepted)

    def take_part(
        self, open_store: Callable[[], tuple[str, int]]
    ) -> tuple[Mapping[str, Any], int, int]:
        """Wait for a round in which this node has workers, or raise one of `errors`.

        Return the coordinator's ``go``, the node rank, and the number of active nodes.
        Node rank 0 opens the workers' store, and sends its address and port.
        """
        member = None if self.peers is None else self.peers.member
        message: dict[str, Any] = {"join": True}
        if member is None and self.request.rank == 0:
            message["store"] = open_store()
        with self._changed:
            self._wanted = self.next_round
            # But keep what is prepared: it belongs to a later round.
            self._go = self._own_failure = None
            self.is_over = self.hangs = False
            if member is not None:
                member.is_ready = True
        if member is None or not member.unhealthy:
            self.send(message)
        try:
            return self._wait_for_go(open_store)
        finally:
            if member is not None:
                member.is_ready = False

    def _wait_for_go(
        self, open_store: Callable[[], tuple[str, int]]
    ) -> tuple[Mapping[str, Any], int, int]:
        while True:
            self.until(
                lambda: self._go or self._prepared or self.is_over or self.finished
            )
            if self.finished:
                raise NotNeededError
            if self.is_over:
                raise RoundOverError
            if self._go is not None:
                self._round, active = self._go["go"], self.active
                return self._go, active.index(self.request.rank), len(active)
            with self._changed:
                record, self._prepared = self._prepared, None
            if record is not None and self.peers is not None:
                self.send(self.peers.confirmation(record, open_store))

    @property
    def active(self) -> Sequence[int]:
        """The nodes with workers, by node rank."""
        peers = self.peers
        return peers.member.record.active if peers else range(self.request.nodes)

    def ask(self, question: Mapping[str, Any], timeout: float) -> Any:
        """Ask the coordinator's store; raise `TimeoutError` or one of `errors`."""
        number = next(self._numbers)
        self.send({"ask": number, **question})
        self.until(lambda: number in self._answers or self.is_over, timeout)
        answer = self._answers.pop(number, None)
        if self.is_over:
            raise RoundOverError
        return answer

    def ask_all(
        self, what: str, wait: Callable[[dict[int, Any]], None], about: Any = None
    ) -> dict[int, Any]:
        """Ask all nodes; return their replies, without those that are ``None``.

        `wait` waits for enough of the replies so far; the reply of a lost node is
        ``None``. `about` is plain data for the nodes.
        """
        number = next(self._numbers)  # several threads ask
        replies = self._replies[number] = {}
        self.send({"question": number, "what": what, "with": about})
        try:
            wait(replies)
        finally:
            self.send({"question": number})
            with self._changed:
                del self._replies[number]
        return {node: of for node, of in replies.items() if of is not None}

    def finish(self) -> None:
        """Wait until all nodes have finished, or raise `JobFailedError`."""
        if self.peers is not None:
            self.peers.member.is_done = True
        self.send({"done": self.next_round - 1})
        self.until(lambda: self.finished)

    def worker_failed(self, failure: Failure) -> None:
        """Inform the coordinator of a failed worker. The first one ends the round."""
        self._own_failure = self._own_failure or failure
        self.send({"died": wire.encode(failure), "round": self._round})

    def fail(self, failure: Failure) -> None:
        """Inform the others that this agent gives up, and why."""
        if self._is_running and self.failure is None and not self.finished:
            if failure.kind is Kind.WORKER:  # PyTorch does not know the cause
                failure = self._own_failure or failure
            self.failure = failure
            self.send({"failed": wire.encode(failure.brief)})

    def leave(self, timeout: float = 0, is_urgent: Callable[[], bool] = never) -> None:
        """Disconnect; after a failure, once the first failure is known.

        Then wait up to `timeout` seconds until the coordinator's node ends, which
        reports, or until this `is_urgent`. Some launchers end all tasks when one ends
        with an error.
        """
        if not self._is_running:
            return
        if self._wanted >= 0 and not self.finished:
            text = "it left before the end"
            self.fail(Failure(Kind.AGENT, (self.request.rank,), text=text))
        if self.is_unreported and self.request.nodes == 1:
            self._loop.call(self._ask_for_report)  # all have ended: no more fail
        if self.failure is not None and self.is_accepted:
            self.wait_for(lambda: self.ending, _DECIDED_TIMEOUT)
            self.wait_for(lambda: not self.is_unreported, _REPORT_TIMEOUT)
            self.wait_for(is_urgent, timeout)
        self._loop.call(self._disconnect)
        self.wait_for(lambda: not self._is_running, _LEAVE_TIMEOUT)

    @property
    def is_unreported(self) -> bool:
        """Whether a worker has failed, and nobody has reported it yet."""
        is_worker = self.failure is not None and self.failure.kind is Kind.WORKER
        return is_worker and not self._is_reported

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the coordinator."""
        self._loop.call(self._send, message)

    def until(self, condition: Callable[[], object], timeout: float = math.inf) -> None:
        """Wait for a condition, or raise `JobFailedError` or `TimeoutError`."""
        with self._changed:
            self.wait_for(lambda: condition() or self.failure or self._problem, timeout)
            if not condition():
                failed = self.failure and JobFailedError(self.failure)
                raise failed or self._problem or TimeoutError

    def wait_for(self, condition: Callable[[], object], timeout: float) -> None:
        """Wait for a condition, also after a failure, or until nothing can arrive."""
        if not self._is_running:
            return
        clock = self._loop.events.time
        end = clock() + timeout
        with self._changed:
            while self._is_running and not condition() and (left := end - clock()) > 0:
                self._changed.wait(min(left, _SIGNAL_TIMEOUT))

    # --- in the loop --------------------------------------------------------------

    def _begin(self, find: Find) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_exception)
        self._task = asyncio.create_task(self._run(find))

    async def _run(self, find: Find) -> None:
        try:
            await self._communicate(find)
        except (CoordinatorNotFoundError, RefusedError, OSError) as problem:
            self._change(_problem=problem)
        except Exception as error:  # noqa: BLE001 - the main thread waits for it
            self._on_fault(error)
        finally:
            self._change(_is_running=False)

    def _on_fault(self, error: Exception) -> None:
        """End this agent, which has a fault. What it serves continues."""
        text = f"{type(error).__name__}: {error}"
        self._lose(Failure(Kind.AGENT, (self.request.rank,), text=text))
        if self._channel is not None:
            self._channel.abort()
        self._task.cancel()

    def _on_exception(
        self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        """End this agent if a call has failed, but not if a connection has a fault."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if isinstance(error, Exception) and "protocol" not in context:
            self._on_fault(error)

    def _change(self, **values: Any) -> None:
        with self._changed:
            vars(self).update(values)
            self._changed.notify_all()

    async def _communicate(self, find: Find) -> None:
        found, peers = await find(), self.peers
        while True:
            channel = found[0]
            await self._follow(*found)
            self._check_lease()
            if self.finished or self.failure is not None or self._is_leaving:
                return
            if peers is None:
                self._lose(Failure(Kind.COORDINATOR, code=self._silence.ended_after))
                return
            self._change(is_over=True, _prepared=None)
            try:
                found = await peers.find_again(has_ended=channel.at_end)
            except CoordinatorNotFoundError:
                self._lose(Failure(Kind.COORDINATOR, (peers.member.record.term[1],)))
                return

    async def _follow(self, channel: Channel, answer: Mapping[str, Any]) -> None:
        self._channel = channel
        self._silence.begin()
        channel.on_message = self._handle
        number = answer.get("round", 0)
        # Another coordinator may begin an earlier round than this agent has joined.
        wanted = min(self._wanted, number)
        self._change(next_round=number, _wanted=wanted, is_accepted=True)
        tasks: set[asyncio.Task[Any]] = {asyncio.create_task(channel.closed.wait())}
        if self.peers is not None:
            for message in self.peers.accepted(answer):
                self._send(message)
            if self.peers.member.coordinates:
                tasks.add(asyncio.create_task(self.peers.watch()))
        if "failed" in answer:
            self._handle(answer)
        channel.deliver()  # what arrived with the answer
        try:
            while not channel.closed.is_set():
                done, tasks = await asyncio.wait(
                    tasks, timeout=_TICK, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()  # or its fault
                if not done:
                    self._tick(channel)
        finally:
            for task in tasks:
                task.cancel()

    def _tick(self, channel: Channel) -> None:
        for event in self._silence.tick(channel):
            of = {} if self.peers is None else {"of": self.peers.member.follows}
            self.tell({**event, **of})
        self._check_lease()

    def _check_lease(self) -> bool:
        if self.peers is None or self._channel is None:
            return False
        suspended = self.peers.end_lease(self._channel)
        if suspended:
            self.tell({"suspended": suspended})
        return suspended is not None

    def _lose(self, failure: Failure) -> None:
        if not self.finished and not self._is_leaving:
            self._change(failure=self.failure or failure)

    def tell(self, event: Mapping[str, Any]) -> None:
        """Inform the user, aside."""
        self._loop.call_aside(partial(self._on_event, event))

    def _report(self, summary: Summary) -> None:
        first = self._on_event({"report": summary}) or summary.first
        self._loop.call(self._reported, first)

    def _reported(self, first: Failure | None = None) -> None:
        if first is not None and self.failure is not None:
            first = replace(first, finished=self.failure.finished)
        self._change(failure=first or self.failure, _is_reported=True)
        self._send({"printed": True})

    def _send(self, message: Mapping[str, Any]) -> None:
        self._log("to the coordinator: %s", message)
        if self._channel is not None:
            self._channel.send(message)

    def _log(self, text: str, message: Mapping[str, Any]) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            self._loop.call_aside(lambda: _log.debug(text, message))

    def _disconnect(self) -> None:
        self._is_leaving = True  # the end of the connection is no failure
        if self._channel is None or self._channel.closed.is_set():
            self._task.cancel()
            return
        self._channel.send({"bye": True})
        self._channel.close()

    def _handle(self, message: Mapping[str, Any]) -> None:
        self._log("from the coordinator: %s", message)
        if self._check_lease():
            return
        if self.peers is not None:
            self.peers.handle(message)
        if "heartbeat" in message:
            self._send({"heartbeat": now()})
        elif "answer" in message:
            self._answers[message["answer"]] = message.get("value")
            self._change()
        elif "prepare" in message and self.peers is not None:
            self._change(_prepared=self.peers.member.prepared(message))
        elif "go" in message:
            self._change(_go=message, next_round=message["go"] + 1, is_over=False)
        elif "over" in message:
            # The end of a round may arrive when this agent has joined the next.
            over = self.is_over or message["over"] >= self._wanted
            self.hangs = "hang" in message
            self._change(next_round=message["over"] + 1, is_over=over, _prepared=None)
        elif "finished" in message:
            self._change(finished=True, ending=message)
        elif "failed" in message:
            self._handle_failure(message)
        else:
            self._handle_workers(message)

    def _handle_failure(self, message: Mapping[str, Any]) -> None:
        self._send({"read": True})
        failure = wire.decode(Failure, message["failed"])
        self._change(failure=failure, ending=message)
        if "reports" in message and failure.kind is Kind.WORKER:
            wait = COLLECT_TIMEOUT[failure.is_doubtful]
            asyncio.get_running_loop().call_later(wait, self._ask_for_report)

    def _ask_for_report(self) -> None:
        if not self._wants_report:
            self._wants_report = True
            self._send({"report": True})

    def _replied(self, message: Mapping[str, Any]) -> None:
        """Keep a node's reply, unless it is late."""
        number, node = message["replied"], message.get("node")
        with self._changed:
            if type(number) is type(node) is int and number in self._replies:
                self._replies[number][node] = message.get("of")
            self._changed.notify_all()

    def _handle_workers(self, message: Mapping[str, Any]) -> None:
        if "report" in message:
            summary = message["report"] and wire.decode(Summary, message["report"])
            if summary is None or self.failure is None:
                self._reported()
            else:
                self._loop.call_aside(partial(self._report, summary))
        elif "printed" in message:
            self._change(_is_reported=True)
        elif "replied" in message:
            self._replied(message)
        elif "record" not in message:
            self.tell(message)

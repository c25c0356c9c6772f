"""An agent's connection to the coordinator.

The main thread waits only in Python's locks. So it handles signals within 0.5 s.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torchrun_hpc import limits
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.failures.report import time_to_collect
from torchrun_hpc.rendezvous.errors import (
    CoordinatorNotFoundError,
    JobFailedError,
    NotNeededError,
    Refused,
    RefusedError,
    RoundOverError,
)
from torchrun_hpc.rendezvous.loop import Lease, Silence, now
from torchrun_hpc.rendezvous.messages import News, Suspended
from torchrun_hpc.rendezvous.protocol import (
    Answer,
    Ask,
    Bye,
    Died,
    Done,
    Ended,
    GaveUp,
    Go,
    Heartbeat,
    Join,
    Over,
    Prepare,
    Printed,
    Question,
    QuestionOver,
    Read,
    Reply,
    Report,
    Standby,
    WantsReport,
    Welcome,
)
from torchrun_hpc.rendezvous.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrun_hpc.failures.failure import Summary
    from torchrun_hpc.rendezvous.loop import Loop
    from torchrun_hpc.rendezvous.member import Member
    from torchrun_hpc.rendezvous.peers import Peers
    from torchrun_hpc.rendezvous.protocol import (
        FromAgent,
        FromCoordinator,
        JoinRequest,
        Store,
        StoreRequest,
    )
    from torchrun_hpc.rendezvous.search import Answered, Channel, Find

_log = logging.getLogger(__name__)


def never() -> bool:
    """Return false: a condition that never holds."""
    return False


@dataclass(frozen=True)
class Listener:
    """What an agent does with messages. All functions may block.

    Attributes:
        tell: Shows the user some news.
        report: Reports the failed workers. It returns the first failure, perhaps with
            more details.
        reply: Replies to a question to all agents.
        end_workers: Ends the workers of this node at once. It runs in a thread of its
            own; the other functions share one.
    """

    tell: Callable[[News], None] = lambda _: None
    report: Callable[[Summary], Failure] = attrgetter("first")
    reply: Callable[[Question], None] = lambda _: None
    end_workers: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class JobState:
    """What an agent knows of its job.

    Attributes:
        is_running: Whether it connects, or is connected.
        is_accepted: Whether a coordinator has accepted it.
        is_leaving: Whether the end of its connection is no failure.
        problem: Why it cannot connect.
        wanted: The round that it joined last; -1 before the first one.
        next_round: The round that it joins next.
        prepared: The record of a round that it has not confirmed yet.
        active: The active nodes of its latest round.
        round: Its latest round.
        go: The start of this round, until it joins the next one.
        is_over: Whether that round is over.
        hangs: Whether it is over because a collective failed.
        own_failure: The first failure of one of its workers in this round.
        failure: Why the job has failed.
        ending: How the job has ended for all nodes.
        wants_report: Whether it has asked which workers have failed.
        is_reported: Whether the user knows which workers have failed.
        asked: The number of its latest request to the agents' store.
        answer: The answer to this request.
        replies: The replies to its own questions, by number and node.
    """

    is_running: bool = False
    is_accepted: bool = False
    is_leaving: bool = False
    problem: Exception | None = None
    wanted: int = -1
    next_round: int = 0
    prepared: Record | None = None
    active: tuple[int, ...] = ()
    round: int = 0
    go: Go | None = None
    is_over: bool = False
    hangs: bool = False
    own_failure: Failure | None = None
    failure: Failure | None = None
    ending: Ended | None = None
    wants_report: bool = False
    is_reported: bool = False
    asked: int = 0
    answer: Answer | None = None
    replies: Mapping[int, Mapping[int, Any]] = field(default_factory=dict)

    @property
    def has_finished(self) -> bool:
        """Whether all nodes have finished."""
        return self.ending is not None and self.ending.failure is None

    @property
    def is_unreported(self) -> bool:
        """Whether a worker has failed, and nobody has reported it yet."""
        is_worker = self.failure is not None and self.failure.kind is Kind.WORKER
        return is_worker and not self.is_reported

    def joining(self) -> JobState:
        """Return what the agent knows when it joins the next round.

        A prepared round is a later one, so keep it.
        """
        fresh = replace(self, go=None, own_failure=None, is_over=False, hangs=False)
        return replace(fresh, wanted=self.next_round)

    def confirming(self, active: tuple[int, ...]) -> JobState:
        """Return what the agent knows when it confirms a round."""
        return replace(self, prepared=None, active=active)

    def after(self, message: FromCoordinator) -> JobState:  # noqa: PLR0911 - each message
        """Return what the agent knows after a message."""
        match message:
            case Welcome(round=number):
                # Another coordinator may begin an earlier round than this agent joined.
                wanted = min(self.wanted, number)
                return replace(self, is_accepted=True, wanted=wanted, next_round=number)
            case Go(round=number):
                begun = replace(self, go=message, round=number, is_over=False)
                return replace(begun, next_round=number + 1)
            case Over(round=number, hangs=hangs):
                # It may arrive when this agent has joined the next one.
                is_over = self.is_over or number >= self.wanted
                over = replace(self, is_over=is_over, hangs=hangs, prepared=None)
                return replace(over, next_round=number + 1)
            case Ended():
                failure = message.failure or self.failure
                return replace(self, is_accepted=True, failure=failure, ending=message)
            case Printed():
                return replace(self, is_reported=True)
            case Answer(number=number) if number == self.asked:
                return replace(self, answer=message)
            case Reply(number=number, node=node) if number in self.replies:
                replies = {**self.replies[number], node: message.content}
                return replace(self, replies={**self.replies, number: replies})
            case Refused() | Standby() | Prepare() | Record() | Report() | Question():
                return self
            case Reply() | Answer() | Heartbeat() | News():
                return self


class Client:
    """An agent's connection to the coordinator.

    A coordinator that is silent for `silence_timeout` seconds counts as lost. Without
    `peers`, the job ends with it. `state` is replaced as a whole.
    """

    def __init__(
        self,
        loop: Loop,
        request: JoinRequest,
        member: Member,
        silence_timeout: int,
        listener: Listener,
    ) -> None:
        self.request = request
        self.member = member
        self.state = JobState(active=member.record.active)
        self._loop = loop
        self._listener = listener
        self._silence = Silence(silence_timeout)
        self._lease = Lease(math.inf)
        self._numbers = itertools.count(1)  # of its questions; several threads ask
        self._changed = threading.Condition()  # the state has changed
        self._peers: Peers | None = None
        self._channel: Channel | None = None
        self._task: asyncio.Task[None]

    def _change(self, change: Callable[[JobState], JobState]) -> None:
        with self._changed:
            before, self.state = self.state, change(self.state)
            if self.state is not before:
                self._changed.notify_all()

    # --- for the main thread ------------------------------------------------------

    def connect(self, find: Find, peers: Peers | None = None) -> None:
        """Find the coordinator, and wait until it accepts this agent.

        Raise one of `errors` if either is impossible.
        """
        if peers is not None:
            self._peers, self._lease = peers, Lease(self._silence.limit)
        self._change(lambda state: replace(state, is_running=True))
        self._loop.call(self._begin, peers.find if peers else find)
        self.until(lambda: self.state.is_accepted)

    def take_part(self, open_store: Callable[[], Store]) -> tuple[Go, int, int]:
        """Wait for a round in which this node has workers, or raise one of `errors`.

        Return the coordinator's `Go`, the node rank, and the number of active nodes.
        Node rank 0 opens the workers' store, and sends its address and port.
        """
        self._change(JobState.joining)
        self.member.is_ready = True
        if not self.member.unhealthy:
            self.send(Join())
        try:
            return self._wait_for_go(open_store)
        finally:
            self.member.is_ready = False

    def _wait_for_go(self, open_store: Callable[[], Store]) -> tuple[Go, int, int]:
        while True:
            self.until(self._can_continue)
            state = self.state
            if state.has_finished:
                raise NotNeededError
            if state.is_over:
                raise RoundOverError
            if state.go is not None:
                rank = state.active.index(self.request.rank)
                return state.go, rank, len(state.active)
            with self._changed:
                if (record := self.state.prepared) is None:
                    continue
                self._change(partial(JobState.confirming, active=record.active))
            self.send(self.member.confirmation(record, open_store))

    def _can_continue(self) -> object:
        state = self.state
        return state.go or state.prepared or state.is_over or state.has_finished

    @property
    def active(self) -> tuple[int, ...]:
        """The nodes with workers, by node rank."""
        return self.member.record.active

    def ask(self, request: StoreRequest, timeout: float) -> Any:
        """Ask the agents' store, one request at a time, and return its answer.

        Raise `TimeoutError` or one of `errors`.
        """
        number = next(self._numbers)
        self._change(lambda state: replace(state, asked=number, answer=None))
        self.send(Ask(number, request))
        self.until(lambda: self.state.answer or self.state.is_over, timeout)
        answer = self.state.answer
        if answer is None or self.state.is_over:
            raise RoundOverError
        return answer.value

    def ask_all(
        self,
        what: str,
        wait: Callable[[Callable[[], Mapping[int, Any]]], None],
        about: Any = None,
    ) -> dict[int, Any]:
        """Ask all nodes; return their replies, without those that are ``None``.

        `wait` waits for enough replies; its argument returns the replies so far. The
        reply of a lost node is ``None``. `about` is plain data for the nodes.
        """
        number = next(self._numbers)
        self._change(lambda s: replace(s, replies={**s.replies, number: {}}))
        self.send(Question(number, what, about))
        try:
            wait(lambda: self.state.replies[number])
        finally:
            self.send(QuestionOver(number))
            replies = self.state.replies[number]
            self._change(lambda s: replace(s, replies=_without(s.replies, number)))
        return {node: each for node, each in replies.items() if each is not None}

    def finish(self) -> None:
        """Wait until all nodes have finished, or raise `JobFailedError`."""
        self.member.is_done = True
        self.send(Done(self.state.next_round - 1))
        self.until(lambda: self.state.has_finished)

    def worker_failed(self, failure: Failure) -> None:
        """Inform the coordinator of a failed worker. The first one ends the round."""
        self._change(lambda s: replace(s, own_failure=s.own_failure or failure))
        self.send(Died(failure, self.state.round))

    def fail(self, failure: Failure) -> None:
        """Inform the others that this agent gives up, and why."""
        state = self.state
        if state.is_running and state.failure is None and not state.has_finished:
            if failure.kind is Kind.WORKER:  # PyTorch does not know the cause
                failure = state.own_failure or failure
            self._change(lambda s: replace(s, failure=s.failure or failure))
            self.send(GaveUp(failure.brief))

    def leave(self, timeout: float = 0, is_urgent: Callable[[], bool] = never) -> None:
        """Disconnect. After a failure, first wait until the job's failure is known.

        Then wait up to `timeout` seconds until the coordinator's node has reported it
        and ends, or until this `is_urgent`: some launchers end all tasks when one ends
        with an error.
        """
        if not self.state.is_running:
            return
        if self.state.wanted >= 0 and not self.state.has_finished:
            text = "it left before the end"
            self.fail(Failure(Kind.AGENT, (self.request.rank,), text=text))
        if self.state.is_unreported and self.request.nodes == 1:
            self._loop.call(self._ask_for_report)  # no other worker can fail
        if self.state.failure is not None and self.state.is_accepted:
            self.wait_for(lambda: self.state.ending, limits.DECISION_TIMEOUT)
            self.wait_for(lambda: not self.state.is_unreported, limits.REPORT_TIMEOUT)
            self.wait_for(is_urgent, timeout)
        self._loop.call(self._disconnect)
        self.wait_for(lambda: not self.state.is_running, limits.LEAVE_TIMEOUT)

    def send(self, message: FromAgent) -> None:
        """Send a message to the coordinator."""
        self._loop.call(self._send, message)

    def until(self, condition: Callable[[], object], timeout: float = math.inf) -> None:
        """Wait for a condition, or raise `JobFailedError` or `TimeoutError`."""
        with self._changed:
            self.wait_for(
                lambda: condition() or self.state.failure or self.state.problem, timeout
            )
            if not condition():
                failed = self.state.failure and JobFailedError(self.state.failure)
                raise failed or self.state.problem or TimeoutError

    def wait_for(self, condition: Callable[[], object], timeout: float) -> None:
        """Wait for a condition, also after a failure, or until nothing can arrive."""
        if not self.state.is_running:
            return
        clock = self._loop.events.time
        end = clock() + timeout
        with self._changed:
            while self.state.is_running and not condition():
                if (left := end - clock()) <= 0:
                    return
                self._changed.wait(min(left, limits.CLIENT_SIGNAL_TIMEOUT))

    # --- in the loop --------------------------------------------------------------

    def _begin(self, find: Find) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_exception)
        self._task = asyncio.create_task(self._run(find))

    async def _run(self, find: Find) -> None:
        try:
            await self._communicate(find)
        except (CoordinatorNotFoundError, RefusedError, OSError) as error:
            problem = error
            self._change(lambda state: replace(state, problem=problem))
        except Exception as error:  # noqa: BLE001 - the main thread waits for it
            self._on_fault(error)
        finally:
            self._change(lambda state: replace(state, is_running=False))

    def _on_fault(self, error: Exception) -> None:
        """End this agent, which has a fault. Its coordinator continues."""
        text = f"{type(error).__name__}: {error}"
        self._lose(Failure(Kind.AGENT, (self.request.rank,), text=text))
        if self._channel is not None:
            self._channel.abort()
        self._task.cancel()

    def _on_exception(
        self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        """End this agent if a call has failed, but not if a connection has a fault."""
        error = context.get("exception")
        if "future" in context and isinstance(error, OSError):
            return  # an attempt to connect was cancelled when it failed
        loop.default_exception_handler(context)
        if isinstance(error, Exception) and "protocol" not in context:
            self._on_fault(error)

    async def _communicate(self, find: Find) -> None:
        (channel, answer), peers = await find(), self._peers
        while True:
            await self._follow(channel, answer)
            self._check_lease()
            state = self.state
            if state.has_finished or state.failure is not None or state.is_leaving:
                return
            if peers is None:
                self._lose(Failure(Kind.COORDINATOR, code=self._silence.ended_after))
                return
            self._change(lambda state: replace(state, is_over=True, prepared=None))
            try:
                channel, answer = await self._find_again(peers, channel)
            except CoordinatorNotFoundError:
                last = self.member.record.term[1]
                self._lose(Failure(Kind.COORDINATOR, (last,)))
                return

    async def _find_again(self, peers: Peers, lost: Channel) -> Answered:
        """Find the next coordinator. Watch the lease, because old workers may run."""
        finding = asyncio.create_task(peers.find_again(has_ended=lost.at_end))
        try:
            while not finding.done():
                await asyncio.wait([finding], timeout=limits.TICK)
                self._check_lease()
            return finding.result()
        finally:
            finding.cancel()

    async def _follow(self, channel: Channel, answer: Welcome | Ended) -> None:
        self._channel = channel
        self._silence.begin()
        self._lease.begin()
        channel.on_message = self._handle
        tasks: set[asyncio.Task[Any]] = {asyncio.create_task(channel.closed.wait())}
        if self._peers is not None and self.member.coordinates:
            tasks.add(asyncio.create_task(self._peers.watch()))
        self._handle(answer)
        channel.deliver()  # messages that arrived with the answer
        try:
            while not channel.closed.is_set():
                done, tasks = await asyncio.wait(
                    tasks, timeout=limits.TICK, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()  # raises its fault
                if not done:
                    self._tick(channel)
        finally:
            for task in tasks:
                task.cancel()

    def _tick(self, channel: Channel) -> None:
        for news in self._silence.tick(channel):
            # With spares, any node may be the coordinator's.
            node = self.member.follows if self._peers else None
            self.tell(replace(news, node=node))
        self._check_lease()

    def _check_lease(self) -> bool:
        """Leave the coordinator if the lease is over; return whether it is."""
        is_over = self._lease.is_over()
        if is_over and self._channel is not None:
            self._channel.on_message = None
            self._channel.abort()
        if seconds := self._lease.overslept():
            self._loop.call_apart(self._listener.end_workers)
            self.tell(Suspended(seconds))
        return is_over

    def _lose(self, failure: Failure) -> None:
        if not (self.state.has_finished or self.state.is_leaving):
            self._change(lambda s: replace(s, failure=s.failure or failure))

    def tell(self, news: News) -> None:
        """Inform the user, aside."""
        self._loop.call_aside(partial(self._listener.tell, news))

    def _report(self, summary: Summary) -> None:
        first = self._listener.report(summary)
        self._loop.call(self._reported, first)

    def _reported(self, first: Failure | None = None) -> None:
        if first is not None and self.state.failure is not None:
            first = replace(first, finished=self.state.failure.finished)
        failure = first or self.state.failure
        self._change(lambda state: replace(state, failure=failure, is_reported=True))
        self._send(Printed())

    def _send(self, message: FromAgent) -> None:
        self._log("to the coordinator: %s", message)
        if self._channel is not None:
            self._channel.send(message)

    def _log(self, text: str, message: object) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            self._loop.call_aside(lambda: _log.debug(text, message))

    def _disconnect(self) -> None:
        self._change(lambda state: replace(state, is_leaving=True))
        if self._channel is None or self._channel.closed.is_set():
            self._task.cancel()
            return
        self._channel.send(Bye())
        self._channel.close()

    def _handle(self, message: FromCoordinator) -> None:  # noqa: C901, PLR0912 - each message
        self._log("from the coordinator: %s", message)
        if self._check_lease():
            return
        match message:
            case Welcome():
                for reply in self.member.accepted(message):
                    self._send(reply)
            case Heartbeat(seconds):
                self._lease.renew(seconds)
                self._send(Heartbeat(now()))
            case Prepare(record):
                to_confirm = self.member.prepared(record)
                self._change(lambda state: replace(state, prepared=to_confirm))
            case Record():
                self.member.informed(message)
            case Go():
                self.member.began()
            case Ended(failure):
                if failure is not None:
                    self._send(Read())
                    self._ask_later(failure, reports=message.reports)
            case Report(summary) if summary and self.state.failure:
                self._loop.call_aside(partial(self._report, summary))
            case Report():
                self._reported()
            case Question():
                self._loop.call_aside(partial(self._listener.reply, message))
            case Suspended():  # this node's coordinator was also suspended
                self._loop.call_apart(self._listener.end_workers)
                self.tell(message)
            case News():
                self.tell(message)
            case Refused() | Standby() | Over() | Printed() | Reply() | Answer():
                pass  # only the state or a search uses them
        self._change(lambda state: state.after(message))

    def _ask_later(self, failure: Failure, *, reports: bool) -> None:
        if reports and failure.kind is Kind.WORKER:
            wait = time_to_collect(failure)
            asyncio.get_running_loop().call_later(wait, self._ask_for_report)

    def _ask_for_report(self) -> None:
        if not self.state.wants_report:
            self._change(lambda state: replace(state, wants_report=True))
            self._send(WantsReport())


def _without(replies: Mapping[int, Any], number: int) -> dict[int, Any]:
    return {key: value for key, value in replies.items() if key != number}

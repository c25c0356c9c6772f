"""What a member makes of the coordinator's messages, in whatever order they come."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.support import simulated_job
from tests.support.loopback import (
    HERE,
    WELCOME,
    answer_with,
    failure_of,
    key_of,
    other_program,
    settle,
)
from tests.support.patience import PATIENCE, until
from tests.support.simulated_job import SILENCE, STORE, as_sent, go, over
from torchrun_hpc import limits, wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous import client as clients
from torchrun_hpc.rendezvous import loop as loops
from torchrun_hpc.rendezvous.client import Listener
from torchrun_hpc.rendezvous.coordinator import Coordinator
from torchrun_hpc.rendezvous.errors import (
    JobFailedError,
    NotNeededError,
    RoundOverError,
)
from torchrun_hpc.rendezvous.loop import Lease
from torchrun_hpc.rendezvous.messages import Excluded, Suspended
from torchrun_hpc.rendezvous.peers import Peers
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    Confirm,
    Ended,
    Heartbeat,
    Join,
    Prepare,
    Standby,
)
from torchrun_hpc.rendezvous.record import Record
from torchrun_hpc.rendezvous.search import Channel
from torchrun_hpc.wire import WireError

PREPARED = Record((0, 0), 0, (1, 0, 2))
GO = go(0)
CONFIRM = Confirm((0, 0), 0)


def hear(client, *messages):
    for message in messages:
        client._handle(as_sent(message, FROM_COORDINATOR))


class Aborted:
    """A connection that notes whether it was aborted."""

    has_received = aborted = False

    def abort(self):
        self.aborted = True


@pytest.fixture
def clock(job, monkeypatch):
    """Let a test decide what time it is for leases."""
    for module in (clients, loops):
        monkeypatch.setattr(module, "now", job.clock)
    return job.clock


@pytest.fixture
def events(job):
    """Return what member 1 must report."""
    return job.events[1]


@pytest.fixture
def sent():
    return []


@pytest.fixture
def killed():
    return []


@pytest.fixture
def client(job, events, sent, killed, monkeypatch):
    """Return member 1 of four, connected to nobody."""
    listener = Listener(events.append, end_workers=lambda: killed.append(True))
    client = job.client(1, (4000,), nodes=4, spares=1, listener=listener)
    client._peers = Peers(mock.Mock(), client.member, client.search, 60, 60)
    client._lease = Lease(SILENCE)
    client._change(lambda state: replace(state, is_running=True))
    monkeypatch.setattr(
        client, "send", lambda message: sent.append(as_sent(message, FROM_AGENT))
    )
    yield client
    client._change(lambda state: replace(state, is_running=False))


@pytest.fixture
def accepted(client, clock, monkeypatch):  # noqa: ARG001 - it must be first
    """Return a client that a coordinator has just accepted; its answers are sent."""
    client._channel = Aborted()
    client._lease.begin()
    monkeypatch.setattr(client, "_send", client.send)
    return client


def take_part(client, *messages):
    """Take part; a message comes whenever it waits for one."""
    later = [*messages]

    def wait_for(condition, _timeout):
        while not condition():
            hear(client, later.pop(0))

    client.wait_for = wait_for
    return client.take_part(lambda: STORE)


@pytest.mark.parametrize(
    ("active", "rank", "store"), [((1, 0, 2), 0, STORE), ((0, 2, 1), 2, None)]
)
def test_a_round_in_which_it_has_a_node_rank(client, sent, active, rank, store):
    prepare = Prepare(replace(PREPARED, active=active))
    assert take_part(client, prepare, GO) == (GO, rank, 3)
    assert sent == [Join(), replace(CONFIRM, store=store)]


def test_a_round_that_is_prepared_before_it_has_noticed_the_end_of_the_last(client):
    """The coordinator is lost while it waits, and the next one is quick."""
    client._change(lambda state: replace(state, is_over=True))
    hear(client, Prepare(PREPARED))
    assert take_part(client, GO) == (GO, 0, 3)


def test_a_round_that_is_over_before_it_has_begun(client, sent):
    with pytest.raises(RoundOverError):
        take_part(client, Prepare(PREPARED), over(0))
    sent.clear()
    later = Prepare(replace(PREPARED, round=1))
    assert take_part(client, later, go(1)) == (go(1), 0, 3)
    assert sent == [Join(), Confirm((0, 0), 1, STORE)]


WITHOUT_IT = Prepare(replace(PREPARED, active=(0, 2, 3)))


@pytest.mark.parametrize(
    ("before", "messages"),
    [([Prepare(PREPARED), over(0)], [Ended()]), ([], [WITHOUT_IT, Ended()])],
)
def test_nothing_is_confirmed(client, sent, before, messages):
    """The round is over, or another node takes part."""
    hear(client, *before)
    with pytest.raises(NotNeededError):
        take_part(client, *messages)
    assert sent == [Join()]


def test_no_older_workers_are_left_when_a_round_begins(client):
    hear(client, Prepare(replace(PREPARED, leased=(3,))))
    assert client.member.record.leased == (3,)
    hear(client, GO)
    assert client.member.record.leased == ()


def test_a_member_that_is_not_well(client, sent):
    client.member.unhealthy = "bad GPU"
    with pytest.raises(NotNeededError):
        take_part(client, Ended())
    assert sent == []  # it does not join


def test_what_it_hears_at_the_end(client, events):
    hear(client, Excluded(1, "bad GPU"))
    assert client.state.ending is None
    end = Ended(out_at_end=(1,))
    hear(client, end)
    until(lambda: events)
    assert events == [Excluded(1, "bad GPU")]
    assert client.state.ending == end


# --- the lease ----------------------------------------------------------------------


def test_the_lease_runs_from_the_last_received_answer(accepted, sent, clock):
    """What the coordinator sends proves nothing: perhaps it cannot hear this member."""
    hear(accepted, Heartbeat())
    clock.now += 10
    hear(accepted, Heartbeat(1000.0))
    assert sent == [Heartbeat(1000.0), Heartbeat(1010.0)]
    clock.now = 1000.0 + SILENCE - 0.1
    hear(accepted, PREPARED)
    assert not accepted._check_lease()
    clock.now = 1000.0 + SILENCE
    assert accepted._check_lease()
    assert accepted._channel.aborted


@pytest.mark.parametrize("said", [1e9, 999.0])
def test_no_coordinator_makes_a_lease_longer(accepted, clock, said):
    hear(accepted, Heartbeat(said))
    clock.now += SILENCE
    assert accepted._check_lease()


@pytest.mark.parametrize("said", ["1", None, True, [], {}, float("nan"), 1e999])
def test_an_answer_that_is_no_time(said):
    with pytest.raises(WireError):
        wire.decode(FROM_COORDINATOR, {"heartbeat": {"seconds": said}})


LATE = [
    lambda client: hear(client, GO),
    lambda client: hear(client, Heartbeat(1000.0)),
    lambda client: client._check_lease(),
]


@pytest.mark.parametrize("what_comes_first", LATE)
@pytest.mark.parametrize("late", [1, 3])
def test_after_the_end_of_its_lease(  # noqa: PLR0913, PLR0917 - fixtures
    accepted, sent, killed, clock, events, what_comes_first, late
):
    """Nothing that is read then counts; after a suspension, workers are killed."""
    is_suspended = late > limits.SUSPENSION
    clock.now += SILENCE + late
    what_comes_first(accepted)
    until(lambda: killed == [True] * is_suspended)
    settle(accepted)
    assert events == ([Suspended(SILENCE + late)] if is_suspended else [])
    assert accepted._channel.aborted
    assert sent == []
    assert accepted.state.go is None
    assert accepted._check_lease()
    settle(accepted)
    assert len(events) == is_suspended  # once


def test_a_suspension_after_the_end_of_its_lease(accepted, clock, events, killed):
    """Its workers may be ending then."""
    clock.now += SILENCE
    for seconds in (0, 1, limits.SUSPENSION, limits.SUSPENSION + 1):
        clock.now += seconds
        assert accepted._check_lease()
    settle(accepted)
    assert events == killed == []
    clock.now += limits.SUSPENSION + 1.1
    assert accepted._check_lease()
    until(lambda: killed)
    settle(accepted)
    assert events == [Suspended(int(clock.now - 1000))]


def test_nothing_counts_that_arrives_together_after_the_end(accepted, clock):
    """A suspended member reads all that has arrived, before its own clock ticks."""
    accepted._channel = channel = Channel(accepted.request, key_of().secret)
    ended = {"abort": list, "is_closing": lambda: True}
    places = {"socket": mock.Mock()}.get
    channel.connection_made(SimpleNamespace(get_extra_info=places, **ended))
    channel._steps = None
    channel.on_message = accepted._handle
    clock.now += 2 * SILENCE
    messages = Heartbeat(1000.0), GO
    lines = (wire.to_line(wire.encode(m, FROM_COORDINATOR)) for m in messages)
    channel.data_received(b"".join(lines))
    assert accepted.state.go is None


def test_a_suspended_coordinator_ends_its_own_workers(accepted, events, killed):
    hear(accepted, Suspended(61))
    until(lambda: killed == [True])
    settle(accepted)
    assert events == [Suspended(61)]


def test_a_fault_of_what_kills_workers_leaves_no_connection(
    accepted, clock, monkeypatch
):
    raised = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: raised.set())
    fault = mock.Mock(side_effect=ZeroDivisionError)
    accepted._listener = Listener(end_workers=fault)
    clock.now += 2 * SILENCE
    assert accepted._check_lease()
    assert raised.wait(PATIENCE)
    assert accepted._channel.aborted


def test_a_reply_without_a_proof_does_not_count(client):
    for message in (Standby(0, coordinates=True, has_quorum=True), WELCOME):
        with other_program(answer_with(message)) as port:
            asked = asyncio.run_coroutine_threadsafe(
                client._peers._ask((HERE, port), asks=True), client._loop.events
            )
            assert asked.result(PATIENCE) is None


def test_a_question_that_is_cancelled_when_its_answer_arrives(client, monkeypatch):
    """Before Python 3.12, `asyncio.wait_for` loses such a cancellation."""

    async def cancelled():
        answer = asyncio.get_running_loop().create_future()

        async def open_channel(*_):
            return await answer

        monkeypatch.setattr(Channel, "open", open_channel)
        asking = asyncio.create_task(client._peers._ask((HERE, 1)))
        for _ in range(3):
            await asyncio.sleep(0)
        answer.set_result(WELCOME)
        await asyncio.sleep(0)  # until the channel has it, but nobody else
        asking.cancel()
        await asyncio.wait([asking])
        return asking.cancelled()

    assert asyncio.run(cancelled())


# --- the coordinator is here ---------------------------------------------------------


class Owned(Coordinator):
    """A coordinator for one thread only, once it has been given to it.

    Attributes:
        owner: The thread.
        asked_by: The threads that have asked it since then.
    """

    owner: threading.Thread | None = None
    asked_by: frozenset[threading.Thread] = frozenset()

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if name in {"members", "outbox", "rounds"} and self.owner is not None:
            self.asked_by |= {threading.current_thread()}
        return value


@pytest.fixture
def coordinating(job, monkeypatch):
    """Return the client on the coordinator's node: of two nodes, one is a spare."""
    monkeypatch.setattr(simulated_job, "Coordinator", Owned)
    job.start_server(nodes=2, spares=1)
    coordinator, member = job.server.coordinator, job.simulated.member
    member.coordinates = True
    client = job.client(0, nodes=2, spares=1, loop=job.server._loop)
    client.member = member
    client.peers = Peers(job.server, member, client.search, PATIENCE, PATIENCE)
    coordinator.owner = job.server._loop._thread
    return client


def test_only_one_thread_asks_what_coordinates(job, coordinating):
    coordinating.connect()
    assert coordinating.member.coordinates
    coordinating.fail(Failure(Kind.AGENT, (0,), text="why"))
    coordinating.leave()
    job.server.close(late_timeout=0)
    assert job.server.coordinator.asked_by == {job.server._loop._thread}


def test_a_fault_of_what_looks_for_others_ends_the_agent_only(
    job, coordinating, monkeypatch, raw
):
    async def ask(*_, **__):
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(limits, "PEERS_PAUSE", 0)
    monkeypatch.setattr(Peers, "_ask", ask)
    monkeypatch.setattr(job.server.coordinator, "absent", lambda **_: {1: (HERE, 4000)})
    with suppress(JobFailedError):
        coordinating.connect()
    fault = Failure(Kind.AGENT, (0,), text="ZeroDivisionError: a fault")
    assert failure_of(coordinating) == fault
    raw().accepted(1, nodes=2, spares=1)

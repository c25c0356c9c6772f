"""What a member makes of the coordinator's messages, in whatever order they come."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.support.loopback import (
    HERE,
    WELCOME,
    Raw,
    failure_of,
    key_of,
    line,
    listening,
    loop_started,
    other_program,
    settle,
)
from tests.support.patience import PATIENCE, until
from tests.support.simulated_job import as_sent
from torchrun_hpc import __version__, limits, wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous import client as clients
from torchrun_hpc.rendezvous import loop as loops
from torchrun_hpc.rendezvous.client import Client, Listener
from torchrun_hpc.rendezvous.coordinator import Coordinator
from torchrun_hpc.rendezvous.errors import (
    JobFailedError,
    NotNeededError,
    RoundOverError,
)
from torchrun_hpc.rendezvous.loop import Lease
from torchrun_hpc.rendezvous.member import Member
from torchrun_hpc.rendezvous.messages import Excluded, Suspended
from torchrun_hpc.rendezvous.peers import Peers
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    Confirm,
    Ended,
    Go,
    Heartbeat,
    Join,
    JoinRequest,
    Over,
    Prepare,
    Settings,
    Standby,
    Welcome,
)
from torchrun_hpc.rendezvous.record import Record, first_record
from torchrun_hpc.rendezvous.search import Channel, CoordinatorAddress, Search
from torchrun_hpc.rendezvous.server import CoordinatorServer
from torchrun_hpc.wire import WireError

PREPARED = Record((0, 0), 0, (1, 0, 2))
STORE = ("10.20.0.1", 40000)
GO = Go(0, STORE)
CONFIRM = Confirm((0, 0), 0)


SILENCE = 40


def hear(client, *messages):
    for message in messages:
        client._handle(as_sent(message, FROM_COORDINATOR))


class Aborted:
    """A connection that notes whether it was aborted."""

    has_received = aborted = False

    def abort(self):
        self.aborted = True


@pytest.fixture
def clock(monkeypatch):
    """Let a test decide what time it is."""
    moment = SimpleNamespace(now=1000.0)
    for module in (clients, loops):
        monkeypatch.setattr(module, "now", lambda: moment.now)
    return moment


@pytest.fixture
def accepted(client, clock, monkeypatch):  # noqa: ARG001 - it must be first
    """Return a client that a coordinator has just accepted; its answers are sent."""
    client._channel = Aborted()
    client._lease.begin()
    monkeypatch.setattr(client, "_send", client.send)
    return client


@pytest.fixture
def events():
    return []


@pytest.fixture
def client(events, monkeypatch):
    """Return member 1 of four, connected to nobody; what it sends is in ``sent``."""
    settings = Settings("mine", 4, 1, 40, 9, 60, 1, spare_after=60, kill=5)
    request = JoinRequest("mine", 4, 1, "n1", 101, __version__, "agent 1", spares=1)
    member = Member(1, first_record(4, 1, 0))
    member.listens(("n1", 4001), {})
    killed, sent = [], []
    listener = Listener(events.append, end_workers=lambda: killed.append(True))
    made = Client(loop_started(), request, member, SILENCE, listener)
    where = CoordinatorAddress("n0", (4000,), 60)
    search = Search(request, where, key_of(), made.tell)
    server = SimpleNamespace(coordinator=Coordinator(settings, member), flush=list)
    made._peers = Peers(server, member, search, 60, 60)
    made._lease = Lease(SILENCE)
    made._change(lambda state: replace(state, is_running=True))
    made.killed, made.sent = killed, sent

    def send(message):
        sent.append(as_sent(message, FROM_AGENT))

    monkeypatch.setattr(made, "send", send)
    yield made
    made._loop.close()


def take_part(client, *messages):
    """Take part; a message comes whenever it waits for one."""
    later = [*messages]

    def wait_for(condition, _timeout):
        while not condition():
            hear(client, later.pop(0))

    client.wait_for = wait_for
    return client.take_part(lambda: STORE)


def test_a_round_in_which_it_has_node_rank_0(client):
    assert take_part(client, Prepare(PREPARED), GO) == (GO, 0, 3)
    assert client.sent == [Join(), replace(CONFIRM, store=STORE)]


def test_a_round_in_which_it_has_another_node_rank(client):
    record = Record((0, 0), 0, (0, 2, 1))
    assert take_part(client, Prepare(record), GO) == (GO, 2, 3)
    assert client.sent == [Join(), CONFIRM]


def test_a_round_that_is_prepared_before_it_has_noticed_the_end_of_the_last(client):
    """The coordinator is lost while it waits, and the next one is quick."""
    client._change(lambda state: replace(state, is_over=True))
    hear(client, Prepare(PREPARED))
    assert take_part(client, GO) == (GO, 0, 3)


def test_a_round_that_is_confirmed_twice_has_one_store(client):
    """The coordinator asked again just when the first answer was under way."""
    opened = []

    def open_store():
        opened.append(STORE)
        return STORE

    for _ in range(2):
        hear(client, Prepare(PREPARED))
        record = client.state.prepared
        client.sent.append(client.member.confirmation(record, open_store))
    assert opened == [STORE]
    assert client.sent == [replace(CONFIRM, store=STORE)] * 2


def test_a_round_that_is_over_before_it_has_begun(client):
    with pytest.raises(RoundOverError):
        take_part(client, Prepare(PREPARED), Over(0, hangs=False))
    client.sent.clear()
    later = Record((0, 0), 1, (1, 0, 2))
    go = replace(GO, round=1)
    assert take_part(client, Prepare(later), go) == (go, 0, 3)
    assert client.sent == [Join(), Confirm((0, 0), 1, STORE)]


def test_nothing_is_confirmed_of_a_round_that_is_over(client):
    hear(client, Prepare(PREPARED))
    hear(client, Over(0, hangs=False))
    with pytest.raises(NotNeededError):
        take_part(client, Ended())
    assert client.sent == [Join()]


def test_a_round_without_it(client):
    record = Record((0, 0), 0, (0, 2, 3))
    with pytest.raises(NotNeededError):
        take_part(client, Prepare(record), Ended())
    assert client.sent == [Join()]


def test_no_older_workers_are_left_when_a_round_begins(client):
    record = Record((0, 0), 0, (1, 0, 2), leased=(3,))
    hear(client, Prepare(record))
    assert client.member.record.leased == (3,)
    hear(client, GO)
    assert client.member.record.leased == ()


def test_a_member_that_is_not_well(client):
    client.member.unhealthy = "bad GPU"
    with pytest.raises(NotNeededError):
        take_part(client, Ended())
    assert client.sent == []  # it does not join


def test_what_it_hears_at_the_end(client, events):
    hear(client, Excluded(1, "bad GPU"))
    assert client.state.ending is None
    end = Ended(out_at_end=(1,))
    hear(client, end)
    until(lambda: events)
    assert events == [Excluded(1, "bad GPU")]
    assert client.state.ending == end


# --- the lease ----------------------------------------------------------------------


def test_the_lease_runs_from_the_last_answer_that_was_received(accepted, clock):
    """What the coordinator sends proves nothing: it may not hear this member."""
    hear(accepted, Heartbeat())
    clock.now += 10
    hear(accepted, Heartbeat(1000.0))
    assert accepted.sent == [Heartbeat(1000.0), Heartbeat(1010.0)]
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
def test_after_the_end_of_its_lease(accepted, clock, events, what_comes_first, late):
    """Nothing that is read then counts; after a suspension, workers are killed."""
    is_suspended = late > limits.SUSPENSION
    clock.now += SILENCE + late
    what_comes_first(accepted)
    until(lambda: accepted.killed == [True] * is_suspended)
    settle(accepted)
    assert events == ([Suspended(SILENCE + late)] if is_suspended else [])
    assert accepted._channel.aborted
    assert accepted.sent == []
    assert accepted.state.go is None
    assert accepted._check_lease()
    settle(accepted)
    assert len(events) == is_suspended  # once


def test_a_suspension_after_the_end_of_its_lease(accepted, clock, events):
    """Its workers may be ending then."""
    clock.now += SILENCE
    for seconds in (0, 1, limits.SUSPENSION, limits.SUSPENSION + 1):
        clock.now += seconds
        assert accepted._check_lease()
    settle(accepted)
    assert events == accepted.killed == []
    clock.now += limits.SUSPENSION + 1.1
    assert accepted._check_lease()
    until(lambda: accepted.killed)
    settle(accepted)
    assert events == [Suspended(int(clock.now - 1000))]


def test_nothing_counts_that_arrives_together_behind_the_end(accepted, clock):
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


def test_a_coordinator_that_was_suspended_ends_its_own_workers(accepted, events):
    hear(accepted, Suspended(61))
    until(lambda: accepted.killed == [True])
    settle(accepted)
    assert events == [Suspended(61)]


def test_a_fault_of_what_kills_workers_leaves_no_connection(
    accepted, clock, monkeypatch
):
    raised = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: raised.set())
    accepted._listener = Listener(end_workers=lambda: 1 / 0)
    clock.now += 2 * SILENCE
    assert accepted._check_lease()
    assert raised.wait(PATIENCE)
    assert accepted._channel.aborted


def test_a_reply_without_a_proof_does_not_count(client):
    for message in (Standby(0, coordinates=True, has_quorum=True), WELCOME):
        with other_program(line(message)) as port:
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


@pytest.fixture
def raw_to():
    made = []

    def connect(port):
        made.append(Raw(port))
        return made[-1]

    yield connect
    for each in made:
        each.close()


@pytest.fixture
def coordinating():
    """Start the only active member of two; return its server and its client."""
    settings = Settings("mine", 2, 0, SILENCE, 9, 60, 1, spare_after=60)
    member = Member(0, first_record(2, 1, 0))
    member.listens((HERE, 4000), {})
    member.coordinates = True
    coordinator = Owned(settings, member)
    coordinator.coordinate(member.record)
    opened, loop = listening(), loop_started()
    port = opened.getsockname()[1]
    server = CoordinatorServer(loop, opened, coordinator, key_of())
    request = JoinRequest("mine", 2, 0, "n0", 100, __version__, "a", spares=1)
    client = Client(loop, request, member, SILENCE, Listener())
    where = CoordinatorAddress(HERE, (port,), PATIENCE)
    search = Search(request, where, key_of(), client.tell)
    peers = Peers(server, member, search, PATIENCE, PATIENCE)
    coordinator.owner = loop._thread
    server.start()
    client.connect = partial(client.connect, search.find, peers)
    yield server, client
    client.leave()
    server.close(late_timeout=0)
    loop.close()


class Owned(Coordinator):
    """Answers one thread only, once it has been given to it."""

    owner = None
    asked_by = frozenset()

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        owner = super().__getattribute__("owner")
        if owner is not None and name in {"members", "outbox", "rounds"}:
            self.asked_by |= {threading.current_thread()}
        return found


def test_only_one_thread_asks_what_coordinates(coordinating):
    server, client = coordinating
    client.connect()
    assert client.member.coordinates
    client.fail(Failure(Kind.AGENT, (0,), text="why"))
    client.leave()
    server.close(late_timeout=0)
    assert server.coordinator.asked_by == {server._loop._thread}


def test_a_fault_of_what_looks_for_others_ends_the_agent_only(
    coordinating, monkeypatch, raw_to
):
    async def ask(*_, **__):
        raise ZeroDivisionError("a fault")

    server, client = coordinating
    monkeypatch.setattr(limits, "PEERS_PAUSE", 0)
    monkeypatch.setattr(Peers, "_ask", ask)
    monkeypatch.setattr(server.coordinator, "absent", lambda **_: {1: (HERE, 4000)})
    with suppress(JobFailedError):
        client.connect()
    assert failure_of(client) == Failure(
        Kind.AGENT, (0,), text="ZeroDivisionError: a fault"
    )
    other = raw_to(server._listening.getsockname()[1])
    other.request(1, nodes=2, spares=1, release=__version__)
    assert isinstance(other.receive(), Welcome)

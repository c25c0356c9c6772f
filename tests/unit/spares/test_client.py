"""What a member makes of the coordinator's messages, in whatever order they come."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
from loopback import HERE, listening
from torchrun_hpc.spares.coordinator import Limits
from torchrun_hpc.spares.standby import Standby
from waiting import NEVER_S, PATIENCE, until

from torchrun_hpc import __version__, wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous.client import RoundOverError
from torchrun_hpc.rendezvous.coordinator import Settings
from torchrun_hpc.rendezvous.member import Member
from torchrun_hpc.rendezvous.protocol import JoinRequest
from torchrun_hpc.rendezvous.record import Record
from torchrun_hpc.rendezvous.search import Channel, CoordinatorAddress
from torchrun_hpc.rendezvous.server import CoordinatorServer
from torchrun_hpc.spares import client as clients
from torchrun_hpc.spares.client import MemberClient, NotNeededError

PREPARED = Record((0, 0), 0, (1, 0, 2))
STORE = ("10.20.0.1", 40000)
GO = {"go": 0, "store": [*STORE]}
CONFIRM = {"confirm": [(0, 0), 0]}


SILENCE = 40


class Aborted:
    """A connection that notes whether it was aborted."""

    closed = asyncio.Event()
    has_received = aborted = False

    def abort(self):
        self.aborted = True


@pytest.fixture
def clock(monkeypatch):
    """Let a test decide what time it is."""
    moment = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(clients, "now", lambda: moment.now)
    return moment


@pytest.fixture
def accepted(client, clock, monkeypatch):  # noqa: ARG001 - it must be first
    """Return a client that a coordinator has just accepted; its answers are sent."""
    client._channel = Aborted()
    client._accepted({})
    monkeypatch.setattr(client, "_send", client.sent.append)
    return client


@pytest.fixture
def events():
    return []


@pytest.fixture
def client(events, monkeypatch):
    """Return member 1 of four, connected to nobody; what it sends is in ``sent``."""
    first = records.first_record(4, 1, 0)
    settings = Settings("19.0", "mine", 4, 1, 9, 60, 40, spares=1)
    request = JoinRequest(
        "19.0", "mine", 4, 1, "n1", 101, __version__, "agent 1", spares=1
    )
    made = MemberClient(
        request,
        CoordinatorAddress("n0", (4000,), 60, SILENCE, ()),
        events.append,
        None,
        Standby(settings, Limits(60, 5), Member(1, ("n1", 4001), first)),
    )
    made.sent = []
    monkeypatch.setattr(made, "send", made.sent.append)
    yield made
    made._loop.close()


def as_prepared(record=PREPARED):
    return {"prepare": wire.encode(record)}


def take_part(client, *messages):
    """Take part; a message comes whenever it waits for one."""
    later = [*messages]

    def wait_for(condition, _timeout):
        while not condition():
            client._handle(later.pop(0))

    client._wait_for = wait_for
    return client.take_part(lambda: STORE)


def test_a_round_in_which_it_has_node_rank_0(client):
    assert take_part(client, as_prepared(), GO) == (GO, 0, 3)
    assert client.sent == [{"join": 0}, CONFIRM | {"store": STORE}]


def test_a_round_in_which_it_has_another_node_rank(client):
    record = Record((0, 0), 0, (0, 2, 1))
    assert take_part(client, as_prepared(record), GO) == (GO, 2, 3)
    assert client.sent == [{"join": 0}, CONFIRM]


def test_a_round_that_is_prepared_before_it_has_noticed_the_end_of_the_last(client):
    """The coordinator is lost while it waits, and the next one is quick."""
    client._change(is_over=True)
    client._handle(as_prepared())
    assert take_part(client, GO) == (GO, 0, 3)


def test_a_round_that_is_confirmed_twice_has_one_store(client):
    """The coordinator asked again just when the first answer was under way."""
    opened = []

    def open_store():
        opened.append(STORE)
        return STORE

    for _ in range(2):
        client._handle(as_prepared())
        client._confirm(open_store)
    assert opened == [STORE]
    assert client.sent == [CONFIRM | {"store": STORE}] * 2


def test_a_round_that_is_over_before_it_has_begun(client):
    with pytest.raises(RoundOverError):
        take_part(client, as_prepared(), {"over": 0})
    client.sent.clear()
    later = Record((0, 0), 1, (1, 0, 2))
    go = GO | {"go": 1}
    assert take_part(client, as_prepared(later), go) == (go, 0, 3)
    assert client.sent == [{"join": 1}, {"confirm": [(0, 0), 1], "store": STORE}]


def test_nothing_is_confirmed_of_a_round_that_is_over(client):
    client._handle(as_prepared())
    client._handle({"over": 0})
    with pytest.raises(NotNeededError):
        take_part(client, {"finished": 1})
    assert client.sent == [{"join": 1}]


def test_a_round_without_it(client):
    record = Record((0, 0), 0, (0, 2, 3))
    with pytest.raises(NotNeededError):
        take_part(client, as_prepared(record), {"finished": 0})
    assert client.sent == [{"join": 0}]


def test_no_older_workers_are_left_when_a_round_begins(client):
    record = Record((0, 0), 0, (1, 0, 2), may_run=(3,))
    client._handle(as_prepared(record))
    assert client.member.record.may_run == (3,)
    client._handle(GO)
    assert client.member.record.may_run == ()


def test_a_member_that_is_not_well(client):
    client.be_unfit("bad GPU")
    with pytest.raises(NotNeededError):
        take_part(client, {"finished": 0})
    assert client.sent == [{"unfit": "bad GPU"}]


def test_what_it_hears_at_the_end(client, events):
    client._handle({"out": "bad GPU"})
    client._handle({"finished": 0, "out_at_end": [1], "is_certain": True})
    assert events == [{"out": "bad GPU"}]
    assert (client.out_at_end, client.is_certain) == ((1,), True)
    assert not client.reports  # the one that coordinates does


# --- the lease ----------------------------------------------------------------------


def test_the_lease_runs_from_the_last_answer_that_was_received(accepted, clock):
    """What the coordinator sends proves nothing: it may not hear this member."""
    accepted._handle({"heartbeat": True})
    clock.now += 10
    accepted._handle({"heartbeat": 1000.0})
    assert accepted.sent == [{"heartbeat": 1000.0}, {"heartbeat": 1010.0}]
    clock.now = 1000.0 + SILENCE - 0.1
    accepted._handle({"record": wire.encode(PREPARED)})
    assert not accepted._check_lease()
    clock.now = 1000.0 + SILENCE
    assert accepted._check_lease()
    assert accepted._channel.aborted


@pytest.mark.parametrize("said", [1e9, float("nan"), 999.0])
def test_no_coordinator_makes_a_lease_longer(accepted, clock, said):
    accepted._handle({"heartbeat": said})
    clock.now += SILENCE
    assert accepted._check_lease()


@pytest.mark.parametrize("said", ["1", None, [], {}])
def test_an_answer_that_is_no_time(accepted, said):
    with pytest.raises(TypeError):
        accepted._handle({"heartbeat": said})


LATE = [
    lambda client: client._handle({"go": 0, "store": [*STORE]}),
    lambda client: client._handle({"heartbeat": 1000.0}),
    lambda client: client._check_lease(),
]


@pytest.mark.parametrize("what_comes_first", LATE)
@pytest.mark.parametrize(("late", "is_suspended"), [(1, False), (3, True)])
def test_after_the_end_of_its_lease(
    accepted, clock, what_comes_first, late, is_suspended
):
    """Nothing that is read then counts; after a suspension, workers are killed."""
    events = []
    accepted._on_event = events.append
    clock.now += SILENCE + late
    what_comes_first(accepted)
    assert events == ([{"suspended": SILENCE + late}] if is_suspended else [])
    assert accepted._channel.aborted
    assert accepted.sent == []
    assert accepted._go is None
    assert not accepted._check_lease()  # once


def test_nothing_counts_that_arrives_together_behind_the_end(accepted, clock):
    """A suspended member reads all that has arrived, before its own clock ticks."""
    accepted._channel = channel = Channel()
    channel.connection_made(SimpleNamespace(get_extra_info=mock.Mock(), abort=list))
    channel.on_message = accepted._handle
    clock.now += 2 * SILENCE
    messages = {"heartbeat": 1000.0}, {"go": 0, "store": [*STORE]}
    channel.data_received(b"".join(map(wire.to_line, messages)))
    assert accepted._go is None


def test_a_fault_of_what_is_told_leaves_no_connection(accepted, clock):
    accepted._on_event = lambda _: 1 / 0
    clock.now += 2 * SILENCE
    with pytest.raises(ZeroDivisionError):
        accepted._check_lease()
    assert accepted._channel.aborted


def test_a_fault_of_what_looks_for_others_ends_the_agent(client, monkeypatch):
    async def ask(*_, **__):
        raise ZeroDivisionError("a fault")

    async def call(_function, *_args):
        return {2: ("n2", 4000)}

    async def run():
        client._task = asyncio.current_task()
        client._coordinate()
        await asyncio.sleep(NEVER_S)

    monkeypatch.setattr(clients, "_PAUSE", 0)
    monkeypatch.setattr(client, "_ask", ask)
    monkeypatch.setattr(client, "_call", call)
    with pytest.raises(asyncio.CancelledError):
        client._loop.run_until_complete(run())
    text = "ZeroDivisionError: a fault"
    assert client.failure == Failure(Kind.AGENT, (1,), text=text, by=1)


# --- threads ------------------------------------------------------------------------


class Owned(Standby):
    """Answers one thread only, once it has been given to it."""

    owner = None
    asked_by = frozenset()

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        owner = super().__getattribute__("owner")
        if owner is not None and name in {"coordinator", "outbox", "_connections"}:
            self.asked_by |= {threading.current_thread()}
        return found


def test_only_the_thread_of_the_server_asks_what_coordinates():
    settings = Settings("19.0", "mine", 2, 0, 9, 60, 40)
    record = records.first_record(2, 0, 0)
    standby = Owned(settings, Limits(60, 5), Member(0, (HERE, 4000), record))
    standby.coordinate(record)
    opened = listening()
    port = opened.getsockname()[1]
    server = CoordinatorServer(opened, standby)
    standby.owner = server._thread
    server.start()
    request = JoinRequest("19.0", "mine", 2, 0, "n0", 100, __version__, "a")
    address = CoordinatorAddress(HERE, (port,), PATIENCE, 40)
    client = MemberClient(request, address, [].append, server, standby)
    client.connect()
    until(lambda: client.member.coordinates)
    client.fail(Failure(Kind.AGENT, (0,), text="why"))
    client.leave()
    server.close(late_timeout=0)
    assert standby.asked_by == {server._thread}

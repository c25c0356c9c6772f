"""What the coordinator of a job with spares decides."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from tests.support.loopback import as_sent, request_of, worker_failure
from torchrun_hpc import wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.limits import HEARTBEAT_INTERVAL
from torchrun_hpc.rendezvous.coordinator import Coordinator
from torchrun_hpc.rendezvous.member import Member
from torchrun_hpc.rendezvous.messages import (
    Excluded,
    Leased,
    News,
    Replaced,
    Restart,
    Silent,
    Waiting,
)
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    Bye,
    Close,
    Confirm,
    Died,
    Done,
    Ended,
    GaveUp,
    Go,
    Heartbeat,
    Join,
    Over,
    Prepare,
    Present,
    Read,
    Settings,
    Unhealthy,
    Welcome,
    read_request,
)
from torchrun_hpc.rendezvous.record import Record, first_record
from torchrun_hpc.rendezvous.rounds import Phase
from torchrun_hpc.wire import WireError

SILENCE, KILL, SPARE_AFTER, JOIN = 40, 5, 60, 200
LEASE = SILENCE + KILL
STORE = ("10.20.0.1", 40000)
BLAMED = "its workers were the first to fail in two consecutive rounds"


def address(member):
    return f"n{member}", 4000 + member


def addresses(*members):
    """Return what a record has of the addresses of members."""
    return {member: address(member) for member in members}


class Job:
    """A coordinator of four members, one of them a spare, and what it has sent.

    A connection is the number of its member, unless a test says otherwise.

    Args:
        record: What the coordinator knows; by default, that of a new job.
        spares: How many spares a new job has.
        coordinator: The member that coordinates.
        health_check: Seconds that a health check may take.
        settings: What is otherwise in the settings.
    """

    def __init__(
        self, record=None, *, spares=1, coordinator=0, health_check=0, **settings
    ):
        nodes = settings.get("nodes", 4)
        values = {"nodes": nodes, "max_restarts": 9, "spares": spares} | settings
        common = {"join_timeout": JOIN, "silence_timeout": SILENCE}
        limits = {"spare_after": SPARE_AFTER, "kill": KILL}
        limits["health_check"] = health_check
        self.settings = Settings(
            "mine", coordinator=coordinator, **common | values | limits
        )
        record = record or first_record(nodes, spares, coordinator)
        member = Member(coordinator, record)
        member.listens(address(coordinator), addresses(*range(nodes)))
        self.coordinator = Coordinator(self.settings, member)
        self.coordinator.coordinate(record)
        self.events = []  # for the user, on the node that reports
        self.reporter = coordinator

    @property
    def rounds(self):
        return self.coordinator.rounds

    @property
    def roster(self):
        return self.coordinator.roster

    @property
    def record(self):
        return self.roster.record

    @property
    def active(self):
        return self.record.active

    @property
    def is_running(self):
        return self.rounds.phase is Phase.RUN

    @property
    def here(self):
        return {*self.coordinator.members.agents}

    @property
    def absent(self):
        return {*(self.coordinator.absent(ask_all=False) or ())}

    def sent(self):
        """Return what was sent since the last time: connection to messages.

        But for heartbeats, and for what the user reads.
        """
        sent = defaultdict(list)
        for connection, message in self.coordinator.outbox:
            if isinstance(message, Close):
                sent[connection].append("close")
                continue
            arrived = as_sent(message, FROM_COORDINATOR)
            if connection == self.reporter and isinstance(arrived, News):
                self.events.append(arrived)
            elif not isinstance(arrived, Heartbeat):
                sent[connection].append(arrived)
        self.coordinator.outbox.clear()
        return dict(sent)

    def receive(self, connection, message):
        self.coordinator.receive(connection, as_sent(message, FROM_AGENT))

    def send(self, connection, message):
        self.receive(connection, message)
        return self.sent()

    def request(self, connection, member, **changes):
        """Send the join request of a member."""
        nodes, spares = self.settings.nodes, self.settings.spares
        request = request_of(member, nodes=nodes, spares=spares)
        self.coordinator.request(connection, read_request(request | changes))
        return self.sent()

    def present(self, member, **changes):
        """Let a member say where it is, and what it knows: nothing, by default."""
        known = {"done": False, "term": (0, 0), "round": -1} | changes
        return self.send(member, Present(address(member), **known))

    def connect(self, *members, **changes):
        for member in members:
            self.request(member, member)
            self.present(member, **changes)

    def join(self, *members):
        """Let members be ready; return what was sent since the first one."""
        for member in members:
            self.receive(member, Join())
        return self.sent()

    def come(self, *members):
        self.connect(*members)
        return self.join(*members)

    def confirmation(self, member):
        term, number = self.record.term, self.record.round
        return Confirm(term, number, STORE if member == self.active[0] else None)

    def confirm(self, *members):
        """Let members confirm the round; by default, all that are active."""
        for member in members or self.active:
            self.receive(member, self.confirmation(member))
        return self.sent()

    def all_at_work(self):
        self.come(*range(self.settings.nodes))
        self.confirm()
        assert self.is_running
        self.wait(1)  # all hear where the others are
        return self

    def restart(self, *members):
        """Let members be ready, and the active ones confirm; return what was sent."""
        self.join(*members)
        return self.confirm()

    def lose(self, *members):
        """End the connections of members."""
        for member in members:
            self.coordinator.disconnected(member)
        return self.sent()

    def gone(self, *members, number=None):
        """Let another member say that it saw the end of their processes, in a round."""
        for member in members:
            witness = next(each for each in self.here if each != member)
            seen = member, self.record.round if number is None else number
            known = {"term": self.record.term, "round": self.record.round}
            present = Present(address(witness), done=False, gone=seen, **known)
            self.receive(witness, present)

    def end(self, *members):
        """End the processes of members."""
        for member in members:
            self.coordinator.disconnected(member, ended=True)
        return self.sent()

    def finish(self, *members):
        """Let members finish the round; return what was sent since the first one."""
        for member in members:
            self.receive(member, Done(self.rounds.round))
        return self.sent()

    def died(self, member, **changes):
        """Let the first worker of a member's node rank fail."""
        rank = 4 * self.active.index(member)
        worker = worker_failure(rank, **changes)
        return self.send(member, Died(worker, self.rounds.round))

    def wait(self, seconds, *silent):
        """Let time pass until something is sent.

        Args:
            seconds: How long at most.
            silent: Members that do not answer a heartbeat.

        Returns:
            Second and messages; ``None`` if nothing is sent.
        """
        for second in range(1, seconds + 1):
            self.coordinator.tick()
            for member in [*self.here]:
                if member not in silent:
                    self.receive(member, Heartbeat(1.0))
            if sent := self.sent():
                return second, sent
        return None


def to(connections, *messages):
    """Return what is sent where the same is sent to all of these."""
    return {connection: list(messages) for connection in connections}


def go(number):
    return Go(number, STORE)


def prepared(sent):
    """Return the record of the round that was prepared, from what was sent."""
    messages = [message for (message,) in sent.values()]
    assert all(isinstance(message, Prepare) for message in messages)
    return whole([message.record for message in messages])


def whole(found):
    """Return the record that was sent, in all its parts to those that need them."""
    most = max(found, key=lambda record: len(record.addresses))
    for each in found:
        assert replace(each, addresses=most.addresses) == most
        assert each.addresses.items() <= most.addresses.items()
    return most


def replaced(number, *who, because=None):
    return Replaced(who, number, because)


def waiting(*members, seconds):
    return Waiting(members, seconds, ())


def welcome(number=0, age=(-1, (0, 0)), coordinator=0):
    return Welcome(number, age, coordinator)


def certain(*out, takeovers=0, is_certain=True):
    """Return what all hear at the end: which nodes were out, and that it is the end."""
    return Ended(out_at_end=out, is_certain=is_certain, takeovers=takeovers)


def failed(job, sent):
    """Return why a job failed, and what else all members hear."""
    heard = {member: message for member, (message,) in sent.items()}
    assert [member for member, end in heard.items() if end.reports] == [job.reporter]
    message, *others = [replace(each, reports=False) for each in heard.values()]
    assert all(other == message for other in others)
    assert message.failure is not None
    return message.failure, replace(message, failure=None)


# --- a job that goes well -----------------------------------------------------------


def test_a_job_from_its_beginning_to_its_end():
    job = Job()
    for member in (3, 0, 2, 1):
        assert job.request(member, member) == {member: [welcome()]}
        assert job.present(member) == {}
    assert job.join(3, 0, 2) == {}
    record = prepared(job.join(1))
    assert (record.term, record.round, record.active) == ((0, 0), 0, (0, 1, 2))
    assert record.addresses == addresses(0, 1, 2, 3)
    assert job.confirm(2, 0) == {}
    assert job.confirm(1) == to((0, 1, 2), go(0))
    assert job.finish(0, 2) == {}
    assert job.send(1, Done(0)) == to(range(4), certain())
    for member in range(4):
        assert not job.coordinator.all_informed
        assert job.send(member, Bye()) == {member: ["close"]}
    assert job.coordinator.all_informed
    assert job.events == []


def ended_early(end):
    """Return a job that has ended before its spare has come."""
    job = Job(max_restarts=0)
    job.come(0, 1, 2)
    job.confirm()
    if end == "finished":
        job.finish(0, 1, 2)
    else:
        job.coordinator.fail(Failure(Kind(end), (1,)))
    for member in range(3):
        job.send(member, Read())
        job.send(member, Bye())
    return job


@pytest.mark.parametrize(("end", "kind"), [("finished", None), ("worker", Kind.WORKER)])
def test_a_spare_that_comes_after_the_end_hears_of_it(end, kind):
    """Nobody else could tell it, and it would wait for the others."""
    job = ended_early(end)
    assert job.coordinator.expects_nodes
    assert not job.coordinator.all_informed
    (*_, heard) = job.request(3, 3)[3]
    assert isinstance(heard, Ended)
    assert (heard.failure and heard.failure.kind) is kind
    job.send(3, Read())
    assert not job.coordinator.expects_nodes
    job.send(3, Bye())
    assert job.coordinator.all_informed


def test_a_spare_that_does_not_come_is_not_waited_for_forever():
    job = ended_early("finished")
    for _ in range(JOIN):
        assert not job.coordinator.all_informed
        job.coordinator.tick()
    assert job.coordinator.all_informed


def test_nobody_waits_after_a_signal():
    assert ended_early("signal").coordinator.all_informed


def test_a_spare_that_was_there_is_not_waited_for():
    job = Job().all_at_work()
    job.lose(3)
    job.finish(0, 1, 2)
    for member in range(3):
        job.send(member, Bye())
    assert job.coordinator.all_informed


def test_it_starts_without_the_spare():
    job = Job()
    assert prepared(job.come(0, 1, 2)).active == (0, 1, 2)
    assert job.confirm() == to((0, 1, 2), go(0))
    assert job.request(3, 3) == {3: [welcome(0, (0, (0, 0)))]}
    assert job.present(3) == {3: [job.record]}
    assert job.join(3) == {}
    assert job.is_running


@pytest.mark.parametrize("without", [0, 1, 2])
def test_all_active_members_confirm_a_round(without):
    job = Job()
    job.come(0, 1, 2, 3)
    assert job.confirm(*{0, 1, 2, 3} - {without}) == {}
    assert job.confirm(without) == to((0, 1, 2), go(0))


@pytest.mark.parametrize(("term", "number"), [((0, 0), 1), ((0, 1), 0), ((1, 0), 0)])
def test_another_round_is_not_confirmed(term, number):
    job = Job()
    job.come(0, 1, 2, 3)
    job.confirm(0, 2)
    assert job.send(1, Confirm(term, number)) == {}
    assert job.confirm(1) == to((0, 1, 2), go(0))


@pytest.mark.parametrize("confirm", [None, [], [0, 0], 0, {"term": [0], "round": 0}])
def test_what_is_no_confirmation(confirm):
    with pytest.raises(WireError):
        wire.decode(FROM_AGENT, {"confirm": confirm})


def test_nobody_confirms_before_the_round_is_prepared():
    job = Job()
    job.come(0, 1)
    job.confirm(0, 1)
    job.come(2)
    assert job.confirm(2) == {}
    assert not job.is_running


def test_node_rank_0_gives_the_address_of_the_workers_store():
    job = Job(Record((0, 0), -1, (2, 1, 0)))
    job.come(0, 1, 2)
    for member in (0, 1):
        job.send(member, replace(job.confirmation(member), store=("10.9.9.9", 1)))
    assert job.confirm(2) == to((0, 1, 2), go(0))


def test_node_rank_0_confirms_with_the_address_of_the_workers_store():
    job = Job()
    job.come(0, 1, 2)
    with pytest.raises(WireError, match="no store"):
        job.send(0, replace(job.confirmation(0), store=None))


def test_all_hear_where_a_member_is_that_may_have_to_take_over():
    job = Job()
    job.come(0, 2, 3)
    job.wait(SPARE_AFTER)
    job.confirm()
    assert job.record.addresses == addresses(0, 2, 3)
    job.come(1)
    second, sent = job.wait(10)
    assert (second, sorted(sent)) == (1, [0, 1, 2, 3])
    assert whole([record for (record,) in sent.values()]) == job.record
    assert job.record.addresses == addresses(0, 1, 2, 3)
    assert job.wait(30) is None


def test_a_member_that_comes_while_workers_of_others_may_run():
    """All hear of it when the round has begun, though some were asked again."""
    job = taken_over(1, 2, 3)
    job.restart(1, 2, 3)
    job.wait(3)
    job.connect(0, term=(0, 0), round=1)
    job.wait(LEASE - 4)
    job.coordinator.tick()
    sent = job.sent()
    assert job.is_running
    told = [m for messages in sent.values() for m in messages if type(m) is Record]
    assert told
    assert all(0 in record.addresses for record in told)


def test_those_that_may_have_to_take_over_know_where_all_are():
    job = Job(spares=2, nodes=7)
    sent = job.come(*range(7))
    for member, (message,) in sent.items():
        known = range(7) if member < 3 else range(3)
        assert message.record.addresses == addresses(*known)


def test_nobody_needs_to_hear_of_another_spare():
    """Where more are lost than there are spares, the job cannot go on."""
    job = Job(spares=2, nodes=7)
    job.come(*range(6))
    job.confirm()
    job.come(6)
    assert job.wait(30) is None


def test_members_that_are_out_do_not_take_over():
    job = Job()
    job.connect(0, 1, 2, 3)
    job.send(1, Unhealthy(UNFIT))
    job.join(0, 2, 3)
    job.confirm()
    assert job.wait(10) is None


WRONG = {
    "address": [
        *(["n1"], ["n1", "ssh"], ["n1", 70000], ["n1", -1], ["n1", True]),
        *(["n1..cluster", 4000], ["n1\0", 4000], ["", 4000], [1, 4000]),
    ],
    "term": [None, [1]],
    "round": [None, "first", float("inf")],
    "record": [{}, "record"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]]
)
def test_what_no_member_says(name, value):
    present = wire.encode(Present(address(1), done=False, term=(0, 0), round=-1))
    assert wire.decode(FROM_AGENT, {"present": present})
    with pytest.raises(WireError):
        wire.decode(FROM_AGENT, {"present": present | {name: value}})


@pytest.mark.parametrize("value", [None, 1, "n1", [], {}])
def test_what_is_no_member(value):
    with pytest.raises(WireError):
        wire.decode(FROM_AGENT, {"present": value})


def test_a_member_that_does_not_say_where_it_is_takes_no_part():
    job = Job()
    job.request(1, 1)
    job.come(0, 2)
    assert job.join(1) == {}
    job.present(1)
    assert prepared(job.join(1)).active == (0, 1, 2)


# --- members that are lost ----------------------------------------------------------

LOST = {member: Failure(Kind.LOST, (member,)) for member in range(4)}
SILENT = {member: Failure(Kind.SILENT, (member,), code=SILENCE) for member in range(4)}


@pytest.mark.parametrize("member", [1, 2])
def test_a_spare_takes_the_place_of_a_member_that_is_lost(member):
    job = Job().all_at_work()
    left = [each for each in range(4) if each != member]
    assert job.lose(member) == to(left, Over(0, hangs=False)) | {member: ["close"]}
    job.gone(member)
    expected = tuple(3 if rank == member else rank for rank in range(3))
    record = prepared(job.join(*left))
    assert (record.round, record.active) == (1, expected)
    assert record.losses == {member: 1}
    assert job.confirm() == to(expected, go(1))
    because = LOST[member]
    assert job.events == [replaced(1, (member, member, 3), because=because)]


def test_nothing_begins_while_a_member_runs_its_workers():
    job = Job().all_at_work()
    job.end(1)
    assert job.join(0, 3) == {}
    assert job.wait(LEASE - 1) is None
    assert prepared(job.join(2)).active == (0, 3, 2)
    assert job.confirm() == to((0, 3, 2), go(1))


def let_be_silent(job, member):
    """Let a member answer nothing, and lose its connection for that."""
    assert job.wait(SILENCE, member)[0] == SILENCE
    assert member not in job.here


@pytest.mark.parametrize(
    ("lost", "seconds", "because", "reported"),
    [
        (
            Job.lose,
            LEASE,
            LOST[1],
            [Leased((1,), LEASE - 10)],  # once
        ),
        # It has ended its workers, or is about to.
        (let_be_silent, KILL, SILENT[1], [Silent((1,), 30, SILENCE - 30)]),
    ],
)
def test_the_workers_of_a_member_that_cannot_be_asked_have_time_to_end(
    lost, seconds, because, reported
):
    job = Job().all_at_work()
    lost(job, 1)
    assert job.restart(0, 2, 3) == {}
    assert job.wait(seconds + 10) == (seconds, to((0, 3, 2), go(1)))
    assert job.events == [*reported, replaced(1, (1, 1, 3), because=because)]


@pytest.mark.parametrize("lost", [Job.lose, let_be_silent])
def test_a_member_whose_process_has_ended_runs_no_workers(lost):
    job = Job().all_at_work()
    lost(job, 1)
    assert job.restart(0, 2, 3) == {}
    job.gone(1)
    assert job.sent() == to((0, 3, 2), go(1))


def test_a_member_that_comes_back_has_ended_its_workers():
    job = Job().all_at_work()
    job.lose(1)
    job.restart(0, 2, 3)
    job.connect(1)
    assert not job.is_running
    assert job.join(1) == to((0, 3, 2), go(1))


def test_a_member_that_comes_back_in_time_keeps_its_place():
    job = Job().all_at_work()
    job.lose(1)
    job.connect(1)
    assert job.join(0, 2, 3) == {}
    assert prepared(job.join(1)).active == (0, 1, 2)
    assert job.confirm() == to((0, 1, 2), go(1))


@pytest.mark.parametrize("lost", [Job.lose, let_be_silent])
def test_a_spare_that_is_lost_ends_no_round(lost):
    job = Job().all_at_work()
    lost(job, 3)
    assert job.is_running
    assert job.record.losses == {}
    job.come(3)
    job.end(1)
    assert job.restart(0, 2, 3) == to((0, 3, 2), go(1))


def test_a_member_that_is_connected_is_not_gone():
    job = Job().all_at_work()
    job.lose(1)
    job.connect(1)
    job.gone(1)
    assert prepared(job.join(0, 1, 2, 3)).active == (0, 1, 2)


def test_a_member_that_has_not_come_yet_is_not_gone():
    job = Job()
    job.come(0, 2, 3)
    job.gone(1)
    job.come(1)
    assert job.coordinator.rounds.failure is None
    assert job.confirm() == to((0, 1, 2), go(0))


def test_an_active_member_that_connects_anew_begins_another_round():
    """The end of its first connection was not seen yet."""
    job = Job().all_at_work()
    sent = job.request("again", 1)
    assert sent[1] == ["close"]
    assert sent["again"][0] == welcome(1, (0, (0, 0)))
    assert sent[0] == sent[2] == sent[3] == [Over(0, hangs=False)]


def test_a_member_that_is_lost_before_the_round_begins():
    job = Job()
    job.come(0, 1, 2, 3)
    job.confirm(0, 2)
    sent = job.lose(1)
    assert sent.pop(1) == ["close"]
    assert prepared(sent).active == (0, 3, 2)
    assert job.confirm(0, 2) == {}
    assert job.confirm(3) == to((0, 3, 2), go(1))


def test_each_round_counts_the_workers_that_end_anew():
    job = Job(spares=2, nodes=5).all_at_work()
    for number, (member, spare) in enumerate([(1, 3), (3, 4)], 1):
        job.end(member)
        left = [*job.here]
        sent = job.restart(*left)
        assert sent == to((0, spare, 2), go(number))


# --- members that do not come -------------------------------------------------------


def test_a_spare_takes_the_place_of_a_member_that_does_not_come():
    job = Job()
    assert job.come(0, 2, 3) == {}
    second, sent = job.wait(SPARE_AFTER + 10)
    assert second == SPARE_AFTER
    assert prepared(sent).active == (0, 3, 2)
    assert job.confirm() == to((0, 3, 2), go(0))
    assert job.events == [
        waiting(1, seconds=10),
        waiting(1, seconds=40),
        replaced(0, (1, 1, 3)),
    ]


def test_a_member_that_comes_too_late_is_a_spare():
    job = Job()
    job.come(0, 2, 3)
    job.wait(SPARE_AFTER)
    assert job.come(1) == {}
    assert job.confirm() == to((0, 3, 2), go(0))


def test_two_that_do_not_come_and_one_spare():
    job = Job()
    job.come(0, 3)
    second, sent = job.wait(2 * JOIN)
    missing = Failure(Kind.MISSING, (1, 2), code=JOIN)
    # Those that have not come cannot be a world without these.
    assert (second, *failed(job, sent)) == (JOIN, missing, certain())


@pytest.mark.parametrize(
    ("health_check", "seconds"), [(0, SPARE_AFTER), (100, KILL + 100)]
)
def test_a_restart_waits_for_the_health_check(health_check, seconds):
    job = Job(health_check=health_check).all_at_work()
    job.died(0)
    assert job.join(0, 2, 3) == {}
    second, sent = job.wait(seconds + 10)
    assert second == seconds
    assert prepared(sent).active == (0, 3, 2)


# --- too few members ----------------------------------------------------------------


def test_two_are_lost_and_there_is_one_spare():
    job = Job().all_at_work()
    job.lose(1)
    job.lose(2)
    job.join(0, 3)
    job.gone(1)
    assert job.sent() == {}
    job.gone(2)
    assert failed(job, job.sent()) == (Failure(Kind.LOST, (1, 2)), certain(1, 2))


def test_two_are_not_reached_and_there_is_one_spare():
    """They may come back."""
    job = Job().all_at_work()
    job.lose(1, 2)
    job.join(0, 3)
    second, sent = job.wait(2 * JOIN)
    silent = Failure(Kind.SILENT, (1, 2), code=LEASE)
    assert (second, *failed(job, sent)) == (LEASE, silent, certain(1, 2))


def test_two_are_not_reached_and_one_comes_back():
    job = Job().all_at_work()
    job.lose(1, 2)
    job.join(0, 3)
    assert job.wait(LEASE - 1) is None
    assert prepared(job.come(2)).active == (0, 3, 2)
    assert job.coordinator.rounds.failure is None


@pytest.mark.parametrize(("join_timeout", "limit"), [(JOIN, JOIN), (1, LEASE)])
def test_a_coordinator_with_few_members_waits_longer(join_timeout, limit):
    """The others may be a world, and want this one as a spare later."""
    job = Job(join_timeout=join_timeout).all_at_work()
    job.lose(1, 2, 3)
    second, sent = job.wait(2 * JOIN)
    assert second == limit
    failure, end = failed(job, sent)
    assert failure == Failure(Kind.SILENT, (1, 2, 3), code=limit)
    assert end == certain(1, 2, 3, is_certain=False)


@pytest.mark.parametrize(
    ("lost", "has_quorum"), [((), True), ((1,), True), ((1, 2), False), ((3,), True)]
)
def test_whether_enough_are_here(lost, has_quorum):
    job = Job().all_at_work()
    job.lose(*lost)
    assert job.rounds.has_quorum is has_quorum
    assert {*job.here} == set(range(4)) - {*lost}


def test_who_is_looked_for():
    job = Job().all_at_work()
    job.lose(3)
    assert not job.absent  # all is well without it
    job.lose(1)
    assert {*job.absent} == {1, 3}
    job.gone(3)
    assert {*job.absent} == {1}
    job.coordinator.fail(Failure(Kind.SIGNAL, (0,), code=15))
    assert not job.absent


# --- members that are out -----------------------------------------------------------

UNFIT = "its health check ended with exit code 1: bad GPU"


def test_a_member_that_is_not_well():
    job = Job()
    job.connect(0, 1, 2, 3)
    job.join(0, 2, 3)
    sent = job.send(1, Unhealthy(UNFIT))
    assert sent.pop(1)[0] == Excluded(1, UNFIT)
    assert job.record.active == (0, 3, 2)
    assert job.confirm() == to((0, 3, 2), go(0))
    assert job.events == [
        Excluded(1, UNFIT),
        replaced(0, (1, 1, 3)),
    ]


def test_a_member_that_is_not_well_after_a_restart():
    job = Job().all_at_work()
    job.died(2, text="RuntimeError: CUDA error")
    job.join(0, 2, 3)
    job.send(1, Unhealthy(UNFIT))
    assert job.record.active == (0, 3, 2)
    # Its workers have ended: else it would not have looked.
    assert job.confirm() == to((0, 3, 2), go(1))
    because = worker_failure(8, node=2, text="RuntimeError: CUDA error")
    assert job.events == [
        Excluded(1, UNFIT),
        replaced(1, (1, 1, 3), because=because),
    ]


def test_a_spare_that_is_not_well_takes_no_place():
    job = Job(spares=2, nodes=5)
    job.connect(*range(5))
    job.join(0, 1, 2, 4)
    job.send(3, Unhealthy(UNFIT))
    job.confirm()
    job.end(1)
    assert job.restart(0, 2, 4) == to((0, 4, 2), go(1))


def test_too_many_are_not_well():
    job = Job()
    job.connect(0, 1, 2, 3)
    job.send(1, Unhealthy("its disk is full"))
    sent = job.send(3, Unhealthy(UNFIT))
    assert sent.pop(3)[0] == Excluded(3, UNFIT)
    expected = Failure(Kind.EXCLUDED, (1, 3), text=UNFIT)
    assert job.coordinator.rounds.failure == expected
    (message,) = sent[2]
    assert message.failure == expected
    assert message.out_at_end == (1, 3)


def test_what_cannot_be_printed_of_a_reason():
    job = Job()
    job.connect(0, 1)
    job.send(1, Unhealthy("\x1b[2J" + 500 * "x"))
    assert job.record.excluded == {1: " [2J" + 196 * "x"}


def test_a_member_that_is_out_hears_so_when_it_comes_back():
    job = Job()
    job.connect(0, 1, 2, 3)
    job.send(1, Unhealthy(UNFIT))
    job.lose(1)
    job.request(1, 1)
    assert Excluded(1, UNFIT) in job.present(1)[1]


def test_a_member_that_was_lost_twice_is_out():
    job = Job().all_at_work()
    for number, (member, spare) in enumerate([(1, 3), (3, 1), (1, 3)], 1):
        job.end(member)
        left = [each for each in range(4) if each != member]
        assert job.restart(*left) == to(job.active, go(number))
        assert spare in job.active
        job.request(member, member)
        out = "it was lost 2 times"
        heard = Excluded(member, out) in job.present(member)[member]
        assert heard is (number == 3)
        assert job.record.excluded == ({1: out} if number == 3 else {})
        job.join(member)
    assert job.events[-1] == Excluded(1, out)


# --- nodes on which workers fail ----------------------------------------------------


def fail_on(job, member):
    """Let a worker of a member fail, and all begin again; return what was sent."""
    job.died(member)
    spares = sorted({*job.here} - {*job.active})
    sent = job.join(*spares, *job.active)
    job.confirm()
    assert job.is_running
    return sent


def test_a_worker_that_fails_is_a_restart_for_all():
    job = Job().all_at_work()
    assert job.died(1) == to(range(4), Over(0, hangs=False))
    assert prepared(job.join(3, 0, 1, 2)).active == (0, 1, 2)
    assert job.confirm() == to((0, 1, 2), go(1))
    assert job.events == [Restart(1, worker_failure(4))]


def test_a_node_that_is_the_first_to_fail_in_two_rounds_is_out():
    job = Job().all_at_work()
    fail_on(job, 1)
    assert (job.active, job.record.suspect) == ((0, 1, 2), 1)
    sent = fail_on(job, 1)
    assert Excluded(1, BLAMED) in sent[1]
    assert job.active == (0, 3, 2)
    assert job.record.excluded == {1: BLAMED}
    assert job.events[1] == Excluded(1, BLAMED)


def test_two_nodes_that_fail_in_turns_are_not_blamed():
    job = Job().all_at_work()
    for member in (1, 2, 1, 2):
        fail_on(job, member)
    assert (job.active, job.record.excluded) == ((0, 1, 2), {})


def test_no_node_is_blamed_where_nothing_could_take_its_place():
    job = Job().all_at_work()
    job.lose(3)
    for _ in range(3):
        fail_on(job, 1)
    assert (job.active, job.record.excluded) == ((0, 1, 2), {})


def test_a_script_that_fails_on_the_next_node_too():
    job = Job().all_at_work()
    fail_on(job, 1)
    fail_on(job, 1)
    sent = fail_on(job, 3)
    assert Excluded(1, "") in sent[1]
    assert Excluded(1, "") in job.events
    assert (job.record.excluded, job.record.script_faults) == ({}, (1,))
    for _ in range(2):
        fail_on(job, 3)
    assert (job.active, job.record.excluded) == ((0, 3, 2), {})


def test_the_first_worker_that_fails_counts():
    """The others lose their connection to it."""
    job = Job().all_at_work()
    for _ in range(2):
        job.died(2, text="RuntimeError: Connection closed by peer")
        worker = worker_failure(4, text="ValueError: bad batch 17")
        number = job.rounds.round - 1
        job.send(1, Died(worker, number))
        job.restart(3, 0, 1, 2)
    assert (job.active, job.record.excluded) == ((0, 3, 2), {1: BLAMED})


def test_a_lost_member_is_not_a_failure_of_the_script():
    """Workers fail of it, on any node."""
    job = Job(spares=2, nodes=5).all_at_work()
    fail_on(job, 1)
    job.died(1)
    job.end(2)
    job.restart(3, 4, 0, 1)
    assert (job.active, job.record.excluded) == ((0, 1, 3), {})


# --- how it ends --------------------------------------------------------------------


@pytest.mark.parametrize("done", [(0,), (0, 2)])
@pytest.mark.parametrize(
    ("what", "kind"),
    [(Job.died, Kind.WORKER), (Job.lose, Kind.LOST), (let_be_silent, Kind.SILENT)],
)
def test_no_restart_after_others_have_finished(what, kind, done):
    job = Job().all_at_work()
    job.finish(*done)
    what(job, 1)
    failure = job.coordinator.rounds.failure
    assert (failure.kind, failure.nodes) == (kind, (1,))
    assert failure.finished == len(done)


def test_a_member_that_has_finished_may_go():
    job = Job().all_at_work()
    job.finish(1)
    job.lose(1)
    assert job.is_running
    assert job.finish(0, 2) == to((0, 2, 3), certain(1))


def test_a_round_that_runs_may_end_without_those_that_have_ended():
    """The spare is killed, and a member ends its process when it has finished."""
    job = Job(nodes=3).all_at_work()
    job.end(2)
    job.finish(0)
    job.end(0)
    assert job.finish(1) == {1: [certain(0, 2)]}


@pytest.mark.parametrize("member", [0, 1])
def test_a_member_that_had_finished_before_another_took_over(member):
    job = Job(Record((0, 0), 0, (0, 1, 2)), coordinator=1)
    job.connect(member, round=0, done=True)
    expected = Failure(Kind.LOST, (0,), finished=1)
    if member == 0:  # then it is not lost, but its connection was
        expected = Failure(Kind.AGENT, (0,), finished=1)
    assert job.coordinator.rounds.failure == expected


def test_nodes_that_were_lost_are_named_at_the_end():
    job = Job(spares=2, nodes=5).all_at_work()
    job.end(1)
    job.restart(0, 2, 3, 4)
    job.send(4, Unhealthy(UNFIT))
    assert job.finish(0, 3, 2) == to((0, 2, 3, 4), certain(1, 4))


@pytest.mark.parametrize("coordinator", [0, 2])
def test_the_coordinator_reports_how_the_job_failed(coordinator):
    job = Job(coordinator=coordinator, max_restarts=0).all_at_work()
    assert failed(job, job.died(1)) == (worker_failure(4), certain())


def test_nodes_that_were_never_there_are_not_bad():
    """The job has not begun: nobody knows."""
    job = Job()
    job.connect(0, 1)
    given_up = Failure(Kind.AGENT, (0,), text="why")
    sent = job.send(0, GaveUp(given_up))
    assert failed(job, sent) == (given_up, certain())


@pytest.mark.parametrize("lost", [1, 2])
def test_a_member_is_lost_and_no_restart_is_left(lost):
    job = Job(max_restarts=0).all_at_work()
    sent = job.lose(lost)
    assert sent.pop(lost) == ["close"]
    assert failed(job, sent) == (LOST[lost], certain(lost))


def test_an_agent_that_wants_another_restart():
    job = Job().all_at_work()
    assert job.join(1) == to(range(4), Over(0, hangs=False))
    job.join(0, 2)
    assert job.confirm() == to((0, 1, 2), go(1))


# --- another member takes over ------------------------------------------------------

# The coordinator was member 0, and the second round runs.
BEFORE = Record((0, 0), 1, (0, 3, 2), addresses(0, 1), {1: 1})


def taken_over(*members, record=BEFORE, **settings):
    """Return a job of which the first coordinator is lost, and who comes then."""
    job = Job(record, coordinator=1, **settings)
    assert job.sent() == {}
    connect_all(job, *members, record=record)
    return job


def connect_all(job, *members, record=BEFORE):
    for member in members:
        expected = welcome(2, (1, (0, 0)), 1)
        assert job.request(member, member) == {member: [expected]}
        assert job.present(member, term=record.term, round=record.round) == {}


def test_another_member_takes_over():
    job = taken_over(1, 2, 3)
    record = prepared(job.join(1, 2, 3))
    assert record == replace(
        BEFORE,
        term=(1, 1),
        round=2,
        active=(1, 3, 2),
        addresses=addresses(1, 2, 3),
        losses={1: 1, 0: 1},
        leased=(0,),
    )
    assert job.confirm() == {}
    job.gone(0)
    assert job.sent() == to((1, 3, 2), go(2))
    assert job.record.leased == ()
    assert job.events == [replaced(2, (0, 0, 1), because=LOST[0])]


def test_the_workers_of_the_first_coordinator_have_time_to_end():
    job = taken_over(1, 2, 3)
    job.restart(1, 2, 3)
    assert job.wait(2 * LEASE) == (LEASE, to((1, 3, 2), go(2)))


def test_the_workers_of_members_that_follow_have_time_to_end():
    job = taken_over(1, 2, 3)
    job.gone(0)
    assert job.join(1, 2) == {}
    assert prepared(job.join(3)).active == (1, 3, 2)


def test_the_first_coordinator_comes_back():
    job = taken_over(0, 1, 2, 3)
    assert prepared(job.join(0, 1, 2, 3)).active == (0, 3, 2)
    assert job.confirm() == to((0, 3, 2), go(2))


@pytest.mark.parametrize(
    ("members", "expected", "is_certain"),
    [
        # The others may be a world.
        ((1,), Failure(Kind.MISSING, (0, 3, 2), code=JOIN), False),
        ((1, 3), Failure(Kind.SILENT, (0, 2), code=LEASE), True),
    ],
)
def test_a_member_without_enough_others_gives_up(members, expected, is_certain):
    job = taken_over(*members)
    job.join(*members)
    assert not job.rounds.has_quorum
    second, sent = job.wait(2 * JOIN)
    failure, end = failed(job, sent)
    assert (second, failure) == (expected.code, expected)
    away = sorted({0, 1, 2, 3} - {*members})
    assert end == certain(*away, takeovers=1, is_certain=is_certain)


def test_an_end_that_was_seen_in_an_earlier_round_says_nothing():
    """Whoever was started again since then may have workers."""
    job = taken_over(1, 3, record=replace(BEFORE, addresses=addresses(0, 1, 2)))
    job.gone(2, number=BEFORE.round - 1)
    job.join(1, 3)
    job.gone(0)
    assert job.coordinator.rounds.failure is None
    job.gone(2)
    assert job.coordinator.rounds.failure == Failure(Kind.LOST, (0, 2))


def test_workers_of_a_round_before_the_one_that_was_prepared():
    """Member 4 was cut off, and its place taken, when the coordinator was lost.

    It may have followed an earlier coordinator, which has to miss the others first.
    """
    record = replace(BEFORE, leased=(4,))
    job = taken_over(1, 2, 3, record=record, nodes=5, spares=2)
    job.restart(1, 2, 3)
    job.gone(0)
    assert not job.is_running
    second, sent = job.wait(2 * LEASE)
    assert (second, sent) == (SILENCE + LEASE, to((1, 3, 2), go(2)))


@pytest.mark.parametrize("ends", [False, True])
def test_a_coordinator_that_is_cut_off_may_renew_the_leases_of_others(ends):
    """Until it has missed those that are here. Then it ends its own workers."""
    job = taken_over(1, 3, 4, record=replace(BEFORE, active=(0, 3, 2)), nodes=5)
    if ends:
        job.gone(0)
    job.join(1, 3, 4)
    limits = {2: LEASE} if ends else {0: LEASE, 2: SILENCE + LEASE}
    assert job.roster.leases == limits


def test_a_second_witness_of_an_end_makes_nobody_wait_longer():
    job = taken_over(1, 3, 4, record=replace(BEFORE, active=(0, 3, 2)), nodes=5)
    job.gone(0)
    job.wait(10)
    job.gone(0)
    assert job.roster.leases[2] == LEASE - 10


def test_a_later_round_hides_no_earlier_one_that_another_coordinator_may_begin():
    """Members 3 and 4 confirmed it, and then followed this coordinator again.

    It has only prepared its own round: it had not noticed that they had left.
    """
    job = Job(nodes=5, spares=2).all_at_work()
    job.lose(1, 2, 3, 4)
    job.join(0)
    another = Record((1, 2), job.record.round, (3, 4, 2), leased=(1,))
    job.roster.record = replace(job.record, round=another.round + 1)
    for member in (3, 4):
        job.request(member, member)
        job.present(member, term=(1, 2), round=another.round, record=another)
    sent = job.join(3, 4)
    assert prepared(sent).leased == (1, 2)
    assert prepared(sent).round > another.round
    assert job.roster.leases == {1: SILENCE + LEASE, 2: LEASE}


def test_too_few_members_do_not_count_the_seconds_of_the_others():
    """The others may be a world, which goes on."""
    job = taken_over(1, nodes=5, spares=2)
    job.wait(3 * LEASE)
    connect_all(job, 3, 4)
    job.restart(1, 3, 4)
    second, _ = job.wait(2 * LEASE)
    assert second >= LEASE


def test_a_member_that_has_not_confirmed_is_asked_again():
    """Nothing of it is lost; but no job waits for ever without a word."""
    job = Job()
    job.come(0, 1, 2, 3)
    job.confirm(0, 2)
    second, sent = job.wait(10)
    assert (second, [*sent]) == (5, [1])
    assert prepared(sent) == job.record
    job.wait(5)
    assert waiting(1, seconds=10) in job.events
    assert job.confirm(1) == to((0, 1, 2), go(0))


def test_the_first_coordinator_never_came():
    """All have looked for it as long as a spare waits: they need not do so again."""
    job = Job(coordinator=1, record=first_record(4, 1, 0))
    assert prepared(job.come(1, 2, 3)).active == (3, 1, 2)


def test_another_node_than_the_first_coordinates_from_the_beginning():
    """Slurm 26.05 numbers tasks by topology. Node 0 is only late."""
    job = Job(coordinator=1)
    assert job.come(1, 2, 3) == {}
    assert job.coordinator.rounds.ending.takeovers == 0
    assert prepared(job.come(0)).active == (0, 1, 2)


def test_a_second_agent_of_a_silent_member():
    job = Job().all_at_work()
    silent = job.coordinator.members.agents[2]
    silent.silent_for = SILENCE - 1
    job.request("second", 2, agent="second")
    job.coordinator.tick()
    sent = job.sent()
    assert "close" in sent[2]
    assert isinstance(sent["second"][0], Welcome)
    job.lose("second")
    assert job.coordinator.rounds.failure is None


def test_a_member_comes_when_the_job_has_ended():
    job = Job().all_at_work()
    job.lose(3)
    job.finish(0, 1, 2)
    assert job.request(3, 3) == {3: [welcome(0, (0, (0, 0))), certain()]}


@pytest.mark.parametrize("is_new", [True, False])
def test_a_node_that_gives_up_is_replaced(is_new):
    """Its own fault: a full disk, a GPU that is missing."""
    given_up = Failure(Kind.AGENT, (1,), text="HPC012 no GPU")
    job = Job()
    job.connect(0, 2, 3)
    if is_new:  # it connects only to say so
        job.request(1, 1, failed=wire.encode(given_up))
    else:
        job.connect(1)
    (*_, told) = job.send(1, GaveUp(given_up))[1]
    assert told == Ended(given_up, is_certain=False)
    assert job.coordinator.rounds.failure is None
    assert prepared(job.join(0, 2, 3)).active == (0, 3, 2)
    assert job.events == [Excluded(1, "HPC012 no GPU")]


def test_two_nodes_give_up_and_there_is_one_spare():
    job = Job().all_at_work()
    for member in (3, 2):
        given_up = Failure(Kind.AGENT, (member,), text="no space left")
        job.send(member, GaveUp(given_up))
    assert job.coordinator.rounds.failure == given_up


def test_a_replaced_member_comes_back_that_had_finished():
    job = Job().all_at_work()
    job.end(1)
    job.restart(0, 2, 3)
    assert job.is_running
    job.connect(1, term=(0, 0), round=0, done=True)
    assert job.coordinator.rounds.failure is None
    assert 1 in job.record.excluded


def test_a_member_that_is_on_its_way_is_not_bad():
    """Member 3 has not found the new coordinator yet."""
    job = taken_over(1, record=replace(BEFORE, addresses=addresses(0, 1, 2, 3)))
    job.gone(0, 2)
    assert failed(job, job.sent()) == (
        Failure(Kind.LOST, (0, 2)),
        certain(0, 2, takeovers=1),
    )


def test_no_restart_is_left_for_a_takeover():
    job = taken_over(1, 2, 3, max_restarts=1)
    assert failed(job, job.join(1, 2, 3)) == (LOST[0], certain(0, takeovers=1))


@pytest.mark.parametrize("term", [(1, 2), (3, 3), (5, 1)])
def test_the_term_is_above_all_that_were_confirmed(term):
    """Another one may have tried to take over."""
    job = taken_over(1, 2)
    job.connect(3, term=term, round=1)
    record = prepared(job.join(1, 2, 3))
    assert record.term == (term if term[1] == 1 else (term[0] + 1, 1))
    assert record.round == 2


def test_a_member_knows_of_a_newer_round():
    """This one was cut off while it began."""
    newer = replace(BEFORE, term=(2, 3), round=4, active=(1, 3, 2), losses={1: 1, 0: 1})
    job = taken_over(1)
    job.connect(3, term=(2, 3), round=4, record=newer)
    assert replace(job.record, losses=newer.losses) == newer
    job.connect(2, term=(2, 3), round=4)
    record = prepared(job.join(1, 2, 3))
    assert (record.term, record.round, record.active) == ((3, 1), 5, (1, 3, 2))
    assert job.confirm() == {}  # what it knew itself of member 0 counts, too
    assert job.wait(2 * LEASE) == (LEASE, to((1, 3, 2), go(5)))


def test_members_of_a_newer_round_have_time_to_end_their_workers():
    newer = replace(BEFORE, term=(2, 3), round=4, active=(0, 3, 1))
    job = taken_over(1, 2)
    job.connect(3, term=(2, 3), round=4, record=newer)
    assert prepared(job.join(1, 2, 3)).active == (2, 3, 1)
    assert job.confirm() == {}  # member 0 may be at work in the newer one
    assert job.wait(2 * LEASE) == (LEASE, to((2, 3, 1), go(5)))


@pytest.mark.parametrize("known", [replace(BEFORE, round=0, active=(0, 1, 2)), BEFORE])
def test_a_record_that_is_not_newer_changes_nothing(known):
    job = taken_over(1, 2)
    before = job.record
    assert before.losses == {1: 1, 0: 1}
    job.connect(3, round=known.round, record=known)
    assert replace(job.record, addresses=before.addresses) == before


def test_a_member_that_knows_less_hears_of_it():
    job = taken_over()
    job.request(2, 2)
    (known,) = job.present(2, round=0)[2]
    assert replace(known, addresses={}) == replace(job.record, addresses={})


# --- time, and ends -------------------------------------------------------------------


def test_a_late_second_is_counted_as_what_it_was():
    """Another coordinator, and the members, have counted it, too."""
    job = Job().all_at_work()
    job.coordinator.tick(SILENCE - 2)
    assert job.is_running
    job.coordinator.tick()
    job.coordinator.tick()
    assert not job.is_running


def test_who_is_lost_at_once_is_not_reported_as_silent():
    """The second that tells it comes late."""
    job = Job().all_at_work()
    job.coordinator.tick(SILENCE - 11)
    job.receive(0, Heartbeat(1.0))
    job.coordinator.tick(12)
    job.sent()
    assert not job.is_running
    assert not [event for event in job.events if isinstance(event, Silent)]


def test_time_for_workers_to_end_is_counted_in_ticks():
    """A coordinator that was suspended may have read nothing meanwhile."""
    job = Job().all_at_work()
    job.lose(1)
    job.restart(0, 2, 3)
    job.coordinator.tick(SILENCE - 1)
    for member in (0, 2, 3):
        job.receive(member, Heartbeat(1.0))
    assert job.wait(LEASE - 2) is None
    assert job.wait(1) is not None


def test_the_coordinator_says_what_it_heard_last():
    job = Job()
    job.come(0)
    for said in (0.0, 5.5, 7, 9.5):
        heartbeat = wire.decode(FROM_AGENT, {"heartbeat": {"seconds": said}})
        job.coordinator.receive(0, heartbeat)
        job.coordinator.outbox.clear()
        for _ in range(HEARTBEAT_INTERVAL):
            job.coordinator.tick()
        sent = [message for _, message in job.coordinator.outbox]
        assert [m for m in sent if isinstance(m, Heartbeat)] == [Heartbeat(said)]


@pytest.mark.parametrize("said", [True, "x", None])
def test_what_is_no_heartbeat(said):
    with pytest.raises(WireError):
        wire.decode(FROM_AGENT, {"heartbeat": {"seconds": said}})


@pytest.mark.parametrize(("is_end", "waits"), [(True, False), (False, True)])
def test_an_end_of_file_is_the_end_of_a_process_and_a_reset_is_silence(is_end, waits):
    job = Job().all_at_work()
    (job.end if is_end else job.lose)(1)
    sent = job.restart(0, 2, 3)
    assert (sent == {}) is waits


def test_a_member_that_says_good_bye_has_no_workers():
    job = Job().all_at_work()
    job.send(1, GaveUp(Failure(Kind.AGENT, (1,), text="no disk")))
    job.send(1, Bye())
    assert job.restart(0, 2, 3) == to((0, 3, 2), go(1))


def test_an_end_that_was_seen_counts_no_more_when_a_later_round_is_known():
    job = taken_over(1, record=replace(BEFORE, addresses=addresses(0, 1, 2, 3)))
    job.gone(0)
    assert job.absent == {2, 3}
    later = replace(BEFORE, round=2, active=(0, 3, 2))
    job.request(2, 2)
    job.present(2, round=2, record=later)
    assert job.absent == {0, 3}


def test_who_is_here_has_not_ended():
    job = taken_over(1, 2)
    job.gone(2)
    assert 2 in job.roster.left


def test_a_member_alone_that_is_out_gives_up():
    """No round was formed yet: it waits for the others, but not forever."""
    job = Job()
    job.come(0)
    job.send(0, Unhealthy(UNFIT))
    second, sent = job.wait(2 * JOIN)
    assert (second, sent[0][-1].failure.kind) == (JOIN, Kind.MISSING)

"""A job with spares, simulated: real state machines, and a network without sockets.

Each member has a clock of its own, and its ticks may be late. Messages arrive in an
order that is drawn, in order on each connection, some of them seconds later. A member
may be killed, started again, cut off in one direction or both, suspended, or behind a
firewall that rejects. Its node may be unwell, and its store slow. Its workers may fail
or finish, and it may give up.
"""

from __future__ import annotations

import json
import math
import random
from collections import deque

from loopback import request_of, worker_failure

from torchrun_hpc import wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous.coordinator import Coordinator
from torchrun_hpc.rendezvous.member import Member
from torchrun_hpc.rendezvous.messages import Suspended
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    Bye,
    Close,
    Died,
    Done,
    Ended,
    GaveUp,
    Go,
    Heartbeat,
    Join,
    Over,
    Prepare,
    Read,
    Settings,
    Standby,
    Unhealthy,
    Welcome,
    read_request,
)
from torchrun_hpc.rendezvous.record import Record, first_record
from torchrun_hpc.rendezvous.search import accepted
from torchrun_hpc.wire import WireError

# Seconds.
SILENCE, KILL, SPARE_AFTER, JOIN, CHECK = 24, 4, 6, 150, 3
MARGIN = 6  # that an agent may take to see an end: a late tick, and a late message
ANSWER_TIMEOUT = 2
LATE = 2  # a message
GAP = 2  # after the end of a lease: this member was suspended
CLOSING = 5  # that a server waits until all know how the job has ended

END, BROKEN = "end", "broken"  # of a connection: its process has ended; it was reset


def as_sent(message, kind):
    """Return a message as it arrives on the other side; see that it is the same."""
    data = json.loads(json.dumps(wire.encode(message, kind)))
    try:
        arrived = wire.decode(kind, data)
    except WireError as error:  # which would only end a connection
        raise AssertionError(message) from error
    assert arrived == message
    return arrived


class Link:
    """A connection from an agent to one that listens.

    Attributes:
        ends: Who has opened it, and to whom.
        is_open: At both ends.
        is_dead: The ways to both ends: nothing arrives any more.
        ways: What is under way to each end: messages, `END` or `BROKEN`.
        since: When something was last delivered to each end.
    """

    def __init__(self, client, host):
        self.ends = client, host
        self.is_open = [True, True]
        self.is_dead = [False, False]
        self.ways = deque(), deque()
        self.since = [0, 0]


class Agent:
    """A launcher on a member: its two machines, and its workers."""

    def __init__(self, number, job, generation=0):
        self.number = number
        self.generation = generation
        self.job = job
        self.member = Member(number, first_record(job.nodes, job.spares, 0))
        hints = {each: (f"n{each}", 4000) for each in range(job.nodes)}
        self.member.listens(hints[number], hints)
        self.coordinator = Coordinator(job.settings(number), self.member)
        self.alive = True
        self.suspended = False
        # Its clock, and how late its ticks are.
        self.rate = job.random.uniform(0.99, 1.01)
        self.lateness = 1.0
        self.next_tick = job.now + job.random.random()
        self.counted = self.clock
        self.link = None  # to its coordinator
        self.lease = (
            math.inf
        )  # when it sent the last answer that the coordinator received
        self.trial = None  # a link that was not answered yet
        self.trial_until = 0.0
        self.workers = None  # the round that they are of
        self.ends_at = None  # until when its workers will have ended
        self.checks_until = None  # its health check
        self.health = "well"
        self.store_takes = 0  # seconds
        self.confirmation = None  # when, and what
        self.leaves = False
        self.ended = None  # how the job has ended, as this agent knows
        self.ended_at = 0.0
        self.seeks_since = job.now
        self.pauses = False  # until the next tick
        self.looks_for_first = True
        self.candidates = None  # those that it asks who coordinates
        self.whom = None  # it asks next
        self.heard_others = None  # when, and what other members have answered

    def __repr__(self):
        return f"<{self.number}.{self.generation}>"

    @property
    def clock(self):
        return self.job.now * self.rate + 1000 * self.number

    @property
    def runs(self):
        return self.alive and not self.suspended and self.ended is None

    # --- workers

    def end_workers(self, seconds):
        """End the workers, within some seconds; then this member is ready."""
        if self.ends_at is None:
            self.ends_at = self.job.now + (seconds if self.workers is not None else 0)

    def pass_time(self):
        """Do what was to be done by now."""
        now = self.job.now
        if self.ends_at is not None and now >= self.ends_at:
            self.workers_ended()
        if self.checks_until is not None and now >= self.checks_until:
            self.checked()
        if self.confirmation is not None and now >= self.confirmation[0]:
            message, self.confirmation = self.confirmation[1], None
            self.send(message)
        if self.ended is not None and self.ends_at is None:
            self.send(Bye())
            self.job.close(self.link, 0)
            is_late = now - self.ended_at > CLOSING
            if self.coordinator.all_informed or is_late:
                self.job.kill(self.number)

    def workers_ended(self):
        self.workers = self.ends_at = None
        if self.leaves and self.ended is None:
            self.end("gave up")
        elif self.ended is None:
            self.check()

    def check(self):
        """Run the health check, as before each round."""
        self.member.is_ready = False
        if not self.member.unhealthy:
            takes = CHECK if self.health == "hangs" else self.job.draw(1)
            self.checks_until = self.job.now + takes

    def checked(self):
        self.checks_until = None
        if self.ended is not None or self.leaves:
            return
        if self.health == "well":
            self.member.is_ready = True
            self.send(Join())
        else:
            self.member.unhealthy = self.health
            self.send(Unhealthy(self.health))

    # --- messages

    def send(self, message):
        if self.link is not None and self.link.is_open[0]:
            self.link.ways[1].append(as_sent(message, FROM_AGENT))

    def accepted(self, link, answer):
        self.link, self.trial, self.lease = link, None, self.clock
        self.looks_for_first = False
        if isinstance(answer, Welcome):
            for message in self.member.accepted(answer):
                self.send(message)
        else:
            self.handle(answer)

    def check_lease(self):
        """Return whether the lease has ended; workers that ran on are killed."""
        late = self.clock - self.lease - SILENCE
        if late < 0:
            return False
        if late > GAP and self.workers is not None:
            self.workers = None
            self.ends_at = self.job.now
        self.lease = math.inf
        return True

    def handle(self, message):
        if self.check_lease():
            self.lose()
            return
        match message:
            case Heartbeat(seconds):
                self.lease = max(self.lease, min(seconds, self.clock))
                self.send(Heartbeat(self.clock))
            case Prepare(record):
                self.prepared(record)
            case Record():
                self.member.informed(message)
            case Suspended() if self.workers is not None:
                self.workers, self.ends_at = None, self.job.now
            case Go(number):
                assert self.number in self.member.record.active
                self.member.began()
                self.job.began(self, number)
                self.workers, self.member.is_ready = number, False
            case Over():
                self.confirmation = None
                self.round_over()
            case Ended():
                self.send(Read())
                self.end("finished" if message.failure is None else "failed")

    def prepared(self, record):
        mine = self.member.prepared(record)
        if mine is not None and self.member.is_ready:
            takes = self.store_takes if mine.active[0] == self.number else 0
            confirm = self.member.confirmation(mine, lambda: ("a", 1))
            self.confirmation = self.job.now + takes, confirm
            self.pass_time()

    def round_over(self):
        if self.member.is_done or self.leaves:
            return
        if self.member.is_ready:
            self.check()
        elif self.checks_until is None:
            self.end_workers(self.job.draw(KILL))

    def end(self, how):
        self.ended, self.ended_at = how, self.job.now
        self.end_workers(self.job.draw(KILL))

    def lose(self, how=BROKEN):
        """The coordinator is lost."""
        self.check_lease()
        if how == END:
            self.member.saw_end()
        self.job.reset(self.link, 0)
        self.link = self.confirmation = None
        self.round_over()
        self.begin()
        self.seeks_since = self.job.now

    def worker_fails(self):
        """Its first worker fails: a restart for all."""
        active = self.member.record.active  # without it, if it is replaced already
        if self.workers is not None and self.runs and self.number in active:
            rank = active.index(self.number)
            self.send(Died(worker_failure(rank), self.workers))

    def workers_finish(self):
        if self.workers is not None and self.ends_at is None and self.runs:
            self.send(Done(self.workers))
            self.workers, self.member.is_done = None, True
            self.job.may_finish = True

    def give_up(self):
        if self.runs and not self.leaves:
            failure = Failure(Kind.AGENT, (self.number,), text="no disk")
            self.send(GaveUp(failure))
            self.leaves, self.member.is_ready = True, False
            self.end_workers(self.job.draw(KILL))

    # --- time

    def count(self, seconds):
        self.counted += seconds
        self.coordinator.tick(seconds)

    def catch_up(self):
        """Count late seconds before anything else, as the server does."""
        if (late := int(self.clock - self.counted)) > GAP:
            self.count(late)

    def tick(self):
        self.count(max(int(self.clock - self.counted), 1))
        if self.ended is not None:
            return
        if self.pauses:
            self.pauses = False
            self.begin()
        if self.link is not None:
            if self.check_lease():
                self.lose()
        elif self.trial is not None and self.clock > self.trial_until:
            trial = self.trial
            self.job.reset(trial, 0)
            self.heard(None)
        if self.link is None:
            self.search_on()
        self.watch_others()

    def search_on(self):
        waited = self.job.now - self.seeks_since
        if self.looks_for_first and waited >= SPARE_AFTER:
            self.looks_for_first = False
            self.begin()
        if waited > JOIN:
            self.end("alone")

    def begin(self):
        """Begin to ask who coordinates."""
        self.candidates = self.member.candidates()
        self.replied(None)

    def replied(self, reply):
        try:
            self.whom, _ = self.candidates.send(reply)
        except StopIteration:
            self.whom = None

    def seek(self):
        """Ask the next member, if none is asked yet."""
        if self.link is not None or self.trial is not None or self.pauses:
            return
        if self.looks_for_first:
            self.connect(0)
            return
        whom = self.whom
        if whom is None:
            self.pauses = True
            return
        if whom == self.number:
            self.coordinator.coordinate(self.member.record)
            self.member.coordinates = True
        self.connect(whom)

    def connect(self, whom):
        self.trial = self.job.open(self, whom)
        self.trial_until = self.clock + ANSWER_TIMEOUT
        if self.trial is None:
            self.heard(None)

    def heard(self, answer):
        self.trial = None
        if self.looks_for_first:
            self.pauses = True
        else:
            self.replied(answer)

    def watch_others(self):
        """Ask the other members, and hear their answers, some of them late."""
        if self.heard_others is None:
            ask_all = self.job.draw(4) == 0
            absent = self.coordinator.absent(ask_all=ask_all)
            if absent is None:
                return
            answers = {each: self.job.ask(self, each) for each in absent}
            answers = {each: answer for each, answer in answers.items() if answer}
            self.heard_others = self.job.now + self.job.draw(LATE), answers
        due, answers = self.heard_others
        if self.job.now >= due:
            self.heard_others = None
            if self.member.should_step_down(answers) and self.coordinator.step_down():
                self.member.coordinates = False


class Job:
    """The members of a job, and their network."""

    def __init__(self, nodes, spares, seed, max_restarts=50):
        self.random = random.Random(seed)  # noqa: S311 - no secret
        self.nodes, self.spares, self.max_restarts = nodes, spares, max_restarts
        self.links = []
        self.cut = set()  # pairs of members: packets of the first do not arrive
        self.rejecting = set()  # the same, and the first gets a reset
        self.now = 0.0
        self.agents = [Agent(number, self) for number in range(nodes)]
        first = self.agents[0]
        first.coordinator.coordinate(first.member.record)
        first.looks_for_first = False
        first.member.coordinates = True
        first.begin()
        for agent in self.agents:
            agent.member.is_ready = True
        self.may_finish = False  # some workers have; their agent may be lost by now
        self.worlds = []  # of each round that began: its number, and term

    def settings(self, number):
        return Settings(
            "mine", self.nodes, number, SILENCE, self.max_restarts, JOIN,
            self.spares, spare_after=SPARE_AFTER, kill=KILL + MARGIN,
            health_check=CHECK,
        )  # fmt: skip

    def draw(self, most):
        """Return a number from 0 to ``most``."""
        return self.random.randint(0, most)

    # --- the network

    def reach(self, one, other):
        """Return whether packets go from one agent to another."""
        return one is other or (one.number, other.number) not in self.cut

    def is_rejected(self, one, other):
        return one is not other and (one.number, other.number) in self.rejecting

    def meet(self, one, other):
        """Return whether a connection can be opened."""
        ways = (one, other), (other, one)
        return other.alive and all(
            self.reach(*way) and not self.is_rejected(*way) for way in ways
        )

    def open(self, agent, whom):
        """Open a connection; ``None`` if that is refused, or not answered."""
        other = self.agents[whom]
        if not self.meet(agent, other):
            return None
        link = Link(agent, other)
        token = 1000 * agent.generation + agent.number
        link.ways[1].append(self.request(agent.number, pid=token, agent=str(token)))
        self.links.append(link)
        return link

    def request(self, number, **changes):
        """Return the first message of an agent: plain data."""
        sizes = {"nodes": self.nodes, "spares": self.spares}
        return json.loads(json.dumps(request_of(number, **sizes, **changes)))

    def ask(self, agent, whom):
        """Ask a member who coordinates, and return the answer."""
        other = self.agents[whom]
        if not self.meet(agent, other) or other.suspended:
            return None
        key = object()
        asks = read_request(self.request(agent.number, asks=True))
        other.coordinator.request(key, asks)
        outbox = other.coordinator.outbox
        found = [m for k, m in outbox if k is key and m is not Close.CLOSE]
        outbox[:] = [pair for pair in outbox if pair[0] is not key]
        assert isinstance(found[0], Standby)
        return as_sent(found[0], FROM_COORDINATOR)

    def close(self, link, end, how=END):
        """Close one end of a connection; the other end hears of it, if it can."""
        if link is not None and link.is_open[end]:
            link.is_open[end] = False
            link.ways[1 - end].append(how)

    def reset(self, link, end):
        """Abort one end of a connection: some of what was sent does not arrive."""
        if link is not None and link.is_open[end]:
            if self.draw(1):
                link.ways[1 - end].clear()
            self.close(link, end, BROKEN)

    def break_links(self, one, other):
        """Let both ends of the connections of two members get a reset."""
        for link in self.links:
            if {end.number for end in link.ends} == {one, other}:
                link.ways[0].append(BROKEN)
                link.ways[1].append(BROKEN)

    def kill(self, number):
        """End the process of an agent; its kernel closes its connections."""
        agent = self.agents[number]
        if not agent.alive:
            return
        agent.alive, agent.workers = False, None
        for link in self.links:
            for end in (0, 1):
                if link.ends[end] is agent:
                    how = BROKEN if self.draw(4) == 0 else END
                    self.close(link, end, how)

    def start_again(self, number):
        """Start an agent again that has ended, with all that it has forgotten."""
        old = self.agents[number]
        if not old.alive:
            self.agents[number] = new = Agent(number, self, old.generation + 1)
            new.member.is_ready = True

    def resume(self, number):
        """Let an agent continue: it may read what has arrived before its tick."""
        agent = self.agents[number]
        if not (agent.alive and agent.suspended):
            return
        agent.suspended = False
        for _ in range(self.draw(20)):
            ready = [way for way in self._deliverable() if way[0].ends[way[1]] is agent]
            if not ready or agent.workers is None:
                break
            self._deliver(*self.random.choice(ready))
        agent.pass_time()
        if agent.alive:
            agent.tick()
            self.flush(agent)
            agent.pass_time()

    def deliver(self):
        """Deliver what can be delivered, in an order that is drawn.

        Some of it, in some seconds, a second or two later.
        """
        most = self.draw(40) if self.draw(2) == 0 else 5_000
        for number in range(5_000):
            for agent in self.agents:
                if agent.runs and not agent.leaves:
                    agent.seek()
            ready = [*self._deliverable()]
            if number >= most:
                soon = self.now - LATE + 1
                ready = [way for way in ready if way[0].since[way[1]] < soon]
            if not ready:
                return
            self._deliver(*self.random.choice(ready))
        raise AssertionError("it never comes to rest")

    def _deliverable(self):
        self.links = [
            link
            for link in self.links
            if link.is_open[0] or link.is_open[1] or link.ways[0] or link.ways[1]
        ]
        for link in self.links:
            for end in (0, 1):
                to, sender = link.ends[end], link.ends[1 - end]
                if not link.ways[end] or not to.alive or to.suspended:
                    continue
                if link.is_dead[end]:
                    link.ways[end].clear()
                elif self.is_rejected(sender, to):
                    link.is_dead[end] = True
                    link.ways[1 - end].append(BROKEN)
                elif self.reach(sender, to):
                    yield link, end

    def _deliver(self, link, end):
        agent, message = link.ends[end], link.ways[end].popleft()
        link.since[end] = self.now
        if not link.is_open[end]:
            if message not in (END, BROKEN):  # the kernel answers what nobody reads
                link.ways[1 - end].append(BROKEN)
            return
        if message in (END, BROKEN):
            link.is_open[end] = False
        if end:
            self._to_host(agent, link, message)
        else:
            self._to_client(agent, link, message)

    def _to_host(self, agent, link, message):
        agent.catch_up()
        if message == END:
            agent.coordinator.disconnected(link, ended=True)
        elif message == BROKEN:
            agent.coordinator.disconnected(link)
        else:
            is_first = isinstance(message, dict)
            try:
                if is_first:
                    agent.coordinator.request(link, read_request(message))
                else:
                    agent.coordinator.receive(link, message)
            except WireError:
                self.reset(link, 1)
                agent.coordinator.disconnected(link)
        self.flush(agent)

    def flush(self, agent):
        outbox = [*agent.coordinator.outbox]
        agent.coordinator.outbox.clear()
        for link, message in outbox:
            if isinstance(message, Close):
                if link.is_open[1]:
                    (self.close if message is Close.CLOSE else self.reset)(link, 1)
                    agent.coordinator.disconnected(link)
            elif link.is_open[1]:
                link.ways[0].append(as_sent(message, FROM_COORDINATOR))

    def _to_client(self, agent, link, message):
        if agent.ended is not None:
            return
        if agent.link is link:
            if message in (END, BROKEN):
                agent.lose(message)
                return
            try:
                agent.handle(message)
            except WireError:
                agent.lose()
        elif agent.trial is link:
            if accepted(message) is not None:
                agent.accepted(link, message)
            else:
                self.close(link, 0)
                agent.heard(message if isinstance(message, Standby) else None)

    # --- time

    def tick(self):
        """Let a second pass."""
        end = self.now + 1
        if self.draw(1):
            self.deliver()
        while True:
            running = [
                each for each in self.agents if each.alive and not each.suspended
            ]
            due = min(running, key=lambda each: each.next_tick, default=None)
            if due is None or due.next_tick >= end:
                break
            self.now = max(self.now, due.next_tick)
            due.pass_time()
            if due.alive:
                due.tick()
                self.flush(due)
            late = due.lateness if due.lateness == 1 else self.random.uniform(1.3, 2.5)
            due.next_tick = self.now + late / due.rate
        self.now = end
        for agent in self.agents:
            if agent.alive and not agent.suspended:
                agent.pass_time()
                self.flush(agent)
        self.deliver()

    # --- what must hold

    def began(self, agent, number):
        """See that no older workers run where a round begins."""
        for other in self.agents:
            if other.alive and not other.suspended and other.workers is not None:
                assert other.workers == number, (
                    f"{other} runs round {other.workers}, {agent} begins {number}"
                )
        term = agent.member.record.term
        if (number, term) not in self.worlds:
            self.worlds.append((number, term))
        numbers = [number for number, _ in self.worlds]
        assert sorted(set(numbers)) == numbers, self.worlds

    def world(self):
        """Return who runs workers of the latest round, by node rank; or None."""
        at_work = [a for a in self.agents if a.alive and a.workers is not None]
        if not at_work or any(a.ends_at is not None for a in at_work):
            return None
        active = at_work[0].member.record.active
        return active if {a.number for a in at_work} == {*active} else None

    def has_ended(self):
        return all(a.ended is not None or not a.alive for a in self.agents)

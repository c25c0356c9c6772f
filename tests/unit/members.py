"""A job with spares, simulated: real state machines, and a network without sockets.

Time goes by in seconds. In each, messages arrive in an order that is drawn, in order on
each connection. A member may be killed, cut off, or suspended.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field

from loopback import request_of, worker_failure

from torchrun_hpc.rendezvous import protocol
from torchrun_hpc.rendezvous.coordinator import CLOSE, Settings
from torchrun_hpc.rendezvous.protocol import ProtocolError
from torchrun_hpc.spares import record
from torchrun_hpc.spares.coordinator import Limits
from torchrun_hpc.spares.member import Answer, Member, answer_of
from torchrun_hpc.spares.standby import Standby

SILENCE, KILL, SPARE_AFTER, JOIN = 10, 4, 6, 60
MARGIN = 5  # the interval of heartbeats, and what an agent may take to see an end
ANSWER_TIMEOUT = 2  # seconds that an answer is waited for


@dataclass(eq=False)
class Link:
    """A connection from a member to one that listens.

    Attributes:
        client: Who has opened it.
        host: To whom.
        asks: Whether it only asks who coordinates.
        is_open: At both ends: the client's, and the host's.
        to_host: Messages under way, ``None`` for the end of the connection.
        to_client: The same in the other direction.
    """

    client: int
    host: int
    asks: bool = False
    is_open: list[bool] = field(default_factory=lambda: [True, True])
    to_host: deque = field(default_factory=deque)
    to_client: deque = field(default_factory=deque)
    since: list[int] = field(default_factory=lambda: [0, 0])  # both ends' last delivery

    def waits_since(self, end):
        return self.since[end]


class Agent:
    """A launcher on a member: its two machines, and its workers."""

    def __init__(self, number, job):
        self.number = number
        self.job = job
        self.member = Member(
            number,
            (f"n{number}", 4000),
            record.first_record(job.nodes, job.spares, 0),
            {each: (f"n{each}", 4000) for each in range(job.nodes)},
        )
        settings = job.settings(number)
        self.standby = Standby(
            settings, Limits(SPARE_AFTER, KILL + MARGIN), self.member
        )
        self.alive = True
        self.suspended = False
        self.is_cut = False
        self.link = None  # to its coordinator
        self.trial = None  # a link that was not answered yet, and for how long
        self.probes = {}  # links to members that are asked, and the answers
        self.silent_for = 0
        self.missed = 0  # seconds in which it was suspended
        self.workers = None  # the round that they are of
        self.ends_in = None  # seconds until they have ended
        self.ended = None  # how the job has ended, as this agent knows
        self.seeks_for = 0
        self.pauses = False  # until the next second
        self.looks_for_first = True

    def __repr__(self):
        return f"<{self.number}>"

    @property
    def runs(self):
        return self.alive and not self.suspended and self.ended is None

    # --- workers

    def end_workers(self, seconds):
        """Stop the workers; say afterwards that this member is ready."""
        if self.ends_in is None:
            self.ends_in = seconds if self.workers is not None else 0

    def workers_ended(self):
        self.workers = self.ends_in = None
        if self.ended is None:
            self.member.is_ready = True
            self.send({"join": True})

    # --- messages

    def send(self, message):
        if self.link is not None and self.link.is_open[0]:
            self.link.to_host.append(message)

    def accepted(self, link, answer):
        self.link, self.trial, self.silent_for, self.seeks_for = link, None, 0, 0
        self.looks_for_first = False
        if "welcome" in answer:
            for message in self.member.accepted(answer):
                self.send(message)
        else:
            self.handle(answer)

    def handle(self, message):
        self.silent_for = 0
        if "heartbeat" in message:
            self.send({"heartbeat": True})
        elif "prepare" in message:
            prepared = self.member.prepared(message)
            if prepared is not None and self.member.is_ready:
                self.send(
                    {"confirm": [prepared.term, prepared.round], "store": ["a", 1]}
                )
        elif "record" in message:
            self.member.informed(message)
        elif "go" in message:
            assert self.number in self.member.record.active
            self.member.began()
            self.job.began(self, message["go"])
            self.workers, self.member.is_ready = message["go"], False
        elif "over" in message:
            if self.member.is_ready:  # it was, and is for the next round
                self.send({"join": True})
            else:
                self.end_workers(self.job.draw(KILL))
        elif "failed" in message or "finished" in message:
            self.send({"read": True})
            self.send({"bye": True})
            self.end("failed" if "failed" in message else "finished")

    def end(self, how):
        self.ended = how
        self.job.close(self.link, 0)
        self.end_workers(self.job.draw(KILL))

    def lose(self):
        """The coordinator is lost."""
        if self.link is not None:
            self.job.close(self.link, 0)
        self.link = None
        if not self.member.is_ready:
            self.end_workers(self.job.draw(KILL))
        self.member.begin()

    # --- time

    def tick(self):
        self.wake_up()
        if self.ends_in is not None:
            self.ends_in -= 1
            if self.ends_in < 0:
                self.workers_ended()
        self.standby.tick()
        if self.link is not None:
            self.silent_for += 1
            if self.silent_for >= SILENCE:
                self.lose()
        else:
            self.wait_for_answer()
        if self.link is None:
            self.search_on()
        self.watch_others()

    def wake_up(self):
        """Find out whether it was suspended, before anything else."""
        if self.missed > 2:
            self.silent_for += self.missed
            if self.silent_for >= SILENCE and self.workers is not None:
                self.workers_killed()
            elif self.ends_in is not None:  # torch's limit is a time of day
                self.ends_in -= self.missed
        self.missed = 0
        if self.pauses:
            self.pauses = False
            self.member.begin()

    def wait_for_answer(self):
        if self.trial is not None:
            self.trial[1] += 1
            if self.trial[1] > ANSWER_TIMEOUT:
                self.job.close(self.trial[0], 0)
                self.heard(self.trial[0].host, None)

    def search_on(self):
        self.seeks_for += 1
        if self.looks_for_first and self.seeks_for >= SPARE_AFTER:
            self.looks_for_first = False
            self.member.begin()
        if self.seeks_for > JOIN:
            self.end("alone")

    def worker_fails(self):
        """Its first worker fails: a restart for all."""
        if self.workers is not None and self.runs:
            rank = self.member.record.active.index(self.number)
            died = protocol.packed_worker(worker_failure(rank))
            self.send({"died": died, "round": self.workers})

    def workers_killed(self):
        self.workers = None
        self.ends_in = 0

    def seek(self):
        """Ask the next member, if none is asked yet."""
        if self.link is not None or self.trial is not None or self.ended:
            return
        if self.pauses:
            return
        if self.looks_for_first:
            self.connect(0)
            return
        whom = self.member.whom()
        if whom is None:
            self.pauses = True
            return
        if whom == self.number:
            self.standby.coordinate(self.member.record)
        self.connect(whom)

    def connect(self, whom):
        link = self.job.open(self, whom)
        if isinstance(link, Link):
            self.trial = [link, 0]
        else:
            self.heard(whom, link)

    def heard(self, whom, answer):
        self.trial = None
        if self.looks_for_first:
            self.pauses = True
        else:
            self.member.heard(whom, answer)

    def watch_others(self):
        """As the real client does, but one answer after the other."""
        ask_all = (self.job.seconds + self.number) % 5 == 0
        absent, is_strong = self.standby.absent(ask_all)
        answers = {each: self.job.ask(self, each) for each in absent}
        answers = {each: answer for each, answer in answers.items() if answer}
        for each, answer in answers.items():
            if answer.is_gone:
                self.standby.found_gone(each, absent[each])
        if not is_strong and self.member.gives_way(answers):
            self.standby.give_way()


class Job:
    """The members of a job, and their network."""

    def __init__(self, nodes, spares, random, max_restarts=50):
        self.random = random
        self.nodes, self.spares, self.max_restarts = nodes, spares, max_restarts
        self.links = []
        self.separated = []  # pairs of members that do not reach each other
        self.seconds = 0
        self.agents = [Agent(number, self) for number in range(nodes)]
        first = record.first_record(nodes, spares, 0)
        self.agents[0].standby.coordinate(first)
        self.agents[0].looks_for_first = False
        self.agents[0].member.begin()
        for agent in self.agents:
            agent.member.is_ready = True
        self.worlds = []  # of each round that began: its term, and number

    def settings(self, number):
        return Settings(
            "19.0", "mine", self.nodes, number, self.max_restarts, JOIN, SILENCE,
            self.spares,
        )  # fmt: skip

    def draw(self, most):
        """Return a number from 0 to ``most``."""
        return self.random.randint(0, most)

    # --- the network

    def reach(self, one, other):
        """Say whether packets go from one agent to another."""
        if {one.number, other.number} in self.separated:
            return one is other
        return one is other or not (one.is_cut or other.is_cut)

    def open(self, agent, whom, *, asks=False):
        """Open a connection; return it, or what is heard instead."""
        other = self.agents[whom]
        if not self.reach(agent, other):
            return None
        if not other.alive:
            return Answer(is_gone=True)
        link = Link(agent.number, whom, asks)
        first = request_of(
            agent.number, nodes=self.nodes, spares=self.spares, asks=asks
        )
        link.to_host.append(first)
        self.links.append(link)
        return link

    def ask(self, agent, whom):
        """Ask a member who coordinates, and return the answer at once."""
        other = self.agents[whom]
        if not self.reach(agent, other) or (other.alive and other.suspended):
            return None
        if not other.alive:
            return Answer(is_gone=True)
        key = object()
        other.standby.receive(key, {"job": "19.0", "asks": True})
        found = [m for k, m in other.standby.outbox if k is key and m is not CLOSE]
        other.standby.outbox = [p for p in other.standby.outbox if p[0] is not key]
        return answer_of(found[0])

    def close(self, link, end):
        """Close one end of a connection; the other end hears of it, if it can."""
        if link is not None and link.is_open[end]:
            link.is_open[end] = False
            (link.to_client if end else link.to_host).append(None)

    def kill(self, number):
        agent = self.agents[number]
        agent.alive, agent.workers = False, None
        for link in self.links:
            if link.client == number:
                self.close(link, 0)
            if link.host == number:
                self.close(link, 1)

    def deliver(self):
        """Deliver what can be delivered, in an order that is drawn.

        Some of it, in some seconds, a second or two later.
        """
        most = self.draw(40) if self.draw(2) == 0 else 5_000
        for number in range(5_000):
            for agent in self.agents:
                if agent.runs:
                    agent.seek()
            ready = [*self._deliverable()]
            if number >= most:
                ready = [
                    way
                    for way in ready
                    if way[0].waits_since(way[1]) < self.seconds - 1
                ]
            if not ready:
                return
            self._deliver(*self.random.choice(ready))
        raise AssertionError("it never comes to rest")

    def _deliverable(self):
        self.links = [
            link
            for link in self.links
            if any(link.is_open) or link.to_host or link.to_client
        ]
        for link in self.links:
            client, host = self.agents[link.client], self.agents[link.host]
            if not self.reach(client, host):
                continue
            if link.to_host and host.alive and not host.suspended:
                yield link, 1
            if link.to_client and client.alive and not client.suspended:
                yield link, 0

    def _deliver(self, link, end):
        agent = self.agents[link.host if end else link.client]
        message = (link.to_host if end else link.to_client).popleft()
        link.since[end] = self.seconds
        if not link.is_open[end]:
            return
        if end:
            self._to_host(agent, link, message)
        else:
            self._to_client(agent, link, message)

    def _to_host(self, agent, link, message):
        if message is None:
            link.is_open[1] = False
            agent.standby.disconnected(link)
        else:
            try:
                agent.standby.receive(link, json.loads(json.dumps(message)))
            except ProtocolError:
                self.close(link, 1)
                agent.standby.disconnected(link)
        self.flush(agent)

    def flush(self, agent):
        outbox, agent.standby.outbox = agent.standby.outbox, []
        for link, message in outbox:
            if message is CLOSE:
                if link.is_open[1]:
                    self.close(link, 1)
                    agent.standby.disconnected(link)
            elif link.is_open[1]:
                link.to_client.append(json.loads(json.dumps(message)))

    def _to_client(self, agent, link, message):
        if agent.ended is not None:
            return
        if agent.link is link:
            if message is None:
                agent.lose()
                return
            try:
                agent.handle(message)
            except ProtocolError:
                agent.lose()
        elif agent.trial is not None and agent.trial[0] is link:
            answer = answer_of(message) if message is not None else None
            if message is not None and ("welcome" in message or "failed" in message):
                agent.accepted(link, message)
            else:
                self.close(link, 0)
                agent.heard(link.host, answer)

    # --- time

    def tick(self):
        self.seconds += 1
        for agent in self.agents:
            if agent.alive and agent.suspended:
                agent.missed += 1
            elif agent.alive:
                if agent.ended is None:
                    agent.tick()
                elif agent.ends_in is not None:
                    agent.ends_in -= 1
                    if agent.ends_in < 0:
                        agent.workers = agent.ends_in = None
                if agent.ended is not None:
                    agent.standby.tick()
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
        if not at_work or any(a.ends_in is not None for a in at_work):
            return None
        active = at_work[0].member.record.active
        return active if {a.number for a in at_work} == {*active} else None

    def has_ended(self):
        return all(a.ended is not None or not a.alive for a in self.agents)

"""The old and the new coordinators, side by side: the same events, the same outboxes.

In the history only: the old ones are deleted after this.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import asdict, replace

from hypothesis import Phase as HP, given, settings as hypothesis_settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import loopback
from loopback import request_of, worker_failure
from torchrun_hpc import wire
from torchrun_hpc.rendezvous import coordinator as old
from torchrun_hpc.rendezvous import new_coordinator as new
from torchrun_hpc.rendezvous import protocol
from torchrun_hpc.rendezvous.protocol import CLOSE, Failure, Kind
from torchrun_hpc.spares import coordinator as old_spares
from torchrun_hpc.spares.record import Record, first_record

SILENCE, KILL, SPARE_AFTER, JOIN = 40, 5, 20, 60
USER = {
    *("waiting", "finishing", "silent", "answering", "lost", "restart", "sites"),
    *("stranger", "replaced", "excluded", "may_run", "suspended"),
}


def plain(message):
    """Return a message as it is compared."""
    if message.get("close") or message.get("reset"):
        return "close" if message.get("close") else "reset"
    text = json.loads(json.dumps(message))
    text.pop("age", None)
    text.pop("coordinator", None)
    return json.dumps(text, sort_keys=True)


class Both(RuleBasedStateMachine):
    """One job, whose events go to both."""

    nodes, spares = 3, 0

    @initialize(taken=st.booleans(), restarts=st.integers(0, 5))
    def begin(self, taken, restarts):
        values = dict(
            job="19.0", run_id="mine", nodes=self.nodes, coordinator=0,
            max_restarts=restarts, join_timeout=JOIN, silence_timeout=SILENCE,
            spares=self.spares,
        )
        record = None
        if taken and self.spares:
            values["coordinator"] = 1
            addresses = {n: (f"n{n}", 4000 + n) for n in range(self.nodes)}
            record = Record((0, 0), 1, tuple(range(self.nodes - self.spares)), addresses)
        self.own = values["coordinator"]
        new_settings = protocol.Settings(
            **values, spare_after=SPARE_AFTER, kill=KILL, health_check=3
        )
        if self.spares:
            limits = old_spares.Limits(SPARE_AFTER, KILL, 3)
            known = record or first_record(self.nodes, self.spares, 0)
            self.old = old_spares.SparesCoordinator(
                old.Settings(**values), limits, known
            )
        else:
            self.old = old.Coordinator(old.Settings(**values))
        self.new = new.Coordinator(new_settings)
        if record is not None:
            self.new._reset(record)
            self.new.rounds.take_over()
        self.open = {}  # connection to rank
        self.next = 0
        self.tokens = Counter()
        self.log = []
        self.work = defaultdict(lambda: None)  # connection to the round that it runs

    def each(self, event):
        """Let both handle an event, and compare what they send."""
        self.log.append(event)
        results = []
        was_over = self.new.rounds.has_ended
        for machine in (self.old, self.new):
            try:
                name, *args = event
                options = args.pop() if name == "disconnected" else {}
                getattr(machine, name)(*args, **options)
                raised = None
            except wire.WireError as error:
                raised = str(error)
            outbox = [*machine.outbox]
            machine.outbox = [] if machine is self.old else machine.outbox
            machine.outbox.clear()
            by_connection, said = defaultdict(list), []
            for connection, message in outbox:
                if {"record", "out", "excluded"} & message.keys() and (self.old.failure or self.old.finished):
                    continue  # the old one shares on after the end
                if ("failed" in message or "finished" in message) and self.open.get(
                    connection
                ) != self.own or was_over:  # only the reporter uses these
                    message = {k: v for k, v in message.items() if k not in ("out_at_end", "is_certain")}
                shown = plain(message)
                (said if USER & message.keys() else by_connection[connection]).append(shown)
            beats = {c: [m for m in ms if "heartbeat" in m] for c, ms in by_connection.items()}
            rest = {c: [m for m in ms if "heartbeat" not in m] for c, ms in by_connection.items()}
            clean = lambda d: {k: v for k, v in d.items() if v}
            results.append((raised, clean(rest), clean(beats), sorted(said), outbox))
        (r1, rest1, beats1, said1, outbox), (r2, rest2, beats2, said2, _) = results
        assert r1 == r2, self.log
        assert rest1 == rest2, (rest1, rest2, self.log)
        assert beats1 == beats2, (beats1, beats2, self.log)
        if event[0] == "receive" and "present" in event[2]:  # another order
            said1, said2 = ([m for m in said if "stranger" not in m] for said in (said1, said2))
        # The old one reports some restarts twice, and some without their reason.
        keys = [
            {json.dumps({k: v for k, v in json.loads(m).items() if k != "because"}, sort_keys=True) for m in said}
            for said in (said1, said2)
        ]
        assert keys[0] == keys[1], (said1, said2, self.log)
        for one, other in zip(sorted(set(said1)), sorted(set(said2))):
            reasons = [json.loads(each).get("because") for each in (one, other)]
            if "restart" in one and "restart" in other:
                assert reasons[0] == reasons[1], (said1, said2, self.log)
        self.check(was_over)
        closed = [c for c, m in outbox if plain(m) in ("close", "reset") and c in self.open]
        for connection, message in outbox:
            if "go" in message:
                self.work[connection] = message["go"]
            elif "over" in message:
                self.work[connection] = None
        if r1 is not None and event[0] == "receive" and event[1] in self.open:
            closed.append(event[1])
        for connection in closed:
            if self.open.pop(connection, None) is not None:
                self.each(("disconnected", connection, {"ended": False}))

    def check(self, was_over):
        rounds = self.new.rounds
        ended = rounds.has_ended
        pairs = {
            "failure": (self.old.failure, self.new.failure),
            "finished": (self.old.finished, rounds.phase.value == "finished"),
            "round": (self.old.round, rounds.round),
            "all_informed": (self.old.all_informed, self.new.all_informed),
            "expects": (self.old.expects_nodes, self.new.expects_nodes),
            "agents": (self.old._agents.keys(), self.new.members.agents.keys()),
        }
        if not ended:
            pairs["running"] = self.old.running, rounds.phase.value == "run"
        if self.spares and not ended:
            pairs["strong"] = self.old.is_strong, rounds.has_quorum
            pairs["record"] = wire.encode(self.old.record), wire.encode(rounds.roster.record)
            pairs["absent"] = set(self.old.absent), set(absent(self.new))
            pairs["leases"] = self.old._may_run, rounds.roster.leases
        if self.spares and ended and not was_over and self.old.failure and not self.old.running:
            pairs["strong"] = self.old.is_strong, rounds.has_quorum
        wrong = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        assert not wrong, (wrong, self.log)

    # --- events

    def draw_connection(self, data):
        return data.draw(st.sampled_from(sorted(self.open)))

    @rule(data=st.data(), again=st.booleans(), odd=st.integers(0, 25))
    def connect(self, data, again, odd):
        rank = data.draw(st.integers(0, self.nodes - 1))
        self.connect_as(rank, again, {0: {"nodes": 9}, 1: {"run_id": "x"}, 2: {"job": "x"}, 3: {"protocol": 1}, 4: {"spares": 7}}.get(odd, {}))

    def connect_as(self, rank, again, changes):
        self.next += 1
        connection = self.next
        self.open[connection] = rank
        self.tokens[rank] += not again
        request = request_of(rank, nodes=self.nodes, spares=self.spares, agent=f"{rank}.{self.tokens[rank]}")
        self.each(("receive", connection, request | changes))
        return connection

    def present(self, connection, **changes):
        rank = self.open[connection]
        record = self.old.record
        known = {"address": [f"n{rank}", 4000 + rank], "term": [*record.term], "round": record.round, "done": False}
        self.each(("receive", connection, {"present": known | changes}))

    def join_as(self, connection):
        rank = self.open[connection]
        wanted = self.old.round + (1 if self.old.running else 0)
        message = {"join": wanted}
        if rank == 0 and not self.spares:
            message["store"] = ["a", 1]
        self.each(("receive", connection, message))

    def of_rank(self, rank):
        agent = self.old._agents.get(rank)
        return agent and agent.connection

    @rule(count=st.integers(1, 5))
    def start(self, count):
        """Let nodes come, be present, join, confirm."""
        for rank in range(min(count, self.nodes)):
            if self.of_rank(rank) is None:
                connection = self.connect_as(rank, False, {})
                if connection in self.open and self.spares and self.of_rank(rank) == connection:
                    self.present(connection)
        for rank in range(min(count, self.nodes)):
            connection = self.of_rank(rank)
            if connection is not None and self.work[connection] is None and not self.old.running:
                self.join_as(connection)
        self.confirm_all()

    def confirm_all(self):
        if self.spares:
            for rank in self.old.record.active:
                if (connection := self.of_rank(rank)) is not None:
                    self.confirm_as(connection)

    def confirm_as(self, connection):
        record = self.old.record
        message = {"confirm": [[*record.term], record.round]}
        if self.open[connection] == record.active[0]:
            message["store"] = ["a", record.round]
        self.each(("receive", connection, message))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def say_present(self, data):
        if not self.spares:
            return
        connection = self.draw_connection(data)
        if self.of_rank(self.open[connection]) != connection:
            return
        changes = {}
        record = self.old.record
        kind = data.draw(st.integers(0, 6))
        if kind == 2 and (self.old.failure or self.old.finished):
            return
        if kind == 0:
            changes["done"] = True
        elif kind == 1:
            changes["gone"] = [data.draw(st.integers(0, self.nodes - 1)), record.round]
        elif kind == 2:
            term = [record.term[0] + data.draw(st.integers(0, 1)), data.draw(st.integers(0, self.nodes - 1))]
            newer = replace(record, term=tuple(term), round=max(0, record.round + data.draw(st.integers(0, 1))), may_run=())
            changes = {"term": term, "round": newer.round, "record": wire.encode(newer)}
        elif kind == 3:
            changes["round"] = record.round - 1
        self.present(connection, **changes)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def join(self, data):
        connection = self.draw_connection(data)
        if self.of_rank(self.open[connection]) == connection:
            self.join_as(connection)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def confirm(self, data):
        connection = self.draw_connection(data)
        if self.spares and self.of_rank(self.open[connection]) == connection:
            self.confirm_as(connection)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), kind=st.sampled_from(["done", "died", "died", "report", "printed", "read", "bye", "heartbeat", "unfit", "stacks", "sampled", "ask"]), behind=st.sampled_from([0, 0, 0, 1]), cause=st.sampled_from(["", "x 1", "connection closed by peer"]))
    def say(self, data, kind, behind, cause):
        connection = self.draw_connection(data)
        if self.of_rank(self.open[connection]) != connection:
            return
        number = self.old.round - behind
        value = {
            "done": number,
            "died": wire.encode(worker_failure(4 * self.open[connection] % 12, cause=cause)),
            "unfit": "no GPU", "stacks": 4, "sampled": [1, 3], "heartbeat": 17.5,
            "ask": 3,
        }.get(kind, True)
        if kind == "done" and self.old.finished:
            return  # the old one sends the end once more
        if kind == "printed" and self.old.failure is None:
            return
        message = {kind: value}
        if kind == "died":
            message["round"] = number if self.old.running or behind else number - 1
            own_round = self.old.round if self.old.running else self.old.round - 1
            if own_round != self.new.rounds.began:
                return  # a round that another coordinator began
        if kind == "ask":
            message |= {"set": {"a": "b"}}
        if kind == "unfit" and not self.spares:
            return
        self.each(("receive", connection, message))
        if kind == "bye":
            self.open.pop(connection, None)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), kind=st.sampled_from([Kind.AGENT, Kind.SIGNAL, Kind.WORKER]), code=st.sampled_from([2, 15]))
    def give_up(self, data, kind, code):
        connection = self.draw_connection(data)
        rank = self.open[connection]
        if self.of_rank(rank) == connection:
            failure = Failure(kind, (rank,), code=code, text="no disk")
            self.each(("receive", connection, {"failed": wire.encode(failure)}))

    @rule(data=st.data())
    def cannot_start(self, data):
        rank = data.draw(st.integers(0, self.nodes - 1))
        failure = wire.encode(Failure(Kind.AGENT, (rank,), text="no torch"))
        if self.of_rank(rank) is None:
            self.connect_as(rank, False, {"failed": failure})

    @precondition(lambda self: self.open)
    @rule(data=st.data(), ended=st.booleans())
    def lose(self, data, ended):
        connection = self.draw_connection(data)
        del self.open[connection]
        self.each(("disconnected", connection, {"ended": ended}))

    @rule(seconds=st.integers(1, 45), answers=st.integers(0, 3), leap=st.sampled_from([1, 1, 1, 50]))
    def pass_time(self, seconds, answers, leap):
        for second in range(seconds):
            self.each(("tick", leap if second == 0 else 1))
            for connection, rank in list(self.open.items()):
                if rank != answers and self.of_rank(rank) == connection:
                    self.each(("receive", connection, {"heartbeat": 3.5}))


def absent(machine):
    rounds = machine.rounds
    from torchrun_hpc.rendezvous.phases import BETWEEN_ROUNDS
    if rounds.phase not in BETWEEN_ROUNDS:
        return ()
    roster = rounds.roster
    active = roster.record.active if rounds.began >= 0 else ()
    return {*roster.addresses, *active} - machine.members.agents.keys() - roster.gone.keys()


class BothWithSpare(Both):
    nodes, spares = 4, 1


class BothWithSpares(Both):
    nodes, spares = 5, 2


for each in (Both, BothWithSpare, BothWithSpares):
    each.TestCase.settings = hypothesis_settings(
        max_examples=int(__import__('os').environ.get('EXAMPLES','80')), stateful_step_count=40, deadline=None, phases=[HP.generate]
    )
TestBoth = Both.TestCase
TestBothWithSpare = BothWithSpare.TestCase
TestBothWithSpares = BothWithSpares.TestCase

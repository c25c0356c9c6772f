"""Whatever happens to its nodes and their network, a job is one world, or ends.

A seed decides all events. Agents are the real ones but for their workers; see
`virtual_network` for the rest. Many more by hand:
``python -m tests.support.virtual_job FIRST LAST``.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.support.virtual_network import Changed, Network, Process, address_of
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.failures.failure import Failure, Kind, WorkerPart
from torchrun_hpc.options.values import SCHEDULER
from torchrun_hpc.planning.meeting import KeyFile, Meeting, Spares
from torchrun_hpc.rendezvous import connection as connections
from torchrun_hpc.rendezvous.client import Listener
from torchrun_hpc.rendezvous.connection import Connection
from torchrun_hpc.rendezvous.errors import (
    CoordinatorNotFoundError,
    JobFailedError,
    NotNeededError,
    RoundOverError,
)
from torchrun_hpc.rendezvous.key import Key, Secret
from torchrun_hpc.rendezvous.protocol import Confirm, Unhealthy

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrun_hpc.rendezvous.client import Client
    from torchrun_hpc.rendezvous.member import Member
    from torchrun_hpc.rendezvous.protocol import FromAgent, Go, Settings, Store
    from torchrun_hpc.rendezvous.record import Age

    # It happens to a job, two nodes of it, and with a number from 0 to 1.
    Action = Callable[["VirtualJob", int, int, float], None]

# Seconds.
SILENCE, KILL, SPARE_AFTER, JOIN, CHECK = 9, 2, 6, 40, 3
MARGIN = 4  # in which an agent sees an order, late
LEASE = SILENCE + KILL + MARGIN
ENOUGH = 6 * LEASE + 3 * JOIN  # in which a stable network comes to rest
SLOW = 1.5  # by which timers of a slow process are late, at most
NOTICED = 1.2  # the end of a lease after a suspension: at the next tick
LONG = 4 * SILENCE  # in which late clocks, and renewed leases, count more

PORT = 4000
FINISHED = "finished"
# Nodes, and spares of them.
SIZES = (8, 3), (3, 1), (4, 1), (5, 2), (6, 1), (6, 2), (7, 3), (4, 0)
STEPS = 25


class GaveUp(Exception):  # noqa: N818 - as torch's SignalException
    """Why an agent gives up."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


class Agent:
    """A launcher on a node, and its workers.

    Attributes:
        workers: The round of its workers; ``None`` without any.
        round: Its last round.
        order: What its workers must do: fail, or finish.
        ended: How the job has ended, as this agent knows; ``None`` if it was killed,
            or has not found the job.
    """

    def __init__(
        self,
        job: VirtualJob,
        number: int,
        generation: int = 0,
        *,
        starts: float = 0.0,
        stranger_on: int | None = None,
    ) -> None:
        self.job, self.number, self.generation = job, number, generation
        self._key = b"the job's" if stranger_on is None else b"another"
        self.workers: int | None = None
        self.round: int | None = None
        self.are_ending = self.is_leaving = False
        self.order = self.health = ""
        self.store_takes = 0.0
        self.ended: Kind | str | None = None
        self.connection: Connection | None = None
        host = number if stranger_on is None else stranger_on
        self.process = Process(job.network, host, self._main, starts)

    def __repr__(self) -> str:
        """Return its number, and the round of its workers."""
        return f"<agent {self.number}.{self.generation}, workers {self.workers}>"

    @property
    def client(self) -> Client:
        """Its connection to the coordinator."""
        assert self.connection is not None
        return self.connection.client

    @property
    def member(self) -> Member:
        """What it knows as a member."""
        assert self.connection is not None
        return self.connection.member

    @property
    def failure_elsewhere(self) -> Failure | None:
        """Why the job has failed, unless torch's agent reports its own worker."""
        failure = self.client.state.failure
        is_own = failure and failure.rank >= 0 and failure.nodes == (self.number,)
        return None if is_own else failure

    # --- its main thread, which stands for torch's agent, `handler` and `end` -----

    def _main(self) -> None:
        meeting = self.job.meeting(self.number, address_of(self.process.host))
        settings = self.job.settings(meeting)
        key = Key(KeyFile(), meeting.launch_id)
        key.secret = Secret(meeting.launch_id, self._key)
        listener = Listener(end_workers=self._kill_workers)
        connection = Connection(meeting, settings, {}, listener, key=key)
        request = replace(connection._request, agent=repr(self))
        self.connection, client = connection, connection.client
        connection._request = client.request = request
        patched: Any = client
        patched._changed = Changed(self.process, client)
        patched._on_fault = self.process.errors.append
        self._send, patched.send = client.send, self._send_or_confirm
        failure = None
        try:
            self._run(connection.open(JOIN))
        except GaveUp as problem:
            failure = problem.failure
        except (CoordinatorNotFoundError, JobFailedError, LaunchError):
            pass
        self.is_leaving = True
        if failure is None or failure.kind is not Kind.SIGNAL:
            self._end_workers()
        if failure is not None and client.state.is_accepted:
            client.fail(failure)
        self._end_workers()
        connection.close(
            0 if settings.has_spares or self.number == 0 else settings.kill
        )
        state = client.state
        finished = FINISHED if state.has_finished else None
        self.ended = state.failure.kind if state.failure else finished

    def _run(self, client: Client) -> None:
        while True:
            self._check_health(client)
            try:
                go, rank, nodes = client.take_part(self._open_store)
            except RoundOverError:
                continue
            except NotNeededError:
                return
            self.job.began(self, go, rank, nodes)
            self.order = ""
            client.wait_for(
                lambda: self.order or client.state.is_over or self.failure_elsewhere,
                math.inf,
            )
            self._sleep(0.5)
            if (failure := self.failure_elsewhere) is not None:
                raise JobFailedError(failure)
            if self.order == "finish" and not client.state.is_over:
                self.workers = None
                client.finish()
                return
            self._restart(client, rank, nodes)

    def _restart(self, client: Client, rank: int, nodes: int) -> None:
        failure = None
        if self.order == "fail":
            part = WorkerPart(rank, nodes, 0)
            failure = Failure(Kind.WORKER, (self.number,), 1, time=1.0, worker=part)
            client.worker_failed(failure)
        self._end_workers()
        has_restarts = client.state.next_round - 1 < self.job.max_restarts
        if failure is not None and not has_restarts:
            raise GaveUp(failure)

    def _check_health(self, client: Client) -> None:
        if not self.job.spares or client.member.unhealthy:
            return
        if self.health == "hangs":
            self.process.wait(CHECK)
        else:
            self._sleep(1)
        if self.health and client.state.failure is None:
            client.member.unhealthy = self.health
            client.send(Unhealthy(self.health))

    def _send_or_confirm(self, message: FromAgent) -> None:
        if isinstance(message, Confirm):
            self.job.confirmed.add((self.number, (message.round, message.term)))
        self._send(message)

    def _open_store(self) -> Store:
        stores = self.job.stores
        opened = self.number, self.generation, self.member.record.age
        assert opened not in stores.values(), "a second store of a round"
        store = address_of(self.number), PORT + 1 + len(stores)
        stores[store] = opened
        if self.store_takes:
            self.process.wait(self.store_takes)
        return store

    def _sleep(self, seconds: float) -> None:
        """Wait, now and then: as the job's luck is."""
        if self.job.network.random.random() < self.job.delays:
            self.process.wait(seconds)

    def _end_workers(self) -> None:
        if self.workers is not None:
            self.are_ending = True
            self._sleep(KILL)
            self.workers, self.are_ending = None, False

    def _kill_workers(self) -> None:
        self.workers = None

    # --- what happens to it -------------------------------------------------------

    def command(self, order: str) -> None:
        """Let its workers fail, or finish."""
        if self.workers is not None and self.process.is_alive:
            self.order = order
            self.process.notify()

    def give_up(self, kind: Kind, **details: Any) -> None:
        """Let it end with a failure of its own."""
        if self.process.is_alive and not self.is_leaving:
            failure = Failure(kind, (self.number,), **details)
            self.process.interrupt(GaveUp(failure))


class VirtualJob:
    """The agents of a job.

    Attributes:
        delays: The share of times at which an agent is slow.
        is_finishing: Whether some workers have finished.
        stores: By address: the node, its generation, and the age of its record.
        confirmed: Nodes, and the ages of the records that they have confirmed.
        worlds: The store and the nodes of each round that began.
    """

    silence = SILENCE

    def __init__(
        self,
        network: Network,
        nodes: int,
        spares: int,
        max_restarts: int = 50,
        late: float = 0.05,
    ) -> None:
        self.network, self.nodes, self.spares = network, nodes, spares
        self.max_restarts = max_restarts
        self.is_finishing = False
        self.stores: dict[Store, tuple[int, int, Age]] = {}
        self.confirmed: set[tuple[int, Age]] = set()
        self.worlds: dict[int, tuple[Store, tuple[int, ...]]] = {}
        drawn = network.random
        self.delays = drawn.choice((0.1, 0.3, 1))
        self.agents: list[Agent] = []
        for number in range(nodes):
            starts = drawn.random() * (JOIN if drawn.random() < late else 1)
            self.agents.append(Agent(self, number, starts=starts))

    def meeting(self, number: int, address: str) -> Meeting:
        """Return the plan of a node's meeting with the others."""
        names = tuple(f"n{each}" for each in range(self.nodes))
        addresses = tuple(address_of(each) for each in range(self.nodes))
        return Meeting(
            SCHEDULER,
            self.nodes,
            number,
            launch_id="19.0",
            hosts=names,
            fast_hosts=addresses,
            spares=Spares(self.spares, SPARE_AFTER, "check", CHECK),
            connect_host=addresses[0],
            ports=(PORT,),
            coordinator=0,
            is_coordinator=number == 0,
            local_address=address,
            listen=(address, PORT),
        )

    def settings(self, meeting: Meeting) -> Settings:
        """Return what all agents agree on."""
        return replace(
            connections.settings_of(meeting, "mine", self.silence),
            max_restarts=self.max_restarts,
            join_timeout=JOIN,
            kill=KILL + MARGIN,
        )

    def start_again(self, number: int) -> None:
        """Start an agent again that was killed, with all that it has forgotten."""
        old = self.agents[number]
        if not old.process.is_alive and old.ended is None:
            self.network.power_on(number)
            self.agents[number] = Agent(self, number, old.generation + 1)

    # --- what must hold -----------------------------------------------------------

    def began(self, agent: Agent, go: Go, rank: int, nodes: int) -> None:
        """See that a round that begins on a node is the only one that runs."""
        number, active = go.round, agent.client.state.active
        assert agent in self.agents, "a stranger"
        assert agent.round is None or agent.round < number, "a round begins once"
        agent.round = number
        assert number <= self.max_restarts
        assert active[rank] == agent.number
        assert nodes == len({*active}) == self.nodes - self.spares
        world = go.store, active
        assert self.worlds.setdefault(number, world) == world, "two worlds of a round"
        first, _, age = self.stores[go.store]
        assert (first, age[0]) == (active[0], number), "another store"
        assert not self.spares or agent.member.record.age == age
        to_confirm = active if self.spares else active[:1]
        assert {(node, age) for node in to_confirm} <= self.confirmed, "a hole"
        agent.workers = number
        self.check()

    def check(self) -> None:
        """See that workers of the latest round run, and no others.

        The workers of a suspended process end soon after it runs again.
        """
        for agent in self.alive:
            process, latest = agent.process, max(self.worlds, default=None)
            notices = self.network.now - process.resumed >= NOTICED + process.late
            if notices and not process.is_suspended:
                older = f"{agent} runs older workers than of round {latest}"
                assert agent.workers in {None, latest}, older

    def world(self) -> tuple[int, ...] | None:
        """Return who runs workers of the latest round, by node rank; or None."""
        at_work = [a for a in self.alive if a.workers is not None]
        rounds = {a.workers for a in at_work if a.workers is not None}
        if len(rounds) != 1 or any(a.are_ending or a.order for a in at_work):
            return None
        _, active = self.worlds[rounds.pop()]
        return active if {a.number for a in at_work} == {*active} else None

    @property
    def alive(self) -> list[Agent]:
        """The agents whose processes have not ended."""
        return [agent for agent in self.agents if agent.process.is_alive]

    def check_endings(self) -> None:
        """See that all agents whom one coordinator told the end know the same one."""
        told = [a.client.state.ending for a in self.agents if a.connection]
        certain = {
            (ending.takeovers, ending.failure is None)
            for ending in told
            if ending is not None and ending.is_certain
        }
        assert len(certain) == len({takeovers for takeovers, _ in certain}), told


def at_rest(job: VirtualJob) -> tuple[int, ...] | None:
    """Let time pass until there is a world, or all have ended; return the world."""
    for _ in range(ENOUGH):
        job.network.run(1)
        if job.world() is not None or not job.alive:
            break
    return job.world()


def at_work(
    network: Network, nodes: int, spares: int, silence: int = SILENCE
) -> VirtualJob:
    """Return a job whose first round runs."""
    job = VirtualJob(network, nodes, spares, late=0)
    job.silence = silence
    assert at_rest(job) == tuple(range(nodes - spares))
    return job


# --- what happens to a job: see `Action` ----------------------------------------------


def pass_a_moment(job: VirtualJob, _one: int, _other: int, share: float) -> None:
    job.network.run(1 + share * 5)


def pass_a_while(job: VirtualJob, _one: int, _other: int, share: float) -> None:
    job.network.run(1 + share * 3 * LEASE)


def kill(job: VirtualJob, one: int, _other: int = 0, share: float = 0) -> None:
    """Kill a node's agent, or let its host lose power."""
    if share < 0.7:
        job.agents[one].process.end()
    else:
        job.network.power_off(one)


def start_again(job: VirtualJob, one: int, *_: float) -> None:
    """Start an agent again, which has forgotten what it has confirmed.

    Of two sets of N members, enough must have forgotten nothing. Without spares, nobody
    can take over from the first node.
    """
    active = job.nodes - job.spares
    if job.spares:
        forgetful = sum(agent.generation for agent in job.agents) + 1
        may_start = forgetful < active - job.spares
    else:
        may_start = one != 0
    if may_start:
        job.start_again(one)


def _ways(job: VirtualJob, one: int, share: float) -> set[tuple[int, int]]:
    """Return pairs: from a node to all others, or back, or both."""
    others = [each for each in range(job.nodes) if each != one]
    there = {(one, each) for each in others} if share < 0.7 else set()
    back = {(each, one) for each in others} if share > 0.3 else set()
    return there | back


def cut(job: VirtualJob, one: int, _other: int = 0, share: float = 0) -> None:
    """Cut a node off from all others."""
    job.network.cut |= _ways(job, one, share)


def separate(job: VirtualJob, one: int, other: int, share: float) -> None:
    """Cut two nodes off from each other: in one direction or both."""
    job.network.cut.add((one, other))
    if share > 0.3:
        job.network.cut.add((other, one))


def reject(job: VirtualJob, one: int, _other: int = 0, share: float = 0) -> None:
    """Let a firewall reject what a node sends, or what it is sent, or both."""
    job.network.rejecting |= _ways(job, one, share)


def heal(job: VirtualJob, *_: float) -> None:
    """Let the network be well."""
    job.network.heal()


def break_links(job: VirtualJob, one: int, other: int, *_: float) -> None:
    """Reset all connections of two nodes."""
    job.network.break_between(one, other)


def suspend(job: VirtualJob, one: int, _other: int = 0, share: float = 0) -> None:
    """Suspend a process, or all of its host, whose clock stops."""
    job.agents[one].process.suspend(stops_clock=share < 0.5)


def resume(job: VirtualJob, one: int, *_: float) -> None:
    """Let a suspended process or host run again."""
    job.agents[one].process.resume()
    job.network.at(job.network.now + NOTICED, job.check)


def pause(job: VirtualJob, one: int, other: int, share: float) -> None:
    """Suspend a node for a while."""
    suspend(job, one, other, share * 7 % 1)
    job.network.run(1 + share * 2 * LEASE)
    resume(job, one, other, share)


def slow_down(job: VirtualJob, one: int, *_: float) -> None:
    job.agents[one].process.late = SLOW


def speed_up(job: VirtualJob, one: int, *_: float) -> None:
    job.agents[one].process.late = 0


def fail_a_worker(job: VirtualJob, one: int, *_: float) -> None:
    job.agents[one].command("fail")


def finish(job: VirtualJob, one: int, *_: float) -> None:
    """Let a node's workers finish."""
    job.agents[one].command("finish")
    job.is_finishing = True


def finish_all(job: VirtualJob, *_: float) -> None:
    for agent in job.agents:
        finish(job, agent.number)


def give_up(job: VirtualJob, one: int, *_: float) -> None:
    job.agents[one].give_up(Kind.AGENT, text="no disk")


def stop(job: VirtualJob, one: int, _other: int = 0, share: float = 0) -> None:
    """Send SIGTERM: to one agent, or to all."""
    for agent in [job.agents[one]] if share < 0.5 else job.agents:
        agent.give_up(Kind.SIGNAL, code=15)


def be_unwell(job: VirtualJob, one: int, _other: int = 0, share: float = 0) -> None:
    """Let a node's health check fail, or hang."""
    job.agents[one].health = "fails" if share < 0.5 else "hangs"


def slow_store(job: VirtualJob, one: int, _other: int = 0, share: float = 0) -> None:
    job.agents[one].store_takes = share * 10


ACTIONS: tuple[Action, ...] = (
    *(pass_a_moment, pass_a_while) * 8,
    *(heal, resume) * 5,
    *(cut, separate, reject, pause, slow_down, break_links, start_again) * 3,
    *(kill, suspend, speed_up, fail_a_worker, finish, slow_store) * 2,
    *(fail_a_worker,) * 2,
    *(finish_all, give_up, be_unwell, stop),
)


def play(seed: int) -> VirtualJob:
    """Let things happen to a job, and see that it is one world, or ends everywhere.

    The job itself sees what begins.
    """
    drawn = random.Random(seed)  # noqa: S311 - no secret
    with Network(seed) as network:
        job = VirtualJob(network, *drawn.choice(SIZES), drawn.choice((50, 50, 50, 2)))
        if drawn.random() < 0.1:
            Agent(job, drawn.randrange(job.nodes), stranger_on=job.nodes)
        if drawn.random() < 0.7:
            at_rest(job)
        often = drawn.choices(range(job.nodes), k=3)  # one may have several faults
        for _ in range(STEPS):
            one = drawn.choice([*often, drawn.randrange(job.nodes)])
            other = drawn.randrange(job.nodes)
            drawn.choice(ACTIONS)(job, one, other, drawn.random())
        come_to_rest(job)
    return job


def come_to_rest(job: VirtualJob) -> None:
    """See that a job whose network is well is one world, and ends everywhere."""
    heal(job)
    job.network.late = 0
    for agent in job.agents:
        resume(job, agent.number)
        agent.process.late = agent.store_takes = 0
    job.network.run(3 * SILENCE)  # until all losses are noticed
    left: list[Agent] = []
    if not job.is_finishing and (world := at_rest(job)) is not None:
        job.network.run(3 * SILENCE)
        assert job.world() == world
        left = job.alive
        assert len({agent.member.follows for agent in left}) == 1, left
    finish_everywhere(job)
    assert {agent.ended for agent in left} <= {FINISHED}, left
    job.check_endings()


def finish_everywhere(job: VirtualJob) -> None:
    """Let all workers finish; see that all agents end."""
    for _ in range(ENOUGH):
        finish_all(job)
        job.network.run(1)
        if not job.alive:
            return
    raise AssertionError(f"{job.alive} wait")


if __name__ == "__main__":
    for number in range(*map(int, sys.argv[1:])):
        # The last number in the output fails.
        print(f"seed {number}", end="\r", flush=True)
        play(number)

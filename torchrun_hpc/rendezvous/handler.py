"""What torch's elastic agent sees: a rendezvous handler, and a store."""

from __future__ import annotations

import errno
import os
import resource
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.utils.distributed import get_free_port

from torchrun_hpc import __version__
from torchrun_hpc.commandline import rdzv_conf
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.network import join_endpoint, port_holder
from torchrun_hpc.planning import endpoints
from torchrun_hpc.planning.inputs import SCHEDULER
from torchrun_hpc.planning.messages import nested
from torchrun_hpc.rendezvous import messages, open_files
from torchrun_hpc.rendezvous.client import (
    Client,
    CoordinatorAddress,
    CoordinatorNotFound,
    JobFailed,
    Refused,
    RoundOver,
)
from torchrun_hpc.rendezvous.coordinator import Settings
from torchrun_hpc.rendezvous.protocol import Failure, JoinRequest, Refusal
from torchrun_hpc.rendezvous.server import UNKNOWN_PEERS, CoordinatorServer, listen
from torchrun_hpc.reporting import report
from torchrun_hpc.setting import Setting
from torchrun_hpc.torch_compat import capabilities

if TYPE_CHECKING:
    import argparse
    import socket
    from collections.abc import Callable, Mapping, Sequence

    from torchrun_hpc.planning.launch_plan import LaunchPlan

_torch: Any = distributed

# Torch's names in --rdzv-conf, and what they are here where it has none.
_JOIN_TIMEOUT = "join_timeout"
_BEAT, _MISSED_BEATS = "keep_alive_interval", "keep_alive_max_attempt"
SILENCE_TIMEOUT = 120
_SHORTEST_SILENCE = 5


# Seconds to find out who has a port.
_GLANCE = 2


class JobFailedError(RendezvousError):
    """The job has failed; this agent is to stop its workers."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.kind.value)
        self.failure = failure


class RoundOverError(RendezvousError):
    """The round is over before the workers could start: join the next one."""


class CoordinatorMissingError(RendezvousConnectionError):
    """The head was not there in time."""

    def __init__(self, said: Message) -> None:
        super().__init__(said.text)
        self.said = said


class SchedulerRendezvous(RendezvousHandler):
    """Meets the other nodes of a job whose nodes are known.

    Args:
        plan: What is planned on this node.
        parameters: Torch's: the id, ``join_timeout``, and, if typed, the two numbers
            that say how long an agent may be silent.
        max_restarts: How often the job may restart.
    """

    def __init__(
        self, plan: LaunchPlan, parameters: RendezvousParameters, max_restarts: int
    ) -> None:
        self._plan = plan
        self._parameters = parameters
        self._terms = _terms(plan, parameters, max_restarts)
        # As torch's c10d does it.
        self._shares_store = (
            capabilities.RENDEZVOUS_INFO.present
            and capabilities.LISTENING_SOCKET.present
            and os.environ.get(capabilities.UNSHARED) != "1"
        )
        self._head: CoordinatorServer | None = None
        self._member: Client | None = None
        self._workers_store: Any = None

    # --- what torch asks ----------------------------------------------------------

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return SCHEDULER

    def get_run_id(self) -> str:
        """Return the id that was typed, or derived from the scheduler."""
        return str(self._parameters.run_id)

    @property
    def use_agent_store(self) -> bool:
        """Whether node 0 opens a store for the workers, instead of worker 0."""
        return self._shares_store

    def next_rendezvous(self) -> Any:
        """Wait until all nodes are ready for the next round.

        Raises:
            JobFailedError: There will be none.
            LaunchError: This node cannot take part.
        """
        member = self.connect()
        mine = self._open_workers_store() if self._plan.world.node_rank == 0 else None
        try:
            go = member.join(mine)
        except JobFailed as failed:
            raise JobFailedError(failed.failure) from None
        address, port = _address(go)
        known = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        store = AgentStore(member, known)
        rank, nodes = self._plan.world.node_rank, self._plan.world.nodes
        return capabilities.rendezvous_info(store, rank, nodes, address, port)

    def num_nodes_waiting(self) -> int:
        """Say whether there is to be another round; this costs nothing.

        Raises:
            JobFailedError: The job has failed on another node, or for all.
        """
        if self._member is None:
            return 0
        failure = self._member.failure
        # Of its own workers' failure torch's agent makes a report.
        if failure is not None and not self._is_own_worker(failure):
            raise JobFailedError(failure)
        return int(self._member.is_over)

    def is_closed(self) -> bool:
        """Say whether there will be no other round."""
        return self.failure is not None

    def set_closed(self) -> None:
        """Do nothing: a job ends when all have finished, or one has failed."""

    def shutdown(self) -> bool:
        """Leave, unless something went wrong: the launcher has to tell the others."""
        if sys.exc_info()[0] is None:
            self.leave()
        return True

    # --- what the launcher asks ---------------------------------------------------

    @property
    def failure(self) -> Failure | None:
        """Why the job failed."""
        return None if self._member is None else self._member.failure

    @property
    def took_part(self) -> bool:
        """Whether the head let this agent in."""
        return self._member is not None and self._member.is_in

    @property
    def restarts(self) -> int:
        """How often the job has been restarted, up to the round that runs."""
        return 0 if self._member is None else max(self._member.next_round - 1, 0)

    def connect(self, timeout: float | None = None) -> Client:
        """Find the head, and on its node, be it.

        Args:
            timeout: Seconds to look for it; by default those of ``join_timeout``.

        Raises:
            LaunchError: The head cannot listen, or does not let this agent in.
            HeadMissingError: It is not there in time.
            JobFailedError: The job has failed already.
        """
        if self._member is not None:
            return self._member
        ports = self._plan.rendezvous.ports
        needed = open_files.need(self._plan, has_store=self._shares_store)
        others = UNKNOWN_PEERS if self._plan.rendezvous.is_coordinator else 0
        limit = open_files.raise_limit(needed.all + others)
        if self._plan.rendezvous.is_coordinator:
            listening = self._listen()
            room = min(max(limit - needed.all, 0), UNKNOWN_PEERS)
            self._head = CoordinatorServer(listening, self._terms, room, _complain)
            self._head.start()
            ports = (listening.getsockname()[1],)
        where = CoordinatorAddress(
            host=self._plan.rendezvous.connect_host,
            ports=ports,
            timeout=self._terms.join_timeout if timeout is None else timeout,
            silence_timeout=self._terms.silence_timeout,
            notice_ports=endpoints.notice_ports(self._plan.launch_id),
        )
        self._member = Client(_hello(self._plan, self._terms), where, self._tell)
        try:
            self._member.connect()
        except Refused as refused:
            raise _refusal(refused, self._plan, self._terms) from None
        except CoordinatorNotFound as nothing:
            found = messages.head_search(str(nothing), self._plan)
            text = (
                f"no head node at {self._plan.rendezvous.endpoint} ({self._plan.rendezvous.connect_host}) within "
                f"{where.timeout:.0f} s (join_timeout): {found}"
            )
            raise CoordinatorMissingError(Message("HPC112", text)) from None
        except JobFailed as failed:
            raise JobFailedError(failed.failure) from None
        self._check_limit(limit, needed)
        return self._member

    def watch(self, workers: Mapping[int, Callable[[], int | None]]) -> None:
        """Report the first worker that ends with an error, see `Client.watch`."""
        if self._member is not None:
            self._member.watch(workers)

    def stop_watching(self, *, look: bool) -> None:
        """Take the end of workers for what was wanted, after a last look at them."""
        if self._member is not None:
            if look:
                self._member.look()
            self._member.watch({})

    def finish(self) -> bool:
        """Wait until all nodes have finished; say whether they did."""
        if self._member is None:
            return True
        try:
            self._member.finish()
        except JobFailed:
            return False
        return True

    def give_up(self, failure: Failure) -> None:
        """Let the others know that this agent gives up, and why."""
        if self._member is not None:
            self._member.fail(replace(failure, nodes=(self._plan.world.node_rank,)))

    def leave(self) -> None:
        """Leave; the head stays until all others know how it ended."""
        if self._member is not None:
            self._member.leave()
        if self._head is not None:
            self._head.close()
            self._head = None
        self._workers_store = None

    # --- parts --------------------------------------------------------------------

    def _is_own_worker(self, failure: Failure) -> bool:
        return failure.rank >= 0 and failure.nodes == (self._plan.world.node_rank,)

    def _listen(self) -> socket.socket:
        """Listen on the first port that is free.

        Raises:
            LaunchError: There is none.
        """
        address = (
            self._plan.rendezvous.listen[0] if self._plan.rendezvous.listen else None
        )
        problems = {}
        opened = None
        for port in self._plan.rendezvous.ports:
            try:
                opened = listen(address, port)
                break
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise  # it is not the port's fault
                problems[port] = error
        taken = [p for p, e in problems.items() if e.errno == errno.EADDRINUSE]
        if taken:
            self._check_no_other_head(taken)
        if opened is not None:
            return opened
        ports = self._plan.rendezvous.ports
        holder = f", taken by {port_holder(ports[0])}" if len(ports) == 1 else ""
        where = address or "any address"
        listed = "; ".join(f"port {p}: {e.strerror}" for p, e in problems.items())
        raise LaunchError(
            "HPC111",
            f"cannot listen on {where}: {listed}{holder}. Type another "
            "port: --rdzv_endpoint="
            f"{join_endpoint(self._plan.rendezvous.connect_host, 'PORT')}",
        )

    def _check_no_other_head(self, ports: Sequence[int]) -> None:
        """Find out whether who has one of the ports is an agent of this job, here.

        Raises:
            LaunchError: It is.
        """
        where = CoordinatorAddress(
            self._plan.rendezvous.connect_host, ports, _GLANCE, _GLANCE
        )
        other = Client(_hello(self._plan, self._terms), where, lambda _: None)
        try:
            other.connect()
        except Refused as refused:
            if refused.reason is not Refusal.STRANGER:
                raise _refusal(refused, self._plan, self._terms) from None
        except (CoordinatorNotFound, JobFailed):
            pass
        finally:
            other.leave()

    def _open_workers_store(self) -> tuple[str, int]:
        """Open a store for the workers of one round; return where it is.

        Each round has its own, so that no worker finds what a dead one has left.
        """
        self._workers_store = None
        address = str(self._parameters.local_addr)
        if not self._shares_store:
            return address, int(get_free_port())  # type: ignore[no-untyped-call]
        listening = listen(self._plan.rendezvous.local_address, 0)
        port = listening.getsockname()[1]
        self._workers_store = _torch.TCPStore(
            self._plan.rendezvous.local_address or "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            **capabilities.listening_on(listening),
        )
        return address, port

    def _check_limit(self, limit: int, needed: open_files.Need) -> None:
        """Find out whether there are enough open files, once others can hear of it.

        Raises:
            LaunchError: They are not enough for this agent.
        """
        if limit >= needed.all:
            return
        error = LaunchError("HPC122", open_files.too_few(limit, needed, self._plan))
        if limit < needed.least:
            raise error
        report.line(Message(error.code, str(error)), sys.stderr, "warning")

    def _tell(self, message: Mapping[str, Any]) -> None:
        said = messages.told(message, self._plan)
        if said is not None:
            report.line(said, sys.stderr, "warning" if "sites" in message else "")


class AgentStore(_torch.Store):  # type: ignore[misc]
    """The store in which torch's agents tell each other about their workers.

    It is kept by the head. A wait ends when the job fails.

    Args:
        member: Asks the head.
        known: Keys that need no asking, and what they are, whatever is set.
    """

    def __init__(self, member: Client, known: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._member = member
        self._known = known or {}
        self._timeout = timedelta(seconds=300)

    @property
    def timeout(self) -> timedelta:
        """How long to wait for a key."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait so long for a key."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set one key."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set some keys."""
        texts = {k: _text(v) for k, v in zip(keys, values, strict=True)}
        new = {k: text for k, text in texts.items() if k not in self._known}
        if new:
            self._ask({"set": new})

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return it."""
        return int(self._ask({"add": key, "by": amount}))

    def check(self, keys: Sequence[str]) -> bool:
        """Say whether all keys are there."""
        asked = self._unknown(keys)
        return not asked or bool(self._ask({"check": asked}))

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is there."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of some keys, once all are there."""
        asked = self._unknown(keys)
        answers = self._ask({"get": asked}) if asked else []
        values = {**dict(zip(asked, answers, strict=True)), **self._known}
        return [str(values[key]).encode("latin-1") for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for some keys."""
        asked = self._unknown(keys)
        if asked:
            self._ask({"get": asked}, timeout)

    def _unknown(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key not in self._known]

    def _ask(
        self, question: Mapping[str, Any], timeout: timedelta | None = None
    ) -> Any:
        limit = self._timeout if timeout is None else timeout
        try:
            return self._member.ask(question, limit.total_seconds())
        except TimeoutError:
            raise capabilities.STORE_ERROR(
                f"no answer within {limit.total_seconds():.0f} s"
            ) from None
        except RoundOver:
            raise RoundOverError from None
        except JobFailed as failed:
            raise JobFailedError(failed.failure) from None


@dataclass(eq=False)
class Creator:
    """Makes the handler when torch asks for it, and knows it afterwards.

    Torch's ``--rdzv-conf`` has no room for a plan, and its registry keeps the first
    creator of a name, unless the other one is equal: all of ours are.
    """

    plan: LaunchPlan
    max_restarts: int
    handler: SchedulerRendezvous | None = None

    def __call__(self, parameters: RendezvousParameters) -> SchedulerRendezvous:
        """Make the handler."""
        self.handler = SchedulerRendezvous(self.plan, parameters, self.max_restarts)
        return self.handler

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Creator)

    __hash__ = object.__hash__


def parameters(args: argparse.Namespace, plan: LaunchPlan) -> RendezvousParameters:
    """Return what torch makes of its arguments."""
    conf = rdzv_conf.parse(Setting(args.rdzv_conf, "--rdzv_conf"))
    nodes = plan.world.nodes
    endpoint, local = args.rdzv_endpoint, getattr(args, "local_addr", None)
    return RendezvousParameters(
        SCHEDULER, endpoint, args.rdzv_id, nodes, nodes, local, **conf
    )


def register(plan: LaunchPlan, max_restarts: int) -> Creator:
    """Let torch find this rendezvous under its name.

    Args:
        plan: What is planned on this node.
        max_restarts: How often the job may restart.
    """
    creator = Creator(plan, max_restarts)
    rendezvous_handler_registry.register(SCHEDULER, creator)
    return creator


def _terms(
    plan: LaunchPlan, parameters: RendezvousParameters, max_restarts: int
) -> Settings:
    beat, missed = parameters.get_as_int(_BEAT), parameters.get_as_int(_MISSED_BEATS)
    silence = SILENCE_TIMEOUT
    if beat is not None or missed is not None:
        # Torch's defaults; and agents must have time to answer.
        silence = max((beat or 5) * (missed or 3), _SHORTEST_SILENCE)
    return Settings(
        job=plan.launch_id,
        run_id=str(parameters.run_id),
        nodes=plan.world.nodes,
        head=plan.world.node_rank if plan.rendezvous.is_coordinator else -1,
        max_restarts=max_restarts,
        join_timeout=parameters.get_as_int(_JOIN_TIMEOUT) or 0,
        silence_timeout=silence,
    )


def _hello(plan: LaunchPlan, terms: Settings) -> JoinRequest:
    return JoinRequest(
        job=terms.job,
        run_id=terms.run_id,
        nodes=terms.nodes,
        rank=plan.world.node_rank,
        host=plan.world.hosts[plan.world.node_rank],
        pid=os.getpid(),
        release=__version__,
        site=str(plan.site.value) if plan.site else "",
    )


def _complain(reason: str) -> None:
    """Say that a connection to the head has to wait."""
    text = (
        f"cannot take a connection of another node: {reason} (ulimit -n is "
        f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}); trying on"
    )
    report.line(Message("HPC162", text), sys.stderr, "warning")


def _address(go: Mapping[str, Any]) -> tuple[str, int]:
    """Return where the workers meet.

    Raises:
        RendezvousError: The head did not say.
    """
    store = go.get("store")
    if (
        isinstance(store, list)
        and [type(part) for part in store] == [str, int]
        and 0 < store[1] < 2**16
    ):
        return store[0], store[1]
    raise RendezvousError("the head did not say where the workers meet")


def _text(value: str | bytes) -> str:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return data.decode("latin-1")


def _refusal(refused: Refused, plan: LaunchPlan, terms: Settings) -> LaunchError:
    """Say why the head did not let this agent in."""
    where = join_endpoint(plan.rendezvous.connect_host, refused.port)
    head = f"the head node at {where}"
    value = refused.value
    run_id = value if refused.reason is Refusal.RUN_ID else terms.run_id
    inside = nested(os.environ, run_id)
    if inside is not None and refused.reason in (Refusal.TAKEN, Refusal.RUN_ID):
        return inside
    if refused.reason is Refusal.TAKEN:
        return LaunchError(
            "HPC115",
            f"{head} has another agent of node {plan.world.node_rank} already: {value}. "
            "Start torchrun_hpc once on each node",
            others_know=True,
        )
    if refused.reason is Refusal.VERSION:
        return LaunchError(
            "HPC116",
            f"{head} has torchrun_hpc {value}, which speaks another protocol than "
            f"{__version__} here. Load the same environment on all nodes",
            others_know=True,
        )
    if refused.reason is Refusal.RUN_ID:
        return LaunchError(
            "HPC117",
            f"--rdzv_id={terms.run_id} here, but {value} on {head}. Was it $RANDOM, "
            "expanded on each node? Leave the option out",
            others_know=True,
        )
    if refused.reason is Refusal.NODES:
        return LaunchError(
            "HPC118",
            f"this is node {plan.world.node_rank} of {plan.world.nodes}, but {head} waits for "
            f"{value}. Start one job step with the same command on all nodes",
            others_know=True,
        )
    return LaunchError(
        "HPC119",
        f"{head} is of another job than this one, {terms.job}. Type another port, or "
        "leave the endpoint out",
    )

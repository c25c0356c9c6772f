"""What PyTorch's elastic agent uses: rendezvous handler, store, and health check."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.utils.distributed import get_free_port

from torchrun_hpc import limits, waiting
from torchrun_hpc.errors import Message
from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Failure, Kind, ending
from torchrun_hpc.failures.worker import end_of, exit_code_of
from torchrun_hpc.host import capabilities
from torchrun_hpc.names import placed
from torchrun_hpc.rendezvous import connection, messages
from torchrun_hpc.rendezvous.client import Listener, never
from torchrun_hpc.rendezvous.connection import Connection
from torchrun_hpc.rendezvous.errors import (
    CoordinatorNotFoundError,
    JobFailedError,
    RoundOverError,
)
from torchrun_hpc.rendezvous.messages import Replaced, Restart
from torchrun_hpc.rendezvous.protocol import Add, Check, Ended, Get, Set, Unhealthy
from torchrun_hpc.rendezvous.server import listen
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.console import is_reporter, reports_wait_for
from torchrun_hpc.variables import MASTER_ADDR, MASTER_PORT, UNSHARED
from torchrun_hpc.wire import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrun_hpc.failures.failure import Summary
    from torchrun_hpc.failures.report import Explain
    from torchrun_hpc.failures.watch import Attempt
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.rendezvous.client import Client, JobState
    from torchrun_hpc.rendezvous.messages import News
    from torchrun_hpc.rendezvous.protocol import Settings, Store, StoreRequest

_torch: Any = distributed
# Options with which node rank 0 opens the workers' store.
_SERVER = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}

_LONGEST = 150  # characters of a health check's last line


class CoordinatorMissingError(rendezvous.RendezvousConnectionError):
    """The coordinator was not found in time. `message` is for the user."""

    def __init__(self, message: Message) -> None:
        super().__init__(message.text)
        self.message = message


class SchedulerRendezvous(rendezvous.RendezvousHandler):
    """The rendezvous of a job.

    `address` is the workers' store's, if this node opens it. For `explain`, see
    `report.Explain`.
    """

    def __init__(  # noqa: PLR0913 - the last three are of few
        self,
        meeting: Meeting,
        settings: Settings,
        environ: Mapping[str, str],
        *,
        address: str = "",
        replies: Mapping[str, Callable[[Any], Any]] | None = None,
        end_workers: Callable[[], None] = lambda: None,
        explain: Explain = lambda first: (first, ()),
    ) -> None:
        self._explain = explain
        self.run_id = settings.run_id
        self._meeting = meeting
        self._settings = settings
        self._address = address
        # As in PyTorch's c10d.
        self._shares_store = (
            capabilities.RENDEZVOUS_INFO.present
            and capabilities.LISTENING_SOCKET.present
            and environ.get(UNSHARED) != "1"
        )
        self._connection = Connection(
            meeting,
            settings,
            environ,
            Listener(self._tell, self._report, end_workers=end_workers),
            replies=replies,
        )
        self.client = self._connection.client
        self._workers_store: list[Any] = []
        self._opening: threading.Thread | None = None

    # --- what torch asks ----------------------------------------------------------

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return self._meeting.backend

    def get_run_id(self) -> str:
        """Return the user's id, or the launch id."""
        return self.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether node 0 opens a store for the workers, instead of worker 0."""
        return self._shares_store

    def next_rendezvous(self) -> Any:
        """Wait for a round in which this node has workers.

        Raise `NotNeededError` or `JobFailedError` if there is none, or `LaunchError`.
        """
        client = self.connect()
        while True:
            self._check_health()
            with suppress(RoundOverError):
                go, rank, nodes = client.take_part(self._open_workers_store)
                break
        address, port = go.store
        fixed = {MASTER_ADDR: address, MASTER_PORT: str(port)}
        store = AgentStore(client, fixed)
        return capabilities.rendezvous_info(store, rank, nodes, address, port)

    def num_nodes_waiting(self) -> int:
        """Return 1 if another round must begin, otherwise 0, without network traffic.

        Raise `JobFailedError` if the job has failed on another node.
        """
        failure, this_node = self.failure, (self._meeting.node_rank,)
        if failure is not None:
            # PyTorch's agent reports its own workers' failures itself.
            is_of_agent = failure.rank >= 0 and failure.nodes == this_node
            if not is_of_agent:
                raise JobFailedError(failure)
        return int(self.state.is_over)

    def is_closed(self) -> bool:
        """Return whether no other round will follow."""
        return self.failure is not None

    def set_closed(self) -> None:
        """Do nothing: a job ends when all have finished, or one has failed."""

    def shutdown(self) -> bool:
        """Leave. If an error is being raised, the launcher informs the others first."""
        if sys.exc_info()[0] is None:
            self.leave()
        return True

    # --- what the launcher and the agent ask --------------------------------------

    @property
    def meeting(self) -> Meeting:
        """The meeting; on the coordinator's node, with the names of joined nodes."""
        server = self._connection.server
        names = server.coordinator.members.hosts.copy() if server else {}
        return replace(self._meeting, hosts=placed(self._meeting.hosts, names))

    @property
    def has_spares(self) -> bool:
        """Whether the job continues without a lost node."""
        return self._settings.has_spares

    @property
    def state(self) -> JobState:
        """The agent's knowledge of the job."""
        return self.client.state

    @property
    def failure(self) -> Failure | None:
        """Why the job failed."""
        return self.state.failure

    @property
    def hangs(self) -> bool:
        """Whether the round has ended because a collective failed."""
        state, failure = self.state, self.failure
        return state.is_over and state.hangs if failure is None else failure.is_hang

    @property
    def _ending(self) -> Ended:
        return self.state.ending or Ended(is_certain=False)

    @property
    def reports(self) -> bool:
        """Whether this node reports how the job has ended."""
        failure, meeting = self.failure, self._meeting
        is_alone = failure is not None and failure.kind is Kind.COORDINATOR
        if self.has_spares:
            return is_alone or (self.is_first and self.state.ending is not None)
        if is_alone:
            return reports_wait_for(meeting.node_rank, meeting.coordinator)
        return self.is_first

    @property
    def is_first(self) -> bool:
        """Whether this node does what only one node must do while the job runs."""
        return self.client.member.coordinates

    @property
    def is_certain(self) -> bool:
        """Whether the job cannot continue if this node gives up."""
        if self._meeting.in_process:  # each task may have such a world
            return is_reporter(self._meeting.report_rank)
        return not self.has_spares or self._ending.is_certain

    @property
    def out_at_end(self) -> Sequence[int]:
        """Ranks of the nodes that the next job should exclude."""
        return self._ending.out_at_end

    @property
    def takeovers(self) -> int:
        """How often another node took over as the coordinator, until the job ended."""
        return self._ending.takeovers

    @property
    def took_part(self) -> bool:
        """Whether the coordinator has accepted this agent."""
        return self.state.is_accepted

    @property
    def is_unreported(self) -> bool:
        """Whether a worker has failed, and nobody has reported it."""
        return self.state.is_unreported

    @property
    def restarts(self) -> int:
        """How often the job has been restarted, up to the current round."""
        return max(self.state.next_round - 1, 0)

    def connect(self, timeout: float | None = None) -> Client:
        """Start the coordinator, if this is its node, and connect to it.

        Raise `LaunchError`, `CoordinatorMissingError` or `JobFailedError`.
        """
        if self.took_part:
            return self.client
        limit = self._settings.join_timeout if timeout is None else timeout
        try:
            return self._connection.open(limit)
        except CoordinatorNotFoundError as error:
            message = messages.coordinator_missing(error, limit, self._meeting)
            raise CoordinatorMissingError(message) from None

    def worker_failed(self, failure: Failure, _: Attempt) -> None:
        """Inform the coordinator of a failed worker."""
        self.client.worker_failed(failure)

    def finish(self) -> None:
        """Wait until all nodes have finished, or the job has failed."""
        if self.took_part:
            with suppress(JobFailedError):
                self.client.finish()

    def give_up(self, failure: Failure) -> None:
        """Inform the others that this agent gives up, and why."""
        self.client.fail(replace(failure, nodes=(self._meeting.node_rank,)))

    def leave(self, is_urgent: Callable[[], bool] = never) -> None:
        """Disconnect. The coordinator ends once all agents know how the job ended.

        The other agents end after it. They stop waiting when this `is_urgent`.
        """
        # With spares, a job may continue without this node.
        may_end = self.reports or self.has_spares
        self._connection.close(0 if may_end else self._settings.kill, is_urgent)
        self._workers_store = []
        if self._opening is not None:
            self._opening.join(limits.WORKERS_STORE_TIMEOUT)
            if self._opening.is_alive():
                text = "waiting for the name server before exit: PyTorch is still "
                text += "looking up the name of this node's address"
                console.write(Message("HPC176", text))
            self._opening = None

    # --- parts --------------------------------------------------------------------

    def _check_health(self) -> None:
        member, spares = self.client.member, self._meeting.spares
        if member.unhealthy or not spares.health_check:
            return
        limit = spares.health_check_timeout
        problem = check_health(spares.health_check, limit, lambda: self.failure)
        if problem and self.failure is None:
            member.unhealthy = problem
            self.client.send(Unhealthy(problem))

    def _open_workers_store(self) -> Store:
        """Open a new store, so that no worker finds values of the previous round."""
        opening: list[Any] = []
        self._workers_store = opening
        if not self._shares_store:
            return self._address, int(get_free_port())  # type: ignore[no-untyped-call]
        address = self._meeting.local_address
        opened = listen(address, 0)
        port = opened.getsockname()[1]
        # The store serves before its constructor returns, which takes long if no name
        # server answers. No daemon: C++ would abort this process if the constructor
        # returned while Python ends.
        self._opening = threading.Thread(
            target=self._serve,
            args=[
                opening,
                address or "127.0.0.1",
                port,
                capabilities.listening_on(opened),
            ],
            name="workers' store",
        )
        self._opening.start()
        return self._address, port

    def _serve(
        self, opening: list[Any], host: str, port: int, options: Mapping[str, Any]
    ) -> None:
        try:
            store = _torch.TCPStore(host, port, **_SERVER, **options)
        except Exception as error:  # noqa: BLE001 - the other nodes wait for it
            self.give_up(Failure(Kind.AGENT, text=f"the workers' store: {error}"))
        else:
            opening.append(store)

    def _report(self, summary: Summary) -> Failure:
        first, lines = self._explain(summary.first)
        report.write(summary, self.meeting, lines)
        return first

    def _tell(self, news: News) -> None:
        lines: Sequence[str] = ()
        if isinstance(news, Replaced | Restart) and news.because is not None:
            cause, lines = self._explain(news.because)
            news = replace(news, because=cause)
        message = news.words(self.meeting)
        if message is not None:
            kind = "warning" if news.is_warning(self._meeting) else "note"
            console.write(message, kind, report.indented(lines))


def settings_of(
    meeting: Meeting, run_id: str, asked: Options, shutdown: float = 0
) -> Settings:
    """Return what all agents agree on. `shutdown` is torch's limit in seconds."""
    conf = asked.rdzv_conf
    return replace(
        connection.settings_of(meeting, run_id, conf.silence_timeout),
        max_restarts=asked.max_restarts,
        join_timeout=conf.join_timeout or limits.JOIN_TIMEOUT,
        kill=int(shutdown) + limits.KILL_MARGIN,
    )


# --- the agents' store ------------------------------------------------------------


class AgentStore(_torch.Store):  # type: ignore[misc]
    """A store that the coordinator keeps. A wait ends when the job fails.

    Methods may raise `JobFailedError`, `RoundOverError`, or PyTorch's timeout error.
    The coordinator is never asked for `fixed` values.
    """

    def __init__(self, client: Client, fixed: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._client = client
        self._fixed = fixed or {}
        self._timeout = timedelta(seconds=limits.STORE_TIMEOUT)

    @property
    def timeout(self) -> timedelta:
        """How long to wait for a key."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long to wait for a key."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set one key."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        data = (v.encode() if isinstance(v, str) else bytes(v) for v in values)
        # JSON has no bytes; `multi_get` reverses this.
        texts = zip(keys, (each.decode("latin-1") for each in data), strict=True)
        new = {key: text for key, text in texts if key not in self._fixed}
        if new:
            self._ask(Set(new))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return it."""
        return int(self._ask(Add(key, amount)))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        asked = self._without_fixed(keys)
        return not asked or bool(self._ask(Check(asked)))

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it exists."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys, once all exist."""
        asked = self._without_fixed(keys)
        answers = self._ask(Get(asked)) if asked else []
        values = {**dict(zip(asked, answers, strict=True)), **self._fixed}
        return [str(values[key]).encode("latin-1") for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until several keys exist."""
        asked = self._without_fixed(keys)
        if asked:
            self._ask(Get(asked), timeout)

    def _without_fixed(self, keys: Sequence[str]) -> tuple[str, ...]:
        return tuple(key for key in dict.fromkeys(keys) if key not in self._fixed)

    def _ask(self, request: StoreRequest, timeout: timedelta | None = None) -> Any:
        limit = (self._timeout if timeout is None else timeout).total_seconds()
        try:
            return self._client.ask(request, limit)
        except TimeoutError:
            text = f"no answer within {limit:.0f} s"
            raise capabilities.STORE_ERROR(text) from None


# --- a node's health --------------------------------------------------------------


def check_health(command: str, limit: float, is_over: Callable[[], object]) -> str:
    """Run a command with ``/bin/sh``; return why the node is unhealthy, or nothing.

    Kill the command and its children after ``limit`` seconds, or if the job is over.
    """
    try:
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        process = subprocess.Popen(  # noqa: S602 - the user's own command
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return f"its health check cannot be started: {error.strerror}"
    try:
        waiting.until(lambda: exit_code_of(process.pid) is not None or is_over(), limit)
    finally:
        code = exit_code_of(process.pid)
        with suppress(OSError):  # nobody else has its number before it is collected
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # the kernel may keep it
            process.wait(limits.HEALTH_CHECK_KILL_TIMEOUT)
    with output:
        text = end_of(output.fileno()).decode(errors="backslashreplace")
    texts = [line.strip() for line in text.splitlines() if line.strip()]
    last = f": {printable(texts[-1], _LONGEST)}" if texts else ""
    if code is None:
        return f"its health check did not end within {limit:g} s{last}"
    return f"its health check {ending(code)}{last}" if code else ""

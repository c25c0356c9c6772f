"""What torch's agent sees of our rendezvous, and how a launch with it ends."""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import os
import re
import resource
import signal
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousParameters,
    registry,
)

from tests.support.loopback import failure_of, started, together
from tests.support.patience import PATIENCE, until
from tests.support.plans import PLAN, refused
from tests.support.ports import own_port
from tests.support.simulated_job import worker_failure
from torchrun_hpc import limits
from torchrun_hpc.agent import end, patches
from torchrun_hpc.agent.patches import Hooks
from torchrun_hpc.agent.patches.agent import ActTogether, extend
from torchrun_hpc.agent.signals import DeathSignals
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.failures.failure import Failure, Kind, WorkerPart
from torchrun_hpc.host import capabilities
from torchrun_hpc.options.options import Options
from torchrun_hpc.options.rdzv_conf import RdzvConf
from torchrun_hpc.planning.meeting import KeyFile, Meeting
from torchrun_hpc.rendezvous import connection, protocol
from torchrun_hpc.rendezvous import connection as connections
from torchrun_hpc.rendezvous.errors import JobFailedError
from torchrun_hpc.rendezvous.handler import (
    AgentStore,
    CoordinatorMissingError,
    SchedulerRendezvous,
    settings_of,
)
from torchrun_hpc.rendezvous.protocol import VERSION, Question, Reply
from torchrun_hpc.reporting import console

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torchrun_hpc.planning.plan import LaunchPlan

HERE = "127.0.0.2"
dist: Any = torch.distributed

shares_store = pytest.mark.skipif(
    not capabilities.RENDEZVOUS_INFO.present,
    reason="here the workers' store is worker 0's own",
)
HOSTS = ("n0", "n1")


def _worker_failure(rank: int, **changes: Any) -> Failure:
    """Return how the only worker of a node failed."""
    return worker_failure(rank, size=2, node=rank, local_rank=0, **changes)


class HandlerJob:
    """Two nodes of a job in one process, with the handlers that torch's agent asks.

    Attributes:
        ports: The coordinator's ports.
        answers: What `next_rendezvous` has answered torch on both nodes.
    """

    def __init__(self) -> None:
        self.ports: tuple[int, ...] = (own_port(),)
        self.answers: list[Any] = []
        self._handlers: list[SchedulerRendezvous] = []

    def plan(self, rank: int, **changes: Any) -> LaunchPlan:
        meeting = Meeting(
            "scheduler",
            nodes=2,
            node_rank=rank,
            report_rank=rank,
            endpoint=f"n0:{self.ports[0]}",
            launch_id="19.0",
            connect_host=HERE,
            ports=self.ports,
            coordinator=0,
            is_coordinator=rank == 0,
            hosts=HOSTS,
            local_address=HERE,
            listen=(HERE, self.ports[0]) if rank == 0 else None,
        )
        return replace(PLAN, meeting=replace(meeting, **changes))

    def handler(
        self,
        rank: int,
        *,
        run_id: str = "mine",
        max_restarts: int = 0,
        conf: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
        **changes: Any,
    ) -> SchedulerRendezvous:
        """Make the handler of a node, as a launch does."""
        meeting = self.plan(rank, **changes).meeting
        rdzv_conf = RdzvConf(**{"join_timeout": PATIENCE} | (conf or {}))
        options = Options(rdzv_conf=rdzv_conf, max_restarts=max_restarts)
        settings = settings_of(meeting, run_id, options)
        handler = SchedulerRendezvous(meeting, settings, environ or {}, address=HERE)
        self._handlers.append(handler)
        return handler

    def connected(self, **changes: Any) -> list[SchedulerRendezvous]:
        """Let both nodes connect; return their handlers."""
        handlers = [self.handler(rank, **changes) for rank in (0, 1)]
        together(*(handler.connect for handler in handlers))
        return handlers

    def at_work(self, **changes: Any) -> list[SchedulerRendezvous]:
        """Let both nodes take part in the first round; return their handlers."""
        handlers = [self.handler(rank, **changes) for rank in (0, 1)]
        self.next_round(handlers)
        return handlers

    def next_round(self, handlers: Sequence[SchedulerRendezvous]) -> None:
        """Let both nodes take part in the next round."""
        self.answers = together(*(handler.next_rendezvous for handler in handlers))

    def close(self) -> None:
        together(*(handler.leave for handler in self._handlers))


@pytest.fixture
def job() -> Iterator[HandlerJob]:
    with contextlib.closing(HandlerJob()) as job:
        yield job


# --- rounds -------------------------------------------------------------------------


def _parts_of(answer: Any) -> tuple[Any, int, int]:
    """Return the store, the rank and the number of nodes that a handler answers."""
    if capabilities.RENDEZVOUS_INFO.present:
        return answer.store, answer.rank, answer.world_size
    store, rank, nodes = answer
    return store, rank, nodes


def _workers_store(answer: Any) -> tuple[str, int]:
    """Return the address of the workers' store, as torch's agent finds it."""
    if capabilities.RENDEZVOUS_INFO.present:
        info = answer.bootstrap_store_info
        return info.master_addr, info.master_port
    store, rank, _ = answer
    agent_class: Any = SimpleElasticAgent
    if rank == 0:
        agent_class._set_master_addr_port(store, None, None, None)
    address, port = agent_class._get_master_addr_port(store)
    return address, port


def test_two_nodes_meet_twice_and_finish(job: HandlerJob) -> None:
    handlers = job.at_work(max_restarts=1)
    ports = set()
    for number in range(2):
        if number == 1:
            handlers[1].client.worker_failed(_worker_failure(1, code=7))
            until(lambda: all(each.num_nodes_waiting() for each in handlers))
            job.next_round(handlers)
        parts = [_parts_of(answer) for answer in job.answers]
        assert [numbers for _, *numbers in parts] == [[0, 2], [1, 2]]
        assert {store.get("MASTER_ADDR") for store, *_ in parts} == {HERE.encode()}
        ((address, port),) = {_workers_store(answer) for answer in job.answers}
        assert address == HERE
        ports.add(port)
        assert [each.restarts for each in handlers] == [number] * 2
        assert [each.num_nodes_waiting() for each in handlers] == [0, 0]
    assert len(ports) == 2  # no worker meets what a dead one has left
    together(*(each.finish for each in handlers))
    assert not any(each.is_closed() for each in handlers)
    assert handlers[1].shutdown()
    assert handlers[0].shutdown()


def test_nodes_that_use_different_sites(
    job: HandlerJob, capfd: pytest.CaptureFixture[str]
) -> None:
    job.next_round([job.handler(0, compared="derecho"), job.handler(1)])
    warning = "torchrun_hpc: warning[HPC163]: the nodes have different values: derecho"
    assert capfd.readouterr().err.startswith(warning)


def test_what_torch_asks_a_handler(job: HandlerJob) -> None:
    handler = job.handler(0)
    assert (handler.get_backend(), handler.get_run_id()) == ("scheduler", "mine")
    assert handler.use_agent_store is capabilities.RENDEZVOUS_INFO.present
    assert (handler.num_nodes_waiting(), handler.restarts) == (0, 0)
    handler.set_closed()
    handler.give_up(Failure(Kind.AGENT))
    handler.client.worker_failed(_worker_failure(0))  # torch has not joined a round
    assert handler.failure is None
    handler.finish()
    assert not handler.is_closed()
    assert handler.shutdown()


@shares_store
@pytest.mark.skipif(
    not capabilities.LISTENING_SOCKET.present,
    reason="this torch cannot listen on one address",
)
def test_the_workers_store_listens_on_one_address_and_works(job: HandlerJob) -> None:
    job.at_work()
    info = job.answers[1].bootstrap_store_info
    listening = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr.port == info.master_port
    }
    assert listening == {HERE}
    workers: Any = dist.TCPStore(info.master_addr, info.master_port, is_master=False)
    workers.set("key", "value")
    assert workers.get("key") == b"value"


@shares_store
def test_a_store_that_is_still_being_opened_at_the_end(
    job: HandlerJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slow name server may be the reason. Python must not end meanwhile."""
    opens, may_open = dist.TCPStore, threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        may_open.wait(PATIENCE)
        return opens(*args, **options)

    monkeypatch.setattr(dist, "TCPStore", slow)
    monkeypatch.setattr(limits, "WORKERS_STORE_TIMEOUT", 0.1)
    handlers = [job.handler(rank) for rank in (0, 1)]
    other = started(handlers[1].next_rendezvous)
    handlers[0].next_rendezvous()  # as torch does: in the main thread
    other.result(PATIENCE)
    (opening,) = (t for t in threading.enumerate() if t.name == "workers' store")
    together(*(each.shutdown for each in handlers))
    assert "HPC176]: waiting for the name server" in capsys.readouterr().err
    assert opening.is_alive()
    assert not opening.daemon  # so Python waits for it
    may_open.set()
    opening.join(PATIENCE)
    assert not opening.is_alive()


@pytest.mark.parametrize(
    ("value", "can_listen", "shares"),
    [("1", True, False), ("0", True, True), ("", True, True), ("", False, False)],
)
def test_whose_the_workers_store_is(
    job: HandlerJob,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    can_listen: bool,
    shares: bool,
) -> None:
    """Worker 0's if the user wants so, or the agent's would listen everywhere."""
    if not can_listen:
        none = capabilities.Capability(">=2.0", present=False)
        monkeypatch.setattr(capabilities, "LISTENING_SOCKET", none)
    shares = shares and capabilities.RENDEZVOUS_INFO.present
    handlers = job.at_work(environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": value})
    assert [each.use_agent_store for each in handlers] == [shares] * 2
    (store,) = {_workers_store(answer) for answer in job.answers}
    with socket.socket() as probe:
        probe.settimeout(PATIENCE)
        answers = probe.connect_ex(store) == 0
    assert answers is shares  # otherwise the port is worker 0's to open


def test_a_node_without_a_known_address_listens_on_all(job: HandlerJob) -> None:
    job.at_work(local_address=None, listen=None, connect_host="127.0.0.1")
    ports = [job.ports[0]]
    if capabilities.RENDEZVOUS_INFO.present:
        ports.append(_workers_store(job.answers[1])[1])
    for port in ports:
        for address in ("127.0.0.1", HERE):
            socket.create_connection((address, port), timeout=PATIENCE).close()


def test_another_node_than_node_0_may_run_the_coordinator(job: HandlerJob) -> None:
    listen = (HERE, job.ports[0])
    handlers = [
        job.handler(0, is_coordinator=False, listen=None, coordinator=1),
        job.handler(1, is_coordinator=True, listen=listen, coordinator=1),
    ]
    job.next_round(handlers)
    assert [_parts_of(answer)[1] for answer in job.answers] == [0, 1]
    together(*(each.finish for each in handlers))
    assert not any(each.is_closed() for each in handlers)


def test_what_counts_of_rdzv_conf(job: HandlerJob) -> None:
    conf = {"join_timeout": 77, "keep_alive_interval": 7, "keep_alive_max_attempt": 6}
    settings = job.handler(0, conf=conf, max_restarts=5)._settings
    assert (settings.silence_timeout, settings.join_timeout) == (42, 77)
    assert (settings.run_id, settings.nodes) == ("mine", 2)
    assert (settings.coordinator, settings.max_restarts) == (0, 5)


# --- failures -----------------------------------------------------------------------


def test_a_failure_of_another_node(job: HandlerJob) -> None:
    handlers = job.at_work()
    handlers[1].give_up(Failure(Kind.SIGNAL, code=15))
    expected = Failure(Kind.SIGNAL, (1,), code=15)
    assert failure_of(handlers[0]) == expected
    for call in (handlers[0].num_nodes_waiting, handlers[0].next_rendezvous):
        with pytest.raises(JobFailedError) as caught:
            call()
        assert caught.value.failure == expected
    assert handlers[0].is_closed()
    handlers[0].finish()


def test_a_failure_of_its_own_worker_is_for_torch_to_report(job: HandlerJob) -> None:
    handlers = job.at_work()
    handlers[1].client.worker_failed(_worker_failure(1, code=-11))
    assert [failure_of(each).code for each in handlers] == [-11, -11]
    assert handlers[1].num_nodes_waiting() == 0
    with pytest.raises(JobFailedError):
        handlers[0].num_nodes_waiting()


BAD = "ValueError: bad batch 17"
CLOSED = "RuntimeError: Connection closed by peer"


def test_failures_of_workers_are_reported_by_node_0(
    job: HandlerJob,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may hear of the first one later than of the consequences."""
    monkeypatch.setattr(limits, "COLLECT_CAUSE_TIMEOUT", 5.0)
    monkeypatch.setattr(limits, "REPORT_TIMEOUT", PATIENCE)
    handlers = job.at_work()
    handlers[0].client.worker_failed(_worker_failure(0, text=CLOSED, lines=(CLOSED,)))
    assert [failure_of(each).text for each in handlers] == [CLOSED, CLOSED]
    first = _worker_failure(1, text=BAD, lines=("Traceback ...", BAD))
    handlers[1].client.worker_failed(first)
    together(*(each.leave for each in handlers))
    line, *details = capfd.readouterr().err.splitlines()
    begin = "torchrun_hpc: error[HPC125]: the job has failed: worker 1 on n1 (node 1) "
    assert line.startswith(begin)
    follows = f"torchrun_hpc:     rank 0 of 2: {CLOSED}"
    assert details == ["    Traceback ...", f"    {BAD}", follows]
    assert handlers[0].failure == first  # the last line is about it


# --- connections that are impossible --------------------------------------------------


def test_no_coordinator(job: HandlerJob) -> None:
    handler = job.handler(1, conf={"join_timeout": 1})
    with pytest.raises(CoordinatorMissingError) as caught:
        handler.next_rendezvous()
    message = caught.value.message
    assert message.code == "HPC112"
    begin = f"no head node at n0:{job.ports[0]} ({HERE}) within 1 s (join_timeout): "
    assert message.text.startswith(begin)


@pytest.mark.parametrize("number", [1, 2])
def test_a_coordinator_whose_ports_are_taken(job: HandlerJob, number: int) -> None:
    job.ports = tuple(own_port() for _ in range(number))
    with contextlib.ExitStack() as taken:
        for port in job.ports:
            taken.enter_context(socket.create_server((HERE, port)))
        last = f"port {job.ports[-1]}: Address already in use"
        refusal = refused("HPC055", last, by=job.handler(0).next_rendezvous)
    assert f"cannot listen on {HERE}: port {job.ports[0]}: " in str(refusal)
    assert f"--rdzv_endpoint={HERE}:PORT" in str(refusal)
    # A single port is the user's choice.
    holder = f"{psutil.Process().name()} (pid {os.getpid()}"
    assert (holder in str(refusal)) is (number == 1)


def test_the_coordinator_takes_the_first_port_that_is_free(job: HandlerJob) -> None:
    job.ports = tuple(own_port() for _ in range(3))
    with socket.create_server((HERE, job.ports[0])):
        job.connected()
    socket.create_connection((HERE, job.ports[1]), timeout=PATIENCE).close()


# What differs on node 1.
REFUSED: dict[str, dict[str, Any]] = {
    "HPC117": {"run_id": "other"},
    "HPC118": {"nodes": 3},
    "HPC119": {"launch_id": "20.0"},
}


@pytest.mark.parametrize("code", REFUSED)
def test_an_agent_that_is_refused(
    job: HandlerJob, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "KEY_FILE_TIMEOUT", 0)
    job.handler(0).connect()
    handler = job.handler(1, **REFUSED[code])
    refusal = refused(code, f"{HERE}:{job.ports[0]}", by=handler.connect)
    assert not refusal.everywhere


def test_an_agent_of_another_release(
    job: HandlerJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.handler(0).connect()
    monkeypatch.setattr(protocol, "VERSION", VERSION + 1)
    refused("HPC116", "has another version", by=job.handler(1).connect)


def test_a_launch_inside_a_worker(
    job: HandlerJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the launch that it meets, whichever id was given."""
    job.ports = tuple(own_port() for _ in range(3))
    handlers = job.connected()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    environ = {"RANK": "5", "TORCHELASTIC_RUN_ID": "mine"}
    for rank, run_id in itertools.product((0, 1), ("mine", "other")):
        inner = job.handler(rank, run_id=run_id, environ=environ)
        refused("HPC164", "this is worker 5 of launch", by=inner.connect)
    assert [each.failure for each in handlers] == [None, None]


def _key(path: Path, source: str = "--hpc_key_file=FILE") -> KeyFile:
    """Return a key at a path, which the user has set."""
    return KeyFile(str(path), source)


def test_nodes_with_a_key(
    job: HandlerJob, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is made if it is not there; both sides have the same."""
    job.connected(key=_key(tmp_path / "new" / "key"))
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["key"]
    assert capfd.readouterr().err == ""


def test_nodes_with_two_keys(
    job: HandlerJob,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each names its own; the job waits as for a node that is missing."""
    monkeypatch.setattr(limits, "KEY_FILE_TIMEOUT", 0)
    files = [tmp_path / name for name in ("first", "second")]
    job.handler(0, key=_key(files[0])).connect()
    handler = job.handler(1, key=_key(files[1]))
    refused("HPC119", f"Key here: {files[1]} (", by=handler.connect)
    err = until(lambda: capfd.readouterr().err)
    assert "warning[HPC237]: ignored 127.0.0.1, " in err
    assert f"Key here: {files[0]} (" in err


def test_nodes_without_a_key(
    job: HandlerJob, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each says so; nothing starts if there has to be one."""
    key = _key(tmp_path / "key", source="")
    job.connected(key=key)
    reason = f"Key here: none ({tmp_path}/key: nodes do not share its file system ("
    lines = sorted(capfd.readouterr().err.splitlines())
    for line, host in zip(lines, HOSTS, strict=True):
        assert line.startswith(f"torchrun_hpc: warning[HPC236]: on {host}: ")
        assert reason in line
    for rank in (0, 1):
        handler = job.handler(rank, key=replace(key, required="--hpc_auth=require"))
        refused("HPC238", reason, by=handler.connect)


# --- stacks -------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [1, 600])
def test_only_some_stacks_are_taken_at_once(job: HandlerJob, asked: int) -> None:
    """The others get no reply: each one starts a program for each worker."""
    connection, may_end = job.handler(0)._connection, threading.Event()
    taken: list[bool] = []
    sent: list[Any] = []

    def sample(_: Any) -> list[Any]:
        taken.append(True)
        assert may_end.wait(PATIENCE)
        return []

    connection._replies = {"stacks": sample}
    client: Any = SimpleNamespace(send=sent.append, leave=lambda *_: None)
    connection.client = client
    wanted = min(asked, connections._REPLIES)
    for _ in range(2):  # the next questions are also answered
        for each in (taken, sent):
            each.clear()
        may_end.clear()
        for number in range(asked):
            connection._reply(Question(number, "stacks", None, 0))
        until(lambda: len(taken) == wanted)
        may_end.set()
        until(lambda: len(sent) == wanted)
        expected = [Reply(0, number, []) for number in range(wanted)]
        assert sorted(sent, key=attrgetter("number")) == expected


def test_stacks_that_cannot_be_taken_are_taken_again(
    job: HandlerJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = job.handler(0)._connection
    threads: list[threading.Thread] = []
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def sample(_: Any) -> list[Any]:
        threads.append(threading.current_thread())
        raise MemoryError

    connection._replies = {"stacks": sample}
    for number in range(2 * connections._REPLIES):
        connection._reply(Question(number, "stacks", None, 0))
        until(lambda: threads)
        threads.pop().join(PATIENCE)


# --- open files ---------------------------------------------------------------------


def test_the_limit_of_open_files_is_raised(job: HandlerJob) -> None:
    number = resource.RLIMIT_NOFILE
    before = resource.getrlimit(number)
    resource.setrlimit(number, (before[1] - 1, before[1]))
    try:
        job.handler(0).connect()
        assert resource.getrlimit(number) == (before[1], before[1])
    finally:
        resource.setrlimit(number, before)


def test_a_limit_of_open_files_that_stays(
    job: HandlerJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError

    monkeypatch.setattr(resource, "setrlimit", refuse)
    job.handler(0).connect()


def test_a_connection_that_has_to_wait(capsys: pytest.CaptureFixture[str]) -> None:
    connection._report_problem("Too many open files")
    assert capsys.readouterr().err == (
        "torchrun_hpc: warning[HPC162]: cannot accept a connection from another node: "
        "Too many open files (ulimit -n is "
        f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}). Trying again every second\n"
    )


# --- the store of torch's agents ----------------------------------------------------


def test_the_agents_store(job: HandlerJob) -> None:
    handlers = job.connected()
    fixed = {"MASTER_ADDR": HERE}
    first, second = (AgentStore(handler.client, fixed) for handler in handlers)
    first.set("text", "jülich €")
    first.set("bytes", bytes(range(256)))
    second.multi_set(["a", "MASTER_ADDR", "b"], [b"1", "n0.cl", "2"])
    assert second.get("text") == "jülich €".encode()
    assert second.get("bytes") == bytes(range(256))
    keys = ["b", "MASTER_ADDR", "a", "b"]
    assert first.multi_get(keys) == [b"2", HERE.encode(), b"1", b"2"]
    assert first.add("a", 4) == 5
    assert first.check(["a", "text"]) is True
    assert first.check(["a", "c"]) is False
    first.wait(["a", "b"])
    assert first.timeout == timedelta(seconds=300)
    first.set_timeout(timedelta(seconds=0.2))
    for question in (
        lambda: first.get("c"),
        lambda: first.wait(["c"]),
        lambda: second.wait(["c"], timedelta(seconds=0.1)),
    ):
        with pytest.raises(capabilities.STORE_ERROR, match="no answer within 0 s"):
            question()
    handlers[0].give_up(Failure(Kind.AGENT, text="why"))
    with pytest.raises(JobFailedError):
        second.get("c")


class NobodyToAsk:
    """A client that must not be asked."""

    def ask(self, request: Any, _limit: float) -> Any:
        raise AssertionError(request)


def test_fixed_keys_are_there_without_asking() -> None:
    client: Any = NobodyToAsk()
    store = AgentStore(client, {"MASTER_ADDR": HERE, "MASTER_PORT": "1"})
    fixed = ["MASTER_ADDR", "MASTER_PORT"]
    store.wait(fixed)
    store.wait(fixed, timedelta(seconds=1))
    assert store.check(fixed) is True
    assert store.multi_get(fixed) == [HERE.encode(), b"1"]
    store.set("MASTER_ADDR", "n0.cl")
    for ask in (store.wait, store.check):
        with pytest.raises(AssertionError, match=r"keys=\('more',\)"):
            ask(["more", *fixed])


# --- how torch finds it -------------------------------------------------------------


def _found_by_torch(handler: SchedulerRendezvous) -> list[Any]:
    """Return what torch finds for each kind of rendezvous, after ours is put in."""
    nothing: Any = None
    hooks = Hooks(nothing, nothing, nothing, nothing, rendezvous=handler)
    patches.restore()
    extend([ActTogether], None, hooks)
    kinds: tuple[Any, ...] = ("static", "c10d", "scheduler", "c10d")
    conf = {"is_host": "1", "store_type": "file"}
    handlers = []
    for kind in kinds:
        parameters = RendezvousParameters(kind, "", "torchs", 1, 1, **conf)
        with contextlib.suppress(ValueError, RendezvousError):
            handlers.append(registry.get_rendezvous_handler(parameters))
    return handlers


def test_torch_finds_ours_once(job: HandlerJob) -> None:
    try:
        for backend in ("scheduler", "c10d", "scheduler"):
            ours = job.handler(0, backend=backend)
            handlers = _found_by_torch(ours)
            assert [type(each) for each in handlers].count(SchedulerRendezvous) == 1
            assert ours in handlers
            assert (ours.get_backend(), ours.get_run_id()) == (backend, "torchs")
    finally:
        patches.restore()


# --- one node -----------------------------------------------------------------------


ONE: dict[str, Any] = {
    "nodes": 1,
    "hosts": (),
    "backend": "c10d",
    "ports": (),
    "launch_id": "",
    "local_address": "127.0.0.1",
}


def test_one_node_meets_without_a_port(job: HandlerJob) -> None:
    handler = job.handler(0, **ONE)
    before = _listening()
    handler.connect()
    assert _listening() <= before
    store, rank, size = _parts_of(handler.next_rendezvous())
    if handler.use_agent_store:
        assert len(_listening() - before) == 1  # the workers' store
    assert (rank, size) == (0, 1)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert handler.num_nodes_waiting() == 0


def _fail_and_wait(handler: SchedulerRendezvous, text: str) -> None:
    """Let the only worker fail; wait until another round begins, or the job ends."""
    handler.client.worker_failed(worker_failure(0, text=text, size=1))
    until(lambda: handler.num_nodes_waiting() or handler.failure)


def test_one_node_reports_as_soon_as_its_workers_have_ended(
    job: HandlerJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No other node may still tell of a failure."""
    monkeypatch.setattr(limits, "COLLECT_TIMEOUT", 10 * PATIENCE)
    handler = job.handler(0, **ONE, max_restarts=1)
    for restarts in (0, 1):
        handler.next_rendezvous()
        assert handler.restarts == restarts
        _fail_and_wait(handler, "boom")
    assert (handler.reports, handler.is_certain, handler.took_part) == (True,) * 3
    handler.leave()
    assert not handler.is_unreported
    assert re.findall(r"HPC\d+", capsys.readouterr().err) == ["HPC128", "HPC125"]


def test_a_hang_is_explained_and_forgotten_with_the_next_round(
    job: HandlerJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(limits, "COLLECT_TIMEOUT", 10 * PATIENCE)
    handler = job.handler(0, **ONE, max_restarts=2)
    late = "rank 3 did not call all_reduce 4"

    def explain(failure: Failure) -> tuple[Failure, Sequence[str]]:
        if failure.is_hang:
            return replace(failure, absent=late), ["7 of 8 ranks: here"]
        return failure, ()

    handler._explain = explain
    hang = "Timed out waiting 9ms for recv operation"
    for text, hangs in ((hang, True), ("boom", False), (hang, True)):
        handler.next_rendezvous()
        assert not handler.hangs
        _fail_and_wait(handler, text)
        assert handler.hangs == hangs
    handler.leave()
    lines = capsys.readouterr().err.splitlines()
    shown = "torchrun_hpc:     7 of 8 ranks: here"
    assert [line == shown for line in lines] == [False, True, False, False, True]


def _listening() -> set[Any]:
    connections = psutil.Process().net_connections()
    return {each.laddr for each in connections if each.status == psutil.CONN_LISTEN}


# --- how a launch ends --------------------------------------------------------------


class Recording(SchedulerRendezvous):
    """A handler that records what it tells the others.

    Attributes:
        plan: The plan of its launch.
        given_up: Why it has given up, as it has told them.
        left: How often it has left.
    """

    took_part: Any = True
    failure: Any = None

    def __init__(self, plan: LaunchPlan, failure: Failure | None = None) -> None:
        settings = settings_of(plan.meeting, "mine", plan.asked)
        super().__init__(plan.meeting, settings, {})
        self.plan = plan
        self.failure = failure
        self.given_up: list[Failure] = []
        self.left = 0

    def give_up(self, failure: Failure) -> None:
        self.given_up.append(replace(failure, time=0.0))
        self.failure = self.failure or failure

    def leave(self, *_: Any) -> None:
        self.left += 1
        super().leave()

    def launch(self) -> contextlib.AbstractContextManager[None]:
        """Launch and end as the command does."""
        return end.together(self.plan, self, DeathSignals(), is_command=True)


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what Python will write when it ends."""
    registered: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda *args: registered.append(args))
    return registered


def _child_failed() -> ChildFailedError:
    failure = ProcessFailure(local_rank=1, pid=5, exitcode=-9, error_file="none")
    return ChildFailedError("train.py", {5: failure})


SIGTERM = SignalException("signal 15", signal.SIGTERM)

# The exception; what it tells the others; the exit code, or the exception.
ENDINGS: dict[str, tuple[Any, Failure | None, Any]] = {
    "well": (None, None, None),
    "workers that failed": (
        _child_failed(),
        Failure(Kind.WORKER, code=-9, worker=WorkerPart(5)),
        ChildFailedError,
    ),
    "a failure elsewhere": (JobFailedError(Failure(Kind.LOST, (1,))), None, 1),
    "a signal": (SIGTERM, Failure(Kind.SIGNAL, code=15), 1),
    "a full disk": (
        OSError(errno.ENOSPC, "No space left on device", "/tmp/x"),  # noqa: S108
        Failure(Kind.AGENT, text="No space left on device: /tmp/x"),
        1,
    ),
    "wrong use": (
        LaunchError("HPC055", "cannot listen"),
        Failure(Kind.AGENT, text="HPC055 cannot listen"),
        LaunchError,
    ),
    "anything else": (
        ValueError("why"),
        Failure(Kind.AGENT, text="ValueError why"),
        ValueError,
    ),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_an_end(
    job: HandlerJob, case: str, at_exit: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    raised, given_up, ending = ENDINGS[case]
    elsewhere = Failure(Kind.LOST, (1,)) if case == "a failure elsewhere" else None
    handler = Recording(job.plan(0), elsewhere)
    ends: Any = contextlib.nullcontext()
    if ending is not None:
        ends = pytest.raises(SystemExit if ending == 1 else ending)
    with ends as caught, handler.launch():
        if raised is not None:
            raise raised
    if ending == 1:
        # A program that has called torch gets the cause.
        cause = caught.value.__cause__
        assert caught.value.code == 1
        assert isinstance(cause, RendezvousError) if elsewhere else cause is raised
    assert handler.given_up == ([] if given_up is None else [given_up])
    assert handler.left == 1
    assert len(at_exit) == (ending is not None)
    err = capsys.readouterr().err
    expected = "torchrun_hpc: error[HPC127]: on n0: No space left on device: /tmp/x\n"
    assert err == (expected if case == "a full disk" else "")


def test_the_last_line_is_one_nodes_and_says_why(
    job: HandlerJob, at_exit: list[Any]
) -> None:
    failure = Failure(Kind.WORKER, (1,), code=-9, worker=WorkerPart(5))
    for rank in (0, 1):
        handler = Recording(job.plan(rank), failure)
        with pytest.raises(SystemExit) as caught, handler.launch():
            pass  # its own workers have done well
        assert isinstance(caught.value.__cause__, RendezvousError)
        assert str(caught.value.__cause__).startswith("HPC125 the job has failed: ")
    ((write, message, kind),) = at_exit
    assert write is console.write
    why = "worker 5 on n1 (node 1) was killed by SIGKILL (9): probably out of memory"
    assert str(message) == f"HPC125 the job has failed: {why}"
    assert kind == "error"


@pytest.mark.parametrize("is_command", [True, False])
def test_a_failure_that_node_0_does_not_report(
    job: HandlerJob,
    at_exit: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *,
    is_command: bool,
) -> None:
    """Its agent is suspended."""
    monkeypatch.setattr(limits, "REPORT_TIMEOUT", 0.3)
    monkeypatch.setattr(limits, "KILL_MARGIN", 1)
    head, handler = job.at_work()
    client: Any = head.client
    continues = threading.Event()
    client._loop.call(continues.wait)
    handler.client.worker_failed(_worker_failure(1, text=BAD))
    with (
        pytest.raises(ChildFailedError),
        end.together(job.plan(1), handler, DeathSignals(), is_command=is_command),
    ):
        raise _child_failed()
    continues.set()
    expected = (
        "the job has failed: worker 1 on n1 (node 1) ended with exit code 1: "
        f"{BAD}; the head node has not reported it"
    )
    assert [message.text for _, message, _ in at_exit] == [expected] * is_command
    assert (expected in capfd.readouterr().err) is not is_command


def test_signals_before_there_are_workers(job: HandlerJob) -> None:
    names = ("SIGTERM", "SIGUSR9", "SIGKILL", "signal")
    options = Options(signals_to_handle=names)
    handler = Recording(replace(job.plan(1), asked=options))

    def launch() -> None:
        with handler.launch():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(PATIENCE)

    with pytest.raises(SystemExit) as caught:
        launch()
    assert caught.value.code == 143
    assert caught.value.__cause__ is None  # a program dies of it
    assert handler.given_up == [Failure(Kind.SIGNAL, code=15)]


HEAD = Failure(Kind.COORDINATOR)


@pytest.mark.parametrize(
    ("failure", "head", "expected"),
    [
        (_worker_failure(1), 0, [0]),
        (Failure(Kind.AGENT, (0,)), 0, [0]),
        (Failure(Kind.REFUSED, (0,)), 1, [1]),
        (Failure(Kind.LOST, (0,)), 2, [2]),
        *((HEAD, None, [0, 1]), (HEAD, 0, [1]), (HEAD, 1, [0]), (HEAD, 2, [0])),
    ],
)
def test_the_coordinators_node_reports_unless_it_is_lost(
    job: HandlerJob, failure: Failure, head: int | None, expected: list[int]
) -> None:
    common = {"nodes": 3, "hosts": ("n0", "n1", "n2"), "coordinator": head}
    plans = [job.plan(r, **common, is_coordinator=r == head) for r in range(3)]
    reports = [Recording(plan, failure).reports for plan in plans]
    assert [rank for rank in range(3) if reports[rank]] == expected


def test_a_launch_from_a_thread_leaves_signals_alone(job: HandlerJob) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def launch() -> None:
        with Recording(job.plan(0)).launch():
            pass

    started(launch).result(PATIENCE)
    assert signal.getsignal(signal.SIGTERM) is before

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
import torch.distributed as dist
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
from tests.support.plans import make_launch_plan
from tests.support.ports import own_port
from tests.support.simulated_job import worker_failure
from torchrun_hpc import limits, wire
from torchrun_hpc.agent import end, patches
from torchrun_hpc.agent.patches import Hooks
from torchrun_hpc.agent.patches.agent import ActTogether, extend
from torchrun_hpc.agent.signals import DeathSignals
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.failures.failure import Failure, Kind, WorkerPart
from torchrun_hpc.host import capabilities
from torchrun_hpc.options.options import Options
from torchrun_hpc.options.rdzv_conf import RdzvConf
from torchrun_hpc.planning.meeting import KeyFile
from torchrun_hpc.rendezvous import connection, protocol
from torchrun_hpc.rendezvous import connection as connections
from torchrun_hpc.rendezvous.errors import JobFailedError
from torchrun_hpc.rendezvous.handler import (
    AgentStore,
    CoordinatorMissingError,
    SchedulerRendezvous,
    settings_of,
)
from torchrun_hpc.rendezvous.protocol import (
    FROM_COORDINATOR,
    VERSION,
    Question,
    Reply,
)
from torchrun_hpc.reporting import console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torchrun_hpc.planning.plan import LaunchPlan

HERE = "127.0.0.2"

shares_store = pytest.mark.skipif(
    not capabilities.RENDEZVOUS_INFO.present,
    reason="here the workers' store is worker 0's own",
)
HOSTS = ("n0", "n1")


def _worker_failure(rank: int, **changes: Any) -> Failure:
    """Return how the only worker of a node failed."""
    return worker_failure(rank, size=2, node=rank, local_rank=0, **changes)


class Job:
    """Two nodes of a job in one process."""

    def __init__(self) -> None:
        self.ports: tuple[int, ...] = (own_port(),)
        self._handlers: list[SchedulerRendezvous] = []

    def plan(self, rank: int, **changes: Any) -> LaunchPlan:
        values: dict[str, Any] = {
            "title": "Slurm 19.0",
            "nodes": 2,
            "node_rank": rank,
            "workers": 1,
            "report_rank": rank,
            "endpoint": f"n0:{self.ports[0]}",
            "launch_id": "19.0",
            "backend": "scheduler",
            "connect_host": HERE,
            "ports": self.ports,
            "coordinator": 0,
            "is_coordinator": rank == 0,
            "hosts": HOSTS,
            "local_address": HERE,
            "listen": (HERE, self.ports[0]) if rank == 0 else None,
        }
        return make_launch_plan(**values | changes)

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
        typed = RdzvConf(**{"join_timeout": PATIENCE} | (conf or {}))
        asked = Options(rdzv_conf=typed, max_restarts=max_restarts)
        settings = settings_of(meeting, run_id, asked)
        made = SchedulerRendezvous(meeting, settings, environ or {}, address=HERE)
        self._handlers.append(made)
        return made

    def meet(self, **changes: Any) -> tuple[list[SchedulerRendezvous], list[Any]]:
        """Let both nodes meet; return their handlers, and what these answer torch."""
        made = [self.handler(rank, **changes) for rank in (0, 1)]
        return made, together(*(each.next_rendezvous for each in made))

    def close(self) -> None:
        for each in sorted(self._handlers, key=_has_coordinator):
            each.leave()  # the coordinator last


def _has_coordinator(handler: SchedulerRendezvous) -> bool:
    return handler._connection.server is not None


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


# --- rounds -------------------------------------------------------------------------


def _answer(given: Any) -> tuple[Any, int, int]:
    """Return the store, the rank and the number of nodes that a handler answers."""
    if capabilities.RENDEZVOUS_INFO.present:
        return given.store, given.rank, given.world_size
    store, rank, nodes = given
    return store, rank, nodes


def _where(given: Any) -> tuple[str, int]:
    """Return where the workers meet, as torch's agent finds it."""
    if capabilities.RENDEZVOUS_INFO.present:
        info = given.bootstrap_store_info
        return info.master_addr, info.master_port
    store, rank, _ = given
    agent_class: Any = SimpleElasticAgent
    if rank == 0:
        agent_class._set_master_addr_port(store, None, None, None)
    address, port = agent_class._get_master_addr_port(store)
    return address, port


def test_two_nodes_meet_twice_and_finish(job: Job) -> None:
    made = [job.handler(rank, max_restarts=1) for rank in (0, 1)]
    ports = set()
    for number in range(2):
        given = together(*(each.next_rendezvous for each in made))
        answers = [_answer(each) for each in given]
        assert [answer[1:] for answer in answers] == [(0, 2), (1, 2)]
        assert {store.get("MASTER_ADDR") for store, *_ in answers} == {HERE.encode()}
        found = [_where(each) for each in given]
        assert found[0] == found[1]
        assert found[0][0] == HERE
        ports.add(found[0][1])
        assert [each.restarts for each in made] == [number] * 2
        assert [each.num_nodes_waiting() for each in made] == [0, 0]
        if number == 0:
            made[1].client.worker_failed(_worker_failure(1, code=7))
            until(lambda: all(each.num_nodes_waiting() for each in made))
    assert len(ports) == 2  # no worker meets what a dead one has left
    together(*(each.finish for each in made))
    assert not any(each.is_closed() for each in made)
    assert made[1].shutdown()
    assert made[0].shutdown()


def test_nodes_that_use_different_sites(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    made = [job.handler(0, compared="derecho"), job.handler(1)]
    together(*(each.next_rendezvous for each in made))
    warning = "torchrun_hpc: warning[HPC163]: the nodes have different values: derecho"
    assert capfd.readouterr().err.startswith(warning)


def test_what_torch_asks_a_handler(job: Job) -> None:
    made = job.handler(0)
    assert (made.get_backend(), made.get_run_id()) == ("scheduler", "mine")
    assert made.use_agent_store is capabilities.RENDEZVOUS_INFO.present
    assert (made.num_nodes_waiting(), made.is_closed(), made.restarts) == (0, False, 0)
    made.set_closed()
    made.give_up(Failure(Kind.AGENT))
    made.client.worker_failed(_worker_failure(0))
    made.finish()
    assert not made.is_closed()
    assert made.shutdown()


@shares_store
@pytest.mark.skipif(
    not capabilities.LISTENING_SOCKET.present,
    reason="this torch cannot listen on one address",
)
def test_the_workers_store_listens_on_one_address_and_works(job: Job) -> None:
    info = job.meet()[1][1].bootstrap_store_info
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
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a name server is slow: it must not come back while Python ends."""
    opens, may_open = dist.TCPStore, threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        may_open.wait(PATIENCE)
        return opens(*args, **options)

    monkeypatch.setattr(dist, "TCPStore", slow)
    monkeypatch.setattr(limits, "WORKERS_STORE_TIMEOUT", 0.1)
    made = [job.handler(rank) for rank in (0, 1)]
    other = started(made[1].next_rendezvous)
    made[0].next_rendezvous()
    other.result(PATIENCE)
    (opening,) = (t for t in threading.enumerate() if t.name == "workers' store")
    together(*(each.shutdown for each in made))
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
    job: Job,
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
    made, given = job.meet(environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": value})
    assert [each.use_agent_store for each in made] == [shares] * 2
    first, second = (_where(each) for each in given)
    assert first == second
    with socket.socket() as probe:
        probe.settimeout(PATIENCE)
        answers = probe.connect_ex(second) == 0
    assert answers is shares  # otherwise the port is worker 0's to open


def test_a_node_without_a_known_address_listens_on_all(job: Job) -> None:
    _, given = job.meet(local_address=None, listen=None, connect_host="127.0.0.1")
    ports = [job.ports[0]]
    if capabilities.RENDEZVOUS_INFO.present:
        ports.append(_where(given[1])[1])
    for port in ports:
        for address in ("127.0.0.1", HERE):
            socket.create_connection((address, port), timeout=PATIENCE).close()


def test_node_0_need_not_run_the_coordinator(job: Job) -> None:
    listen = (HERE, job.ports[0])
    made = [
        job.handler(0, is_coordinator=False, listen=None, coordinator=1),
        job.handler(1, is_coordinator=True, listen=listen, coordinator=1),
    ]
    given = together(*(each.next_rendezvous for each in made))
    assert [_answer(each)[1] for each in given] == [0, 1]
    together(*(each.finish for each in made))
    assert not any(each.is_closed() for each in made)


@pytest.mark.parametrize(
    ("conf", "silence", "join"),
    [
        ({}, 120, PATIENCE),
        ({"join_timeout": 77}, 120, 77),
        ({"keep_alive_interval": 10}, 120, PATIENCE),
        ({"keep_alive_max_attempt": 100}, 500, PATIENCE),
        ({"keep_alive_interval": 7, "keep_alive_max_attempt": 6}, 42, PATIENCE),
    ],
)
def test_what_counts_of_rdzv_conf(
    job: Job, conf: dict[str, int], silence: int, join: int
) -> None:
    settings = job.handler(0, conf=conf, max_restarts=5)._settings
    assert (settings.silence_timeout, settings.join_timeout) == (silence, join)
    assert (settings.run_id, settings.nodes) == ("mine", 2)
    assert (settings.coordinator, settings.max_restarts) == (0, 5)


# --- failures -----------------------------------------------------------------------


def test_a_failure_of_another_node(job: Job) -> None:
    made, _ = job.meet()
    made[1].give_up(Failure(Kind.SIGNAL, code=15))
    expected = Failure(Kind.SIGNAL, (1,), code=15)
    assert failure_of(made[0]) == expected
    for call in (made[0].num_nodes_waiting, made[0].next_rendezvous):
        with pytest.raises(JobFailedError) as caught:
            call()
        assert caught.value.failure == expected
    assert made[0].is_closed()
    made[0].finish()


def test_a_failure_of_an_own_worker_is_for_torch_to_report(job: Job) -> None:
    made, _ = job.meet()
    made[1].client.worker_failed(_worker_failure(1, code=-11))
    assert failure_of(made[1]).code == -11
    assert made[1].num_nodes_waiting() == 0
    assert failure_of(made[0]).code == -11
    with pytest.raises(JobFailedError):
        made[0].num_nodes_waiting()


BAD = "ValueError: bad batch 17"
CLOSED = "RuntimeError: Connection closed by peer"


def test_failures_of_workers_are_reported_by_node_0(
    job: Job, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it hears of the first one later than of those that follow from it."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr(limits, "COLLECT_CAUSE_TIMEOUT", 5.0)
    monkeypatch.setattr(limits, "REPORT_TIMEOUT", PATIENCE)
    made, _ = job.meet()
    made[0].client.worker_failed(_worker_failure(0, text=CLOSED, lines=(CLOSED,)))
    for each in made:
        assert failure_of(each).text == CLOSED
    lines = ("Traceback (most recent call last):", BAD)
    made[1].client.worker_failed(_worker_failure(1, text=BAD, lines=lines))
    together(*(each.leave for each in made))
    assert capfd.readouterr().err.splitlines() == [
        (
            "torchrun_hpc: error[HPC125]: the job has failed: worker 1 on n1 (node 1) "
            "ended with exit code 1 (local rank 0, at 2023-11-14 22:13:20)"
        ),
        "    Traceback (most recent call last):",
        f"    {BAD}",
        f"torchrun_hpc:     rank 0 of 2: {CLOSED}",
    ]
    first = _worker_failure(1, text=BAD, lines=lines)
    assert made[0].failure == first  # of which the last line is


def test_a_failure_of_a_worker_without_a_rendezvous(job: Job) -> None:
    """Torch has not asked for the next round, or could not join it."""
    made = job.handler(0)
    made.client.worker_failed(_worker_failure(0))
    assert made.failure is None


def test_no_coordinator(job: Job) -> None:
    made = job.handler(1, conf={"join_timeout": 1})
    with pytest.raises(CoordinatorMissingError) as caught:
        made.next_rendezvous()
    message = caught.value.message
    assert message.code == "HPC112"
    assert message.text == (
        f"no head node at n0:{job.ports[0]} ({HERE}) within 1 s (join_timeout): port "
        f"{job.ports[0]}: nobody listens (not started there yet, or ended). "
        "Check that the job has started there"
    )


def test_a_coordinator_whose_port_is_taken(job: Job) -> None:
    with (
        socket.create_server((HERE, job.ports[0])),
        pytest.raises(LaunchError) as caught,
    ):
        job.handler(0).next_rendezvous()
    assert caught.value.code == "HPC055"
    for part in (
        f"cannot listen on {HERE}: port {job.ports[0]}: Address already in use",
        f"{psutil.Process().name()} (pid {os.getpid()}",
        f"--rdzv_endpoint={HERE}:PORT",
    ):
        assert part in str(caught.value)


def test_the_coordinator_takes_the_first_port_that_is_free(job: Job) -> None:
    job.ports = tuple(own_port() for _ in range(3))
    with socket.create_server((HERE, job.ports[0])):
        assert len(job.meet()[1]) == 2
    socket.create_connection((HERE, job.ports[1]), timeout=PATIENCE).close()


def test_a_coordinator_whose_ports_are_all_taken(job: Job) -> None:
    job.ports = tuple(own_port() for _ in range(2))
    with (
        socket.create_server((HERE, job.ports[0])),
        socket.create_server((HERE, job.ports[1])),
        pytest.raises(LaunchError, match=f"port {job.ports[1]}: ") as caught,
    ):
        job.handler(0).next_rendezvous()
    assert caught.value.code == "HPC055"


# What is otherwise on node 1.
REFUSED: dict[str, dict[str, Any]] = {
    "HPC117": {"run_id": "other"},
    "HPC118": {"nodes": 3},
    "HPC119": {"launch_id": "20.0"},
}


@pytest.mark.parametrize("code", REFUSED)
def test_an_agent_that_is_refused(
    job: Job, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "KEY_FILE_TIMEOUT", 0)
    job.handler(0).connect()
    with pytest.raises(LaunchError) as caught:
        job.handler(1, **REFUSED[code]).connect()
    assert caught.value.code == code
    assert f"{HERE}:{job.ports[0]}" in str(caught.value)
    assert not caught.value.everywhere


def test_nodes_with_a_key(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is made if it is not there; both sides have the same."""
    job.meet(key=KeyFile(str(tmp_path / "new" / "key"), source="--hpc_key_file=FILE"))
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["key"]
    assert capfd.readouterr().err == ""


def test_nodes_with_two_keys(
    job: Job,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each names its own; the job waits as for a node that is missing."""
    monkeypatch.setattr(limits, "KEY_FILE_TIMEOUT", 0)
    files = [tmp_path / name for name in ("first", "second")]
    keys = [KeyFile(str(file), source="--hpc_key_file=FILE") for file in files]
    job.handler(0, key=keys[0]).connect()
    with pytest.raises(LaunchError) as caught:
        job.handler(1, key=keys[1]).connect()
    assert caught.value.code == "HPC119"
    assert re.search(
        rf"key\. Key here: {files[1]} \([0-9a-f]{{8}}\)\. ", str(caught.value)
    )
    err = until(lambda: capfd.readouterr().err)
    assert re.fullmatch(
        r"torchrun_hpc: warning\[HPC237\]: ignored 127.0.0.1, which does not prove "
        r"that it belongs to this job\. .*, or runs an older torchrun_hpc\. "
        rf"Key here: {files[0]} \([0-9a-f]{{8}}\)\n",
        err,
    )


def test_nodes_without_a_key(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each says so; nothing starts if there has to be one."""
    key = KeyFile(str(tmp_path / "key"))
    job.meet(key=key)
    why = rf"none \({tmp_path}/key: nodes do not share its file system \(\w+\)\)\. "
    why += "Pass --hpc-key-file=FILE on a shared file system"
    text = "anybody who knows this job's number can join it, or pretend to be its head "
    text += "node"
    lines = sorted(capfd.readouterr().err.splitlines())
    for line, host in zip(lines, HOSTS, strict=True):
        begin = rf"torchrun_hpc: warning\[HPC236\]: on {host}: {text}"
        assert re.fullmatch(rf"{begin}\. Key here: {why}", line)
    for rank in 0, 1:
        with pytest.raises(LaunchError) as caught:
            job.handler(rank, key=replace(key, required="--hpc_auth=require")).connect()
        text = r"this node needs a usable key \(--hpc_auth=require\)"
        assert caught.value.code == "HPC238"
        assert re.fullmatch(rf"{text}\. Key here: {why}", str(caught.value))


def test_a_launch_inside_a_worker(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known by the id of the launch that it meets, whichever was typed."""
    job.ports = tuple(own_port() for _ in range(3))
    outer = [job.handler(number) for number in (0, 1)]
    together(*(each.connect for each in outer))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    environ = {"RANK": "5", "TORCHELASTIC_RUN_ID": "mine"}
    for rank, run_id in itertools.product((0, 1), ("mine", "other")):
        with pytest.raises(LaunchError, match="this is worker 5 of launch") as caught:
            job.handler(rank, run_id=run_id, environ=environ).connect()
        assert caught.value.code == "HPC164", (rank, run_id)
    assert [each.failure for each in outer] == [None, None]


def test_an_agent_of_another_release(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.handler(0).connect()
    monkeypatch.setattr(protocol, "VERSION", VERSION + 1)
    with pytest.raises(LaunchError) as caught:
        job.handler(1).connect()
    assert caught.value.code == "HPC116"
    assert "has another version" in str(caught.value)


@pytest.mark.parametrize(
    "store", [None, "x", [], [HERE], [HERE, 0], [HERE, 65536], [5, 5], [HERE, "5"]]
)
def test_no_address_of_the_workers_store(store: Any) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(FROM_COORDINATOR, {"go": {"round": 0, "store": store}})


# --- stacks -------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [1, 600])
def test_only_some_stacks_are_taken_at_once(job: Job, asked: int) -> None:
    """The others are not replied to: each one starts a program for each worker."""
    connection, may_end = job.handler(0)._connection, threading.Event()
    taken: list[int] = []

    def sample() -> list[Any]:
        taken.append(len(taken))
        assert may_end.wait(PATIENCE)
        return []

    connection._replies = {"stacks": lambda _: sample()}
    wanted = min(asked, connections._REPLIES)
    for repeated in (1, 2):  # the next questions are answered, too
        sent: list[Any] = []
        client: Any = SimpleNamespace(send=sent.append, leave=lambda *_: None)
        connection.client = client
        may_end.clear()
        for number in range(asked):
            connection._reply(Question(number, "stacks", None, 0))
        until(lambda repeated=repeated: len(taken) == repeated * wanted)
        may_end.set()
        until(lambda sent=sent: len(sent) == wanted)
        expected = [Reply(0, number, []) for number in range(wanted)]
        assert sorted(sent, key=attrgetter("number")) == expected


def test_stacks_that_cannot_be_taken_are_taken_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, tried = job.handler(0)._connection, []
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def sample(_: Any) -> list[Any]:
        tried.append(threading.current_thread())
        raise MemoryError

    connection._replies = {"stacks": sample}
    for number in range(1, 2 * connections._REPLIES):
        connection._reply(Question(number, "stacks", None, 0))
        until(lambda number=number: len(tried) == number)
        tried[-1].join(PATIENCE)


# --- open files ---------------------------------------------------------------------


def test_the_limit_of_open_files_is_raised(job: Job) -> None:
    number = resource.RLIMIT_NOFILE
    before = resource.getrlimit(number)
    resource.setrlimit(number, (before[1] - 1, before[1]))
    try:
        job.handler(0).connect()
        assert resource.getrlimit(number) == (before[1], before[1])
    finally:
        resource.setrlimit(number, before)


def test_a_limit_of_open_files_that_stays(
    job: Job, monkeypatch: pytest.MonkeyPatch
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


def test_the_agents_store(job: Job) -> None:
    made = [job.handler(rank) for rank in (0, 1)]
    known = {"MASTER_ADDR": HERE}
    clients = together(*(each.connect for each in made))
    stores: list[Any] = [AgentStore(client, known) for client in clients]
    stores[0].set("text", "jülich €")
    stores[0].set("bytes", bytes(range(256)))
    stores[1].multi_set(["a", "MASTER_ADDR", "b"], [b"1", "n0.cl", "2"])
    assert stores[1].get("text") == "jülich €".encode()
    assert stores[1].get("bytes") == bytes(range(256))
    asked = ["b", "MASTER_ADDR", "a", "b"]
    assert stores[0].multi_get(asked) == [b"2", HERE.encode(), b"1", b"2"]
    assert stores[0].add("a", 4) == 5
    assert stores[0].check(["a", "text"]) is True
    assert stores[0].check(["a", "c"]) is False
    stores[0].wait(["a", "b"])
    assert stores[0].timeout == timedelta(seconds=300)
    stores[0].set_timeout(timedelta(seconds=0.2))
    for question in (
        lambda: stores[0].get("c"),
        lambda: stores[0].wait(["c"]),
        lambda: stores[1].wait(["c"], timedelta(seconds=0.1)),
    ):
        with pytest.raises(capabilities.STORE_ERROR, match="no answer within 0 s"):
            question()
    made[0].give_up(Failure(Kind.AGENT, text="why"))
    with pytest.raises(JobFailedError):
        stores[1].get("c")


class NobodyToAsk:
    """A client that must not be asked."""

    def ask(self, request: Any, _limit: float) -> Any:
        raise AssertionError(request)


def test_known_keys_are_there_without_asking() -> None:
    client: Any = NobodyToAsk()
    store = AgentStore(client, {"MASTER_ADDR": HERE, "MASTER_PORT": "1"})
    known = ["MASTER_ADDR", "MASTER_PORT"]
    store.wait(known)
    store.wait(known, timedelta(seconds=1))
    assert store.check(known) is True
    assert store.multi_get(known) == [HERE.encode(), b"1"]
    store.set("MASTER_ADDR", "n0.cl")
    others = ["more", *known]
    for ask in (store.wait, store.check):
        with pytest.raises(AssertionError, match=r"keys=\('more',\)"):
            ask(others)


# --- how torch finds it -------------------------------------------------------------


@pytest.fixture
def finds(job: Job) -> Iterator[Callable[..., Any]]:
    """Return what makes a handler, and returns what torch finds instead of its own."""

    def find(backend: str, **changes: Any) -> tuple[SchedulerRendezvous, list[Any]]:
        ours = job.handler(0, backend=backend, **changes)
        patches.restore()
        nothing: Any = None
        hooks = Hooks(nothing, nothing, nothing, nothing, rendezvous=ours)
        extend([ActTogether], None, hooks)
        kinds: tuple[Any, ...] = ("static", "c10d", "scheduler", "c10d")
        conf = {"is_host": "1", "store_type": "file"}
        found = []
        for kind in kinds:
            parameters = RendezvousParameters(kind, "", "torchs", 1, 1, **conf)
            with contextlib.suppress(ValueError, RendezvousError):
                found.append(registry.get_rendezvous_handler(parameters))
        return ours, found

    yield find
    patches.restore()


def test_torch_finds_ours_once(finds: Any) -> None:
    for backend in ("scheduler", "c10d", "scheduler"):
        ours, found = finds(backend)
        assert [type(each) for each in found].count(SchedulerRendezvous) == 1
        assert ours in found
        assert (ours.get_backend(), ours.get_run_id()) == (backend, "torchs")


# --- one node -----------------------------------------------------------------------


ONE: dict[str, Any] = {
    "nodes": 1,
    "hosts": (),
    "backend": "c10d",
    "ports": (),
    "launch_id": "",
    "local_address": "127.0.0.1",
}


def test_one_node_meets_without_a_port(job: Job) -> None:
    handler = job.handler(0, **ONE)
    before = _listening()
    handler.connect()
    assert _listening() <= before
    store, rank, size = _answer(handler.next_rendezvous())
    if handler.use_agent_store:
        assert len(_listening() - before) == 1  # the workers' store
    assert (rank, size) == (0, 1)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert handler.num_nodes_waiting() == 0


def test_one_node_reports_as_soon_as_its_workers_have_ended(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No other node may still tell of a failure."""
    monkeypatch.setattr(limits, "COLLECT_TIMEOUT", 10 * PATIENCE)
    handler = job.handler(0, **ONE, max_restarts=1)
    for restarts in (0, 1):
        handler.next_rendezvous()
        assert handler.restarts == restarts
        handler.client.worker_failed(worker_failure(0, text="boom", size=1))
        until(lambda: handler.num_nodes_waiting() or handler.failure)
    assert (handler.reports, handler.is_certain, handler.took_part) == (True,) * 3
    handler.leave()
    assert not handler.is_unreported
    assert re.findall(r"HPC\d+", capsys.readouterr().err) == ["HPC128", "HPC125"]


def test_a_hang_is_explained_and_forgotten_with_the_next_round(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
        handler.client.worker_failed(worker_failure(0, text=text, size=1))
        until(lambda: handler.num_nodes_waiting() or handler.failure)
        assert handler.hangs == hangs
    handler.leave()
    lines = capsys.readouterr().err.splitlines()
    shown = "torchrun_hpc:     7 of 8 ranks: here"
    assert [line == shown for line in lines] == [False, True, False, False, True]


def _listening() -> set[Any]:
    found = psutil.Process().net_connections()
    return {each.laddr for each in found if each.status == psutil.CONN_LISTEN}


# --- how a launch ends --------------------------------------------------------------


class Recording(SchedulerRendezvous):
    """A handler that records what the others are informed of."""

    took_part: Any = True
    failure: Any = None

    def __init__(self, plan: LaunchPlan, failure: Failure | None = None) -> None:
        settings = settings_of(plan.meeting, "mine", plan.asked)
        super().__init__(plan.meeting, settings, {})
        self.failure = failure
        self.given_up: list[Failure] = []
        self.left = 0

    def give_up(self, failure: Failure) -> None:
        self.given_up.append(replace(failure, time=0.0))
        self.failure = self.failure or failure

    def leave(self, *_: Any) -> None:
        self.left += 1
        super().leave()


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what is to be written when Python ends."""
    registered: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda *args: registered.append(args))
    return registered


def _signal(number: signal.Signals) -> SignalException:
    return SignalException(f"signal {number}", number)


def _child_failed() -> ChildFailedError:
    failure = ProcessFailure(local_rank=1, pid=5, exitcode=-9, error_file="none")
    return ChildFailedError("train.py", {5: failure})


# What is raised; what the others are informed of; the exit code, or the exception.
ENDINGS: dict[str, tuple[Any, Failure | None, Any]] = {
    "well": (None, None, None),
    "workers that failed": (
        _child_failed(),
        Failure(Kind.WORKER, code=-9, worker=WorkerPart(5)),
        ChildFailedError,
    ),
    "a failure elsewhere": (JobFailedError(Failure(Kind.LOST, (1,))), None, 1),
    "a signal": (_signal(signal.SIGTERM), Failure(Kind.SIGNAL, code=15), 1),
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
    job: Job, case: str, at_exit: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    raised, given, ending = ENDINGS[case]
    there = Failure(Kind.LOST, (1,)) if case == "a failure elsewhere" else None
    handler = Recording(job.plan(0), there)
    ends: Any = contextlib.nullcontext()
    if ending is not None:
        ends = pytest.raises(SystemExit if ending == 1 else ending)
    with (
        ends as caught,
        end.together(job.plan(0), handler, DeathSignals(), is_command=True),
    ):
        if raised is not None:
            raise raised
    if ending == 1:
        # What a program gets that has called torch.
        cause = caught.value.__cause__
        assert caught.value.code == 1
        assert isinstance(cause, RendezvousError) if there else cause is raised
    assert handler.given_up == ([] if given is None else [given])
    assert handler.left == 1
    assert len(at_exit) == (ending is not None)
    err = capsys.readouterr().err
    expected = "torchrun_hpc: error[HPC127]: on n0: No space left on device: /tmp/x\n"
    assert err == (expected if case == "a full disk" else "")


def test_the_last_line_is_one_nodes_and_says_why(job: Job, at_exit: list[Any]) -> None:
    failure = Failure(Kind.WORKER, (1,), code=-9, worker=WorkerPart(5))
    for rank in (0, 1):
        handler = Recording(job.plan(rank), failure)
        with (
            pytest.raises(SystemExit) as caught,
            end.together(job.plan(rank), handler, DeathSignals(), is_command=True),
        ):
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
    job: Job,
    at_exit: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *,
    is_command: bool,
) -> None:
    """Its agent is suspended."""
    monkeypatch.setattr(limits, "REPORT_TIMEOUT", 0.3)
    made, _ = job.meet()
    client: Any = made[0].client
    goes_on = threading.Event()
    client._loop.call(goes_on.wait)
    made[1].client.worker_failed(_worker_failure(1, text=BAD))
    handler = made[1]
    with (
        pytest.raises(ChildFailedError),
        end.together(job.plan(1), handler, DeathSignals(), is_command=is_command),
    ):
        raise _child_failed()
    goes_on.set()
    expected = (
        "the job has failed: worker 1 on n1 (node 1) ended with exit code 1: "
        f"{BAD}; the head node has not reported it"
    )
    assert [message.text for _, message, _ in at_exit] == [expected] * is_command
    assert (expected in capfd.readouterr().err) is not is_command


def test_signals_before_there_are_workers(job: Job) -> None:
    handler = Recording(job.plan(1))
    names = ("SIGTERM", "SIGUSR9", "SIGKILL", "signal")
    plan = replace(job.plan(1), asked=Options(signals_to_handle=names))

    def launch() -> None:
        with end.together(plan, handler, DeathSignals(), is_command=True):
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
    job: Job, failure: Failure, head: int | None, expected: list[int]
) -> None:
    hosts = ("n0", "n1", "n2")
    common = {"nodes": 3, "hosts": hosts, "coordinator": head}
    plans = (job.plan(r, **common, is_coordinator=r == head) for r in range(3))
    made = [Recording(plan, failure) for plan in plans]
    assert [r for r in range(3) if made[r].reports] == expected


def test_a_launch_from_a_thread_leaves_signals_alone(job: Job) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def launch() -> None:
        plan = job.plan(0)
        with end.together(plan, Recording(plan), DeathSignals(), is_command=True):
            pass

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before

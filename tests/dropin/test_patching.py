"""What is changed inside torch: that it is needed, that it works, that it gives way."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from side_by_side import OURS, STOCK, clean_environ, end_group
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    subprocess_handler,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    static_tcp_rendezvous,
)

from torchrun_hpc import patching, report
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.patching import (
    fresh_store,
    listening,
    node_order,
    replacing,
    state_as_json,
)
from torchrun_hpc.patching.node_order import RankedNode
from torchrun_hpc.patching.state_as_json import StateAsJson
from torchrun_hpc.plan import LaunchPlan

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from side_by_side import Launcher

Handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
Executor: Any = dynamic_rendezvous._DistributedRendezvousOpExecutor
State: Any = dynamic_rendezvous._RendezvousState
Node: Any = dynamic_rendezvous._NodeDesc

# Everything that a patch may replace.
PLACES = [
    (Handler, "next_rendezvous"),
    (Handler, "shutdown"),
    (Handler, "_create_tcp_store_server"),
    (Handler, "_node_desc_generator"),
    (static_tcp_rendezvous.StaticTCPRendezvous, "next_rendezvous"),
    (static_tcp_rendezvous.StaticTCPRendezvous, "shutdown"),
    (c10d_rendezvous_backend, "TCPStore"),
    (static_tcp_rendezvous, "TCPStore"),
    (dynamic_rendezvous, "pickle"),
    (agent_api.SimpleElasticAgent, "_rendezvous"),
    (agent_api.SimpleElasticAgent, "_exit_barrier"),
    (LocalElasticAgent, "_start_workers"),
    (LocalElasticAgent, "_shutdown"),
    (LocalElasticAgent, "_monitor_workers"),
    (LocalElasticAgent, "_get_fq_hostname"),
    (agent_api, "_get_fq_hostname"),
    (multiprocessing_api.PContext, "close"),
    (subprocess_handler, "Popen"),
]


def _torch() -> list[Any]:
    return [getattr(owner, name) for owner, name in PLACES]


@pytest.fixture
def torch_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put torch back behind the test."""
    replacing.restore()
    for owner, name in PLACES:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    yield
    replacing.restore()


def _plan(**values: Any) -> LaunchPlan:
    given_values = {
        "title": "test",
        "nodes": 3,
        "node_rank": 0,
        "workers": 1,
        "speaks": True,
        "endpoint": "head:1",
        "ordered": True,
        "address": "127.0.0.2",
    }
    return LaunchPlan(**{**given_values, **values})


def _patch_all(**values: Any) -> None:
    """Apply all patches, none of which may be left out."""
    outcomes = patching.apply_patches(_plan(**values))
    assert {outcome.state for outcome in outcomes} == {patching.State.APPLIED}


def _free_port(address: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _parameters(endpoint: str, **conf: Any) -> RendezvousParameters:
    nodes = conf.pop("nodes", 1)
    return RendezvousParameters(
        backend="c10d",
        endpoint=endpoint,
        run_id="test",
        min_nodes=nodes,
        max_nodes=nodes,
        **conf,
    )


# --- all of them ------------------------------------------------------------------


@pytest.mark.parametrize("patch", patching.PATCHES, ids=lambda patch: patch.__name__)
def test_fits_this_torch(patch: patching.Patch) -> None:
    assert patch.fits() is True


@pytest.mark.usefixtures("torch_again")
def test_every_target_is_replaced() -> None:
    before = _torch()
    _patch_all()
    for old, new, place in zip(before, _torch(), PLACES, strict=True):
        assert old is not new, place


@pytest.mark.usefixtures("torch_again")
def test_a_second_launch_in_one_process() -> None:
    """Programs that use torchrun_hpc.auto may launch twice; nothing has changed."""
    _patch_all(node_rank=0)
    _patch_all(node_rank=2)
    assert Handler._node_desc_generator.generate("n").node_rank == 2


@pytest.mark.usefixtures("torch_again")
def test_a_second_launch_listens_on_its_own_address() -> None:
    for address in ("127.0.0.2", "127.0.0.4"):
        patching.apply_patches(_plan(address=address, listen=(address, 0)))
        made = c10d_rendezvous_backend._create_tcp_store(
            _parameters(f"{address}:0", is_host=1)
        )
        assert _listening(made.port) == {address}
        del made


@pytest.mark.usefixtures("torch_again")
def test_what_became_of_each() -> None:
    outcomes = patching.apply_patches(_plan())
    assert [outcome.name for outcome in outcomes] == [
        *("state_as_json", "fresh_store", "node_order"),
        *("listening", "waiting", "leaving"),
        *("agent", "forwarding", "closing", "tied", "host_name"),
    ]
    assert patching.left_out(outcomes) == []
    for outcome in outcomes:
        assert patching.described(outcome) == {
            "name": outcome.name,
            "target": outcome.patch.TARGET,
            "reason": outcome.patch.REASON,
            "releases": outcome.patch.RELEASES,
            "state": "patched",
        }


@pytest.mark.usefixtures("torch_again")
def test_looking_at_patches_applies_none() -> None:
    before = _torch()
    outcomes = patching.examine()
    assert _torch() == before
    assert outcomes == patching.apply_patches(_plan())


@pytest.mark.usefixtures("torch_again")
def test_a_release_without_the_fault_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_as_json, "RELEASES", "<2.0")
    before = dynamic_rendezvous.pickle
    first, *others = patching.apply_patches(_plan())
    assert (first.name, first.state) == ("state_as_json", patching.State.NOT_NEEDED)
    assert {outcome.state for outcome in others} == {patching.State.APPLIED}
    assert patching.left_out([first]) == []
    assert dynamic_rendezvous.pickle is before


def _by_address(self: Any) -> None:
    """Rank as pytorch#191285 proposes: with a key, which asks no participant."""
    ranked = sorted(self._state.participants, key=lambda node: node.addr)
    for rank, node in enumerate(ranked):
        self._state.participants[node] = rank


def _no_order(self: Any) -> None:
    self._state.complete = True


def _other_server(_self: Any, _addr: str, _port: int, _timeout: int) -> None: ...


def _other_store(_params: Any, _timeout: int) -> None: ...


def _other_init(self: Any, node: Any, *_more: Any) -> None:
    self._this_node = node


CHANGES = [
    (node_order, Executor, "_mark_rendezvous_complete", _by_address),
    (node_order, Executor, "_mark_rendezvous_complete", _no_order),
    (node_order, Executor, "_mark_rendezvous_complete", None),
    (node_order, Handler, "_node_desc_generator", None),
    (listening, Handler, "_create_tcp_store_server", _other_server),
    (listening, Handler, "_create_tcp_store_server", None),
    (listening, c10d_rendezvous_backend, "TCPStore", None),
    (listening, c10d_rendezvous_backend, "TCPStore", dist.HashStore),
    (fresh_store, Handler, "__init__", _other_init),
    (fresh_store, Handler, "next_rendezvous", None),
    (state_as_json, dynamic_rendezvous, "pickle", None),
]


@pytest.mark.usefixtures("torch_again")
@pytest.mark.parametrize(
    ("patch", "owner", "name", "changed"),
    CHANGES,
    ids=[
        f"{p.__name__.split('.')[-1]}-{n}-{getattr(c, '__name__', c)}"
        for p, _, n, c in CHANGES
    ],
)
def test_a_torch_that_has_changed(
    patch: Any, owner: Any, name: str, changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if changed is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, changed)
    before = {
        (place, place_name): inspect.getattr_static(place, place_name, None)
        for place, place_name in PLACES
    }
    monkeypatch.setattr(patching, "PATCHES", (patch,))

    (outcome,) = patching.apply_patches(_plan())
    assert outcome.state is patching.State.DOES_NOT_FIT
    assert patching.left_out([outcome]) == [
        Message(
            "HPC080",
            f"torch {torch.__version__} has changed {patch.TARGET}; it is left as it "
            f"is, and {patch.REASON}",
        )
    ]
    assert "#" in patch.REASON  # an issue to read
    for (place, place_name), old in before.items():
        assert inspect.getattr_static(place, place_name, None) is old


@pytest.mark.usefixtures("torch_again")
def test_one_that_does_not_fit_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Executor, "_mark_rendezvous_complete", _by_address)
    outcomes = patching.apply_patches(_plan())
    (message,) = patching.left_out(outcomes)
    assert node_order.TARGET in message.text
    assert len(outcomes) == len(patching.PATCHES)
    assert dynamic_rendezvous.pickle is StateAsJson
    assert c10d_rendezvous_backend.TCPStore is not dist.TCPStore


# --- state_as_json ----------------------------------------------------------------


class Payload:
    """What a stranger writes into the store: unpickling it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


@pytest.mark.parametrize("which", [STOCK, OURS])
def test_payload_in_the_store(which: str, launcher: Launcher, tmp_path: Path) -> None:
    marker, script = tmp_path / "payload-was-here", tmp_path / "train.py"
    script.write_text("print('started')\n")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    payload = b64encode(pickle.dumps(Payload(marker))).decode()
    store.set("torch.rendezvous.victim", payload)
    (result,) = launcher.many(
        [
            (
                which,
                [
                    "--rdzv-backend=c10d",
                    f"--rdzv-endpoint=127.0.0.1:{store.port}",
                    "--rdzv-conf=is_host=0",
                    "--rdzv-id=victim",
                    str(script),
                ],
            )
        ]
    )
    assert result.code != 0
    assert "started" not in result.out
    if which == STOCK:
        assert marker.exists()
        return
    assert not marker.exists()
    assert "Traceback" not in result.err
    last = result.err.splitlines()[-1]
    assert last.startswith("torchrun_hpc: error: HPC085 the rendezvous at 127.0.0.1:")
    assert "RendezvousStateError" in last


def _state(nodes: int = 3) -> Any:
    """Return a state as a rendezvous of our nodes, and one of stock's, holds it."""
    state = State()
    state.round, state.complete, state.closed = 2, True, False
    now = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=timezone.utc)
    state.deadline = now + timedelta(seconds=30)
    for rank in range(nodes):
        node = RankedNode(f"n{9 + rank}", 4000 + rank, 0, rank)
        state.participants[node] = rank
        state.last_heartbeats[node] = now
    state.wait_list.add(RankedNode("n2", 1, 0, 7))
    state.redundancy_list.add(Node("n3", 1, 0))
    return state


@pytest.mark.parametrize("nodes", [0, 1, 3, 1500])
def test_a_state_is_read_as_it_was_written(nodes: int) -> None:
    state = _state(nodes)
    read = StateAsJson.loads(StateAsJson.dumps(state))
    assert vars(read) == vars(state)
    assert [type(node) for node in read.wait_list] == [RankedNode]
    assert [type(node) for node in read.redundancy_list] == [Node]
    assert [node.node_rank for node in read.participants] == list(range(nodes))


def _fields(**changes: Any) -> bytes:
    fields = json.loads(StateAsJson.dumps(_state()))
    return json.dumps({**fields, **changes}).encode()


NOW = "2026-01-02T03:04:05+00:00"
NOT_A_STATE = {
    "a pickle": pickle.dumps(State()),
    "no JSON": b"{",
    "no text": b"\xff\xfe\xff",
    "nothing": b"",
    "null": b"null",
    "a number": b"1",
    "a list": b"[]",
    "no fields": b"{}",
    "deep": b"[" * 100_000,
    "another field": _fields(more=1),
    "a round of text": _fields(round="2"),
    "a round that is true": _fields(round=True),
    "a round with a point": _fields(round=1.5),
    "a round without end": _fields(round=float("inf")),
    "a flag of numbers": _fields(complete=1),
    "a deadline of numbers": _fields(deadline=1),
    "a deadline of another form": _fields(deadline="tomorrow"),
    "a deadline without zone": _fields(deadline="2026-01-02T03:04:05"),
    "participants by name": _fields(participants={"n9": 0}),
    "a rank of text": _fields(participants=[[["n9", 1, 0, 0], "0"]]),
    "a node of two": _fields(wait_list=[["n9", 1]]),
    "a node of five": _fields(wait_list=[["n9", 1, 0, 0, 0]]),
    "a node of text": _fields(wait_list=["n9_1_0"]),
    "a node without name": _fields(wait_list=[[None, 1, 0]]),
    "a process of text": _fields(wait_list=[["n9", "1", 0]]),
    "heartbeats of numbers": _fields(last_heartbeats=[[["n9", 1, 0], 5]]),
    "heartbeats without node": _fields(last_heartbeats=[[NOW, NOW]]),
}


def test_the_form_that_the_bad_ones_are_made_of_is_good() -> None:
    assert vars(StateAsJson.loads(_fields())) == vars(_state())


@pytest.mark.parametrize("data", NOT_A_STATE.values(), ids=NOT_A_STATE)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(pickle.PickleError):
        StateAsJson.loads(data)


def _assert_refused_or_state(data: bytes) -> None:
    try:
        state = StateAsJson.loads(data)
    except pickle.PickleError:
        return
    assert type(state) is State
    assert StateAsJson.loads(StateAsJson.dumps(state)).__dict__ == vars(state)


FUZZ = settings(deadline=None, database=None)


@settings(FUZZ, max_examples=300)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes(data: bytes) -> None:
    _assert_refused_or_state(data)


@settings(FUZZ, max_examples=500)
@given(
    name=st.sampled_from(sorted(vars(State()))),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
)
def test_states_with_another_value(name: str, value: Any) -> None:
    _assert_refused_or_state(_fields(**{name: value}))


# --- node_order -------------------------------------------------------------------


def _ranks(nodes: list[Any]) -> dict[str, int]:
    """Let torch rank participants."""
    state = State()
    state.participants = dict.fromkeys(nodes, 0)
    made = dynamic_rendezvous.RendezvousSettings(
        run_id="test",
        min_nodes=len(nodes),
        max_nodes=len(nodes),
        timeout=dynamic_rendezvous.RendezvousTimeout(),
        keep_alive_interval=timedelta(seconds=5),
        keep_alive_max_attempt=3,
    )
    executor = Executor(nodes[0], None, made)
    executor._state = state
    executor._mark_rendezvous_complete()
    return {node.addr: rank for node, rank in state.participants.items()}


NAMES = ("n9", "n10", "n11")


def test_stock_ranks_by_text() -> None:
    found = _ranks([Node(name, 1, 0) for name in NAMES])
    assert found == {"n10": 0, "n11": 1, "n9": 2}


@pytest.mark.usefixtures("torch_again")
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_nodes_are_ranked_as_the_scheduler_numbers_them(order: tuple[int, ...]) -> None:
    nodes = []
    for rank in order:
        patching.apply_patches(_plan(node_rank=rank))
        nodes.append(Handler._node_desc_generator.generate(NAMES[rank]))
    assert _ranks(nodes) == {"n9": 0, "n10": 1, "n11": 2}
    # As every node sees it: through the store.
    state = State()
    state.participants = dict.fromkeys(nodes, 0)
    copied = StateAsJson.loads(StateAsJson.dumps(state))
    assert _ranks(list(copied.participants)) == {"n9": 0, "n10": 1, "n11": 2}


@pytest.mark.usefixtures("torch_again")
def test_the_original_is_asked_for_the_rest() -> None:
    patching.apply_patches(_plan(node_rank=5))
    first = Handler._node_desc_generator.generate()
    second = Handler._node_desc_generator.generate("name")
    assert (first.addr, first.pid) == (socket.getfqdn(), os.getpid())
    assert second.addr == "name"
    assert second.local_id == first.local_id + 1


@pytest.mark.usefixtures("torch_again")
def test_nodes_that_are_not_to_be_ranked_are_left_alone() -> None:
    before = Handler._node_desc_generator
    patching.apply_patches(_plan(ordered=False))
    assert Handler._node_desc_generator is before


def test_two_agents_on_a_node_keep_apart() -> None:
    nodes = [RankedNode("n", 2, 0, 1), RankedNode("n", 1, 1, 1), RankedNode("n", 1, 0)]
    assert sorted(nodes) == [nodes[2], nodes[1], nodes[0]]
    assert len({*nodes, RankedNode("n", 1, 0, 0)}) == 3


def test_comparisons_agree_with_each_other() -> None:
    first, second = RankedNode("n9", 1, 0, 0), RankedNode("n10", 1, 0, 1)
    assert (first < second, second > first) == (True, True)
    assert (first <= second, second >= first) == (True, True)
    assert (first > second, second < first) == (False, False)
    assert (first >= second, second <= first) == (False, False)
    assert (min(second, first), max(first, second)) == (first, second)


@pytest.mark.parametrize("other", [Node("n9", 1, 0), "n9", 0, None], ids=repr)
def test_another_type_is_not_a_ranked_node(other: Any) -> None:
    node = RankedNode("n9", 1, 0, 0)
    assert node != other
    with pytest.raises(TypeError):
        sorted([node, other])
    with pytest.raises(TypeError):
        sorted([other, node])


def test_text_of_a_node_is_as_in_torch() -> None:
    """It is part of torch's own messages."""
    assert repr(RankedNode("n9", 12, 3, 0)) == repr(Node("n9", 12, 3))


# --- two rounds, over loopback ----------------------------------------------------


def _two_rounds(seen: list[Any], tick: float = 0.05) -> None:
    """Let two agents meet twice, as after a failure of their workers."""
    endpoint = f"127.0.0.1:{_free_port()}"
    handlers = []
    for is_host in (1, 0):
        parameters = _parameters(
            endpoint, is_host=is_host, nodes=2, join_timeout=20, read_timeout=20
        )
        parameters.local_addr = "127.0.0.1"
        backend, store = c10d_rendezvous_backend.create_backend(parameters)
        handlers.append(dynamic_rendezvous.create_handler(store, backend, parameters))
    for _ in range(2):
        found: dict[int, Any] = {}

        def join(number: int, found: dict[int, Any] = found) -> None:
            found[number] = handlers[number].next_rendezvous()

        threads = [threading.Thread(target=join, args=(n,)) for n in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        infos = [found[number].bootstrap_store_info for number in (0, 1)]
        assert infos[0] == infos[1]
        assert sorted(info.rank for info in found.values()) == [0, 1]
        workers = dist.TCPStore(
            infos[0].master_addr,
            infos[0].master_port,
            is_master=False,
            timeout=timedelta(seconds=5),
        )
        seen.append((infos[0].master_port, workers.check(["worker/0"])))
        workers.set("worker/0", "an address")
        time.sleep(tick)
    for handler in handlers:
        handler.shutdown()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let agents look at the state more often than once a second."""
    monkeypatch.setattr(dynamic_rendezvous, "_delay", lambda seconds: time.sleep(0.1))  # noqa: ARG005
    holder = dynamic_rendezvous._BackendRendezvousStateHolder
    original = holder.__init__
    monkeypatch.setattr(
        holder, "__init__", lambda self, b, s: original(self, b, s, cache_duration=0)
    )


@pytest.mark.usefixtures("quick")
def test_stock_keeps_the_store_of_dead_workers() -> None:
    seen: list[Any] = []
    _two_rounds(seen)
    assert seen[0][0] == seen[1][0]
    assert [old for _, old in seen] == [False, True]


@pytest.mark.usefixtures("torch_again", "quick")
@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_every_round_has_a_store_of_its_own(address: str | None) -> None:
    """With the stores opened by torch, and with those opened on one address."""
    _patch_all(address=address)
    seen: list[Any] = []
    _two_rounds(seen)
    assert seen[0][0] != seen[1][0]
    assert [old for _, old in seen] == [False, False]
    assert _listening(seen[0][0]) == set()  # nobody is led to the old one


# --- listening --------------------------------------------------------------------


def _listening(port: int) -> set[str]:
    """Return the addresses on which this process listens at a port."""
    return {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


def _usable(address: str) -> bool:
    try:
        _free_port(address)
    except OSError:
        return False
    return True


def test_stock_listens_on_all_interfaces() -> None:
    port = _free_port()
    store = c10d_rendezvous_backend._create_tcp_store(
        _parameters(f"127.0.0.2:{port}", is_host=1)
    )
    assert _answers("127.0.0.3", port)
    assert _listening(port).isdisjoint({"127.0.0.2"})
    del store


@pytest.mark.usefixtures("torch_again", "quick")
@pytest.mark.parametrize(
    ("address", "other"), [("127.0.0.2", "127.0.0.3"), ("::1", "127.0.0.1")]
)
def test_both_stores_listen_on_one_address(address: str, other: str) -> None:
    if not _usable(address):
        pytest.skip(f"this machine has no {address}")
    port = _free_port(address)
    _patch_all(address=address, listen=(address, port))
    host = f"[{address}]" if ":" in address else address
    parameters = _parameters(f"{host}:{port}", is_host=1)
    parameters.local_addr = address
    backend, store = c10d_rendezvous_backend.create_backend(parameters)
    handler = dynamic_rendezvous.create_handler(store, backend, parameters)
    try:
        info = handler.next_rendezvous().bootstrap_store_info
        assert info.master_addr == address
        assert store.port == port
        for found in (store.port, info.master_port):
            assert _listening(found) == {address}
            assert _answers(address, found)
            assert not _answers(other, found)
        workers = dist.TCPStore(address, info.master_port, is_master=False)
        workers.set("key", "value")
        assert workers.get("key") == b"value"
    finally:
        handler.shutdown()


@pytest.mark.usefixtures("torch_again")
def test_a_client_that_comes_first_waits_quietly(
    capfd: pytest.CaptureFixture[str],
) -> None:
    _patch_all(node_rank=1)
    port = _free_port("127.0.0.2")
    made: list[Any] = []

    def connect() -> None:
        parameters = _parameters(f"127.0.0.2:{port}", is_host=0, read_timeout=30)
        made.append(c10d_rendezvous_backend._create_tcp_store(parameters))
        made[0].set("key", "value")

    client = threading.Thread(target=connect, daemon=True)
    client.start()
    client.join(2)
    assert client.is_alive()
    assert made == []
    server = c10d_rendezvous_backend._create_tcp_store(
        _parameters(f"127.0.0.2:{port}", is_host=1)
    )
    client.join(10)
    assert not client.is_alive()
    assert server.get("key") == b"value"
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("torch_again")
def test_a_client_gives_up(capfd: pytest.CaptureFixture[str]) -> None:
    patching.apply_patches(_plan(endpoint="jwb0001i:23456", node_rank=1))
    port = _free_port("127.0.0.2")
    start = time.monotonic()
    with pytest.raises(RendezvousConnectionError) as caught:
        c10d_rendezvous_backend._create_tcp_store(
            _parameters(f"127.0.0.2:{port}", is_host=0, read_timeout=1)
        )
    assert 1 <= time.monotonic() - start < 3
    start = "HPC082 the head node did not answer at jwb0001i:23456 (127.0.0.2) within"
    assert str(caught.value).startswith(f"{start} 1 s (read_timeout): ")
    assert "refused" in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("torch_again")
def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.2", 0)) as holder:
        port = holder.getsockname()[1]
        patching.apply_patches(_plan(listen=("127.0.0.2", port)))
        with pytest.raises(LaunchError) as caught:
            c10d_rendezvous_backend._create_tcp_store(
                _parameters(f"127.0.0.2:{port}", is_host=1)
            )
    assert caught.value.code == "HPC081"
    name = psutil.Process().name()
    for expected in ("127.0.0.2", str(port), f"{name} (pid {os.getpid()}"):
        assert expected in str(caught.value)


SOON = 0.3


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report a wait within the patience of a test."""
    monkeypatch.setattr(report, "FIRST_REPORT", SOON)
    monkeypatch.setattr(report, "NEXT_REPORT", 60.0)


@pytest.mark.usefixtures("torch_again", "soon")
@pytest.mark.parametrize(("node_rank", "reports"), [(1, 1), (2, 0)])
def test_a_client_says_for_what_it_waits(
    node_rank: int, reports: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Node 1 speaks for all: they wait for the same."""
    _patch_all(node_rank=node_rank, endpoint="jwb0001i:1")
    endpoint = f"127.0.0.2:{_free_port('127.0.0.2')}"
    with pytest.raises(RendezvousConnectionError):
        c10d_rendezvous_backend._create_tcp_store(
            _parameters(endpoint, is_host=0, read_timeout=1)
        )
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == reports
    for line in lines:
        start = "torchrun_hpc: HPC083 waiting for the head node at jwb0001i:1"
        assert line.startswith(f"{start} (127.0.0.2) for 0 s: ")


ENDED = 3.0  # the waiting, which is to last for one second
SUSPICION = "is it --node_rank=0 on every node?"
REPORT = "torchrun_hpc: HPC084 waiting at head:1 for other nodes of 3, for 0 s"


@pytest.mark.usefixtures("torch_again", "soon", "quick")
@pytest.mark.parametrize(
    ("values", "first_report", "lines"),
    [
        ({}, SOON, [REPORT]),
        ({"suspicion": SUSPICION}, SOON, [f"{REPORT}; {SUSPICION}"]),
        ({"speaks": False, "node_rank": 1}, SOON, []),
        ({}, ENDED, []),
    ],
)
def test_node_0_says_that_it_waits_for_others(
    values: dict[str, Any],
    first_report: float,
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "FIRST_REPORT", first_report)
    _patch_all(**values)
    parameters = _parameters(
        f"127.0.0.2:{_free_port('127.0.0.2')}", is_host=1, nodes=2, join_timeout=1
    )
    parameters.local_addr = "127.0.0.2"
    backend, store = c10d_rendezvous_backend.create_backend(parameters)
    handler = dynamic_rendezvous.create_handler(store, backend, parameters)
    start = time.monotonic()
    with pytest.raises(RendezvousTimeoutError):
        handler.next_rendezvous()
    if first_report == ENDED:
        assert time.monotonic() - start < ENDED
        time.sleep(start + ENDED + SOON - time.monotonic())
    assert capsys.readouterr().err.splitlines() == lines


WAITING = """
import sys
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters, c10d_rendezvous_backend,
)
from torchrun_hpc import patching
from torchrun_hpc.plan import LaunchPlan

plan = LaunchPlan(
    title="", nodes=2, node_rank=1, workers=1, speaks=False, endpoint="head:1",
    address="127.0.0.2",
)
assert patching.left_out(patching.apply_patches(plan)) == []
print("waiting", flush=True)
c10d_rendezvous_backend.create_backend(
    RendezvousParameters("c10d", sys.argv[1], "test", 2, 2, is_host=0)
)
"""


# Behind SIGINT Python takes torch apart, which takes a second of its own.
@pytest.mark.parametrize(("number", "limit"), [(signal.SIGTERM, 1), (signal.SIGINT, 5)])
def test_a_signal_ends_the_waiting(number: int, limit: float) -> None:
    endpoint = f"127.0.0.2:{_free_port('127.0.0.2')}"
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, endpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environ(),
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout.readline() == "waiting\n"
            time.sleep(0.3)
            assert process.poll() is None
            process.send_signal(number)
            start = time.monotonic()
            process.wait(timeout=10)
            assert time.monotonic() - start < limit
            assert process.returncode == -number
        finally:
            end_group(process.pid)

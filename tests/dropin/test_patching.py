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
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import permutations
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from side_by_side import OURS, STOCK, clean_environ, end_group, run
from torch.distributed import run as torch_run
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    static_tcp_rendezvous,
)

from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.planning.plan import LaunchPlan
from torchrun_hpc.reporting import intervals
from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches import (
    bind_store,
    fresh_store,
    keep_open_on_restart,
    local_addr,
    master_addr,
    node_order,
    registry,
    replacing,
    state_as_json,
)
from torchrun_hpc.torch_compat.patches.node_order import RankedNode
from torchrun_hpc.torch_compat.patches.state_as_json import StateAsJson

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from side_by_side import Launcher

Handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
Executor: Any = dynamic_rendezvous._DistributedRendezvousOpExecutor
State: Any = dynamic_rendezvous._RendezvousState
Node: Any = dynamic_rendezvous._NodeDesc

# Where workers are started, and by which name.
Starting: Any = multiprocessing_api
Starting = sys.modules[Starting.SubprocessHandler.__module__]
POPEN = "Popen" if hasattr(Starting, "Popen") else "subprocess"

# Everything that a patch may replace, and what a torch has where one does.
_EVERY, _SHARED = capabilities.EVERY, capabilities.SHARED_STORE
_INFO = capabilities.RENDEZVOUS_INFO
EXPECTED = {
    (Handler, "next_rendezvous"): _EVERY,
    (Handler, "shutdown"): _EVERY,
    (Handler, "_create_tcp_store_server"): _SHARED,
    (Handler, "_node_desc_generator"): _EVERY,
    (static_tcp_rendezvous.StaticTCPRendezvous, "next_rendezvous"): _EVERY,
    (static_tcp_rendezvous.StaticTCPRendezvous, "shutdown"): _EVERY,
    (c10d_rendezvous_backend, "TCPStore"): _EVERY,
    (static_tcp_rendezvous, "TCPStore"): _EVERY,
    (dynamic_rendezvous, "pickle"): _EVERY,
    (agent_api.SimpleElasticAgent, "_rendezvous"): _EVERY,
    (agent_api.SimpleElasticAgent, "_exit_barrier"): _EVERY,
    (LocalElasticAgent, "_start_workers"): _EVERY,
    (LocalElasticAgent, "_shutdown"): _EVERY,
    (LocalElasticAgent, "_stop_workers"): capabilities.STOP_CLOSES_RENDEZVOUS,
    (LocalElasticAgent, "_monitor_workers"): _EVERY,
    (LocalElasticAgent, "_get_fq_hostname"): _INFO,
    (agent_api, "_get_fq_hostname"): _INFO,
    (multiprocessing_api.PContext, "close"): _EVERY,
    (Starting, POPEN): _EVERY,
    (torch_run, "config_from_args"): capabilities.WARNS_OF_DEFAULT,
}
PLACES = [place for place, has in EXPECTED.items() if has.present or hasattr(*place)]


def _needs(capability: capabilities.Capability, what: str) -> pytest.MarkDecorator:
    reason = f"torch {torch.__version__} has no {what}"
    return pytest.mark.skipif(not capability.present, reason=reason)


needs_shared_store = _needs(_SHARED, "store that agents keep for workers")
needs_listening = _needs(
    capabilities.LISTENING_SOCKET, "store that listens on a given socket"
)


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
        "is_reporter": True,
        "endpoint": "head:1",
        "ordered": True,
        "address": "127.0.0.2",
    }
    return LaunchPlan(**{**given_values, **values})


def _expected(patch: registry.Patch) -> registry.State:
    """Return what is to become of a patch: none may be left out."""
    needed = patch.IS_FOR.is_expected
    return registry.State.APPLIED if needed else registry.State.NOT_NEEDED


def _patch_all(**values: Any) -> None:
    """Apply all patches that this torch needs, none of which may be left out."""
    outcomes = registry.apply_patches(_plan(**values))
    for outcome in outcomes:
        assert outcome.state is _expected(outcome.patch), outcome.name


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


NEEDED = [patch for patch in registry.PATCHES if patch.IS_FOR.is_expected]


@pytest.mark.parametrize("patch", NEEDED, ids=lambda patch: patch.__name__)
def test_fits_this_torch(patch: registry.Patch) -> None:
    assert patch.fits() is True


@pytest.mark.usefixtures("torch_again")
def test_every_target_is_replaced() -> None:
    before = _torch()
    _patch_all()
    for old, new, place in zip(before, _torch(), PLACES, strict=True):
        assert (old is not new) is EXPECTED[place].present, place


@pytest.mark.usefixtures("torch_again")
def test_a_second_launch_in_one_process() -> None:
    """Programs that use torchrun_hpc.auto may launch twice; nothing has changed."""
    _patch_all(node_rank=0)
    _patch_all(node_rank=2)
    assert Handler._node_desc_generator.generate("n").node_rank == 2


@needs_listening
@pytest.mark.usefixtures("torch_again")
def test_a_second_launch_listens_on_its_own_address() -> None:
    for address in ("127.0.0.2", "127.0.0.4"):
        registry.apply_patches(_plan(address=address, listen=(address, 0)))
        made = c10d_rendezvous_backend._create_tcp_store(
            _parameters(f"{address}:0", is_host=1)
        )
        assert _listening(made.port) == {address}
        del made


@pytest.mark.usefixtures("torch_again")
def test_what_became_of_each() -> None:
    outcomes = registry.apply_patches(_plan())
    assert [outcome.name for outcome in outcomes] == [
        *("state_as_json", "fresh_store", "node_order", "local_addr"),
        *("bind_store", "report_missing_nodes", "host_exits_last"),
        *("agent", "keep_open_on_restart", "forward_signals", "defer_signals_on_close"),
        *("parent_death_signal", "host_name", "master_addr"),
    ]
    assert registry.left_out(outcomes) == []
    for outcome in outcomes:
        assert registry.described(outcome) == {
            "name": outcome.name,
            "target": outcome.patch.TARGET,
            "reason": outcome.patch.REASON,
            "releases": outcome.patch.IS_FOR.releases,
            "state": _expected(outcome.patch).value,
        }


@pytest.mark.usefixtures("torch_again")
def test_looking_at_patches_applies_none() -> None:
    before = _torch()
    outcomes = registry.examine()
    assert _torch() == before
    assert outcomes == registry.apply_patches(_plan())


@pytest.mark.usefixtures("torch_again")
def test_a_release_without_the_fault_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = capabilities.Capability("<2.0", present=False)
    monkeypatch.setattr(state_as_json, "IS_FOR", older)
    before = dynamic_rendezvous.pickle
    first, *others = registry.apply_patches(_plan())
    assert (first.name, first.state) == ("state_as_json", registry.State.NOT_NEEDED)
    for outcome in others:
        assert outcome.state is _expected(outcome.patch), outcome.name
    assert registry.left_out([first]) == []
    assert dynamic_rendezvous.pickle is before


@pytest.mark.usefixtures("torch_again")
def test_a_release_that_has_lost_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fault may be there all the same, at another place."""
    lost = capabilities.Capability(f"=={capabilities.RELEASE}", present=False)
    monkeypatch.setattr(state_as_json, "IS_FOR", lost)
    before = dynamic_rendezvous.pickle
    outcome = registry.apply_patches(_plan())[0]
    assert outcome.state is registry.State.DOES_NOT_FIT
    (message,) = registry.left_out([outcome])
    assert (message.code, state_as_json.TARGET in message.text) == ("HPC080", True)
    assert dynamic_rendezvous.pickle is before


# Where they are gone, somebody has mended them.
FAULTS = (local_addr, master_addr, keep_open_on_restart)


@pytest.mark.parametrize("patch", registry.PATCHES, ids=lambda patch: patch.__name__)
def test_a_release_that_should_have_it_and_has_not(
    patch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = replace(patch.IS_FOR, releases=">=2.0", present=False)
    monkeypatch.setattr(patch, "IS_FOR", lost)
    (outcome,) = outcomes = registry.examine([patch])
    messages = [message.code for message in registry.left_out(outcomes)]
    if patch in FAULTS:
        assert (outcome.state, messages) == (registry.State.NOT_NEEDED, [])
    else:
        assert (outcome.state, messages) == (registry.State.DOES_NOT_FIT, ["HPC080"])


@pytest.mark.usefixtures("torch_again")
def test_a_release_that_nobody_knows_and_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newer = capabilities.Capability("<2.0", present=True)
    monkeypatch.setattr(state_as_json, "IS_FOR", newer)
    assert registry.apply_patches(_plan())[0].state is registry.State.APPLIED


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


def _answer(self: Any) -> Any:
    return self._answer


CHANGES = [
    (node_order, Executor, "_mark_rendezvous_complete", _by_address),
    (node_order, Executor, "_mark_rendezvous_complete", _no_order),
    (node_order, Executor, "_mark_rendezvous_complete", None),
    (node_order, Handler, "_node_desc_generator", None),
    (bind_store, c10d_rendezvous_backend, "TCPStore", None),
    (state_as_json, dynamic_rendezvous, "pickle", None),
]
if capabilities.LISTENING_SOCKET.present:
    CHANGES += [(bind_store, c10d_rendezvous_backend, "TCPStore", dist.HashStore)]
if capabilities.SHARED_STORE.present:
    CHANGES += [
        (bind_store, Handler, "_create_tcp_store_server", _other_server),
        (bind_store, Handler, "_create_tcp_store_server", None),
        (fresh_store, Handler, "__init__", _other_init),
        (fresh_store, Handler, "next_rendezvous", None),
    ]
if capabilities.ADDRESS_IS_LOST.present:
    CHANGES += [
        (local_addr, Handler, "__init__", _other_init),
        (local_addr, Handler, "next_rendezvous", _answer),
        (local_addr, Handler, "next_rendezvous", None),
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
    monkeypatch.setattr(registry, "PATCHES", (patch,))

    (outcome,) = registry.apply_patches(_plan())
    assert outcome.state is registry.State.DOES_NOT_FIT
    assert registry.left_out([outcome]) == [
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
    outcomes = registry.apply_patches(_plan())
    (message,) = registry.left_out(outcomes)
    assert node_order.TARGET in message.text
    assert len(outcomes) == len(registry.PATCHES)
    assert dynamic_rendezvous.pickle is StateAsJson
    assert c10d_rendezvous_backend.TCPStore is not dist.TCPStore


WITHOUT = """
import sys
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

delattr(dynamic_rendezvous, sys.argv[1])

from torchrun_hpc.launching import agent  # it imports all that torch is asked for
from torchrun_hpc.torch_compat.patches import registry
from torchrun_hpc.planning.plan import LaunchPlan

plan = LaunchPlan(
    title="", nodes=2, node_rank=0, workers=1, is_reporter=True, endpoint="head:1",
    address="127.0.0.2", ordered=True,
)
for outcome in registry.apply_patches(plan):
    print(outcome.name, outcome.state.name)
"""


@pytest.mark.parametrize("name", ["_NodeDesc", "_RendezvousState"])
def test_a_torch_without_a_class_that_two_patches_need(
    name: str, tmp_path: Path
) -> None:
    done = run([sys.executable, "-c", WITHOUT, name], cwd=tmp_path)
    assert (done.code, done.own_lines) == (0, []), done.err
    found = dict(line.split() for line in done.out.splitlines())
    expected = {o.name: _expected(o.patch).name for o in registry.examine()}
    left_out = dict.fromkeys(("state_as_json", "node_order"), "DOES_NOT_FIT")
    assert found == {**expected, **left_out}


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


SECOND_SET = hasattr(State(), "redundancy_list")
ZONE = timezone.utc if capabilities.AWARE_TIMES.present else None


def _state(nodes: int = 3) -> Any:
    """Return a state as a rendezvous of our nodes, and one of stock's, holds it."""
    state = State()
    state.round, state.complete, state.closed = 2, True, False
    now = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=ZONE)
    state.deadline = now + timedelta(seconds=30)
    for rank in range(nodes):
        node = RankedNode(f"n{9 + rank}", 4000 + rank, 0, rank)
        state.participants[node] = rank
        state.last_heartbeats[node] = now
    state.wait_list.add(RankedNode("n2", 1, 0, 7))
    second = state.redundancy_list if SECOND_SET else state.wait_list
    second.add(Node("n3", 1, 0))
    return state


@pytest.mark.parametrize("nodes", [0, 1, 3, 1500])
def test_a_state_is_read_as_it_was_written(nodes: int) -> None:
    state = _state(nodes)
    read = StateAsJson.loads(StateAsJson.dumps(state))
    assert vars(read) == vars(state)
    others = {*read.wait_list, *(read.redundancy_list if SECOND_SET else ())}
    kinds = {node.addr: type(node) for node in others}
    assert kinds == {"n2": RankedNode, "n3": Node}
    assert [node.node_rank for node in read.participants] == list(range(nodes))


# As torch's own test has it (dynamic_rendezvous_test.py): nodes that take part, as many
# that wait, and the longest that they may be in the store.
@pytest.mark.parametrize(
    ("nodes", "limit"), [(5, 2048), (50, 16_384), (500, 163_840), (5000, 1_638_400)]
)
def test_a_state_is_no_larger_than_torchs_own(nodes: int, limit: int) -> None:
    state = _state(0)
    for number in range(nodes):
        runs, waits = (
            Node(f"dummy{number}.{'-'.join([name] * 4)}.com", pid, number)
            for name, pid in (("dummy1", 12345), ("dummy2", 67890))
        )
        state.participants[runs] = number
        state.wait_list.add(waits)
        for node in runs, waits:
            state.last_heartbeats[node] = datetime.now(ZONE)
    written = len(b64encode(StateAsJson.dumps(state)))
    assert written <= min(limit, len(b64encode(pickle.dumps(state))))


def _fields(**changes: Any) -> bytes:
    fields = json.loads(StateAsJson.dumps(_state()))
    return json.dumps({**fields, **changes}).encode()


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
    "a deadline of text": _fields(deadline="2026-01-02T03:04:05"),
    "a deadline with a point": _fields(deadline=1.5),
    "a deadline after the last year": _fields(deadline=10**18),
    "a deadline of very many digits": _fields(deadline=10**1000),
    "participants by name": _fields(participants={"n9": 0}),
    "a rank of text": _fields(participants=[[0, "0"]]),
    "a rank of nobody": _fields(participants=[[9, 0]]),
    "a rank before the first": _fields(participants=[[-1, 0]]),
    "a rank of true": _fields(participants=[[True, 0]]),
    "a rank of a node": _fields(participants=[[["n9", 1, 0], 0]]),
    "a node of two": _fields(nodes=[["n9", 1]]),
    "a node of five": _fields(nodes=[["n9", 1, 0, 0, 0]]),
    "a node of text": _fields(nodes=["n9_1_0"]),
    "a node without name": _fields(nodes=[[None, 1, 0]]),
    "a process of text": _fields(nodes=[["n9", "1", 0]]),
    "no nodes": _fields(nodes=[]),
    "nodes by name": _fields(nodes={"n9": 0}),
    "who waits, by name": _fields(wait_list=["n9"]),
    "nobody who waits": _fields(wait_list=[9]),
    "heartbeats of text": _fields(last_heartbeats=[[0, "2026-01-02T03:04:05"]]),
    "heartbeats without time": _fields(last_heartbeats=[[0]]),
    "heartbeats without end": _fields(last_heartbeats=[[0, float("inf")]]),
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
        registry.apply_patches(_plan(node_rank=rank))
        nodes.append(Handler._node_desc_generator.generate(NAMES[rank]))
    assert _ranks(nodes) == {"n9": 0, "n10": 1, "n11": 2}
    # As every node sees it: through the store.
    state = State()
    state.participants = dict.fromkeys(nodes, 0)
    copied = StateAsJson.loads(StateAsJson.dumps(state))
    assert _ranks(list(copied.participants)) == {"n9": 0, "n10": 1, "n11": 2}


@pytest.mark.usefixtures("torch_again")
def test_the_original_is_asked_for_the_rest() -> None:
    registry.apply_patches(_plan(node_rank=5))
    first = Handler._node_desc_generator.generate()
    second = Handler._node_desc_generator.generate("name")
    assert (first.addr, first.pid) == (socket.getfqdn(), os.getpid())
    assert second.addr == "name"
    assert second.local_id == first.local_id + 1


@pytest.mark.usefixtures("torch_again")
def test_nodes_that_are_not_to_be_ranked_are_left_alone() -> None:
    before = Handler._node_desc_generator
    registry.apply_patches(_plan(ordered=False))
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


def test_who_joined_from_outside_of_the_job_comes_last() -> None:
    """And agents that have no scheduler are ranked as torch does it."""
    nodes = [Node("n1", 1, 0), RankedNode("n9", 1, 0, 1), RankedNode("n10", 1, 0, 0)]
    for order in permutations([*nodes, Node("n11", 1, 0)]):
        assert [node.addr for node in sorted(order)] == ["n10", "n9", "n1", "n11"]


@pytest.mark.parametrize("other", ["n9", 0, None], ids=repr)
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


def _two_agents(*addresses: str) -> tuple[list[Any], int]:
    """Return the handlers of two agents, and the port of their rendezvous."""
    port = _free_port()
    handlers = []
    for number, address in enumerate(addresses):
        parameters = _parameters(
            f"127.0.0.1:{port}",
            is_host=int(number == 0),
            nodes=2,
            join_timeout=20,
            read_timeout=20,
        )
        parameters.local_addr = address
        backend, store = c10d_rendezvous_backend.create_backend(parameters)
        handlers.append(dynamic_rendezvous.create_handler(store, backend, parameters))
    return handlers, port


def _meet(handlers: list[Any]) -> list[Any]:
    """Return what the handlers answer when all of them are asked."""
    found: dict[int, Any] = {}

    def join(number: int) -> None:
        found[number] = handlers[number].next_rendezvous()

    numbers = range(len(handlers))
    threads = [threading.Thread(target=join, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return [found[number] for number in numbers]


def _two_rounds(seen: list[Any], tick: float = 0.05) -> int:
    """Let two agents meet twice, as after a failure of their workers.

    Returns the port of their own store.
    """
    handlers, port = _two_agents("127.0.0.1", "127.0.0.1")
    for _ in range(2):
        found = _meet(handlers)
        infos = [answer.bootstrap_store_info for answer in found]
        assert infos[0] == infos[1]
        assert sorted(answer.rank for answer in found) == [0, 1]
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
    return port


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let agents look at the state more often than once a second."""
    monkeypatch.setattr(dynamic_rendezvous, "_delay", lambda seconds: time.sleep(0.1))  # noqa: ARG005
    holder = dynamic_rendezvous._BackendRendezvousStateHolder
    original = holder.__init__
    monkeypatch.setattr(
        holder, "__init__", lambda self, b, s: original(self, b, s, cache_duration=0)
    )


@needs_shared_store
@pytest.mark.usefixtures("quick")
def test_stock_keeps_the_store_of_dead_workers() -> None:
    seen: list[Any] = []
    port = _two_rounds(seen)
    assert seen[0][0] == seen[1][0]
    assert (seen[0][0] == port) is capabilities.SHARED_RENDEZVOUS_STORE.present
    assert [old for _, old in seen] == [False, True]


@needs_shared_store
@pytest.mark.skipif(
    bool(capabilities.variables()), reason="here the store of workers is worker 0's own"
)
@pytest.mark.usefixtures("torch_again", "quick")
@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_every_round_has_a_store_of_its_own(address: str | None) -> None:
    """With the stores opened by torch, and with those opened on one address."""
    _patch_all(address=address)
    seen: list[Any] = []
    port = _two_rounds(seen)
    assert len({port, seen[0][0], seen[1][0]}) == 3
    assert [old for _, old in seen] == [False, False]
    assert _listening(seen[0][0]) == set()  # nobody is led to the old one


# --- stopping ---------------------------------------------------------------------


@pytest.mark.usefixtures("torch_again")
def test_a_restart_leaves_the_rendezvous_open(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = []
    monkeypatch.setattr(
        LocalElasticAgent,
        "_stop_workers",
        lambda self, group: stopped.append((self._rdzv_handler, group)),
    )
    keep_open_on_restart.apply(None)
    agent: Any = SimpleNamespace(_rdzv_handler="handler")
    LocalElasticAgent._stop_workers(agent, "group")
    assert stopped == [(None, "group")]
    assert agent._rdzv_handler == "handler"  # the agent closes it at its end


# --- local_addr -------------------------------------------------------------------


@pytest.mark.usefixtures("torch_again")
@pytest.mark.parametrize("order", [("n9", "n10"), ("n10", "n9")])
def test_the_first_node_says_where_the_workers_meet(
    order: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever node it is, and whatever torch has said."""
    state = State()
    state.participants = {Node(name, 1, 0): order.index(name) for name in NAMES[:2]}
    holder = SimpleNamespace(state=state)
    where = SimpleNamespace(master_addr="n9.cl", master_port=1234)
    answer = SimpleNamespace(bootstrap_store_info=where)
    monkeypatch.setattr(Handler, "next_rendezvous", lambda _self: answer)
    local_addr.apply(None)
    handler: Any = SimpleNamespace(_state_holder=holder)
    assert Handler.next_rendezvous(handler) is answer
    assert vars(where) == {"master_addr": order[0], "master_port": 1234}


@pytest.mark.usefixtures("torch_again")
@pytest.mark.parametrize(
    "ranks", [{"n9": 0, "n10": 0}, {"n9": 1, "n10": 2}, {}], ids=str
)
def test_what_torch_has_said_stays_where_the_first_node_is_not_known(
    ranks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the next round forms, in which all have rank 0 at first."""
    state = State()
    state.participants = {Node(name, 1, 0): rank for name, rank in ranks.items()}
    where = SimpleNamespace(master_addr="n9.cl", master_port=1234)
    answer = SimpleNamespace(bootstrap_store_info=where)
    monkeypatch.setattr(Handler, "next_rendezvous", lambda _self: answer)
    local_addr.apply(None)
    handler: Any = SimpleNamespace(_state_holder=SimpleNamespace(state=state))
    assert Handler.next_rendezvous(handler) is answer
    assert vars(where) == {"master_addr": "n9.cl", "master_port": 1234}


@pytest.mark.skipif(
    not capabilities.RENDEZVOUS_INFO.present,
    reason="this torch does not say where the workers meet",
)
@pytest.mark.usefixtures("torch_again", "quick")
@pytest.mark.parametrize("which", [STOCK, OURS])
def test_workers_meet_at_the_address_of_the_first_node(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second agent to come is the first of the nodes."""
    if which == OURS:
        _patch_all(address=None, ordered=False)
        for name, value in capabilities.variables().items():
            monkeypatch.setenv(name, value.value)
    addresses = ("127.0.0.3", "127.0.0.2")
    handlers, port = _two_agents(*addresses)
    found = _meet(handlers)
    assert [answer.rank for answer in found] == [1, 0]
    met = {answer.bootstrap_store_info.master_addr for answer in found}
    if which == OURS:
        assert met == {"127.0.0.2"}
    elif capabilities.ADDRESS_IS_LOST.present:
        assert met == {socket.getfqdn()}
    elif capabilities.SHARED_RENDEZVOUS_STORE.present:
        assert met == {"127.0.0.1"}  # where the rendezvous is
        assert found[0].bootstrap_store_info.master_port == port
    else:
        assert met == {"127.0.0.2"}
    for handler in handlers:
        handler.shutdown()


# --- listening --------------------------------------------------------------------


@pytest.mark.usefixtures("torch_again")
@pytest.mark.parametrize("may_join", [True, False])
@pytest.mark.parametrize("takes_socket", [True, False])
def test_who_finds_the_port_taken(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    may_join: bool,
    takes_socket: bool,
) -> None:
    """By another agent of this world, if the plan says that this may be."""
    if not takes_socket:  # as up to torch 2.0
        without = replace(capabilities.LISTENING_SOCKET, present=False)
        monkeypatch.setattr(capabilities, "LISTENING_SOCKET", without)
    first = dist.TCPStore("127.0.0.2", 0, is_master=True, wait_for_workers=False)
    first.set("key", "value")
    where = ("127.0.0.2", first.port)
    registry.apply_patches(_plan(listen=where, may_join=may_join))
    parameters = _parameters("{}:{}".format(*where), is_host=1, read_timeout=20)
    if not may_join:
        with pytest.raises(LaunchError, match=f"port {where[1]}: ") as caught:
            c10d_rendezvous_backend._create_tcp_store(parameters)
        assert caught.value.code == "HPC081"
        return
    second = c10d_rendezvous_backend._create_tcp_store(parameters)
    assert second.get("key") == b"value"
    said = capsys.readouterr().err
    assert said.startswith(f"torchrun_hpc: HPC156 cannot listen on {where[0]} port ")
    assert said.endswith(": taken for an agent of this world, and joined\n")


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


class PlainStore:
    """A store that opens its port itself."""

    def __init__(self) -> None:
        """Take a host and a port."""


@pytest.mark.usefixtures("torch_again")
@pytest.mark.parametrize(
    ("releases", "state"),
    [(">=2.0", registry.State.DOES_NOT_FIT), ("<2.0", registry.State.APPLIED)],
)
def test_a_torch_whose_stores_take_no_socket(
    releases: str, state: registry.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that should, and one that nobody expects to."""
    none = capabilities.Capability(releases, present=False)
    monkeypatch.setattr(capabilities, "LISTENING_SOCKET", none)
    modules = (c10d_rendezvous_backend, static_tcp_rendezvous)
    for module in modules:
        monkeypatch.setattr(module, "TCPStore", PlainStore)
    server = vars(Handler).get("_create_tcp_store_server")
    monkeypatch.setattr(registry, "PATCHES", (bind_store,))
    (outcome,) = registry.apply_patches(_plan())
    assert outcome.state is state
    for module in modules:
        replaced = vars(module)["TCPStore"] is not PlainStore
        assert replaced is (state is registry.State.APPLIED)
    assert vars(Handler).get("_create_tcp_store_server") is server


@needs_listening
@pytest.mark.usefixtures("torch_again", "quick")
@pytest.mark.parametrize(
    ("address", "other"), [("127.0.0.2", "127.0.0.3"), ("::1", "127.0.0.1")]
)
def test_all_stores_listen_on_one_address(address: str, other: str) -> None:
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
        answer = handler.next_rendezvous()
        assert store.port == port
        ports = [store.port]
        if capabilities.SHARED_STORE.present:
            info = answer.bootstrap_store_info
            assert info.master_addr == address
            ports.append(info.master_port)
        for found in ports:
            assert _listening(found) == {address}
            assert _answers(address, found)
            assert not _answers(other, found)
        workers = dist.TCPStore(address, ports[-1], is_master=False)
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
    registry.apply_patches(_plan(endpoint="jwb0001i:23456", node_rank=1))
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
        registry.apply_patches(_plan(listen=("127.0.0.2", port)))
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
    monkeypatch.setattr(intervals, "FIRST_REPORT", SOON)
    monkeypatch.setattr(intervals, "NEXT_REPORT", 60.0)


@pytest.mark.usefixtures("torch_again", "soon")
@pytest.mark.parametrize(
    ("head", "node_rank", "reports"),
    [(0, 1, 1), (0, 2, 0), (1, 0, 1), (1, 2, 0), (None, 1, 1)],
)
def test_a_client_says_for_what_it_waits(
    head: int | None, node_rank: int, reports: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One node speaks for all: they wait for the same."""
    _patch_all(node_rank=node_rank, head=head, endpoint="jwb0001i:1")
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


ENDED = 3.0  # the report_missing_nodes, which is to last for one second
SUSPICION = "is it --node_rank=0 on every node?"
REPORT = "torchrun_hpc: HPC084 waiting at head:1 for other nodes of 3, for 0 s"


@pytest.mark.usefixtures("torch_again", "soon", "quick")
@pytest.mark.parametrize(
    ("values", "first_report", "lines"),
    [
        ({}, SOON, [REPORT]),
        ({"suspicion": SUSPICION}, SOON, [f"{REPORT}; {SUSPICION}"]),
        ({"is_reporter": False, "node_rank": 1}, SOON, []),
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
    monkeypatch.setattr(intervals, "FIRST_REPORT", first_report)
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

from torchrun_hpc.torch_compat.patches import registry
from torchrun_hpc.planning.plan import LaunchPlan

plan = LaunchPlan(
    title="", nodes=2, node_rank=1, workers=1, is_reporter=False, endpoint="head:1",
    address="127.0.0.2",
)
assert registry.left_out(registry.apply_patches(plan)) == []
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

"""The rendezvous state as JSON: read as written, and anything else is refused."""

from __future__ import annotations

import json
import os
import pickle
from base64 import b64encode
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stock.inside_torch import Node, State, dist
from tests.support.stock.side_by_side import OURS, STOCK
from torchrun_hpc.agent.patches.c10d import RankedNode
from torchrun_hpc.agent.patches.state_as_json import JsonPickle
from torchrun_hpc.host import capabilities

if TYPE_CHECKING:
    from pathlib import Path


class Payload:
    """What an attacker writes into the store: unpickling it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


@pytest.mark.parametrize("which", [STOCK, OURS])
def test_payload_in_the_store(which, launcher, tmp_path):
    marker, script = tmp_path / "payload-was-here", tmp_path / "train.py"
    script.write_text("print('started')\n")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    payload = b64encode(pickle.dumps(Payload(marker))).decode()
    store.set("torch.rendezvous.victim", payload)
    where = [f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-conf=is_host=0"]
    argv = ["--rdzv-backend=c10d", *where, "--rdzv-id=victim", str(script)]
    result = launcher.launch(which, argv)
    assert result.code != 0
    assert "started" not in result.out
    if which == STOCK:
        assert marker.exists()
        return
    assert not marker.exists()
    assert "Traceback" not in result.err
    last = result.err.splitlines()[-1]
    assert last.startswith("torchrun_hpc: error[HPC085]: the rendezvous at 127.0.0.1:")
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
def test_a_state_is_read_as_it_was_written(nodes):
    state = _state(nodes)
    read = JsonPickle.loads(JsonPickle.dumps(state))
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
def test_a_state_is_no_larger_than_torchs_own(nodes, limit):
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
    written = len(b64encode(JsonPickle.dumps(state)))
    assert written <= min(limit, len(b64encode(pickle.dumps(state))))


def _fields(**changes: Any) -> bytes:
    fields = json.loads(JsonPickle.dumps(_state()))
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


def test_the_form_that_the_bad_ones_are_made_of_is_good():
    assert vars(JsonPickle.loads(_fields())) == vars(_state())


@pytest.mark.parametrize("data", NOT_A_STATE.values(), ids=NOT_A_STATE)
def test_anything_else_is_refused(data):
    with pytest.raises(pickle.PickleError):
        JsonPickle.loads(data)


def _assert_refused_or_state(data: bytes) -> None:
    try:
        state = JsonPickle.loads(data)
    except pickle.PickleError:
        return
    assert type(state) is State
    assert JsonPickle.loads(JsonPickle.dumps(state)).__dict__ == vars(state)


FUZZ = settings(deadline=None, database=None)


@settings(FUZZ, max_examples=300)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes(data):
    _assert_refused_or_state(data)


@settings(FUZZ, max_examples=500)
@given(
    name=st.sampled_from(sorted(vars(State()))),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
)
def test_states_with_another_value(name, value):
    _assert_refused_or_state(_fields(**{name: value}))

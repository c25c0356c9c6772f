"""The rendezvous state as JSON of one fixed form."""

from __future__ import annotations

import dataclasses
import json
import pickle
from datetime import datetime, timedelta, timezone
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from torchrun_hpc.agent.patches import Patch, has, replace
from torchrun_hpc.agent.patches.c10d import RankedNode
from torchrun_hpc.host import capabilities

_torch: Any = dynamic_rendezvous
_FLAGS = ("complete", "closed")
_SETS = ("wait_list", "redundancy_list")
_NODES = "nodes"  # our field: each participant once


class JsonPickle:
    """Replaces the module ``pickle`` where torch keeps the rendezvous state.

    A node is written once: ``[addr, pid, local_id]``, and its rank if it has one. All
    other places have its index. A time is in microseconds since 1970; a dictionary is a
    list of pairs.
    """

    PickleError = pickle.PickleError

    @staticmethod
    def dumps(state: Any) -> bytes:
        """Write a rendezvous state."""
        nodes = dict.fromkeys([*state.participants, *state.last_heartbeats])
        for name in _SETS:
            nodes.update(dict.fromkeys(getattr(state, name, ())))
        index = {node: number for number, node in enumerate(nodes)}
        fields = dict(vars(state))
        fields[_NODES] = [[*vars(node).values()] for node in nodes]
        fields["deadline"] = state.deadline and _microseconds(state.deadline)
        fields["participants"] = [[index[n], r] for n, r in state.participants.items()]
        times = state.last_heartbeats.items()
        fields["last_heartbeats"] = [[index[n], _microseconds(t)] for n, t in times]
        for name in _SETS:
            if name in fields:
                fields[name] = [index[node] for node in fields[name]]
        return json.dumps(fields, separators=(",", ":")).encode()

    @staticmethod
    def loads(data: bytes) -> Any:
        """Read a rendezvous state, or raise `pickle.PickleError`."""
        try:
            return _read(json.loads(data))
        except Exception as error:  # noqa: BLE001 - it may be anything
            raise pickle.PickleError(
                f"this is not a rendezvous state: {error}"
            ) from None


def _read(fields: Any) -> Any:
    state = _torch._RendezvousState()
    if set(_of(dict, fields)) != {*vars(state), _NODES}:
        raise ValueError("other fields")
    nodes = dict(enumerate(map(_node, _of(list, fields[_NODES]))))
    state.round = _of(int, fields["round"])
    for name in _FLAGS:
        setattr(state, name, _of(bool, fields[name]))
    if fields["deadline"] is not None:
        state.deadline = _time(fields["deadline"])
    ranks = _of(list, fields["participants"])
    state.participants = {nodes[_of(int, n)]: _of(int, rank) for n, rank in ranks}
    times = _of(list, fields["last_heartbeats"])
    state.last_heartbeats = {nodes[_of(int, n)]: _time(time) for n, time in times}
    for name in _SETS:
        if name in fields:
            setattr(state, name, {nodes[_of(int, n)] for n in _of(list, fields[name])})
    return state


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is not of type {kind.__name__}")
    return value


def _microseconds(time: datetime) -> int:
    return (time - _epoch(aware=time.tzinfo is not None)) // timedelta(microseconds=1)


def _time(number: Any) -> datetime:
    epoch = _epoch(aware=capabilities.AWARE_TIMES.present)
    return epoch + timedelta(microseconds=_of(int, number))


def _epoch(*, aware: bool) -> datetime:
    """Return the start of 1970 in UTC, with a time zone if torch's times have one."""
    return datetime(1970, 1, 1, tzinfo=timezone.utc if aware else None)


def _node(values: Any) -> Any:
    # The patch `NodeOrder` adds the rank.
    kind: Any = _torch._NodeDesc
    if len(_of(list, values)) > len(dataclasses.fields(kind)):
        kind = RankedNode
    types = (str if f.type in {"str", str} else int for f in dataclasses.fields(kind))
    return kind(*(_of(t, value) for t, value in zip(types, values, strict=True)))


class StateAsJson(Patch):
    """The rendezvous state travels as JSON; nothing is unpickled.

    Anyone who reaches the rendezvous port can write to its store. Torch unpickles it,
    so anyone could run a program in every agent.
    """

    NAME = "state_as_json"
    TARGET = "torch.distributed.elastic.rendezvous.dynamic_rendezvous.pickle"
    REASON = "anybody who reaches the port can run programs in agents (pytorch#127403)"

    @classmethod
    def fits(cls) -> bool:
        """Check that torch pickles by the module's name, and the state is known."""
        if not has(_torch, "pickle"):
            return False
        state = _torch._RendezvousState()
        ranked = RankedNode("n9", 1, 0, node_rank=1)
        plain = _torch._NodeDesc("n10", 1, 0)
        state.participants = {ranked: 0, plain: 1}
        state.wait_list = {ranked, plain}
        state.deadline = _time(1)
        state.last_heartbeats = {ranked: _time(2), plain: _time(3)}
        return bool(vars(JsonPickle.loads(JsonPickle.dumps(state))) == vars(state))

    @classmethod
    def apply(cls, _plan: object, _hooks: object) -> None:
        """Replace ``pickle`` by the reader and writer of JSON."""
        replace(_torch, "pickle", JsonPickle)

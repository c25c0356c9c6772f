"""The rendezvous state travels as JSON of one fixed form, and nothing is unpickled.

Whoever reaches the port of the rendezvous can write to its store, and torch unpickles
what it finds there: a program of a stranger's choice would run in every agent.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from datetime import datetime, timezone
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from torchrun_hpc.patching import capabilities
from torchrun_hpc.patching.node_order import RankedNode
from torchrun_hpc.patching.replacing import has, replace

TARGET = "torch.distributed.elastic.rendezvous.dynamic_rendezvous.pickle"
REASON = "anybody who reaches its port can run programs in it (pytorch#127403)"
IS_FOR = capabilities.EVERY

_torch: Any = dynamic_rendezvous
_FLAGS = ("complete", "closed")
_SETS = ("wait_list", "redundancy_list")


class StateAsJson:
    """Stands in for the module ``pickle`` where torch keeps the rendezvous state.

    A node is a list of its fields, ``[addr, pid, local_id]``, with its rank behind if
    it has one; a time is in ISO format; a dictionary is a list of pairs.
    """

    PickleError = pickle.PickleError

    @staticmethod
    def dumps(state: Any) -> bytes:
        """Write a rendezvous state."""
        fields = dict(vars(state))
        fields["deadline"] = state.deadline and state.deadline.isoformat()
        fields["participants"] = [[_list(n), r] for n, r in state.participants.items()]
        fields["last_heartbeats"] = [
            [_list(node), time.isoformat()]
            for node, time in state.last_heartbeats.items()
        ]
        for name in _SETS:
            if name in fields:
                fields[name] = [_list(node) for node in fields[name]]
        return json.dumps(fields).encode()

    @staticmethod
    def loads(data: bytes) -> Any:
        """Read a rendezvous state.

        Raises:
            pickle.PickleError: It is something else.
        """
        try:
            return _read(json.loads(data))
        except Exception as error:  # noqa: BLE001 - whatever a stranger wrote
            raise pickle.PickleError(
                f"this is not the state of a rendezvous: {error}"
            ) from None


def _list(node: Any) -> list[Any]:
    return list(vars(node).values())


def _read(fields: Any) -> Any:
    state = _torch._RendezvousState()
    if set(_of(dict, fields)) != set(vars(state)):
        raise ValueError("other fields")
    state.round = _of(int, fields["round"])
    for name in _FLAGS:
        setattr(state, name, _of(bool, fields[name]))
    if fields["deadline"] is not None:
        state.deadline = _time(fields["deadline"])
    state.participants = {
        _node(node): _of(int, rank) for node, rank in _of(list, fields["participants"])
    }
    state.last_heartbeats = {
        _node(node): _time(time) for node, time in _of(list, fields["last_heartbeats"])
    }
    for name in _SETS:
        if name in fields:
            setattr(state, name, {_node(node) for node in _of(list, fields[name])})
    return state


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is not of type {kind.__name__}")
    return value


def _time(text: Any) -> datetime:
    time = datetime.fromisoformat(_of(str, text))
    # One of the other kind could not be compared.
    if (time.tzinfo is None) != (_now().tzinfo is None):
        raise ValueError(f"{text} is of another torch")
    return time


def _now() -> datetime:
    aware = capabilities.AWARE_TIMES.present
    return datetime.now(timezone.utc if aware else None)


def _node(values: Any) -> Any:
    # Address, numbers of process and node; where torch is patched, its name.
    kind: Any = _torch._NodeDesc
    if len(_of(list, values)) > len(dataclasses.fields(kind)):
        kind = RankedNode
    types = (str if f.type in {"str", str} else int for f in dataclasses.fields(kind))
    return kind(*(_of(t, value) for t, value in zip(types, values, strict=True)))


def fits() -> bool:
    """Check that torch pickles by the module's name, and that we know the state."""
    if not has(_torch, "pickle"):
        return False
    state = _torch._RendezvousState()
    ranked = RankedNode("n9", 1, 0, node_rank=1)
    plain = _torch._NodeDesc("n10", 1, 0)
    state.participants = {ranked: 0, plain: 1}
    state.wait_list = {ranked, plain}
    state.deadline = _now()
    state.last_heartbeats = {ranked: _now(), plain: _now()}
    return bool(vars(StateAsJson.loads(StateAsJson.dumps(state))) == vars(state))


def apply(_plan: object) -> None:
    """Put the reader and writer of JSON in the place of ``pickle``."""
    replace(_torch, "pickle", StateAsJson)

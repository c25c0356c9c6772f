"""The rendezvous state is unpickled with its own few classes, and nothing else.

Whoever reaches the port of the rendezvous can write to its store, and torch unpickles
what it finds there: a program of a stranger's choice would run in every agent.
"""

from __future__ import annotations

import io
import pickle
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from torchrun_hpc.patching.node_order import RankedNode

if TYPE_CHECKING:
    from torchrun_hpc.plan import LaunchPlan

TARGET = "torch.distributed.elastic.rendezvous.dynamic_rendezvous.pickle"
REASON = "anybody who reaches its port can run programs in it (pytorch#127403)"
RELEASES = ">=2.0"

_torch: Any = dynamic_rendezvous
_State: Any = dynamic_rendezvous._RendezvousState
_Node: Any = dynamic_rendezvous._NodeDesc

_ALLOWED = {
    (allowed.__module__, allowed.__qualname__): allowed
    for allowed in (_State, _Node, RankedNode, datetime, timedelta, timezone, set)
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"{module}.{name} does not belong into a rendezvous"
            ) from None


class SafePickle:
    """Stands in for the module ``pickle`` where torch reads the rendezvous state."""

    PickleError = pickle.PickleError
    dumps = staticmethod(pickle.dumps)

    @staticmethod
    def loads(data: bytes) -> Any:
        """Unpickle a rendezvous state.

        Raises:
            pickle.UnpicklingError: It is something else.
        """
        try:
            state = _Unpickler(io.BytesIO(data)).load()
        except pickle.PickleError:
            raise
        except Exception as error:
            # A broken pickle raises whatever its instructions run into.
            raise pickle.UnpicklingError(str(error)) from error
        if not isinstance(state, _State):
            raise pickle.UnpicklingError("this is not the state of a rendezvous")
        return state


def fits() -> bool:
    """Check that torch pickles its state by the module's name, and that we read it."""
    if getattr(dynamic_rendezvous, "pickle", None) is not pickle:
        return isinstance(getattr(dynamic_rendezvous, "pickle", None), SafePickle)
    state = _State()
    node = RankedNode("n9", 1, 0, 0)
    state.participants[node] = 0
    state.wait_list.add(node)
    state.deadline = state.last_heartbeats[node] = datetime.now(timezone.utc)
    copied = SafePickle.loads(pickle.dumps(state))
    return bool(vars(copied) == vars(state))


def apply(_plan: LaunchPlan) -> None:
    """Put the restricted reader in the place of ``pickle``."""
    _torch.pickle = SafePickle()

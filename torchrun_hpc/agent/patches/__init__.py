"""The changes inside torch: what one declares, calls, and replaces.

`registry` lists them, and says what became of each. `agent` extends torch's agent. The
other modules concern torch's own rendezvous and its command.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torchrun_hpc.host import capabilities

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.agent.signals import DeathSignals
    from torchrun_hpc.failures.relay import Relay
    from torchrun_hpc.failures.watch import Watch
    from torchrun_hpc.host.capabilities import Capability
    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.rendezvous.handler import SchedulerRendezvous


class Patch:
    """A change inside torch, which `registry` applies if it fits.

    Attributes:
        NAME: Its name in ``--hpc-without-patches``.
        TARGET: What is replaced, as a dotted name.
        REASON: What goes wrong without it, with the issue's number.
        IS_FOR: It is applied only if this is present in torch.
    """

    NAME: ClassVar[str]
    TARGET: ClassVar[str]
    REASON: ClassVar[str]
    IS_FOR: ClassVar[Capability] = capabilities.EVERY

    @classmethod
    def fits(cls) -> bool:
        """Return whether torch looks as the patch expects."""
        raise NotImplementedError

    @classmethod
    def is_wanted(cls, _plan: LaunchPlan) -> bool:
        """Return whether a launch needs the patch; some belong to an option."""
        return True

    @classmethod
    def apply(cls, plan: Any, hooks: Any) -> None:
        """Replace the target as the plan says; see `registry.apply_patches`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Hooks:
    """The functions and objects that the patches call.

    Attributes:
        forward: Delivers signals to the workers, by local rank and process number.
        relay: Passes on the workers' stderr.
        watch: Finds out which workers fail.
        death_signals: Holds signals while workers are started or ended.
        fork: Forks a worker, from command line, environment, stdout and stderr; returns
            ``None`` if it cannot.
        rendezvous: What torch finds instead of its own; ``None`` to keep its own.
    """

    forward: Callable[[Mapping[int, int]], None]
    relay: Relay
    watch: Watch
    death_signals: DeathSignals
    fork: Callable[..., Any] = lambda *_: None
    rendezvous: SchedulerRendezvous | None = None


# --- replacing names ------------------------------------------------------------------

_MISSING = object()
_originals: list[tuple[Any, str, Any]] = []


def has(owner: Any, *names: str) -> bool:
    """Return whether a module or class itself defines these names.

    Abstract methods do not count: nobody would call the wrapped one.
    """
    values = [vars(owner).get(name, _MISSING) for name in names]
    return not any(
        value is _MISSING or getattr(value, "__isabstractmethod__", False)
        for value in values
    )


def takes(owner: Any, name: str, *parameters: str) -> bool:
    """Return whether an owner itself defines a function with these parameters."""
    return has(owner, name) and parameters == tuple(
        inspect.signature(vars(owner)[name]).parameters
    )


def replace(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute of a module or class."""
    _originals.append((owner, name, vars(owner)[name]))
    setattr(owner, name, value)


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by one that gets the original as its first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        return wrapper(original, *args, **options)

    replace(owner, name, wrapped)


def restore() -> None:
    """Restore all originals, the last one first."""
    while _originals:
        owner, name, value = _originals.pop()
        setattr(owner, name, value)

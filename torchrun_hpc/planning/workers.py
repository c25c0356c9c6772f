"""The workers of this node: how many there are, and what each of them gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchrun_hpc.names import ranges
from torchrun_hpc.setting import Setting


@dataclass(frozen=True)
class Share:
    """The CPUs of one worker.

    Attributes:
        cpus: Their numbers, in ascending order.
        domain: Where they are: ``NUMA node 3, L3 48-55,112-119``.
        reason: Why this worker gets them.
    """

    cpus: tuple[int, ...]
    domain: str
    reason: str

    @property
    def cpu_list(self) -> str:
        """The CPUs, as Linux writes them: ``48-55,112-119``."""
        return ranges(self.cpus, most=len(self.cpus))


@dataclass(frozen=True)
class Binding:
    """How the CPUs of the affinity mask are divided among the workers of a node.

    Attributes:
        setting: What was asked for, with the option or the site.
        shares: What each worker gets, by local rank. Empty if none is bound.
        problem: Why none is bound; empty if they are.
        instead: Why they are divided evenly where it should have been by GPU.
        sets_threads: Whether each worker gets as many threads as CPUs.
    """

    setting: Setting
    shares: tuple[Share, ...] = ()
    problem: str = ""
    instead: str = ""
    sets_threads: bool = False

    @property
    def fewest(self) -> int:
        """Number of CPUs of the worker that has the fewest; 0 if none is bound."""
        return min((len(share.cpus) for share in self.shares), default=0)


@dataclass(frozen=True)
class Preload:
    """The modules that a node imports once, before it forks its workers.

    Attributes:
        modules: Their names, in the order in which they are imported.
        setting: The same as it was typed, or set, with the option or the site.
        variables: Those to set before, because a module may read them then.
        problem: Why the workers are started by exec nevertheless; empty if they are
            not.
    """

    modules: tuple[str, ...]
    setting: Setting
    variables: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Workers:
    """The workers of this node.

    Attributes:
        number: Number of workers on this node.
        size: Number of all workers; 0 if it is not known before the nodes meet.
        environment: Environment variables of each: threads, and its GPU.
        binding: Which worker gets which CPUs; ``None`` if they are not bound.
        preload: What is imported once for all workers; ``None`` if nothing is.
    """

    number: int = 1
    size: int = 0
    environment: Mapping[str, Setting] = field(default_factory=dict)
    binding: Binding | None = None
    preload: Preload | None = None

"""The workers of this node: their number, CPUs, variables, and preloaded modules."""

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
        domain: Their place: ``NUMA node 3, L3 48-55,112-119``.
        reason: Why this worker gets them.
    """

    cpus: tuple[int, ...]
    domain: str
    reason: str

    @property
    def cpu_list(self) -> str:
        """The CPUs in Linux's format: ``48-55,112-119``."""
        return ranges(self.cpus, most=len(self.cpus))


@dataclass(frozen=True)
class Binding:
    """The division of the affinity mask among a node's workers.

    Attributes:
        setting: The value, with the option or the site.
        shares: The CPUs of each worker, by local rank; empty if none is bound.
        problem: Why none is bound; empty if they are bound.
        instead: Why they are divided evenly instead of by GPU; empty otherwise.
        sets_threads: Whether each worker gets as many threads as CPUs.
    """

    setting: Setting
    shares: tuple[Share, ...] = ()
    problem: str = ""
    instead: str = ""
    sets_threads: bool = False

    @property
    def fewest(self) -> int:
        """Number of CPUs of the smallest share; 0 if no worker is bound."""
        return min((len(share.cpus) for share in self.shares), default=0)


@dataclass(frozen=True)
class Preload:
    """The modules that a node imports once, before it forks its workers.

    Attributes:
        modules: Their names, in the order of import.
        setting: The value, with the option or the site.
        variables: Variables to set first, because modules read them.
        problem: Why the workers start by exec instead; empty if they are forks.
    """

    modules: tuple[str, ...]
    setting: Setting
    variables: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Workers:
    """The workers of this node.

    Attributes:
        size: World size; 0 if it is unknown before the nodes meet.
        environment: Variables of each worker: threads, and its GPU.
        binding: The CPUs of each worker; ``None`` if they are not bound.
        preload: The modules to import once; ``None`` without the option.
    """

    number: int = 1
    size: int = 0
    environment: Mapping[str, Setting] = field(default_factory=dict)
    binding: Binding | None = None
    preload: Preload | None = None

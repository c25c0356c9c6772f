"""The workers of this node: their number, CPUs, variables, and preloaded modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchrun_hpc.errors import Message, Setting
from torchrun_hpc.names import ranges


@dataclass(frozen=True)
class Share:
    """The CPUs of one worker."""

    cpus: tuple[int, ...]  # their numbers, in ascending order
    domain: str  # their place: ``NUMA node 3, L3 48-55,112-119``
    reason: str  # why this worker gets them

    @property
    def cpu_list(self) -> str:
        """The CPUs in Linux's format: ``48-55,112-119``."""
        return ranges(self.cpus, most=len(self.cpus))


@dataclass(frozen=True)
class Binding:
    """The division of the affinity mask among a node's workers."""

    setting: Setting  # the value, with the option or the site
    shares: tuple[Share, ...] = ()  # by local rank; empty if none is bound
    problem: str = ""  # why none is bound; empty if they are bound
    instead: str = ""  # why they are divided evenly instead of by GPU; empty otherwise
    sets_threads: bool = False  # whether each worker gets as many threads as CPUs

    @property
    def fewest(self) -> int:
        """Number of CPUs of the smallest share; 0 if no worker is bound."""
        return min((len(share.cpus) for share in self.shares), default=0)


@dataclass(frozen=True)
class Preload:
    """The modules that a node imports once, before it forks its workers."""

    modules: tuple[str, ...]  # their names, in the order of import
    setting: Setting  # the value, with the option or the site
    variables: Mapping[str, str] = field(default_factory=dict)  # to set first
    problem: str = ""  # why the workers start by exec instead; empty if they are forks
    is_bound: bool = False  # whether each worker has CPUs of its own

    @property
    def is_default(self) -> bool:
        """Whether neither the user nor the site has named modules."""
        return self.setting.source == "default"

    def not_used(self, reason: str) -> Message:
        """Return why the workers are started by exec."""
        option = "preloading" if self.is_default else self.setting
        text = f"{option} is not used, so each worker imports by itself: {reason}"
        return Message("HPC169", text)

    def __str__(self) -> str:
        """Write the modules, or ``none`` and the reason."""
        return f"none ({self.problem})" if self.problem else str(self.setting.value)


@dataclass(frozen=True)
class Workers:
    """The workers of this node."""

    number: int = 1
    size: int = 0  # world size; 0 if it is unknown before the nodes meet
    environment: Mapping[str, Setting] = field(default_factory=dict)  # threads, its GPU
    binding: Binding | None = None
    preload: Preload | None = None

"""Where the CPUs and GPUs of a node are, and what a worker gets of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrun_hpc.errors import ranges

if TYPE_CHECKING:
    from torchrun_hpc.setting import Setting


@dataclass(frozen=True)
class Core:
    """A core, as far as this process may run on it.

    Attributes:
        cpus: Numbers of its CPUs (hardware threads), in ascending order.
        node: Number of its NUMA node; 0 if that is not known.
        cache: CPUs that share its L3 cache, as Linux writes them: ``0-7,64-71``; empty
            if that is not known.
    """

    cpus: tuple[int, ...]
    node: int = 0
    cache: str = ""

    @property
    def domain(self) -> tuple[int, str]:
        """The L3 cache, or what one NUMA node has of it."""
        return self.node, self.cache


@dataclass(frozen=True)
class Gpu:
    """A GPU of the node.

    Attributes:
        address: Its PCI address: ``0000:c1:00.0``.
        cpus: Numbers of the CPUs that are local to it; empty if that is not known.
        uuid: Its name in a list of visible devices: ``GPU-...``; empty if not known.
        is_usable: Whether this process may open it.
        is_amd: Whether it is AMD's; else it is NVIDIA's.
        model: Its name, if the driver says.
    """

    address: str
    cpus: frozenset[int]
    uuid: str = ""
    is_usable: bool = True
    is_amd: bool = False
    model: str = ""


@dataclass(frozen=True)
class Topology:
    """The node, as this process sees it.

    Attributes:
        cores: Those of the affinity mask.
        gpus: All GPUs of the node, in the order in which CUDA or ROCm numbers them.
        cpus: Number of CPUs of the node that are online; 0 if that is not known.
    """

    cores: tuple[Core, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    cpus: int = 0

    @property
    def mask(self) -> frozenset[int]:
        """The CPUs that this process may run on."""
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    @property
    def online(self) -> int:
        """Number of CPUs of the node; if that is not known, of the mask."""
        return max(self.cpus, len(self.mask))


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
        shares: What each worker of this process gets, by local rank; in direct mode of
            this task alone. Empty if none is bound.
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

"""The CPUs that the workers of a node get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrun_hpc.errors import ranges

if TYPE_CHECKING:
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

"""The inputs of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchrun_hpc.errors import Setting
from torchrun_hpc.host.resolver import Resolver
from torchrun_hpc.host.topology import Topology
from torchrun_hpc.schedulers.job import Promise
from torchrun_hpc.sites.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.host.network import Network
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.mode import Mode
    from torchrun_hpc.planning.workers import Preload
    from torchrun_hpc.schedulers.job import Job
    from torchrun_hpc.sites import Site


@dataclass(frozen=True)
class Node:
    """A node's resources for its workers.

    Attributes:
        topology: The places of CPUs and GPUs, if the workers will be bound.
        of_release: Variables that correct c10d of the installed torch release.
        incompatible_patches: Names of needed patches that do not fit this torch.
    """

    workers: int = 1  # a guess before torch is imported
    cpus: int = 1  # in this process's affinity mask
    gpus: int = 0  # as torch sees them; 0 before it is imported
    topology: Topology = field(default_factory=Topology)
    resolver: Resolver = Resolver.UNKNOWN
    of_release: Mapping[str, Setting] = field(default_factory=dict)
    incompatible_patches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inputs:
    """The inputs of a plan; ``environ`` and ``promise`` come from `Preflight`."""

    mode: Mode
    job: Job | None  # ``None`` without one
    site: Site | None  # ``None`` if unknown or switched off
    network: Network
    options: Options  # of the user and the site
    environ: Mapping[str, str]
    command: str = ""  # the user's command, for messages
    hostname: str = ""  # empty if unknown
    free_port: int = 0  # on this node, for a single worker
    promise: Promise = field(default_factory=Promise)
    profile: Profile = field(default_factory=Profile)  # of the site, on this node
    preload: Preload | None = None  # ``None`` if every worker starts by exec
    node: Node = field(default_factory=Node)

    def lacks(self, patch: str) -> bool:
        """Return whether a patch of torch is off or incompatible."""
        incompatible = self.node.incompatible_patches
        return patch in {*self.options.hpc_without_patches, *incompatible}

    @property
    def direct_job(self) -> Job | None:
        """The job, if each of its tasks is a worker; otherwise ``None``."""
        return self.job if self.mode.is_direct else None

    @property
    def site_setting(self) -> Setting | None:
        """Name of the site, with the variable that identifies it."""
        if self.site is None:
            return None
        return Setting(self.site.name, f"{self.site.found_by} ({self.site.file})")

    def rewrite(self, host: str) -> str:
        """Return the site's name for a node on the fast network."""
        return host if self.site is None else self.site.rewrite(host)

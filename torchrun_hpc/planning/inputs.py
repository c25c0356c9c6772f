"""The inputs of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchrun_hpc.host.resolver import Resolver
from torchrun_hpc.host.topology import Topology
from torchrun_hpc.schedulers.job import Promise
from torchrun_hpc.setting import Setting

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
        workers: Their number; a guess before torch is imported.
        cpus: Number of CPUs in this process's affinity mask.
        gpus: Number of GPUs that torch sees here; 0 before it is imported.
        topology: The places of CPUs and GPUs, if the workers will be bound.
        of_release: Variables that correct c10d of the installed torch release.
        incompatible_patches: Names of needed patches that do not fit this torch.
    """

    workers: int = 1
    cpus: int = 1
    gpus: int = 0
    topology: Topology = field(default_factory=Topology)
    resolver: Resolver = Resolver.UNKNOWN
    of_release: Mapping[str, Setting] = field(default_factory=dict)
    incompatible_patches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inputs:
    """The inputs of a plan.

    Attributes:
        job: The scheduler's job; ``None`` without one.
        site: The computing centre; ``None`` if unknown or switched off.
        options: The values of the user and the site.
        environ, promise: The same as in `Preflight`.
        command: The user's command, for messages.
        hostname: Name of this machine; empty if unknown.
        free_port: A free port on this node, for a single worker.
        preload: The modules to import once; ``None`` without the option.
    """

    mode: Mode
    job: Job | None
    site: Site | None
    network: Network
    options: Options
    environ: Mapping[str, str]
    command: str = ""
    hostname: str = ""
    free_port: int = 0
    promise: Promise = field(default_factory=Promise)
    preload: Preload | None = None
    node: Node = field(default_factory=Node)

    def lacks(self, patch: str) -> bool:
        """Return whether a patch of torch is off or incompatible."""
        incompatible = self.node.incompatible_patches
        return patch in {*self.options.hpc_without_patches, *incompatible}

    @property
    def the_job(self) -> Job:
        """The job, in a mode that has one."""
        if self.job is None:
            raise ValueError(f"{self.mode} without a job")
        return self.job

    @property
    def site_setting(self) -> Setting | None:
        """Name of the site, with the variable that identifies it."""
        if self.site is None:
            return None
        return Setting(self.site.name, f"{self.site.found_by} ({self.site.file})")

    def rewrite(self, host: str) -> str:
        """Return the site's name for a node on the fast network."""
        return host if self.site is None else self.site.rewrite(host)

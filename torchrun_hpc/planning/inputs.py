"""What a plan is made from: the inputs of all decisions, in one place."""

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
    """What this node has for its workers.

    Attributes:
        workers: Number of workers on this node; before torch is imported, as far as it
            is known.
        cpus: Number of CPUs that this process may run on (its affinity mask).
        gpus: Number of GPUs that torch sees here; 0 before it is imported.
        topology: Where the CPUs and GPUs are, if the workers are to be bound.
        resolver: Whether names of addresses are answered here.
        of_release: Variables that mend c10d of the installed release of torch.
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
    """What a plan is made from.

    Attributes:
        mode: How the workers are started.
        job: What the scheduler says; ``None`` without one.
        site: The computing centre; ``None`` if unknown or switched off.
        network: This node's network.
        options: What the user and the site have set.
        environ: As in `Preflight`.
        command: The command as typed, for messages.
        hostname: Name of this machine; empty if it is not known.
        free_port: A port that is free here, for a worker that is alone.
        promise: What the scheduler promises, see `Preflight`.
        preload: What is imported once for all workers; ``None`` if nothing is.
        node: What this node has for its workers.
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
        """Return whether torch is not changed where it could be.

        Args:
            patch: Name of the change.
        """
        incompatible = self.node.incompatible_patches
        return patch in {*self.options.hpc_without_patches, *incompatible}

    @property
    def the_job(self) -> Job:
        """The job, in the modes that have one."""
        if self.job is None:
            raise ValueError(f"{self.mode} without a job")
        return self.job

    @property
    def site_setting(self) -> Setting | None:
        """Name of the site, and why it is that."""
        if self.site is None:
            return None
        return Setting(self.site.name, f"{self.site.found_by} ({self.site.file})")

    def rewrite(self, host: str) -> str:
        """Return the site's name for a node on the fast network."""
        return host if self.site is None else self.site.rewrite(host)

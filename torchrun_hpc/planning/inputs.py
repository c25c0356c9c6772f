"""What a plan is made from: the inputs of all decisions, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchrun_hpc.commandline import rdzv_conf
from torchrun_hpc.commandline.options import WITHOUT_PATCHES, names_in
from torchrun_hpc.host.resolver import Resolver
from torchrun_hpc.host.topology import Topology
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.host.network import Network
    from torchrun_hpc.planning.shares import Binding
    from torchrun_hpc.schedulers.job import Job
    from torchrun_hpc.sites import Site


STATIC = "static"
C10D = "c10d"
SCHEDULER = "scheduler"  # ours, for nodes that the scheduler has numbered
DIRECT = "direct"  # none: each task is a worker


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
class Inputs:
    """What a plan is made from.

    Attributes:
        mode: How the workers are started.
        job: What the scheduler says; ``None`` without one.
        site: The computing centre; ``None`` if unknown or switched off.
        network: This node's network.
        options: What the user typed, or set by ``PET_*``, by the names that torchrun's
            parser gives them. An empty value is not there.
        environ: As in `Preflight`.
        workers: Number of workers on this node; before torch is imported, as far as it
            is known.
        cpus: Number of CPUs that this process may run on (its affinity mask).
        gpus: Number of GPUs that torch sees here.
        command: The command as typed, for messages.
        hostname: Name of this machine; empty if it is not known.
        of_release: Variables that mend c10d of the installed release of torch.
        free_port: A port that is free here, for a worker that is alone.
        preload: What is imported once for all workers; ``None`` if nothing is.
        resolver: Whether names of addresses are answered here.
        topology: Where the CPUs and GPUs are, if the workers are to be bound.
        binding: Which worker gets which CPUs; ``None`` if they are not bound.
        unfit_patches: Names of changes inside torch that others need, and that do not
            fit this torch.
    """

    mode: Mode
    job: Job | None
    site: Site | None
    network: Network
    options: Mapping[str, Setting]
    environ: Mapping[str, str]
    workers: int
    cpus: int
    gpus: int
    command: str
    hostname: str = ""
    of_release: Mapping[str, Setting] = field(default_factory=dict)
    free_port: int = 0
    preload: Preload | None = None
    resolver: Resolver = Resolver.UNKNOWN
    topology: Topology = field(default_factory=Topology)
    binding: Binding | None = None
    unfit_patches: tuple[str, ...] = ()

    def explicit(self, name: str) -> Any:
        """Return what was typed for an option, ``None`` if nothing."""
        option = self.options.get(name)
        return None if option is None else option.value

    @property
    def without_patches(self) -> tuple[str, ...]:
        """Names of the changes inside torch that the user leaves out."""
        return names_in(self.explicit(WITHOUT_PATCHES))

    def lacks(self, patch: str) -> bool:
        """Say whether torch is not changed, where it could be: what needs that cannot.

        Args:
            patch: Name of the change.
        """
        return patch in {*self.without_patches, *self.unfit_patches}

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

    @property
    def backend(self) -> str:
        """The kind of the rendezvous that torchrun itself would take."""
        if self.explicit("standalone"):
            return C10D  # torchrun ignores what is typed
        static_only = ("node_rank", "master_addr", "master_port")
        is_static = any(name in self.options for name in static_only)
        is_static |= self.mode is Mode.AS_TYPED  # torchrun's own default
        return str(self.explicit("rdzv_backend") or (STATIC if is_static else C10D))

    @property
    def is_static(self) -> bool:
        """Whether torchrun would take its static rendezvous."""
        return self.backend == STATIC

    @property
    def is_c10d(self) -> bool:
        """Whether torchrun would take its c10d rendezvous, over TCP."""
        conf = self.options.get("rdzv_conf")
        return self.backend == C10D and not rdzv_conf.uses_file(conf)

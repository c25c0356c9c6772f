"""``--hpc-bind``: which worker gets which CPUs of the affinity mask.

No CPU has two workers. Cores stay whole, and L3 domains as far as possible. All of this
is a function of mask, topology, visible GPUs, and the number of workers.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message, choices, count, ranges
from torchrun_hpc.planning.topology import Binding, Core, Share
from torchrun_hpc.setting import Setting
from torchrun_hpc.sites.site import BIND_GPU, BIND_NONE, BINDINGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.planning.topology import Gpu, Topology
    from torchrun_hpc.sites import Site

OPTION = "hpc_bind"
_NUMA = "numa_binding"  # torch's own

# By default CUDA puts fast GPUs first.
_ORDER, _BY_ADDRESS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"


def wanted(options: Mapping[str, Setting], site: Site | None) -> Setting | None:
    """Return how the workers are to be bound; ``None`` if they are not.

    Raises:
        LaunchError: It is no way to bind, or torch is to do it too.
    """
    setting = options.get(OPTION)
    if setting is None and site is not None and _NUMA not in options:
        setting = Setting(site.bind, f"bind of site {site.name}")
    if setting is None or setting.value == BIND_NONE:
        return None
    if setting.value not in BINDINGS:
        raise LaunchError(
            "HPC219",
            f"{setting}: this is no way to bind. {choices(setting.value, BINDINGS)}",
            everywhere=True,
        )
    if _NUMA in options:
        raise LaunchError(
            "HPC220",
            f"{setting} and {options[_NUMA]}: both bind the workers to CPUs. Leave one "
            "of them out",
            everywhere=True,
        )
    return setting


def plan(inputs: Inputs) -> Binding | None:
    """Divide the CPUs of this node; ``None`` if nobody has asked for it.

    Raises:
        LaunchError: What was typed, or set, cannot be followed.
    """
    setting = wanted(inputs.options, inputs.site)
    if setting is None:
        return None
    if inputs.explicit("run_path"):
        option = inputs.options["run_path"].source
        return Binding(setting, problem=f"the workers of {option} are no commands")
    if not inputs.mode.is_direct:
        return _divided(inputs, setting, inputs.workers)
    task = inputs.the_job.task
    found = _divided(inputs, setting, task.local_size)
    if found.own is None:
        found = replace(found, own=task.local_rank)
    problem = _not_shared(inputs, found.shares, task.local_size) or found.problem
    return Binding(setting, problem=problem) if problem else found


def _divided(inputs: Inputs, setting: Setting, workers: int) -> Binding:
    mask = inputs.topology.mask
    if len(mask) < workers:
        problem = f"{workers} workers have {count(len(mask), 'CPU')}"
        return Binding(setting, problem=problem)
    instead = ""
    if setting.value == BIND_GPU:
        try:
            gpus, own = _gpus_of_workers(inputs, workers)
            return Binding(setting, _near(inputs.topology, gpus), own)
        except _NotByGpuError as reason:
            instead = str(reason)
    parts = divide(inputs.topology.cores, workers)
    text = f"1 of {count(workers, 'equal part')}"
    return Binding(setting, tuple(_share(p, text) for p in parts), instead=instead)


def _not_shared(inputs: Inputs, shares: Iterable[Share], tasks: int) -> str:
    """Say why the tasks of this node must not divide the mask of this one.

    One that was faster may have taken its part already.
    """
    mask, masks = inputs.topology.mask, inputs.other_masks
    if len(masks) != tasks - 1:
        return (
            f"{len(masks)} of the {count(tasks - 1, 'other task')} of this node can be "
            "seen: each may be in a container of its own"
        )
    parts = [frozenset(share.cpus) for share in shares]
    if all(m == mask or any(m <= part for part in parts) for m in masks):
        return ""
    return f"the launcher has bound each task itself, this one to CPUs {ranges(mask)}"


class _NotByGpuError(Exception):
    """Says why the CPUs cannot be divided by what is local to the GPUs."""


def _gpus_of_workers(inputs: Inputs, workers: int) -> tuple[list[Gpu], int | None]:
    """Return the GPU of each worker; and which is this task's, if it sees one only.

    Raises:
        _NotByGpuError: It is not known.
    """
    known = inputs.topology.gpus
    visible = _visible(known, inputs.environ)
    if inputs.mode.is_direct and len(visible) == 1 and len(known) == workers:
        return [*known], known.index(visible[0])
    if len(visible) < workers:
        raise _NotByGpuError(
            f"{count(workers, 'worker')} and {count(len(visible), 'GPU')}"
            if known
            else "neither NVIDIA's nor AMD's driver shows a GPU here"
        )
    return visible[:workers], None


def _visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that a worker sees, in the order in which it numbers them.

    Sources: NVIDIA's CUDA C++ Programming Guide, "CUDA Environment Variables"; AMD's
    "GPU isolation techniques".

    Raises:
        _NotByGpuError: A list has names of parts of GPUs.
    """
    found = [gpu for gpu in gpus if gpu.is_usable]
    if len({gpu.model for gpu in found}) > 1 and environ.get(_ORDER) != _BY_ADDRESS:
        raise _NotByGpuError(
            f"the GPUs are of several kinds: export {_ORDER}={_BY_ADDRESS}"
        )
    lists = ["CUDA_VISIBLE_DEVICES"]
    if any(gpu.is_amd for gpu in gpus):
        # What the first leaves is numbered anew. Of the others HIP reads one.
        others = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        lists = ["ROCR_VISIBLE_DEVICES", *[n for n in others if n in environ][:1]]
    for name in lists:
        if name in environ:
            found = _listed(found, name, environ[name])
    return found


def _listed(gpus: Sequence[Gpu], name: str, value: str) -> list[Gpu]:
    found: list[Gpu] = []
    for part in (word.strip() for word in value.split(",")):
        if part.startswith("MIG"):
            raise _NotByGpuError(f"{name}={value} lists parts of GPUs")
        if part.isdecimal():
            named = gpus[int(part) :][:1]
        else:
            start = part.lower()
            named = [
                g
                for g in gpus
                if start[:4] == "gpu-" and g.uuid.lower().startswith(start)
            ]
        if len(named) != 1 or named[0] in found:
            break  # nor is what follows it visible
        found += named
    return found


def _near(topology: Topology, gpus: Sequence[Gpu]) -> tuple[Share, ...]:
    """Give each worker what is local to its GPU; several at one place divide it.

    Raises:
        _NotByGpuError: It is too little for one of them.
    """
    groups: dict[frozenset[int], list[int]] = {}
    for rank, gpu in enumerate(gpus):
        groups.setdefault(gpu.cpus, []).append(rank)
    rest, shares = [*topology.cores], {}
    for local in sorted(groups, key=len):
        ranks = groups[local]
        own = [core for core in rest if local.issuperset(core.cpus)]
        rest = [core for core in rest if core not in own]
        parts = divide(own, len(ranks))
        cpus = sum(len(core.cpus) for core in own)
        # Of a mask that was not made for these GPUs, most would be unused.
        is_far = 2 * cpus * topology.cpus < len(local) * len(topology.mask)
        if is_far or not parts:
            raise _NotByGpuError(
                f"{cpus} of the {count(len(topology.mask), 'CPU')} in the affinity "
                f"mask are local to GPU {ranges(ranks)} ({gpus[ranks[0]].address})"
            )
        for rank, part in zip(ranks, parts, strict=True):
            reason = f"local to GPU {rank} ({gpus[rank].address})"
            shares[rank] = _share(part, reason)
    return tuple(shares[rank] for rank in sorted(shares))


def divide(cores: Sequence[Core], workers: int) -> list[list[Core]]:
    """Divide cores into parts whose sizes differ by one at most.

    Each part gets as many whole L3 domains as fit, in their order, and then a piece of
    one. With fewer cores than workers, the CPUs of the cores are divided; with fewer
    CPUs, there are no parts.
    """
    if len(cores) < workers:
        cores = [replace(core, cpus=(cpu,)) for core in cores for cpu in core.cpus]
    if len(cores) < workers:
        return []
    in_order = sorted(cores, key=lambda core: (core.node, core.cpus))
    domains: dict[tuple[int, str], list[Core]] = {}
    for core in in_order:
        domains.setdefault(core.domain, []).append(core)
    rest = [*domains.values()]
    smallest, larger = divmod(len(cores), workers)
    parts = []
    for _ in range(workers):
        part: list[Core] = []
        for domain in [*rest]:
            if len(part) + len(domain) <= smallest + (larger > 0):
                part += domain
                rest.remove(domain)
        missing = smallest - len(part)
        if missing > 0:
            nodes = {core.node for core in part}
            domain = min(rest, key=lambda domain: domain[0].node not in nodes)
            part += domain[:missing]
            del domain[:missing]
        larger -= len(part) - smallest if missing < 0 else 0
        parts.append(part)
    for core in itertools.chain(*rest):
        small = [part for part in parts if len(part) == smallest]
        min(small, key=lambda part: _distance(core, part)).append(core)
    return parts


def _distance(core: Core, part: Sequence[Core]) -> tuple[bool, bool]:
    """Compare a core with those of a part: the same L3 domain, the same NUMA node."""
    return (
        core.domain not in {other.domain for other in part},
        core.node not in {other.node for other in part},
    )


def _share(cores: Sequence[Core], reason: str) -> Share:
    cpus = tuple(sorted(cpu for core in cores for cpu in core.cpus))
    nodes = sorted({core.node for core in cores})
    domain = f"NUMA node{'s' if len(nodes) > 1 else ''} {ranges(nodes)}"
    caches = sorted({core.cache for core in cores if core.cache})
    if caches:
        domain += (
            f", L3 {caches[0]}" if len(caches) == 1 else f", {len(caches)} L3 caches"
        )
    return Share(cpus, domain, reason)


def advice(inputs: Inputs) -> tuple[Message, ...]:
    """Say what became of it, if the user has asked for it and gets something else."""
    binding = inputs.binding
    is_other_task = inputs.mode.is_direct and inputs.the_job.task.rank > 0
    if binding is None or OPTION not in inputs.options or is_other_task:
        return ()
    if binding.instead:
        text = f"{binding.setting} divides the CPUs evenly: {binding.instead}"
        return (Message("HPC221", text),)
    # Where workers are started, that they have too few CPUs is HPC092.
    if not binding.problem or (inputs.cpus < inputs.workers):
        return ()
    return (Message("HPC222", f"{binding.setting} binds nothing: {binding.problem}"),)

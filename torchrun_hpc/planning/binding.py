"""``--hpc-bind``: the division of the affinity mask among the workers.

No two workers share a CPU, and cores stay whole.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.errors import Message, count
from torchrun_hpc.names import ranges
from torchrun_hpc.options.values import BIND_GPU, BIND_NONE
from torchrun_hpc.planning import resources
from torchrun_hpc.planning.workers import Binding, Share
from torchrun_hpc.variables import CUDA_ORDER, CUDA_VISIBLE, HIP_VISIBLE, ROCR_VISIBLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.host.topology import Core, Gpu, Topology
    from torchrun_hpc.planning.inputs import Inputs, Node

_BY_ADDRESS = "PCI_BUS_ID"  # a value of CUDA_ORDER


def plan(inputs: Inputs) -> Binding | None:
    """Divide the CPUs of this node; return ``None`` without the option."""
    how = inputs.options.hpc_bind
    if how == BIND_NONE:
        return None
    setting = inputs.options["hpc_bind"]
    problem = _problem(inputs)
    if problem:
        return Binding(setting, problem=problem)
    shares, instead = _divided(inputs.node, how, inputs.environ)
    follows = resources.follows_cpus(inputs)
    return Binding(setting, shares, instead=instead, sets_threads=follows)


def _divided(
    node: Node, how: str, environ: Mapping[str, str]
) -> tuple[tuple[Share, ...], str]:
    instead = ""
    if how == BIND_GPU:
        try:
            return _near(node.topology, _gpus_of_workers(node, environ)), ""
        except _NotByGpuError as reason:
            instead = str(reason)
    parts = divide(node.topology.cores, node.workers)
    shares = (
        _share(part, f"part {number} of {len(parts)}")
        for number, part in enumerate(parts, 1)
    )
    return tuple(shares), instead


def _problem(inputs: Inputs) -> str:
    options, node = inputs.options, inputs.node
    mask, workers = node.topology.mask, node.workers
    agents = 1 if inputs.job is None else inputs.job.task.local_size
    if job := inputs.direct_job:
        launcher, option = job.launcher, job.launcher.bind_option
        problem = "in direct mode, the launcher binds each worker"
        return f"{problem}. Use {launcher.name} {option}" if option else problem
    if "bind_workers" in options.hpc_without_patches:
        return str(options["hpc_without_patches"])
    if options.run_path:
        return f"{options['run_path'].source} starts functions, not commands"
    # With CPUs of their own, the agents would have more than there are.
    if agents * len(mask) > node.topology.online:
        return f"{agents} agents of this node share the same CPUs"
    if len(mask) < workers:
        return f"{workers} workers have {count(len(mask), 'CPU')}"
    return ""


class _NotByGpuError(Exception):
    """The reason why the CPUs cannot be divided by GPU."""


def _gpus_of_workers(node: Node, environ: Mapping[str, str]) -> list[Gpu]:
    gpus, workers = node.topology.gpus, node.workers
    if not gpus:
        raise _NotByGpuError("neither NVIDIA's nor AMD's driver shows a GPU here")
    visible = _visible(gpus, environ)
    if len(visible) < workers:
        number = count(len(visible), "visible GPU")
        raise _NotByGpuError(f"{count(workers, 'worker')} and {number}")
    return visible[:workers]


def _visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that a worker sees, in its order.

    Sources: NVIDIA's CUDA C++ Programming Guide, "CUDA Environment Variables"; AMD's
    "GPU isolation techniques".
    """
    visible = [gpu for gpu in gpus if gpu.is_usable]
    if (
        len({gpu.model for gpu in visible}) > 1
        and environ.get(CUDA_ORDER) != _BY_ADDRESS
    ):
        text = f"the GPUs are of several kinds. Export {CUDA_ORDER}={_BY_ADDRESS}"
        raise _NotByGpuError(text)
    lists = [CUDA_VISIBLE]
    if any(gpu.is_amd for gpu in gpus):
        # The first list renumbers the rest. HIP reads one of the others.
        others = (HIP_VISIBLE, CUDA_VISIBLE)
        lists = [ROCR_VISIBLE, *[n for n in others if n in environ][:1]]
    for name in lists:
        if name in environ:
            visible = _listed(visible, name, environ[name])
    return visible


def _listed(gpus: Sequence[Gpu], name: str, value: str) -> list[Gpu]:
    listed: list[Gpu] = []
    for part in (word.strip() for word in value.split(",")):
        if part.startswith("MIG"):
            raise _NotByGpuError(f"{name}={value} lists parts of GPUs")
        if re.fullmatch("[0-9]{1,6}", part):
            named = gpus[int(part) :][:1]
        elif part.lower().startswith("gpu-"):
            named = [g for g in gpus if g.uuid.lower().startswith(part.lower())]
        else:
            break
        if len(named) != 1 or named[0] in listed:
            break  # what follows is not visible either
        listed += named
    return listed


def _near(topology: Topology, gpus: Sequence[Gpu]) -> tuple[Share, ...]:
    """Give each worker the CPUs local to its GPU. Workers at one place divide them."""
    groups: dict[frozenset[int], list[int]] = {}
    for rank, gpu in enumerate(gpus):
        groups.setdefault(gpu.cpus, []).append(rank)
    rest, shares = [*topology.cores], {}
    for local in sorted(groups, key=len):
        ranks = groups[local]
        near = [core for core in rest if local.issuperset(core.cpus)]
        rest = [core for core in rest if core not in near]
        parts = divide(near, len(ranks))
        cpus = sum(len(core.cpus) for core in near)
        # Most of a mask that does not fit these GPUs would be unused.
        is_far = 2 * cpus * topology.online < len(local) * len(topology.mask)
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

    The parts follow NUMA nodes and L3 domains, and end with a domain if possible. With
    fewer cores than workers, CPUs are divided. With fewer CPUs, there are no parts.
    """
    firsts: dict[tuple[int, str], tuple[int, ...]] = {}
    for core in sorted(cores, key=lambda core: core.cpus):
        firsts.setdefault(core.domain, core.cpus)
    in_order = sorted(
        cores, key=lambda core: (core.node, firsts[core.domain], core.cpus)
    )
    if len(in_order) < workers:
        in_order = [replace(c, cpus=(cpu,)) for c in in_order for cpu in c.cpus]
    if len(in_order) < workers:
        return []
    pairs = enumerate(itertools.pairwise(in_order), 1)
    ends = {end for end, (one, other) in pairs if one.domain != other.domain}
    smallest, larger = divmod(len(in_order), workers)
    parts, start = [], 0
    for left in range(workers, 0, -1):
        end = start + smallest
        if larger and (larger == left or end not in ends):
            end, larger = end + 1, larger - 1
        parts.append(in_order[start:end])
        start = end
    return parts


def _share(cores: Sequence[Core], reason: str) -> Share:
    cpus = tuple(sorted(cpu for core in cores for cpu in core.cpus))
    nodes = sorted({core.node for core in cores})
    domain = f"NUMA node{'s' if len(nodes) > 1 else ''} {ranges(nodes)}"
    caches = sorted({core.cache for core in cores if core.cache})
    if len(caches) == 1:
        domain += f", L3 {caches[0]}"
    elif caches:
        domain += f", {len(caches)} L3 caches"
    return Share(cpus, domain, reason)


def advice(inputs: Inputs, binding: Binding | None) -> tuple[Message, ...]:
    """Return a warning if the binding differs from the user's option."""
    job = inputs.direct_job
    is_other_task = job is not None and job.task.rank > 0
    if binding is None or "hpc_bind" not in inputs.options or is_other_task:
        return ()
    if binding.instead:
        text = f"{binding.setting} divides the CPUs evenly: {binding.instead}"
        return (Message("HPC221", text),)
    # HPC092 reports too few CPUs.
    if not binding.problem or (inputs.node.cpus < inputs.node.workers):
        return ()
    return (Message("HPC222", f"{binding.setting} binds nothing: {binding.problem}"),)

"""The input of a plan, collected on this node without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc import sites
from torchrun_hpc.host import network, topology
from torchrun_hpc.host.resolver import ask_name_servers
from torchrun_hpc.options.values import BIND_NONE
from torchrun_hpc.planning.head_node import LOOPBACK
from torchrun_hpc.planning.inputs import Inputs, Node
from torchrun_hpc.planning.resources import likely_workers
from torchrun_hpc.preload import plan
from torchrun_hpc.sites import profile
from torchrun_hpc.variables import MASTER_PORT

if TYPE_CHECKING:
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.mode import Mode
    from torchrun_hpc.preflight import Preflight


def inputs_of(
    mode: Mode, facts: Preflight, options: Options, *, may_preload: bool = False
) -> Inputs:
    """Collect what is known without torch, and add the site's options.

    Without ``may_preload``, no worker can be a fork: a program has imported torch.
    Raise `LaunchError` if the site is unknown, or its file is wrong.
    """
    site = sites.find(facts.environ, facts.site_host, options.given.get("hpc_site"))
    if site is not None:
        options = options.with_site(site.name, site.options)
    is_alone = mode.is_direct and facts.job is not None and facts.job.task.size == 1
    has_port = not is_alone or facts.environ.get(MASTER_PORT)
    inputs = Inputs(
        mode=mode,
        job=facts.job,
        site=site,
        network=network.this_node(),
        options=options,
        environ=facts.environ,
        command=facts.command,
        hostname=facts.hostname,
        free_port=0 if has_port else network.free_port(LOOPBACK),
        promise=facts.promise,
        profile=profile.of_site(site),
    )
    inputs = replace(inputs, node=_node_of(inputs))
    obstacle = plan.obstacle(options, facts.environ) if may_preload else ""
    planned = plan.preload_of(inputs, obstacle) if may_preload else None
    return replace(inputs, preload=planned)


def _node_of(inputs: Inputs) -> Node:
    """Return this node's CPUs and GPUs, without a driver call."""
    cpus = len(topology.own_cpus())
    if job := inputs.direct_job:
        if not topology.is_bound():  # they share
            cpus = max(cpus // job.task.local_size, 1)
        return Node(1, cpus, resolver=ask_name_servers())
    workers = workers_here(inputs.options, inputs)
    if inputs.options.hpc_bind == BIND_NONE:
        return Node(workers, cpus)
    return Node(workers, cpus, topology=topology.this_node())


def workers_here(options: Options, facts: Preflight | Inputs) -> int:
    """Return the likely number of workers of an agent here, without a driver call."""
    gpus = facts.promise.gpus_on_node.value or topology.gpu_files()
    return likely_workers(options, facts.environ, len(topology.own_cpus()), gpus)

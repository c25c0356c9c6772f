"""Where this task is in the examination: the plan of the job, and where all meet.

The stages up to the plan are those of a launch. What they find wrong is collected, as
far as the tasks can meet all the same.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchrun_hpc import main
from torchrun_hpc.commandline.options import wrong_line
from torchrun_hpc.doctor.results import of_launcher
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.host import network
from torchrun_hpc.host.topology import gpu_files
from torchrun_hpc.launching import abort
from torchrun_hpc.launching.start import check_port
from torchrun_hpc.planning.endpoints import LOOPBACK, split_endpoint
from torchrun_hpc.planning.inputs import SCHEDULER
from torchrun_hpc.planning.mode import Mode, choose_mode
from torchrun_hpc.planning.plan import make_plan
from torchrun_hpc.planning.resources import likely_workers
from torchrun_hpc.schedulers.job import Task
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from torchrun_hpc.commandline.command_line import CommandLine
    from torchrun_hpc.doctor.results import Finding
    from torchrun_hpc.launching.abort import Known
    from torchrun_hpc.planning.launch_plan import LaunchPlan, Rendezvous
    from torchrun_hpc.planning.preflight import Preflight


@dataclass(frozen=True)
class Place:
    """Where this task is.

    Attributes:
        plan: The plan of the job, as a launch would have it.
        tasks_plan: The same, as if each task were a node: where they meet.
        task: This task among all of them; with an agent on each node, the node.
        node_rank: Rank of its node.
        workers: How many workers it would start, or be.
        hostname: Name of this machine.
        scheduler: What started the tasks, as a person writes it; empty if nothing did.
        wants_gpus: Whether the workers are to be as many as there are GPUs.
        findings: What the launcher would say.
    """

    plan: LaunchPlan
    tasks_plan: LaunchPlan
    task: Task
    node_rank: int
    workers: int
    hostname: str
    scheduler: str = ""
    wants_gpus: bool = False
    findings: tuple[Finding, ...] = ()

    @functools.cached_property
    def address(self) -> str:
        """This node's address for the job; empty if it is not known."""
        where, own = self.plan.rendezvous, network.this_node()
        if where.local_address:
            return where.local_address
        for host in (self.fast_host, where.connect_host):
            for known in own.addresses_of(host):
                near = known if own.owner(known) else own.address_toward(known)
                if near is not None:
                    return str(near)
        return ""

    @property
    def host(self) -> str:
        """Name of this node in the job."""
        hosts = self.plan.world.hosts
        return (hosts and hosts[self.node_rank]) or self.hostname

    @property
    def fast_host(self) -> str:
        """Its name on the job's network."""
        hosts = self.plan.world.fast_hosts
        return (hosts and hosts[self.node_rank]) or self.host


def find(seen: Preflight, line: CommandLine, known: Known) -> Place:
    """Find out where this task is, as a launch does.

    Args:
        seen: What this process shows.
        line: The command line of the job.
        known: What is known where a fault is raised; filled in.

    Raises:
        LaunchError: A launch would be refused, and the tasks cannot meet.
    """
    if line.problem is not None:
        raise line.problem
    known.options = line.options
    workers = line.options.get("nproc_per_node")
    if workers is not None:
        _workers(workers, seen)
    mode = known.mode = choose_mode(seen, line, lambda setting: _workers(setting, seen))
    findings: list[Finding] = []
    try:
        inputs = main.inputs_of(mode, seen, line)
        if mode.is_direct:
            inputs = replace(inputs, workers=1)
        plan = make_plan(inputs)
        check_port(plan)
    except LaunchError as fault:
        elsewhere = abort.meeting_place(known)
        # What is typed is wrong everywhere; a variable may be so on this node only.
        is_own = not fault.everywhere or _is_of_variable(fault, line)
        if elsewhere is None or not is_own:
            raise
        plan = elsewhere
        own = [plan.world.node_rank]
        findings.append(of_launcher(fault.code, str(fault), own, is_suspect=True))
    known.plan = plan
    findings += _warnings(plan)
    if _is_etcd(plan):
        if mode is Mode.AS_TYPED:
            raise wrong_line(
                f"--rdzv_backend={plan.rendezvous.backend}: the doctor's nodes meet "
                "without etcd; type --rdzv_backend=c10d, and a node as the endpoint"
            )
        text = (
            f"etcd at {plan.rendezvous.endpoint} is not examined: the doctor's nodes "
            "meet without it"
        )
        findings.append(of_launcher("HPC199", text, []))
    task = Task(plan.world.node_rank, plan.world.nodes)
    if mode.is_direct and seen.job is not None:
        task = seen.job.task
    elif mode is Mode.AS_TYPED:
        task = Task(_rank_as_typed(plan, line), plan.world.nodes)
    return Place(
        plan=plan,
        tasks_plan=_tasks_plan(plan, task, seen.hostname),
        task=task,
        node_rank=plan.world.node_rank if mode.is_direct else task.rank,
        workers=1 if mode.is_direct else plan.world.workers,
        hostname=seen.hostname,
        scheduler=seen.job.scheduler if seen.job is not None else "",
        wants_gpus=workers is not None and workers.value == "gpu",
        findings=tuple(findings),
    )


def _workers(setting: Setting, seen: Preflight) -> int:
    """Return how many workers a number means, or what stands in its place.

    Raises:
        LaunchError: It is neither.
    """
    if not re.fullmatch(r"[1-9][0-9]{0,5}|gpu|cpu|auto|xpu", str(setting.value)):
        raise wrong_line(f"{setting}: type a number, gpu, cpu, auto or xpu")
    cpus = len(os.sched_getaffinity(0))
    return likely_workers(setting, seen.environ, cpus, gpu_files())


def _is_of_variable(fault: LaunchError, line: CommandLine) -> bool:
    """Say whether a fault is about an option that a variable has set."""
    options = line.options.items()
    variables = (str(setting) for name, setting in options if name not in line.words)
    return any(variable in str(fault) for variable in variables)


def _is_etcd(plan: LaunchPlan) -> bool:
    return plan.rendezvous.backend.startswith("etcd")


def _warnings(plan: LaunchPlan) -> list[Finding]:
    """Return what the launcher would warn of; what all nodes find, the first one."""
    shared = plan.messages.advice if plan.world.report_rank == 0 else ()
    own = [plan.world.node_rank]
    return [
        *(of_launcher(each.code, each.text, own) for each in plan.messages.warnings),
        *(of_launcher(each.code, each.text, []) for each in shared),
    ]


def _rank_as_typed(plan: LaunchPlan, line: CommandLine) -> int:
    """Return the rank of one of several machines that nobody has numbered.

    Raises:
        LaunchError: Nothing says which one it is.
    """
    world, typed = plan.world, line.options.get("node_rank")
    if typed is not None and typed.value not in range(world.nodes):
        raise wrong_line(f"{typed}, but there are nodes 0 to {world.nodes - 1}")
    if typed is not None:
        return int(typed.value)
    if world.report_rank == 0 or world.nodes == 2:  # noqa: PLR2004 - the other one
        return int(world.report_rank > 0)
    raise LaunchError(
        "HPC180",
        f"one of {world.nodes} machines, and nothing says which one: type on each "
        "another one: --node_rank=0 where the endpoint is, --node_rank=1, 2, ... on "
        "the others",
    )


def _tasks_plan(plan: LaunchPlan, task: Task, hostname: str) -> LaunchPlan:
    """Plan where the tasks meet: where the job would, by our own rendezvous."""
    where, own, is_first = plan.rendezvous, plan.world, task.rank == 0
    hosts = own.hosts
    if len(hosts) != task.size:
        hosts = tuple(
            hostname if rank == task.rank else "" for rank in range(task.size)
        )
    world = replace(
        own, nodes=task.size, node_rank=task.rank, hosts=hosts, report_rank=task.rank
    )
    if plan.mode is not Mode.SEVERAL_NODES or _is_etcd(plan):
        where = _own_rendezvous(plan, is_first=is_first)
    where = replace(where, backend=SCHEDULER, coordinator=where.coordinator or 0)
    return replace(plan, world=world, rendezvous=where)


def _own_rendezvous(plan: LaunchPlan, *, is_first: bool) -> Rendezvous:
    """Return where tasks meet that no agent's rendezvous brings together."""
    where = plan.rendezvous
    if plan.mode is Mode.ONE_NODE:
        host, port = LOOPBACK, 0
    elif plan.mode is not Mode.AS_TYPED:
        host, (port,) = where.connect_host, where.ports
    else:
        host, typed = split_endpoint(Setting(where.endpoint, "--rdzv_endpoint"))
        port = typed or 0
    listen = where.listen if where.listen and where.listen[1] == port else None
    if plan.mode is Mode.ONE_NODE:
        listen = (host, port)
    return replace(
        where,
        connect_host=host,
        ports=(port,),
        notice_ports=(),
        is_coordinator=is_first,
        listen=listen if is_first else None,
    )

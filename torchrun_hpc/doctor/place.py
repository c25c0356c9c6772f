"""Where this task is in the examination: the plan of the job, and where all meet.

The stages up to the plan are those of a launch. What they find wrong is collected, as
far as the tasks can meet all the same.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchrun_hpc.doctor.results import of_launcher
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.host import network
from torchrun_hpc.host.topology import gpu_files, own_cpus
from torchrun_hpc.launching import abort
from torchrun_hpc.launching.inputs import inputs_of
from torchrun_hpc.launching.start import check_port
from torchrun_hpc.options.arguments import wrong_line
from torchrun_hpc.options.values import SCHEDULER
from torchrun_hpc.planning.endpoints import LOOPBACK
from torchrun_hpc.planning.mode import Mode, choose_mode
from torchrun_hpc.planning.plan import make_plan, meet
from torchrun_hpc.planning.resources import likely_workers
from torchrun_hpc.schedulers.job import Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.doctor.results import Finding
    from torchrun_hpc.errors import Message
    from torchrun_hpc.launching.abort import Known
    from torchrun_hpc.options.command_line import CommandLine
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.preflight import Preflight
    from torchrun_hpc.setting import Setting

# What stands in the place of a number of workers.
_WORDS = ("gpu", "cpu", "auto", "xpu")


@dataclass(frozen=True)
class Place:
    """Where this task is.

    Attributes:
        mode: How a launch would start the workers.
        meeting: Where the nodes of the job would meet.
        tasks_meeting: The same, as if each task were a node.
        task: This task among all of them; with an agent on each node, the node.
        node_rank: Rank of its node.
        workers: How many workers it would start, or be.
        hostname: Name of this machine.
        scheduler: What started the tasks, as a person writes it; empty if nothing did.
        environment: The variables that a launch would set.
        wants_gpus: Whether the workers are to be as many as there are GPUs.
        findings: What the launcher would say.
    """

    mode: Mode
    meeting: Meeting
    tasks_meeting: Meeting
    task: Task
    node_rank: int
    workers: int
    hostname: str
    scheduler: str = ""
    environment: Mapping[str, Setting] = field(default_factory=dict)
    wants_gpus: bool = False
    findings: tuple[Finding, ...] = ()

    @functools.cached_property
    def address(self) -> str:
        """This node's address for the job; empty if it is not known."""
        where, own = self.meeting, network.this_node()
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
        hosts = self.meeting.hosts
        return (hosts and hosts[self.node_rank]) or self.hostname

    @property
    def fast_host(self) -> str:
        """Its name on the job's network."""
        hosts = self.meeting.fast_hosts
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
    _workers(line.options, seen)
    mode = known.mode = choose_mode(seen, line, lambda own: _workers(own, seen))
    findings: list[Finding] = []
    advice: tuple[Message, ...] = ()
    workers = 1
    try:
        inputs = inputs_of(mode, seen, line.options, line.script)
        meeting = meet(inputs)
        plan = make_plan(inputs, meeting)
        check_port(plan)
    except LaunchError as fault:
        elsewhere = abort.meeting_place(known)
        # What is typed is wrong everywhere; a variable may be so on this node only.
        is_own = not fault.everywhere or _is_of_variable(fault, line)
        if elsewhere is None or not is_own:
            raise
        meeting, environment = elsewhere, elsewhere.environment
        own = [meeting.node_rank]
        findings.append(of_launcher(fault.code, str(fault), own, is_suspect=True))
    else:
        environment, advice = plan.environment, plan.messages.advice
        workers = inputs.node.workers
    known.meeting = meeting
    findings += _warnings(meeting, advice)
    if _is_etcd(meeting):
        if mode is Mode.AS_TYPED:
            raise wrong_line(
                f"--rdzv_backend={meeting.backend}: the doctor's nodes meet without "
                "etcd; type --rdzv_backend=c10d, and a node as the endpoint"
            )
        text = (
            f"etcd at {meeting.endpoint} is not examined: the doctor's nodes meet "
            "without it"
        )
        findings.append(of_launcher("HPC199", text, []))
    task = Task(meeting.node_rank, meeting.nodes)
    if mode.is_direct and seen.job is not None:
        task = seen.job.task
    elif mode is Mode.AS_TYPED:
        task = Task(_rank_as_typed(meeting, line.options), meeting.nodes)
    return Place(
        mode=mode,
        meeting=meeting,
        tasks_meeting=_tasks_meeting(mode, meeting, task, seen.hostname),
        task=task,
        node_rank=meeting.node_rank if mode.is_direct else task.rank,
        workers=workers,
        hostname=seen.hostname,
        scheduler=seen.job.scheduler if seen.job is not None else "",
        environment=environment,
        wants_gpus=line.options.nproc_per_node == "gpu",
        findings=tuple(findings),
    )


def _workers(options: Options, seen: Preflight) -> int:
    """Return how many workers a number means, or what stands in its place.

    Raises:
        LaunchError: It is neither.
    """
    wanted = options.nproc_per_node
    if isinstance(wanted, str) and wanted not in _WORDS:
        setting = options["nproc_per_node"]
        raise wrong_line(f"{setting}: type a number, gpu, cpu, auto or xpu")
    cpus = len(own_cpus())
    gpus = seen.promise.gpus_on_node.value or gpu_files()
    return likely_workers(options, seen.environ, cpus, gpus)


def _is_of_variable(fault: LaunchError, line: CommandLine) -> bool:
    """Say whether a fault is about an option that a variable has set."""
    options = line.options.given.values()
    return any(s.source in str(fault) for s in options if s.source.startswith("PET_"))


def _is_etcd(meeting: Meeting) -> bool:
    return meeting.backend.startswith("etcd")


def _warnings(meeting: Meeting, advice: tuple[Message, ...]) -> list[Finding]:
    """Return what the launcher would warn of; what all nodes find, the first one."""
    shared = advice if meeting.report_rank == 0 else ()
    own = [meeting.node_rank]
    return [
        *(of_launcher(each.code, each.text, own) for each in meeting.warnings),
        *(of_launcher(each.code, each.text, []) for each in shared),
    ]


def _rank_as_typed(meeting: Meeting, options: Options) -> int:
    """Return the rank of one of several machines that nobody has numbered.

    Raises:
        LaunchError: Nothing says which one it is.
    """
    nodes = meeting.nodes
    if "node_rank" in options and options.node_rank not in range(nodes):
        text = f"{options['node_rank']}, but there are nodes 0 to {nodes - 1}"
        raise wrong_line(text)
    if "node_rank" in options:
        return options.node_rank
    if meeting.report_rank == 0 or nodes == 2:  # noqa: PLR2004 - the other one
        return int(meeting.report_rank > 0)
    raise LaunchError(
        "HPC180",
        f"one of {nodes} machines, and nothing says which one: type on each another "
        "one: --node_rank=0 where the endpoint is, --node_rank=1, 2, ... on the others",
    )


def _tasks_meeting(mode: Mode, where: Meeting, task: Task, hostname: str) -> Meeting:
    """Return where the tasks meet: where the job would, by our own rendezvous."""
    hosts, is_first = where.hosts, task.rank == 0
    if len(hosts) != task.size:
        hosts = tuple(
            hostname if rank == task.rank else "" for rank in range(task.size)
        )
    if mode is not Mode.SEVERAL_NODES or _is_etcd(where):
        # No rendezvous of agents brings them together.
        host, ports = where.connect_host, where.ports[:1]
        if mode is Mode.ONE_NODE:
            host, ports = LOOPBACK, (0,)
        listen = where.listen if where.listen and where.listen[1] in ports else None
        if mode is Mode.ONE_NODE:
            listen = (host, 0)
        where = replace(
            where,
            connect_host=host,
            ports=ports,
            notice_ports=(),
            is_coordinator=is_first,
            listen=listen if is_first else None,
        )
    return replace(
        where,
        nodes=task.size,
        node_rank=task.rank,
        hosts=hosts,
        report_rank=task.rank,
        backend=SCHEDULER,
        coordinator=where.coordinator or 0,
    )

"""The place of this task: its job, the job's meeting, and the tasks' meeting."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchrun_hpc.agent import abort
from torchrun_hpc.agent.inputs import inputs_of, workers_here
from torchrun_hpc.agent.start import check_port
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.host import network
from torchrun_hpc.options import command_line
from torchrun_hpc.options.command_line import (
    OURS,
    TORCHRUN,
    names_of,
    unknown_option,
    wrong_line,
)
from torchrun_hpc.options.values import SCHEDULER
from torchrun_hpc.planning.head_node import ports_of
from torchrun_hpc.planning.meeting import Spares
from torchrun_hpc.planning.mode import Mode, choose_mode
from torchrun_hpc.planning.plan import make_plan, meet
from torchrun_hpc.schedulers.job import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrun_hpc.agent.abort import LaunchState
    from torchrun_hpc.options.command_line import CommandLine
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.preflight import Preflight
    from torchrun_hpc.schedulers.job import Job

COMMAND = "python -m torchrun_hpc.doctor"

# Seconds. The nodes must examine themselves before they meet.
SHORTEST, DAY = 10, 86400
TIMEOUT = 60.0  # seconds, unless the user passes another limit


@dataclass(frozen=True)
class Wishes:
    """The user's choices: the largest size of the collectives, and a time limit."""

    max_bytes: int = 16 * 2**20
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        size, seconds = self.max_bytes, self.timeout
        if not isinstance(size, int) or size < 8:  # noqa: PLR2004 - two elements
            known = "Pass 8 or more. The command also takes 512K, 16M, 1G"
            raise wrong_line(f"--max-bytes={size} is not a valid size. {known}")
        if not isinstance(seconds, int | float) or not SHORTEST <= seconds <= DAY:
            known = f"Pass {SHORTEST} to {DAY} seconds"
            raise wrong_line(f"--timeout={seconds} is not a valid time. {known}")

    @property
    def limit(self) -> float:
        """Seconds for the collectives."""
        return max(TIMEOUT, self.timeout)


@dataclass(frozen=True)
class Place:
    """The place of this task."""

    job: Job | None  # ``None`` without one
    mode: Mode
    meeting: Meeting
    tasks_meeting: Meeting  # the meeting of the doctor's tasks, as if each were a node
    task: Task  # this task among all of them; with an agent on each node, the node
    node_rank: int
    hostname: str
    options: tuple[str, ...]  # the words before the script in the job's launch line
    asked: Options  # the same options, parsed, with the site's
    workers: int = 1  # number of workers that it would start

    @functools.cached_property
    def address(self) -> str:
        """This node's address for the job; empty if unknown."""
        where, own = self.meeting, network.this_node()
        near = (own.address_near(x) for x in (self.fast_host, where.connect_host))
        return where.local_address or str(next(filter(None, near), ""))

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

    @property
    def names(self) -> tuple[str, ...]:
        """Node names to resolve: this node, the head node, and the next node."""
        fast = self.meeting.fast_hosts or (self.hostname,)
        following = fast[(self.node_rank + 1) % len(fast)]
        return tuple(dict.fromkeys(filter(None, (self.fast_host, fast[0], following))))


def find(seen: Preflight, argv: Sequence[str], known: LaunchState) -> Place:
    """Find the place of this task, with the stages of a launch up to the plan."""
    has_job = seen.job is not None
    line = command_line.parse([*argv, "SCRIPT"], seen.environ, has_job=has_job)
    options = known.options = line.options
    _check(line)
    mode = known.mode = choose_mode(seen, line, lambda own: workers_here(own, seen))
    workers = 1
    try:
        inputs = inputs_of(mode, seen, options, may_preload=True)
        meeting, workers, options = meet(inputs), inputs.node.workers, inputs.options
        check_port(make_plan(inputs, meeting))
    except LaunchError as fault:
        # A wrong option is wrong everywhere, but a variable perhaps only on this node.
        # Then the launch of the collectives reports it.
        is_own = not fault.everywhere or _is_of_variable(fault, line)
        elsewhere = abort.meeting_place(known) if is_own else None
        if elsewhere is None:
            raise
        meeting = elsewhere
    known.meeting = meeting
    words = argv[: len(argv) + 1 - len(line.options.words)]
    task = Task(meeting.node_rank, meeting.nodes)
    if mode.is_direct and seen.job is not None:
        task = seen.job.task
    elif mode is Mode.MANUAL:
        task = Task(_rank_as_typed(meeting, options), meeting.nodes)
    return Place(
        job=seen.job,
        mode=mode,
        meeting=meeting,
        tasks_meeting=_tasks_meeting(mode, meeting, task, seen.hostname),
        task=task,
        node_rank=meeting.node_rank if mode.is_direct else task.rank,
        hostname=seen.hostname,
        options=tuple(words[:-1] if words[-1:] == ["--"] else words),
        asked=options,
        workers=workers,
    )


def _check(line: CommandLine) -> None:
    options = line.options
    if line.problem is not None:
        raise line.problem
    if line.unknown:
        names = (each for dest in (*TORCHRUN, *OURS) for each in names_of(dest))
        raise wrong_line(unknown_option(line.unknown[0], names))
    if "hpc_dry_run" in options:
        text = f"{options['hpc_dry_run']}: the doctor has no dry run. Remove the option"
        raise wrong_line(text)
    wanted = options.nproc_per_node
    if isinstance(wanted, str) and wanted not in ("gpu", "cpu", "auto", "xpu"):
        setting = options["nproc_per_node"]
        raise wrong_line(f"{setting} is wrong. Pass a number, gpu, cpu, auto or xpu")


def _is_of_variable(fault: LaunchError, line: CommandLine) -> bool:
    options = line.options.given.values()
    return any(s.source in str(fault) for s in options if s.source.startswith("PET_"))


def _rank_as_typed(meeting: Meeting, options: Options) -> int:
    nodes = meeting.nodes
    if meeting.backend.startswith("etcd"):
        raise wrong_line(
            f"--rdzv_backend={meeting.backend}: the doctor's nodes meet without etcd. "
            "Pass --rdzv_backend=c10d, and a node as the endpoint"
        )
    if "node_rank" in options and options.node_rank not in range(nodes):
        text = f"{options['node_rank']} is not a node. Pass a number from 0 to "
        raise wrong_line(f"{text}{nodes - 1}")
    if "node_rank" in options:
        return options.node_rank
    if meeting.report_rank == 0 or nodes == 2:  # noqa: PLR2004
        return int(meeting.report_rank > 0)
    raise LaunchError(
        "HPC180",
        f"this is one of {nodes} machines, and its rank is unknown. Pass --node_rank=0 "
        "on the endpoint's machine, and --node_rank=1, 2, ... on the others",
    )


def _tasks_meeting(mode: Mode, where: Meeting, task: Task, hostname: str) -> Meeting:
    """Return where the tasks meet: not on the job's ports, which its launch needs."""
    hosts, is_host = where.hosts, task.rank == 0
    if len(hosts) != task.size:
        hosts = tuple(hostname * (rank == task.rank) for rank in range(task.size))
    if mode is Mode.SEVERAL_NODES and not where.backend.startswith("etcd"):
        is_host = where.is_coordinator
    launch = f"{where.launch_id or where.endpoint} doctor"
    ports, notice_ports = ((), ()) if mode is Mode.ONE_NODE else ports_of(launch)
    return replace(
        where,
        launch_id=launch,
        ports=ports,
        notice_ports=notice_ports,
        is_coordinator=is_host,
        listen=(where.listen[0], 0) if where.listen and is_host else None,
        nodes=task.size,
        node_rank=task.rank,
        hosts=hosts,
        report_rank=task.rank,
        backend=SCHEDULER,
        coordinator=where.coordinator or 0,
        spares=Spares(),
        started="",
    )

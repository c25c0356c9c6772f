"""The place of this task: its job, the job's meeting, and the tasks' meeting."""

from __future__ import annotations

import functools
import shlex
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchrun_hpc import environment, limits
from torchrun_hpc.agent import abort
from torchrun_hpc.agent.inputs import inputs_of, workers_here
from torchrun_hpc.agent.start import check_port
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.host import network
from torchrun_hpc.main import Launch, Stage
from torchrun_hpc.names import placed
from torchrun_hpc.options import command_line
from torchrun_hpc.options.command_line import (
    OURS,
    TORCHRUN,
    names_of,
    unknown_option,
    variable_of,
    wrong_line,
)
from torchrun_hpc.options.values import SCHEDULER
from torchrun_hpc.planning.head_node import ports_of
from torchrun_hpc.planning.meeting import Spares
from torchrun_hpc.planning.mode import Mode, choose_mode
from torchrun_hpc.planning.plan import meet
from torchrun_hpc.schedulers import pmi
from torchrun_hpc.schedulers.job import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrun_hpc.options.command_line import CommandLine
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.preflight import Preflight

COMMAND = "python -m torchrun_hpc.doctor"

_MOST_SECONDS = 86400  # of --timeout


@dataclass(frozen=True)
class Wishes:
    """The user's choices: the largest size of the collectives, and a time limit."""

    max_bytes: int = 16 * 2**20
    timeout: float = limits.DOCTOR_TIMEOUT

    def __post_init__(self) -> None:
        size, seconds = self.max_bytes, self.timeout
        least, most = limits.LEAST_DOCTOR_TIMEOUT, _MOST_SECONDS
        if not isinstance(size, int) or size < 8:  # noqa: PLR2004 - two elements
            valid = "Pass 8 or more. The command also takes 512K, 16M, 1G"
            raise wrong_line(f"--max-bytes={size} is not a valid size. {valid}")
        if not isinstance(seconds, int | float) or not least <= seconds <= most:
            valid = f"Pass {least} to {most} seconds"
            raise wrong_line(f"--timeout={seconds} is not a valid time. {valid}")

    @property
    def limit(self) -> float:
        """Seconds for the collectives."""
        return max(limits.DOCTOR_TIMEOUT, self.timeout)


@dataclass(frozen=True)
class Place:
    """The place of this task, and the user's wishes."""

    facts: Preflight  # of this process, without stale variables
    mode: Mode
    meeting: Meeting
    tasks_meeting: Meeting  # the meeting of the doctor's tasks, as if each were a node
    task: Task  # this task among all of them; with an agent on each node, the node
    node_rank: int
    options: tuple[str, ...]  # the words before the script in the job's launch line
    asked: Options  # the same options, parsed, with the site's
    workers: int = 1  # number of workers that it would start
    wishes: Wishes = field(default_factory=Wishes)

    @property
    def is_first(self) -> bool:
        """Whether this is task 0."""
        return self.task.rank == 0

    @functools.cached_property
    def address(self) -> str:
        """This node's address for the job; empty if unknown."""
        near = network.this_node().address_near
        address = self.meeting.local_address or near(self.fast_host)
        return str(address or near(self.meeting.connect_host) or "")

    @property
    def host(self) -> str:
        """Name of this node in the job."""
        hosts = self.meeting.hosts
        name = hosts[self.node_rank] if hosts else ""
        return name or self.facts.hostname

    @property
    def fast_host(self) -> str:
        """Its name on the job's network."""
        hosts = self.meeting.fast_hosts
        name = hosts[self.node_rank] if hosts else ""
        return name or self.host

    @property
    def names(self) -> tuple[str, ...]:
        """Node names to resolve: this node, the head node, and the next node."""
        fast = self.meeting.fast_hosts or (self.facts.hostname,)
        following = fast[(self.node_rank + 1) % len(fast)]
        return tuple(dict.fromkeys(filter(None, (self.fast_host, fast[0], following))))


class ExaminedLaunch(Launch):
    """The launch that the doctor would start, up to where the nodes meet.

    ``argv`` has the job's options. ``words``, for messages, also has the doctor's.
    """

    def __init__(self, argv: Sequence[str], words: Sequence[str] = ()) -> None:
        command = shlex.join([*COMMAND.split(), *(words or argv)])
        super().__init__(command, asks_tasks=True)
        self.argv = argv

    def preflight(self) -> Preflight:
        """Return the facts of this process."""
        facts = super().preflight()
        if facts.job is not None and facts.job.pmi_is_open:
            pmi.finalize(facts.environ)  # the launcher cannot
        return facts

    def parse(self, facts: Preflight) -> CommandLine:
        """Return the job's options, without torch."""
        has_job = facts.job is not None
        words = [*self.argv, "SCRIPT"]
        line = command_line.parse(words, facts.environ, has_job=has_job)
        self.options = line.options
        _check(line)
        return line

    def choose_mode(self, facts: Preflight, line: CommandLine) -> Mode:
        """Return how the workers would be started."""
        return choose_mode(facts, line, lambda options: workers_here(options, facts))

    def collect(self, facts: Preflight, mode: Mode) -> Inputs:
        """Return what is known of this node without torch."""
        return inputs_of(mode, facts, self.options, may_preload=True)


@environment.without_empty_options()
def find_place(launch: ExaminedLaunch, wishes: Wishes) -> Place:
    """Find the place of this task, with the stages of a launch up to the meeting."""
    workers = 1
    try:
        launch.run(upto=Stage.MEET)
        workers, options = launch.inputs.node.workers, launch.inputs.options
        check_port(launch.meeting, is_direct=launch.mode.is_direct)
    except LaunchError as fault:
        # A wrong option is wrong everywhere, but a variable perhaps only on this node.
        # Then the launch of the collectives reports it.
        is_early = not hasattr(launch, "mode")
        if is_early or (fault.everywhere and not _is_of_variable(fault, launch)):
            raise
        meeting = abort.meeting_place(launch)
        if meeting is None:
            raise
        launch.meeting, options = meeting, launch.options
    facts, mode, meeting = launch.facts, launch.mode, launch.meeting
    # `ExaminedLaunch.parse` has added a script.
    words = [*launch.argv[: len(launch.argv) + 1 - len(launch.options.words)]]
    if words and words[-1] == "--":
        words.pop()
    task = Task(meeting.node_rank, meeting.nodes)
    if mode.is_direct and facts.job is not None:
        task = facts.job.task
    elif mode is Mode.MANUAL:
        task = Task(_explicit_rank(meeting, options), meeting.nodes)
    place = Place(
        facts=facts,
        mode=mode,
        meeting=meeting,
        tasks_meeting=_tasks_meeting(mode, meeting, task, facts.hostname),
        task=task,
        node_rank=meeting.node_rank if mode.is_direct else task.rank,
        options=tuple(words),
        asked=options,
        workers=workers,
        wishes=wishes,
    )
    launch.meeting = place.tasks_meeting
    return place


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


def _is_of_variable(fault: LaunchError, launch: ExaminedLaunch) -> bool:
    """Return whether a launch without the user's PET_* variables has no such fault."""
    given = launch.options.given
    without = [name for name in given if given[name].source == variable_of(name)]
    options = launch.options.without(*without)
    try:
        meet(inputs_of(launch.mode, launch.facts, options))
    except LaunchError as other:
        return other.code != fault.code
    return True


def _explicit_rank(meeting: Meeting, options: Options) -> int:
    nodes = meeting.nodes
    if meeting.backend.startswith("etcd"):
        raise wrong_line(
            f"--rdzv_backend={meeting.backend}: the doctor's nodes meet without etcd. "
            "Pass --rdzv_backend=c10d, and a node as the endpoint"
        )
    if "node_rank" in options:
        if options.node_rank in range(nodes):
            return options.node_rank
        text = f"{options['node_rank']} is not a node. Pass a number from 0 to "
        raise wrong_line(f"{text}{nodes - 1}")
    if meeting.report_rank == 0 or nodes == 2:  # noqa: PLR2004
        return int(meeting.report_rank > 0)
    raise LaunchError(
        "HPC180",
        f"this is one of {nodes} machines, and its rank is unknown. Pass --node_rank=0 "
        "on the endpoint's machine, and --node_rank=1, 2, ... on the others",
    )


def _tasks_meeting(mode: Mode, meeting: Meeting, task: Task, hostname: str) -> Meeting:
    """Return the meeting of the tasks. The launch needs the job's own ports."""
    hosts, is_host = meeting.hosts, task.rank == 0
    if len(hosts) != task.size:
        hosts = placed(("",) * task.size, {task.rank: hostname})
    if mode is Mode.SEVERAL_NODES and not meeting.backend.startswith("etcd"):
        is_host = meeting.is_coordinator
    launch = f"{meeting.launch_id or meeting.endpoint} doctor"
    ports, notice_ports = ((), ()) if mode is Mode.ONE_NODE else ports_of(launch)
    return replace(
        meeting,
        launch_id=launch,
        ports=ports,
        notice_ports=notice_ports,
        is_coordinator=is_host,
        listen=(meeting.listen[0], 0) if meeting.listen and is_host else None,
        nodes=task.size,
        node_rank=task.rank,
        hosts=hosts,
        report_rank=task.rank,
        backend=SCHEDULER,
        coordinator=meeting.coordinator or 0,
        spares=Spares(),
        started="",
    )

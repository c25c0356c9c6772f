"""The plan: a pure function of job, site, network, node and explicit values.

Precedence for each value: command line, ``PET_*``, site, derived. Explicit values stay,
with two exceptions. The plain name of a node as endpoint is rewritten to its name on
the fast network. A node rank that c10d ignores is removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchrun_hpc.errors import Message, Setting
from torchrun_hpc.options.values import C10D, STATIC
from torchrun_hpc.planning import (
    binding,
    direct,
    manual,
    messages,
    network_env,
    one_node,
    resources,
    several_nodes,
)
from torchrun_hpc.planning.meeting import Meeting, check_key
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.planning.workers import Workers
from torchrun_hpc.variables import FAULT_HANDLER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.inputs import Inputs

_OF_AGENT = ("hpc_stall_report", "hpc_outcome", "hpc_without_patches", "hpc_rendezvous")

# Functions that make the meeting of a job with several nodes or tasks.
_MEETINGS = {
    Mode.SEVERAL_NODES: several_nodes.meet,
    Mode.DIRECT: direct.meet_on_several,
    Mode.DIRECT_ONE_NODE: direct.meet_on_one_node,
}


@dataclass(frozen=True)
class Messages:
    """The messages about a plan."""

    title: str = ""  # the scheduler and the launch, for the start line
    notes: tuple[Message, ...] = ()  # corrections, the same on all nodes
    advice: tuple[Message, ...] = ()  # probable mistakes, mostly the same on all nodes
    warnings: tuple[Message, ...] = ()  # problems of this node that the launch survives


@dataclass(frozen=True)
class LaunchPlan:
    """All decisions before the start."""

    mode: Mode
    asked: Options  # the values of the user and of the site
    meeting: Meeting
    workers: Workers
    options: Mapping[str, Setting] = field(default_factory=dict)  # by torchrun's names
    environment: Mapping[str, Setting] = field(default_factory=dict)
    messages: Messages = field(default_factory=Messages)

    @property
    def ranks_follow_scheduler(self) -> bool:
        """Whether ``node_rank`` ranks the nodes, which torch could rank differently."""
        is_static = self.meeting.backend == STATIC
        return self.mode is Mode.SEVERAL_NODES and not is_static


def meet(inputs: Inputs) -> Meeting:
    """Decide where the nodes meet, without torch."""
    network_env.check_gloo(inputs.environ, inputs.network)
    several_nodes.check_rendezvous(inputs)
    several_nodes.check_spares(inputs)
    if inputs.mode is Mode.ONE_NODE:
        meeting = one_node.meet(inputs)
    elif inputs.job is None:
        meeting = manual.meet(inputs)
    else:
        meeting = _MEETINGS[inputs.mode](inputs, inputs.job)
    check_key(inputs, meeting)
    return meeting


def make_plan(inputs: Inputs, meeting: Meeting) -> LaunchPlan:
    """Complete the plan, before the nodes meet; refuse what torch does not support."""
    if meeting.has_coordinator and inputs.node.incompatible_patches:
        meeting = meet(inputs)  # perhaps by torch's own rendezvous
    workers, asked = workers_of(inputs), inputs.options
    options = {**meeting.options}
    environment = {**workers.environment, **meeting.environment}
    if meeting.backend == C10D:
        environment |= network_env.of_release(inputs)
    # An empty value is the user's. Python reads it as off.
    if not (inputs.mode.is_direct or FAULT_HANDLER in inputs.environ):
        environment[FAULT_HANDLER] = Setting("1", "for the report of a crash")
    environment |= network_env.of_resolver(inputs)
    if asked.hpc_debug:
        environment |= network_env.debugging(inputs.environ)
        if not (inputs.mode.is_direct or "tee" in asked or "redirects" in asked):
            # The workers' stderr, with the rank on each line.
            options["tee"] = Setting("2", "--hpc-debug")
    return LaunchPlan(
        mode=inputs.mode,
        asked=asked,
        meeting=meeting,
        workers=workers,
        options=options,
        environment=environment,
        messages=_messages(inputs, meeting, workers),
    )


def workers_of(inputs: Inputs) -> Workers:
    """Return this node's workers: their number, CPUs, threads, and GPU.

    Before torch is imported, the number is a guess.
    """
    bound = binding.plan(inputs)
    threads = resources.worker_threads(inputs, bound)
    if job := inputs.direct_job:
        gpu = resources.own_gpu(inputs, job)
        return Workers(job.task.local_size, job.task.size, threads | gpu, bound)
    return Workers(inputs.node.workers, 0, threads, bound, inputs.preload)


def _messages(inputs: Inputs, meeting: Meeting, workers: Workers) -> Messages:
    if job := inputs.direct_job:
        of_node = resources.task_advice(inputs, job, workers)
    else:
        of_node = resources.advice(inputs, workers, meeting.nodes)
    of_binding = binding.advice(inputs, workers.binding)
    return Messages(
        title=messages.title(inputs, meeting.nodes),
        notes=(*meeting.notes, *_unused(inputs, meeting), *_left_out(inputs)),
        advice=(*meeting.advice, *of_node, *_not_preloaded(inputs), *of_binding),
        warnings=meeting.warnings,
    )


def _unused(inputs: Inputs, meeting: Meeting) -> Iterator[Message]:
    """Yield a note on each option that has no effect in this launch."""
    if not (meeting.has_coordinator and meeting.key.path):
        reason = "because no node checks a key"
        yield from messages.unused(inputs, reason, ["hpc_key_file"])
    if inputs.preload is None:
        reason = "in direct mode, and in programs that start the agent themselves"
        yield from messages.unused(inputs, reason, ["hpc_preload"])
    if inputs.mode.is_direct:
        yield from messages.unused(inputs, messages.DIRECT_MODE, _OF_AGENT)
    elif inputs.lacks("watch_workers"):
        reason = "on workers that are not watched"
        yield from messages.unused(inputs, reason, ["hpc_stall_report"])


def _not_preloaded(inputs: Inputs) -> tuple[Message, ...]:
    """Return why the workers are not forks, if the user has set the option."""
    preload = inputs.preload
    if preload is None or preload.is_default or "hpc_preload" not in inputs.options:
        return ()
    return (preload.not_used(preload.problem),) if preload.problem else ()


def _left_out(inputs: Inputs) -> tuple[Message, ...]:
    if inputs.mode.is_direct or not inputs.options.hpc_without_patches:
        return ()
    setting = inputs.options["hpc_without_patches"]
    return (Message("HPC089", f"{setting} switches these patches off"),)

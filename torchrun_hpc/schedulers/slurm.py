"""Slurm, from its variables alone: srun's step, the batch script, or a shell.

``scontrol`` is not used, because containers do not have it. Sources: srun(1),
sbatch(1), salloc(1), and Slurm's ``src/common/env.c``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Setting
from torchrun_hpc.schedulers import hostlist
from torchrun_hpc.schedulers.detector import (
    Allocation,
    Detector,
    Variables,
    whole_number,
)
from torchrun_hpc.schedulers.job import (
    Job,
    LaunchContext,
    Launcher,
    Promise,
    Task,
    as_identifier,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torchrun_hpc.schedulers.process import Process

NAME = "Slurm"

# CPUs of each task, which sbatch sets.
CPUS_PER_TASK = "SLURM_CPUS_PER_TASK"
# The same for srun 22.05 to 23.02, which reads only this one (srun(1)).
SRUN_CPUS_PER_TASK = "SRUN_CPUS_PER_TASK"
# CPUs of the job on each node.
JOB_CPUS = "SLURM_JOB_CPUS_PER_NODE"
# Number of the job's GPUs on this node.
GPUS_ON_NODE = "SLURM_GPUS_ON_NODE"
# Place of this node in the step's list, from 0.
NODE_ID = "SLURM_NODEID"
# Name of the cluster, by which site files recognise a centre.
CLUSTER = "SLURM_CLUSTER_NAME"

# All three are needed. srun inherits missing options from sbatch, and ignores the third
# if there are more tasks than nodes.
_ONCE_PER_NODE = "--nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 {command}"
SRUN = Launcher(
    name="srun",
    template=f"srun {_ONCE_PER_NODE}",
    cpu_option="--cpus-per-task={cpus}",
    block_option="--distribution=block",
    fills_all_nodes=True,
    fail_together="srun --kill-on-bad-exit=1",
    exclude="--exclude=",
    bind_option="--cpus-per-task=N --cpu-bind=cores",
    all_gpus_option="--gpu-bind=none",
    forgets_cpus="srun 22.05 to 23.02 does not read that variable. Add this before "
    "srun",
    remembers_cpus=f"export {SRUN_CPUS_PER_TASK}=${CPUS_PER_TASK}",
    takes_from="sbatch, salloc or srun",
    node_variable=NODE_ID,
)

# The job's number. The first set one counts: in a heterogeneous job, the leader's.
JOB_ID = ("SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID", "SLURM_JOBID")
# Number of the job array.
ARRAY_JOB_ID = "SLURM_ARRAY_JOB_ID"
# Place of the job in its array.
ARRAY_TASK_ID = "SLURM_ARRAY_TASK_ID"
# How often Slurm has started the job again.
RESTART_COUNT = "SLURM_RESTART_COUNT"
# Number of the step. Since 26.05, the batch script also has the first one.
STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")

# Nodes of the job. Components of a heterogeneous job have more variables, which end in
# _HET_GROUP_ and a number.
JOB_NODES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
# Number of components of a heterogeneous job.
HET_SIZE = "SLURM_HET_SIZE"
# Number of the job's nodes.
JOB_NUM_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")

# Nodes of the step. Only srun sets it.
STEP_NODES = "SLURM_STEP_NODELIST"
# Number of the step's nodes. Only srun sets it.
STEP_NUM_NODES = "SLURM_STEP_NUM_NODES"
# Number of tasks on each of the step's nodes. The second one may be the job's, because
# srun keeps it.
STEP_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")

# Slurm's name for this node. A login node does not have it.
NODE_NAME = "SLURMD_NODENAME"
# Rank of the task.
TASK_RANK = "SLURM_PROCID"
# Rank of the task on its node.
LOCAL_RANK = "SLURM_LOCALID"
# How srun distributes the tasks: arbitrary means in the order of a host file.
DISTRIBUTION = "SLURM_DISTRIBUTION"
ARBITRARY = "arbitrary"  # the order of a host file, or of --nodelist

# The step of salloc's shell with LaunchParameters=use_interactive_step: 0xfffffffa,
# signed since 26.05.
INTERACTIVE_STEP_IDS = ("4294967290", "-6")

# Port for the window's size. srun --pty sets it, and steps from its shell inherit it.
PTY_PORT = "SLURM_PTY_PORT"

# Number of the process that Slurm itself started.
TASK_PID = "SLURM_TASK_PID"


def detect(process: Process) -> Job | None:
    """Describe the Slurm job of this process; ``None`` if Slurm did not start it.

    The host name distinguishes a shell on a job node from one on a login node, where
    SLURMD_NODENAME is not set. Programs from the shell of ``srun --pty`` inherit the
    step's variables. Terminal, process group and pid distinguish them from the step
    itself. A login to a job node has only some of the variables.
    """
    slurm = _Variables(process.environ, NAME, "SLURM_*")
    if slurm.first(STEP_NODES, STEP_NUM_NODES) and not _is_left_over(slurm):
        in_shell = slurm.first(*STEP_ID) in INTERACTIVE_STEP_IDS or (
            process.terminal
            and process.in_own_group
            and slurm.first(PTY_PORT)
            and slurm.first(TASK_PID) != str(process.pid)
        )
        return _interactive_step(slurm) if in_shell else _step(slurm)
    if not slurm.first(*JOB_ID):
        return None
    if slurm.first(NODE_ID) and slurm.first(TASK_RANK):
        return _batch_script(slurm)
    # In a heterogeneous job, salloc lists nodes only by component.
    if slurm.first(*JOB_NODES) or _components(slurm):
        return _allocation_shell(slurm, process.hostname)
    return None


def allocation(process: Process) -> Allocation | None:
    """Return the nodes of the Slurm job in which a launcher such as mpirun runs."""
    slurm = _Variables(process.environ, NAME, "SLURM_*")
    if not slurm.first(*JOB_ID) or not (slurm.first(*JOB_NODES) or _components(slurm)):
        return None
    return _allocation(slurm, "")


def promise(environ: Mapping[str, str]) -> Promise:
    """Return Slurm's promises; malformed numbers count as unset.

    Enroot's hook derives a port from the job's number. Source: NVIDIA's enroot,
    ``50-slurm-pytorch.sh``.
    """

    def number(name: str) -> int | None:
        return whole_number(environ.get(name, ""))

    try:
        fewest = min(hostlist.expand_counts(environ.get(JOB_CPUS, "")), default=0)
    except hostlist.HostlistError:
        fewest = 0
    forgotten = None if environ.get(SRUN_CPUS_PER_TASK) else number(CPUS_PER_TASK)
    job = number(next(filter(environ.get, JOB_ID[1:]), ""))
    return Promise(
        cpus_per_task=Setting(forgotten or 0, CPUS_PER_TASK),
        cpus_on_node=Setting(fewest, JOB_CPUS),
        gpus_on_node=Setting(number(GPUS_ON_NODE) or 0, GPUS_ON_NODE),
        hook_port="" if job is None else str(61000 + job % 4536),
    )


class _Variables(Variables):
    """Slurm's variables, also as lists and indexes."""

    def index(self, name: str, size: int, limit: str) -> int:
        """Return a number below ``size``; ``limit`` tells why, for a message."""
        number = self.integer(name)
        if number >= size:
            raise _stale(f"{name}={number}, but {limit}")
        return number

    def hosts(self, *names: str) -> tuple[str, ...]:
        """Return the host names in the first set variable; refuse a repeated name."""
        name = self.name(*names)
        try:
            hosts = hostlist.expand_hostlist(self.environ[name])
        except hostlist.HostlistError as error:
            raise self.damaged(name, f"is not a list of nodes: {error}") from None
        if len(set(hosts)) < len(hosts):
            raise self.damaged(name, "names a node twice")
        return hosts

    def counts(self, *names: str) -> tuple[int, ...]:
        """Return the numbers of tasks per node in the first set variable."""
        name = self.name(*names)
        try:
            return hostlist.expand_counts(self.environ[name])
        except hostlist.HostlistError as error:
            raise self.damaged(name, f"gives no counts: {error}") from None


def _is_left_over(slurm: _Variables) -> bool:
    """Return whether the step's variables belong to another job.

    In a step, sbatch forwards them to its batch script (seen with 22.05).
    """
    step, job = slurm.first(STEP_NODES), slurm.first(*JOB_NODES)
    is_other = step and job and step != job
    return bool(is_other and {*slurm.hosts(STEP_NODES)} - {*slurm.hosts(*JOB_NODES)})


def _srun(slurm: _Variables, nodes: Collection[str], *options: str) -> Launcher:
    """Return srun's command, with one part per component that has some of the nodes."""
    parts = []
    for name, hosts in _components(slurm).items():
        number = len(set(hosts).intersection(nodes))
        if number:
            group = f"--het-group={name.rpartition('_')[2]}"
            once = _ONCE_PER_NODE.replace("{nodes}", str(number))
            parts.append(" ".join((group, *options, once)))
    one_part = " ".join((*options, _ONCE_PER_NODE))
    return replace(SRUN, template=f"srun {' : '.join(parts) or one_part}")


def _components(slurm: _Variables) -> dict[str, tuple[str, ...]]:
    """Return the nodes of each component of a heterogeneous job, by their variable."""
    names = [
        f"{JOB_NODES[0]}_HET_GROUP_{group}"
        for group in range(slurm.integer_or_zero(HET_SIZE))
    ]
    return {name: slurm.hosts(name) for name in names if slurm.first(name)}


def _step(slurm: _Variables) -> Job:
    nodes = slurm.hosts(STEP_NODES)
    tasks_per_node = _tasks_per_node(slurm, nodes)
    tasks_source = slurm.name(*STEP_TASKS_PER_NODE)
    size = sum(tasks_per_node)
    limit = f"the step has only {size} tasks ({tasks_source})"
    task_rank = slurm.index(TASK_RANK, size, limit)
    index, node_source = _index(slurm, nodes)
    local_size = tasks_per_node[index]
    limit = f"there are only {local_size} tasks on this node ({tasks_source})"
    local_rank = 0 if local_size == 1 else slurm.index(LOCAL_RANK, local_size, limit)
    # With one task per node, task rank and node rank are equal. SLURM_NODEID is an
    # index in the list. Since 26.05, tasks follow the topology (slurm_step_layout.c).
    # Before, only a user's host list changed their order. No variable shows the order.
    node_rank = task_rank if size == len(nodes) else index
    order = _own_order(slurm, nodes) if len(nodes) > 1 else ""
    is_ranked = not order and node_rank == index
    launch_id, id_source = _launch_id(slurm, slurm.first(*STEP_ID) or "step")
    return Job(
        scheduler=NAME,
        launcher=_srun(slurm, nodes),
        launch_id=launch_id,
        context=LaunchContext.STEP,
        nodes=nodes,
        node_rank=node_rank,
        task=Task(task_rank, size, local_rank, local_size),
        allocated_nodes=max(slurm.integer_or_zero(*JOB_NUM_NODES), len(nodes)),
        provenance={
            "nodes": STEP_NODES,
            "node_rank": node_source if node_rank == index else TASK_RANK,
            "tasks": tasks_source,
            "task": TASK_RANK,
            **({} if local_size == 1 else {"local_rank": LOCAL_RANK}),
            "launch_id": id_source,
            **({"order": order} if order else {}),
        },
        listed_at=None if is_ranked else index,
    )


def _tasks_per_node(slurm: _Variables, nodes: tuple[str, ...]) -> tuple[int, ...]:
    names = f"{slurm.shown(STEP_NODES)} names {len(nodes)}"
    if slurm.first(STEP_NUM_NODES) and slurm.integer(STEP_NUM_NODES) != len(nodes):
        text = f"{names} nodes, but {STEP_NUM_NODES}={slurm.first(STEP_NUM_NODES)}"
        raise _stale(text, everywhere=True)
    tasks_per_node = slurm.counts(*STEP_TASKS_PER_NODE)
    if len(tasks_per_node) != len(nodes):
        counts = f"{slurm.shown(*STEP_TASKS_PER_NODE)} counts the tasks of"
        text = f"{counts} {len(tasks_per_node)} nodes, but {names}"
        raise _stale(text, everywhere=True)
    return tasks_per_node


def _own_order(slurm: _Variables, nodes: tuple[str, ...]) -> str:
    """Return the variables by which the tasks' order is not the nodes'; or empty.

    srun numbers the tasks of a heterogeneous step component by component, but sorts the
    nodes of all components together.
    """
    if slurm.first(DISTRIBUTION) == ARBITRARY:
        return f"{DISTRIBUTION}={ARBITRARY}"
    groups = _components(slurm)
    hosts, step = dict.fromkeys(chain(*groups.values())), {*nodes}
    in_order_of_tasks = [host for host in hosts if host in step]
    in_order_of_nodes = [node for node in nodes if node in hosts]
    return "" if in_order_of_tasks == in_order_of_nodes else ", ".join(groups)


def _index(slurm: _Variables, nodes: tuple[str, ...]) -> tuple[int, str]:
    """Return this node's index in the step's nodes, and the variable that shows it."""
    name = slurm.first(NODE_NAME)
    if name in nodes:
        return nodes.index(name), NODE_NAME
    if name:
        raise _stale(_not_among(slurm, "step", STEP_NODES))
    limit = f"the step has only {len(nodes)} nodes, {slurm.shown(STEP_NODES)}"
    return slurm.index(NODE_ID, len(nodes), limit), NODE_ID


def _interactive_step(slurm: _Variables) -> Job:
    """Describe a shell on a job node: one node, however many the job has."""
    node = slurm.first(NODE_NAME) or slurm.hosts(STEP_NODES)[0]
    source = NODE_NAME if slurm.first(NODE_NAME) else STEP_NODES
    launch_id, id_source = _launch_id(slurm, "interactive")
    sources = {"nodes": source, "launch_id": id_source}
    shell = Allocation(NAME, launch_id, (node,), sources)
    hosts = list(chain(*_components(slurm).values()))
    # Without --overlap, srun would wait for the resources of the shell's step.
    srun = _srun(slurm, hosts, "--overlap")
    return replace(
        shell.job_of_script(node, srun),
        context=LaunchContext.INTERACTIVE_STEP,
        allocated_nodes=max(slurm.integer_or_zero(*JOB_NUM_NODES), len(hosts), 1),
    )


def _batch_script(slurm: _Variables) -> Job:
    if slurm.integer(NODE_ID) > 0 or slurm.integer(TASK_RANK) > 0:
        # The script runs on the head node. So srun started this, and its list is
        # missing, which ``name`` refuses, or belongs to another step.
        slurm.name(STEP_NODES)
        of_job = slurm.shown(*JOB_NODES)
        text = f"{slurm.shown(STEP_NODES)} names nodes that are not in {of_job}"
        raise _stale(text, everywhere=True)
    batch = _allocation(slurm, "batch")
    node = slurm.first(NODE_NAME) or batch.nodes[0]
    if node not in batch.nodes:
        raise _stale(_not_among(slurm, "job", batch.provenance["nodes"]))
    job = batch.job_of_script(node, _srun(slurm, batch.nodes))
    node_source = NODE_NAME if slurm.first(NODE_NAME) else NODE_ID
    return replace(job, provenance={**job.provenance, "node_rank": node_source})


def _allocation_shell(slurm: _Variables, hostname: str) -> Job | None:
    shell = _allocation(slurm, "shell")
    if hostname.partition(".")[0] in {node.partition(".")[0] for node in shell.nodes}:
        return None  # a login into one of the job's nodes
    job = shell.job_of_script(hostname, _srun(slurm, shell.nodes))
    return replace(job, context=LaunchContext.ALLOCATION_SHELL)


def _allocation(slurm: _Variables, step: str) -> Allocation:
    """Return the job's nodes, with the launch id of a step; see `_launch_id`."""
    groups = _components(slurm)
    if groups:
        nodes, source = tuple(dict.fromkeys(chain(*groups.values()))), ", ".join(groups)
    else:
        nodes, source = slurm.hosts(*JOB_NODES), slurm.name(*JOB_NODES)
    launch_id, id_source = _launch_id(slurm, step)
    return Allocation(NAME, launch_id, nodes, {"nodes": source, "launch_id": id_source})


def _launch_id(slurm: _Variables, step: str) -> tuple[str, str]:
    """Return the launch id, and its variables; refuse a step without a job.

    It is ``123456.0``, ``123456_7.0`` in an array, or ``123456.0-r1`` after a requeue.
    Without ``step``, it is ``123456``.
    """
    job = slurm.first(*JOB_ID)
    if slurm.first(ARRAY_JOB_ID) and slurm.first(ARRAY_TASK_ID):
        job = f"{slurm.first(ARRAY_JOB_ID)}_{slurm.first(ARRAY_TASK_ID)}"
    elif not job:
        slurm.name(*JOB_ID[1:])
    restart = slurm.first(RESTART_COUNT)
    suffix = f"-r{restart}" if restart not in {"", "0"} else ""
    names = [next(filter(slurm.first, JOB_ID), ""), ARRAY_JOB_ID, ARRAY_TASK_ID]
    names += [STEP_ID[0], RESTART_COUNT] if step else [RESTART_COUNT]
    launch_id = as_identifier(f"{job}.{step}{suffix}" if step else job + suffix)
    return launch_id, ", ".join(filter(slurm.first, names))


def _not_among(slurm: _Variables, whose: str, source: str) -> str:
    nodes = f"the {whose}'s nodes, {slurm.shown(source)}"
    return f"this node, {slurm.shown(NODE_NAME)}, is not among {nodes}"


def _stale(text: str, *, everywhere: bool = False) -> LaunchError:
    return LaunchError(
        "HPC025",
        f"{text}. Some variables come from another step or job. Start this with srun, "
        "or unset the SLURM_* variables",
        everywhere=everywhere,
    )


DETECTOR = Detector(
    name=NAME,
    markers=(*JOB_ID, STEP_NODES, STEP_NUM_NODES),
    rank=(TASK_RANK, STEP_NODES),
    prefixes=("SLURM",),
    # psid is ParaStation's, which replaces slurmd at Jülich.
    daemons=("slurmstepd", "salloc", "psid", "psidforwarder"),
    node_name=NODE_NAME,
    task_pid=TASK_PID,
    launcher=SRUN,
    detect=detect,
    allocation=allocation,
    promise=promise,
)

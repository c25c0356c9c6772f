"""CPUs and GPUs of a node: the workers' threads, and what was probably not meant.

Nothing here is an error: a script may know better. A node's CPUs are those of the
affinity mask, which the workers inherit.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.schedulers.hostlist import HostlistError, expand_counts
from torchrun_hpc.schedulers.job import LaunchContext
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.schedulers.job import Job

OMP = "OMP_NUM_THREADS"

# PBS sets both to the chunk's ompthreads, or else to its ncpus, whatever mpiprocs is.
# Source: OpenPBS's src/resmom/start_exec.c; seen with 23.06.
PBS_CPUS = "NCPUS"
PBS_JOB_ID = "PBS_JOBID"

# Each lists the GPUs that a process may use, with commas between them. Sources:
# NVIDIA's CUDA C++ Programming Guide, AMD's "GPU isolation techniques", Intel's
# "Level Zero environment variables".
VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)

# srun(1): since 22.05 srun does not read SLURM_CPUS_PER_TASK, which sbatch sets, but
# SRUN_CPUS_PER_TASK, which it does not; 23.11 took that back.
CPUS_PER_TASK = "SLURM_CPUS_PER_TASK"
SRUN_CPUS_PER_TASK = "SRUN_CPUS_PER_TASK"
JOB_CPUS = "SLURM_JOB_CPUS_PER_NODE"
GPUS_ON_NODE = "SLURM_GPUS_ON_NODE"
SRUN = "srun"  # these are about what it starts


def likely_workers(
    setting: Setting | None, environ: Mapping[str, str], cpus: int, gpus: int
) -> int:
    """Return how many workers there will be, as far as it is known without torch.

    Args:
        setting: Of ``--nproc-per-node``; ``None`` if it is not set.
        environ: Environment of this process.
        cpus: Number of CPUs that this process may run on.
        gpus: Number of GPUs that the system has files for.
    """
    if setting is None:
        return 1
    if re.fullmatch("[0-9]{1,6}", str(setting.value)):
        return int(setting.value)
    listed = [_listed(environ[name]) for name in VISIBLE if name in environ]
    seen = min(listed, default=_integer(environ, GPUS_ON_NODE) or gpus)
    return cpus if setting.value == "cpu" else seen or cpus


def worker_threads(inputs: Inputs) -> dict[str, Setting]:
    """Set what torchrun sets, without its banner: one thread a worker.

    Raises:
        LaunchError: ``--hpc-omp-threads`` is neither a number nor ``auto``.
    """
    explicit = inputs.options.get("hpc_omp_threads")
    if explicit is not None and not re.fullmatch(
        "auto|[1-9][0-9]{0,5}", explicit.value
    ):
        raise LaunchError(
            "HPC090",
            f"{explicit}: type a number of threads for each worker, or auto, which "
            f"divides the {count(inputs.cpus, 'CPU')} of this process by the workers",
            everywhere=True,
        )
    if _chosen_threads(inputs):
        return {}
    if explicit is not None and explicit.value == "auto":
        cpus, workers = count(inputs.cpus, "CPU"), count(inputs.workers, "worker")
        source = f"{explicit}: {cpus} / {workers}"
        if inputs.binding is not None and inputs.binding.shares:
            source = f"{explicit}: the smallest part, by {inputs.binding.setting}"
        return {OMP: Setting(str(_share(inputs)), source)}
    if explicit is not None:
        return {OMP: Setting(explicit.value, explicit.source)}
    # As torchrun: a worker that is alone may use all CPUs.
    if inputs.workers > 1:
        return {OMP: Setting("1", "torchrun's default")}
    if inputs.environ.get(OMP):  # PBS's, which counts as unset
        return {
            OMP: Setting(
                str(_share(inputs)), f"this process's CPUs; {PBS_CPUS} is PBS's"
            )
        }
    return {}


def _chosen_threads(inputs: Inputs) -> str:
    """Return the variable if it is the user's word; empty if it is PBS's, or unset.

    What the user asked PBS for (``ompthreads``) cannot be told from what he did not
    (``ncpus``), but by this: it fits the workers. Nor can it where the other nodes do
    not get it.
    """
    value = inputs.environ.get(OMP, "")
    if not inputs.environ.get(PBS_JOB_ID) or value != inputs.environ.get(PBS_CPUS):
        return value
    fits = _integer(inputs.environ, OMP) * inputs.workers <= inputs.cpus
    is_everywhere = inputs.job is None or inputs.job.nodelist_is_shared
    is_explicit = "hpc_omp_threads" in inputs.options
    return value if fits and is_everywhere and not is_explicit else ""


def advice(inputs: Inputs, nodes: int) -> tuple[Message, ...]:
    """Say what is probably not meant, with the line that mends it.

    Args:
        inputs: What the plan is made from.
        nodes: Number of nodes, for that line.
    """
    return (
        *_about_cpus(inputs, nodes),
        *_about_threads(inputs),
        *_about_gpus(inputs, nodes),
    )


def task_advice(inputs: Inputs, job: Job) -> tuple[Message, ...]:
    """Say what is probably not meant where each task is a worker.

    The tasks of a node mostly find the same; its second one reports it.
    """
    if (job.node_rank, job.task.local_rank) != (0, 1):  # the second of the first node
        return tuple(_about_threads(inputs)) if job.task.rank == 0 else ()
    return tuple(_about_placement(job)) + tuple(_about_own_gpu(inputs))


def _about_placement(job: Job) -> Iterator[Message]:
    if job.task.rank > 1:
        yield Message(
            "HPC079",
            f"tasks are placed in turn: the second one on this node is task "
            f"{job.task.rank} ({job.provenance['task']}). RANK and LOCAL_RANK are the "
            "launcher's; a script must not compute one from the other. To have "
            f"neighbours on one node, type: {job.launcher.name} "
            f"{job.launcher.block_option.format(tasks=job.task.local_size)} …",
        )


def _about_own_gpu(inputs: Inputs) -> Iterator[Message]:
    variable, visible = _visible_gpus(inputs)
    if variable and visible == 1 and not inputs.explicit("virtual_local_rank"):
        yield Message(
            "HPC098",
            f"{variable}={inputs.environ[variable]} shows one GPU to each task, but "
            "LOCAL_RANK goes on counting, and a script that takes GPU number "
            "LOCAL_RANK fails. Type --virtual-local-rank in front of the script, which "
            "makes it 0, or show each task all GPUs of its node",
        )


def own_gpu(inputs: Inputs, job: Job) -> dict[str, Setting]:
    """Return the variable that shows a task its GPU only, for --virtual-local-rank."""
    rank, source = job.task.local_rank, "--virtual-local-rank"
    listed = {
        name: inputs.environ[name].split(",")
        for name in VISIBLE
        if name in inputs.environ
    }
    if not listed:
        return {VISIBLE[0]: Setting(str(rank), source)}
    return {
        name: Setting(gpus[rank], source)
        for name, gpus in listed.items()
        if len(gpus) > rank
    }


def _about_cpus(inputs: Inputs, nodes: int) -> Iterator[Message]:
    cpus = count(inputs.cpus, "CPU")
    promised = _integer(inputs.environ, CPUS_PER_TASK)
    job = (
        inputs.job
        if inputs.job is not None and inputs.job.context is LaunchContext.STEP
        else None
    )
    by_srun = job is not None and job.launcher.name == SRUN
    if (
        by_srun
        and promised > inputs.cpus
        and not inputs.environ.get(SRUN_CPUS_PER_TASK)
    ):
        yield Message(
            "HPC091",
            f"{CPUS_PER_TASK}={promised}, but this process may use only {cpus}: srun "
            "22.05 to 23.02 does not read that variable. Put in front of srun: "
            f"export {SRUN_CPUS_PER_TASK}=${CPUS_PER_TASK}",
        )
    elif inputs.cpus < inputs.workers:
        fix = f"Type: --nproc_per_node={inputs.cpus}"
        more = (
            job.launcher.cpu_option.format(cpus=inputs.workers)
            if job is not None
            else ""
        )
        if by_srun and 0 < (most := _fewest(inputs.environ, JOB_CPUS)) < inputs.workers:
            # srun would refuse it, unless it has made the job itself.
            fix = (
                f"The job has {most} there ({JOB_CPUS}): give sbatch, salloc or srun, "
                f"whichever has made it, {more}. Or type: "
                f"--nproc_per_node={inputs.cpus}"
            )
        elif job is not None and more:
            fix = f"Type: {job.once_per_node(inputs.command, more, nodes)}"
        bind = "With one for each, --hpc-bind divides them"
        if inputs.binding is not None:
            bind = f"{inputs.binding.setting} binds no worker: each needs a CPU"
        yield Message(
            "HPC092",
            f"{inputs.workers} workers share {cpus}: all that the affinity mask of "
            f"this process has. {bind}. {fix}",
        )


def _about_threads(inputs: Inputs) -> Iterator[Message]:
    explicit = inputs.options.get("hpc_omp_threads")
    if explicit is not None and _chosen_threads(inputs):
        yield Message(
            "HPC093",
            f"{explicit} is ignored: {OMP}={inputs.environ[OMP]} is set. Type: "
            f"unset {OMP}",
        )
    value = _chosen_threads(inputs) or str(
        worker_threads(inputs).get(OMP, Setting("", "")).value
    )
    threads = int(value) if re.fullmatch("[0-9]{1,6}", value) else 0
    # One thread each is what is left to have; too few CPUs is another message.
    shares = inputs.binding.shares if inputs.binding is not None else ()
    cpus = sum(len(share.cpus) for share in shares) or inputs.cpus
    if threads > 1 and threads * inputs.workers > cpus:
        yield Message(
            "HPC094",
            f"{OMP}={value} times {count(inputs.workers, 'worker')} is "
            f"{threads * inputs.workers} threads on {count(cpus, 'CPU')}. Type: "
            f"export {OMP}={_share(inputs)}",
        )


def _about_gpus(inputs: Inputs, nodes: int) -> Iterator[Message]:
    """Compare the GPUs that are visible with those of the node, and the workers."""
    variable, visible = _visible_gpus(inputs)
    present = _integer(inputs.environ, GPUS_ON_NODE)
    if not visible or not (inputs.gpus or present):
        return
    shown = f"{variable}={inputs.environ[variable]}" if variable else "this node"
    number = "gpu" if inputs.gpus == visible else visible  # torch may be one for CPUs
    if variable and visible < present:
        fix = f"unset {variable}"
        job = inputs.job
        if (
            job is not None
            and job.context is LaunchContext.STEP
            and job.launcher.name == SRUN
        ):
            fix = job.once_per_node(
                f"env -u {variable} {inputs.command}", "--gpu-bind=none", nodes
            )
        yield Message(
            "HPC095",
            f"{shown} shows {visible} of {count(present, 'GPU')} "
            f"({GPUS_ON_NODE}={present}). Type: {fix}",
        )
    elif visible < inputs.workers:
        yield Message(
            "HPC096",
            f"{count(inputs.workers, 'worker')}, but {shown} shows "
            f"{count(visible, 'GPU')}. Type: --nproc_per_node={number}",
        )
    elif visible > 1 and inputs.workers == 1 and "nproc_per_node" not in inputs.options:
        yield Message(
            "HPC097",
            f"one worker, the default, but {shown} shows {count(visible, 'GPU')}. "
            f"Type: --nproc_per_node={number}   (or "
            "--nproc_per_node=1, if one is meant)",
        )


def _visible_gpus(inputs: Inputs) -> tuple[str, int]:
    """Return how many GPUs are visible, and the variable that says so, if one does."""
    counts = {
        name: _listed(inputs.environ[name])
        for name in VISIBLE
        if name in inputs.environ
    }
    if not counts:
        return "", inputs.gpus
    fewest = min(counts, key=lambda name: counts[name])
    return fewest, counts[fewest]


def _listed(value: str) -> int:
    """Count the GPUs in a list; CUDA takes those in front of one that is not valid."""
    listed = [part.strip() for part in value.split(",")]
    invalid = (i for i, part in enumerate(listed) if part in {"", "-1", "NoDevFiles"})
    return next(invalid, len(listed))


def _integer(environ: Mapping[str, str], name: str) -> int:
    """Return a variable as a number; 0 if it is none."""
    value = environ.get(name, "")
    return int(value) if re.fullmatch("[0-9]{1,6}", value) else 0


def _fewest(environ: Mapping[str, str], name: str) -> int:
    """Return the smallest of Slurm's numbers for the nodes; 0 if there are none."""
    try:
        return min(expand_counts(environ.get(name, "")), default=0)
    except HostlistError:
        return 0


def _share(inputs: Inputs) -> int:
    """Return the CPUs of a worker, at least one; of the one that has the fewest."""
    own = inputs.binding.fewest if inputs.binding is not None else 0
    return own or max(inputs.cpus // inputs.workers, 1)


def follows_cpus(inputs: Inputs) -> bool:
    """Say whether each worker is to have as many threads as CPUs."""
    is_auto = inputs.explicit("hpc_omp_threads") == "auto"
    return is_auto and not _chosen_threads(inputs)

"""CPUs and GPUs of a node: the workers' threads, and probable mistakes.

Nothing here is an error, because a script can know better.
"""

from __future__ import annotations

import re
from operator import itemgetter
from typing import TYPE_CHECKING

from torchrun_hpc.errors import Message, Setting, count, to_copy
from torchrun_hpc.names import ranges
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.schedulers.job import LaunchContext
from torchrun_hpc.variables import (
    CUDA_VISIBLE,
    HIP_VISIBLE,
    LEVEL_ZERO_VISIBLE,
    LOCAL_RANK,
    OMP,
    OMP_BINDING,
    RANK,
    ROCR_VISIBLE,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.inputs import Inputs, Node
    from torchrun_hpc.planning.workers import Binding, Share, Workers
    from torchrun_hpc.schedulers.job import Job


# Each lists the GPUs that a process can use, with commas. Sources:
# NVIDIA's CUDA C++ Programming Guide, AMD's "GPU isolation techniques", Intel's
# "Level Zero environment variables".
VISIBLE = (
    CUDA_VISIBLE,
    HIP_VISIBLE,
    ROCR_VISIBLE,
    LEVEL_ZERO_VISIBLE,
)


# --- the number of workers, and their threads -----------------------------------------


def likely_workers(
    options: Options, environ: Mapping[str, str], cpus: int, gpus: int
) -> int:
    """Return the likely number of workers, without torch."""
    workers = options.nproc_per_node
    if isinstance(workers, int):
        return workers
    _, visible = _visible_gpus(environ, gpus)
    return cpus if workers == "cpu" else visible or cpus


def worker_threads(inputs: Inputs, binding: Binding | None) -> dict[str, Setting]:
    """Return ``OMP_NUM_THREADS``: one thread per worker, as torchrun sets it."""
    wanted, node = inputs.options.hpc_omp_threads, inputs.node
    if chosen_threads(inputs):
        return {}
    number: int | str
    if wanted == "auto":
        number = _share(node, binding)
        source = f"{count(node.cpus, 'CPU')} / {count(node.workers, 'worker')}"
        if binding is not None and binding.shares:
            source = f"the smallest part, by {binding.setting}"
        source = f"{inputs.options['hpc_omp_threads']}: {source}"
    elif wanted is not None:
        number, source = wanted, inputs.options["hpc_omp_threads"].source
    elif node.workers > 1:
        number, source = 1, "torchrun's default"
    elif inputs.environ.get(OMP) or _may_lack_threads(inputs):
        number = _share(node, binding)
        source = f"this process's CPUs; {inputs.promise.threads.source}".rstrip("; ")
    else:
        return {}  # as with torchrun, a single worker can use all CPUs
    return {OMP: Setting(str(number), source)}


def _may_lack_threads(inputs: Inputs) -> bool:
    """Return whether a node may lack the scheduler's value, which counts as unset.

    Over ssh, other nodes may lack it. Tasks in direct mode cannot compare their values.
    """
    job = inputs.job if inputs.mode is Mode.DIRECT else None
    return job is not None and not job.nodelist_is_shared


def threads_of(binding: Binding, share: Share) -> dict[str, str]:
    """Return ``OMP_NUM_THREADS`` for one worker's CPUs, if it follows them."""
    return {OMP: str(len(share.cpus))} if binding.sets_threads else {}


def follows_cpus(inputs: Inputs) -> bool:
    """Return whether each worker gets as many threads as CPUs."""
    is_auto = inputs.options.hpc_omp_threads == "auto"
    return is_auto and not chosen_threads(inputs)


def chosen_threads(inputs: Inputs) -> str:
    """Return the user's value of the variable; empty if the scheduler has set it.

    PBS sets it from the user's ``ompthreads``, otherwise from ``ncpus``. The value
    counts as the user's if it fits the workers, and if all nodes get it.
    """
    value = inputs.environ.get(OMP, "")
    if value != inputs.promise.threads.value:
        return value
    fits = _number(value) * inputs.node.workers <= inputs.node.cpus
    is_everywhere = inputs.job is None or inputs.job.nodelist_is_shared
    is_explicit = "hpc_omp_threads" in inputs.options
    return value if fits and is_everywhere and not is_explicit else ""


def _number(value: str) -> int:
    return int(value) if re.fullmatch("[0-9]{1,6}", value) else 0


def _share(node: Node, binding: Binding | None) -> int:
    smallest = binding.fewest if binding is not None else 0
    return smallest or max(node.cpus // node.workers, 1)


# --- probable mistakes ----------------------------------------------------------------


def advice(inputs: Inputs, workers: Workers, nodes: int) -> tuple[Message, ...]:
    """Return warnings about probable mistakes, with the line to use instead."""
    return (
        *_about_cpus(inputs, workers, nodes),
        *_about_threads(inputs, workers),
        *_about_gpus(inputs, nodes),
    )


def task_advice(inputs: Inputs, job: Job, workers: Workers) -> tuple[Message, ...]:
    """Return warnings about probable mistakes in direct mode.

    Tasks of a node mostly find the same. The second one reports it.
    """
    if (job.node_rank, job.task.local_rank) == (0, 1):  # the second of the first node
        return (*_about_placement(job), *_about_own_gpu(inputs))
    return tuple(_about_threads(inputs, workers)) if job.task.rank == 0 else ()


def _about_placement(job: Job) -> Iterator[Message]:
    if job.task.rank > 1:
        option = job.launcher.block_option.format(tasks=job.task.local_size)
        line = to_copy(f"{job.launcher.name} {option} …")
        yield Message(
            "HPC079",
            f"tasks are placed in turn: the second one on this node is task "
            f"{job.task.rank} ({job.provenance['task']}). {RANK} and {LOCAL_RANK} "
            "come from the launcher: a script must not compute one from the other. "
            f"To place neighbours on one node, add the option:{line}",
        )


def _about_own_gpu(inputs: Inputs) -> Iterator[Message]:
    variable, visible = _visible_gpus(inputs.environ, inputs.node.gpus)
    if variable and visible == 1 and not inputs.options.virtual_local_rank:
        yield Message(
            "HPC098",
            f"{variable}={inputs.environ[variable]} shows one GPU to each task, but "
            f"{LOCAL_RANK} still counts the tasks. A script that takes GPU number "
            f"{LOCAL_RANK} fails. Pass --virtual-local-rank before the script, to make "
            f"{LOCAL_RANK} 0, or show each task all GPUs of its node",
        )


def _about_cpus(inputs: Inputs, workers: Workers, nodes: int) -> Iterator[Message]:
    cpus, number, job = inputs.node.cpus, inputs.node.workers, _step(inputs)
    promised, most = inputs.promise.cpus_per_task, inputs.promise.cpus_on_node
    if job and job.launcher.forgets_cpus and promised.value > cpus:
        yield Message(
            "HPC091",
            f"{promised}, but this process can use only {count(cpus, 'CPU')}: "
            f"{job.launcher.forgets_cpus}:{to_copy(job.launcher.remembers_cpus)}",
        )
    elif cpus < number:
        fix = f"Pass --nproc_per_node={cpus}"
        more = job.launcher.cpu_option.format(cpus=number) if job else ""
        if job and job.launcher.takes_from and 0 < most.value < number:
            # The launcher would refuse the option, unless it has made the job.
            fix = (
                f"The job has {most.value} there ({most.source}). Pass {more} to "
                f"the command that made it ({job.launcher.takes_from}), or pass "
                f"--nproc_per_node={cpus}"
            )
        elif job and more:
            line = job.once_per_node(inputs.command, more, nodes)
            fix = f"Give the task more CPUs:{to_copy(line)}"
        if workers.binding is not None:
            fix = f"{workers.binding.setting} binds none of them. {fix}"
        yield Message(
            "HPC092",
            f"{number} workers share {count(cpus, 'CPU')}, the whole affinity mask of "
            f"this process. {fix}",
        )


def of_imports(inputs: Inputs, workers: Workers, cpus: set[int]) -> Iterator[Message]:
    """Yield a warning if the import of torch binds all workers to the same ``cpus``."""
    if not cpus or workers.number == 1 or (workers.binding and workers.binding.shares):
        return
    given = [f"{n}={inputs.environ[n]}" for n in OMP_BINDING if inputs.environ.get(n)]
    yield Message(
        "HPC227",
        f"OpenMP binds the main threads of all {workers.number} workers to "
        f"{count(len(cpus), 'CPU')} ({ranges(cpus)}) when they import torch "
        f"({', '.join(given) or 'none of its usual variables is set'}). To give each "
        "worker its own CPUs, pass --hpc-bind=gpu, or --hpc-bind=even without GPUs",
    )


def _about_threads(inputs: Inputs, workers: Workers) -> Iterator[Message]:
    chosen, node = chosen_threads(inputs), inputs.node
    if "hpc_omp_threads" in inputs.options and chosen:
        yield Message(
            "HPC093",
            f"{inputs.options['hpc_omp_threads']} is ignored: {OMP}={chosen} is set. "
            f"To use the option, unset it:{to_copy(f'unset {OMP}')}",
        )
    planned = workers.environment.get(OMP)
    value = chosen or str(planned.value if planned else "")
    threads = _number(value) * node.workers
    # With one thread each, there are too few CPUs: another message.
    shares = workers.binding.shares if workers.binding is not None else ()
    cpus = sum(len(share.cpus) for share in shares) or node.cpus
    if _number(value) > 1 and threads > cpus:
        line = to_copy(f"export {OMP}={_share(node, workers.binding)}")
        yield Message(
            "HPC094",
            f"{OMP}={value} times {count(node.workers, 'worker')} is {threads} threads "
            f"on {count(cpus, 'CPU')}. Use fewer:{line}",
        )


def _about_gpus(inputs: Inputs, nodes: int) -> Iterator[Message]:
    node, present = inputs.node, inputs.promise.gpus_on_node
    variable, visible = _visible_gpus(inputs.environ, node.gpus)
    if not visible or not (node.gpus or present.value):
        return
    shown = f"{variable}={inputs.environ[variable]}" if variable else "this node"
    number = "gpu" if node.gpus == visible else visible  # torch can be a CPU build
    if variable and visible < present.value:
        fix, job = f"unset {variable}", _step(inputs)
        if job and (option := job.launcher.all_gpus_option):
            command = f"env -u {variable} {inputs.command}"
            fix = job.once_per_node(command, option, nodes)
        yield Message(
            "HPC095",
            f"{shown} shows {visible} of {count(present.value, 'GPU')} "
            f"({present}). Show all of them:{to_copy(fix)}",
        )
    elif visible < node.workers:
        yield Message(
            "HPC096",
            f"{count(node.workers, 'worker')}, but {shown} shows "
            f"{count(visible, 'GPU')}. Pass --nproc_per_node={number}",
        )
    elif visible > 1 and node.workers == 1 and "nproc_per_node" not in inputs.options:
        yield Message(
            "HPC097",
            f"one worker, the default, but {shown} shows {count(visible, 'GPU')}. "
            f"Pass --nproc_per_node={number}, or --nproc_per_node=1 for one worker",
        )


def _step(inputs: Inputs) -> Job | None:
    job = inputs.job
    return job if job and job.context is LaunchContext.STEP else None


# --- visible GPUs ---------------------------------------------------------------------


def own_gpu(inputs: Inputs, job: Job) -> dict[str, Setting]:
    """Return the variable that shows a task only its GPU, for --virtual-local-rank."""
    if not inputs.options.virtual_local_rank:
        return {}
    rank, source = job.task.local_rank, "--virtual-local-rank"
    visible = _visible(inputs.environ)
    if not visible:
        return {VISIBLE[0]: Setting(str(rank), source)}
    gpus = {name: value.split(",")[rank:] for name, value in visible.items()}
    return {name: Setting(rest[0], source) for name, rest in gpus.items() if rest}


def _visible_gpus(environ: Mapping[str, str], gpus: int) -> tuple[str, int]:
    """Return the variable that shows the fewest GPUs, and their number.

    Without such a variable, it is empty, and ``gpus`` are visible.
    """
    counts = [(_listed(v), name) for name, v in _visible(environ).items()]
    number, name = min(counts, key=itemgetter(0), default=(gpus, ""))
    return name, number


def _visible(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in VISIBLE if name in environ}


def _listed(value: str) -> int:
    """Count the GPUs in a list, up to the first invalid one, like CUDA."""
    listed = [part.strip() for part in value.split(",")]
    invalid = (i for i, part in enumerate(listed) if part in {"", "-1", "NoDevFiles"})
    return next(invalid, len(listed))

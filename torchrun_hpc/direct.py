"""Direct mode: each task is a worker, started by srun or mpirun itself.

The launcher sets what torchrun's agent would set for a worker, and becomes the script.
Torch is not imported, so that this takes no longer than Python does.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from torchrun_hpc import (
    endpoints,
    grammar,
    network,
    plan,
    report,
    resources,
    schedulers,
    signals,
    sites,
    streams,
    variables,
)
from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.inputs import DIRECT, Inputs, Value
from torchrun_hpc.job import Job, Start, Task, same_host
from torchrun_hpc.plan import LaunchPlan
from torchrun_hpc.schedulers import pmi
from torchrun_hpc.schedulers.allocation import in_identity
from torchrun_hpc.schedulers.slurm import SRUN, port_of_hook

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    from torchrun_hpc.describing import Description

# Says that the agent hosts the store, which nobody does here: torch/distributed/
# rendezvous.py.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"

# torchrun's defaults
_ROLE = "default"
_ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(frozen=True)
class Line:
    """A command line of direct mode.

    Attributes:
        options: The options that were typed, by their names in torchrun's parser.
        script: The script, the module or the program.
        arguments: Its arguments.
    """

    options: Mapping[str, Value]
    script: str
    arguments: tuple[str, ...]


def line_of(argv: Sequence[str], job: Job | None) -> Line | None:
    """Return the command line, if each task is a worker; ``None`` if an agent is.

    Raises:
        LaunchError: The line is wrong, or this task has become a worker already.
    """
    if job is None or not job.has_several_tasks:
        return None
    line = parse(argv, os.environ, job)
    problem = plan.nested(os.environ, job.identity)
    if line is not None and problem is not None:
        raise problem
    return line


def parse(argv: Sequence[str], environ: Mapping[str, str], job: Job) -> Line | None:
    """Parse a command line of direct mode, which has few of torchrun's options.

    Args:
        argv: Arguments, without the program's name.
        environ: Environment of this process.
        job: What the launcher says, for the message.

    Returns:
        The line; ``None`` if the user asks for one node, or for help: that is for
        torchrun's own parser.

    Raises:
        LaunchError: The line is wrong, or has an option of the agent.
    """
    made = _parser()
    args, others = made.parse_known_args(list(argv))
    nodes = {"nnodes": Value(args.nnodes, "--nnodes")} if args.nnodes else {}
    if args.help or args.standalone or plan.one_node_is_typed(nodes):
        return None
    if others and any(word.startswith(("--nn", "--stand")) for word in argv):
        return None  # what follows an unknown option may be its value
    bare, _ = grammar.without_defaults(_parser()).parse_known_args(list(argv))
    options = grammar.options_of(made)
    typed = {
        action.dest: Value(
            getattr(args, action.dest),
            action.option_strings[-1]
            if hasattr(bare, action.dest)
            else grammar.variable_of(action.dest),
        )
        for action in options
        if getattr(args, action.dest) not in _UNSET
    }
    known = {grammar.variable_of(action.dest) for action in options}
    refused = [option for option in others if option.startswith("-")]
    refused += [str(typed["nnodes"])] if "nnodes" in typed else []
    refused += [
        f"{name}={value}"
        for name, value in environ.items()
        if name.startswith("PET_") and name not in known
    ]
    form = typed.get("hpc_dry_run")
    if form is not None and form.value not in grammar.DRY_RUN:
        grammar.wrong_line(f"{form}: type one of {', '.join(grammar.DRY_RUN)}")
    if refused:
        raise LaunchError(
            "HPC134",
            f"{refused[0]} is no option where each task is a worker. Options of the "
            "script stand behind it; torchrun's are for its agent, which is there if "
            "the launcher is started once on each node: "
            f"{job.line(shlex.join(['python', '-m', 'torchrun_hpc', *argv]))}",
            everywhere=True,
        )
    words = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not words:
        grammar.wrong_line("the script is missing")
    return Line(typed, words[0], tuple(words[1:]))


_UNSET = (None, "", False)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(grammar.PROGRAM, add_help=False)
    flag, value = grammar.Flag, grammar.OrVariable
    try:
        grammar.add_ours(made)
        made.add_argument("-h", "--help", action="store_true")
        made.add_argument("-m", "--module", action=flag)
        made.add_argument("--no-python", "--no_python", action=flag)
        made.add_argument("--virtual-local-rank", "--virtual_local_rank", action=flag)
        made.add_argument("--nproc-per-node", "--nproc_per_node", action=value)
        # With these a user asks for one node.
        made.add_argument("--standalone", action=flag)
        made.add_argument("--nnodes", action=value)
    except ValueError as error:
        grammar.wrong_variable(error)
    made.add_argument("script", nargs=argparse.REMAINDER)
    made.error = grammar.wrong_line  # type: ignore[method-assign]
    return made


# --- the plan -----------------------------------------------------------------------


def make_plan(q: Inputs, job: Job) -> LaunchPlan:
    """Decide what a worker gets that is a task of a step.

    Raises:
        LaunchError: Something that the user typed, or set, cannot work.
    """
    variables.check_gloo(q.environ, q.network)
    rank, index = job.node_rank, job.index
    if rank is None or index is None:
        raise plan.outside()
    environment: dict[str, Value] = {}
    warnings: tuple[Message, ...] = ()
    master, notes = _master(q, job)
    if master is not None:
        q = replace(q, options={**q.options, "rdzv_endpoint": master})
    if len(job.nodes) == 1:
        host, port, _ = endpoints.typed_endpoint(
            q, plan.LOOPBACK, endpoints.port_of(job.identity)
        )
        endpoint, address = endpoints.join_endpoint(host, port), host
        source = "one node"
    else:
        meeting = endpoints.endpoint_of(q, job)
        option = f"export {endpoints.MASTER_ADDR}="
        endpoints.check_first_is_known(job, meeting, option)
        here = endpoints.view(q, job, index, meeting)
        if not here.reach:
            raise plan.unreachable(q, job, meeting, here)
        if job.task.rank == 0 and plan.is_foreign(q, here.reach):
            own = [str(a.ip) for i in q.network.interfaces for a in i.addresses]
            raise LaunchError(
                "HPC135",
                f"rank 0 is to be reached at {here.reach} ({here}), which no interface "
                f"of this node has: there are {', '.join(own)}. A container with a "
                "network of its own has to use the host's",
            )
        endpoint, address, port = str(here), here.reach, here.port
        source = plan.endpoint_source(q, job, meeting, here)
        environment = variables.network(q, here.own)
        warnings = plan.warnings_of(q, job, rank, here)
    if q.typed("hpc_debug"):
        environment |= variables.debugging(q.environ)
    environment |= _agents_variables(q, job, Value(address, source), port)
    task = job.task
    shape = f"{count(len(job.nodes), 'node')}, {count(task.size, 'task')}"
    if task.size == task.local_size * len(job.nodes):
        shape = f"{count(len(job.nodes), 'node')} x {count(task.local_size, 'task')}"
    return LaunchPlan(
        title=plan.title_of(q, len(job.nodes)),
        shape=shape,
        nodes=len(job.nodes),
        node_rank=rank,
        workers=task.local_size,
        speaks=task.rank == 0,
        endpoint=endpoint,
        identity=job.identity,
        backend=DIRECT,
        reach=address,
        ports=(port,),
        hosts=plan.hosts_of(job),
        site=plan.site_of(q) if len(job.nodes) > 1 else None,
        interface=variables.interface_name(q.environ, environment),
        address=address if task.rank == 0 else None,
        listen=(address, port) if task.rank == 0 else None,
        environment=environment,
        notes=(*notes, *plan.unused(q, "direct mode", ("hpc_rendezvous",))),
        advice=resources.task_advice(q, job),
        warnings=warnings if task.local_rank == 0 else (),
    )


def _master(q: Inputs, job: Job) -> tuple[Value | None, tuple[Message, ...]]:
    """Take the ``MASTER_ADDR`` and ``MASTER_PORT`` that the user has exported.

    In a script without a launcher they are how a user says where rank 0 is. But hooks
    of containers export them too, for another step.
    """
    address = q.environ.get(endpoints.MASTER_ADDR, "")
    port = endpoints.port_of(job.identity)
    typed_port = q.environ.get(endpoints.MASTER_PORT, "")
    if typed_port == port_of_hook(q.environ) or not job.same_everywhere:
        typed_port = ""  # the same for all steps of a job; or not on all nodes
    if address and not _is_first_node(q, job, address):
        first = job.nodes[0] or "this one"
        text = (
            f"{endpoints.MASTER_ADDR}={address} is not node 0 of this step, {first}, "
            "and is replaced"
        )
        return None, (Message("HPC078", text),)
    if typed_port:
        port = endpoints.port_number(typed_port, endpoints.MASTER_PORT)
    if not address and not typed_port:
        return None, ()
    source = endpoints.MASTER_ADDR if address else endpoints.MASTER_PORT
    if not address:
        address = job.nodes[0] if len(job.nodes) > 1 else plan.LOOPBACK
    if not address or (source == endpoints.MASTER_PORT and not job.is_ranked):
        return None, ()  # only the launcher knows where rank 0 is
    where = endpoints.join_endpoint(address, port)
    return Value(where, source), ()


def _is_first_node(q: Inputs, job: Job, address: str) -> bool:
    first = job.nodes[0]
    if len(job.nodes) == 1:
        return q.network.local_address(address) is not None
    if job.guessed_head or not first:
        return True  # nobody else knows; node 0 will see
    firsts = (first,) if job.is_ranked else job.nodes  # rank 0 will see
    names = (name for node in firsts for name in (node, q.rewrite(node)))
    if any(_is_named(address, name) for name in names):
        return True
    # Only the node itself knows that of a number; rank 0 will see.
    return bool(endpoints.is_number(address) and q.network.addresses_of(address))


def _is_named(address: str, node: str) -> bool:
    """Say whether an address may be a node's: its name, or one made of it.

    ``n9i`` and ``n9-ib0`` are common names of a node n9 on its other networks.
    """
    label = re.escape(node.partition(".")[0])
    made = re.fullmatch(rf"{label}([^0-9].*)?", address) is not None
    return same_host(address, node) or made


def _agents_variables(
    q: Inputs, job: Job, master: Value, port: int
) -> dict[str, Value]:
    """Return what torchrun's agent sets: LocalElasticAgent._start_workers."""
    task, sources = job.task, job.sources
    size, rank = sources.get("tasks", ""), sources.get("task", "")
    local_rank = (task.local_rank, rank)
    if q.typed("virtual_local_rank"):
        local_rank = (0, "--virtual-local-rank")
    found = {
        "RANK": (task.rank, rank),
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": (task.size, size),
        "LOCAL_WORLD_SIZE": (task.local_size, size),
        "GROUP_RANK": (job.node_rank, sources.get("node_rank", "")),
        "GROUP_WORLD_SIZE": (len(job.nodes), sources.get("nodes", "")),
        "ROLE_RANK": (task.rank, rank),
        "ROLE_WORLD_SIZE": (task.size, size),
        "ROLE_NAME": (_ROLE, "default"),
        endpoints.MASTER_ADDR: (master.value, master.source),
        endpoints.MASTER_PORT: (port, master.source),
        plan.RUN_ID: (job.identity, sources.get("identity", "")),
        "TORCHELASTIC_RESTART_COUNT": (0, "no agent"),
        "TORCHELASTIC_MAX_RESTARTS": (0, "no agent"),
    }
    if not q.environ.get(_ASYNC_ERRORS):
        found[_ASYNC_ERRORS] = (1, "as torchrun")
    threads = resources.worker_threads(q)  # of one worker
    gpu = resources.own_gpu(q, job) if q.typed("virtual_local_rank") else {}
    return (
        {k: Value(str(v), source) for k, (v, source) in found.items()} | threads | gpu
    )


# --- the launch ---------------------------------------------------------------------


def plan_of(line: Line, job: Job, command: str) -> tuple[Inputs, LaunchPlan]:
    """Look at this node, and make the plan.

    Args:
        line: What was typed.
        job: What the launcher says.
        command: The command as typed, for messages.

    Raises:
        LaunchError: It cannot work.
    """
    _check_workers(line, job, command)
    cpus = len(os.sched_getaffinity(0))
    if cpus == os.cpu_count():
        cpus = max(cpus // job.task.local_size, 1)  # not bound: they share
    environ = schedulers.environment()
    q = Inputs(
        job=job,
        site=sites.find(environ, job.a_node, line.options.get("hpc_site")),
        network=network.this_node(),
        options=line.options,
        environ=environ,
        workers=1,
        cpus=cpus,
        gpus=0,
        command=command,
    )
    return q, make_plan(q, job)


def launch(line: Line, job: Job, command: str) -> NoReturn:
    """Set the environment, and become the script.

    Args:
        line: What was typed.
        job: What the launcher says.
        command: The command as typed, for messages.

    Raises:
        LaunchError: It cannot work.
        SystemExit: It was a dry run.
    """
    q, made = plan_of(line, job, command)
    _check_script(line)
    if line.options.get("hpc_dry_run"):
        sys.exit(_dry_run(line, q, made))
    words = _program(line)
    _check_port(made)
    announce(made)
    write(made, os.environ)
    if job.has_talked:
        pmi.finalize_at_end(os.environ)
    signals.uninstall()
    try:
        with streams.default_signals():
            os.execvp(words[0], words)  # noqa: S606
    except OSError as error:
        text = f"{words[0]} cannot be run: {error.strerror}"
        raise LaunchError("HPC133", text) from None


def is_set_up(environ: Mapping[str, str]) -> bool:
    """Say whether an agent, or direct mode, has set the environment already."""
    return bool(environ.get(plan.RUN_ID) and environ.get(plan.RANK))


def set_up(job: Job | None, hostname: str, command: str) -> dict[str, str]:
    """Set the environment of this process, which is a worker.

    Args:
        job: What the launcher says; ``None`` without one.
        hostname: Name of this machine.
        command: The command as typed, for messages.

    Returns:
        The variables that were set.

    Raises:
        LaunchError: It cannot work.
    """
    job = job or _no_job(hostname)
    ours = ("hpc_site", "hpc_omp_threads")
    variables_of = {name: grammar.variable_of(name) for name in ours}
    typed = {
        name: Value(os.environ[variable], variable)
        for name, variable in variables_of.items()
        if os.environ.get(variable)
    }
    _, made = plan_of(Line(typed, "", ()), job, command)
    if job.task.size == 1 and not os.environ.get(endpoints.MASTER_PORT):
        port = str(network.free_port(plan.LOOPBACK))
        made = replace(
            made,
            endpoint=endpoints.join_endpoint(plan.LOOPBACK, port),
            environment={
                **made.environment,
                endpoints.MASTER_PORT: Value(port, "alone"),
            },
        )
    else:
        _check_port(made)
    announce(made)
    write(made, os.environ)
    if job.has_talked:
        pmi.finalize_at_end(os.environ)
    return {name: str(value.value) for name, value in made.environment.items()}


def _no_job(hostname: str) -> Job:
    """Describe a process that nobody has started but a person."""
    return Job(
        scheduler=plan.NO_SCHEDULER,
        identity=in_identity(f"{hostname.partition('.')[0]}.{os.getpid()}"),
        start=Start.STEP,
        launcher=SRUN,
        nodes=(hostname,),
        node_rank=0,
        task=Task(),
        allocated_nodes=1,
        sources={},
    )


def announce(made: LaunchPlan) -> None:
    """Print the start line, and the warnings."""
    if made.speaks:
        report.line(report.start_line(made), sys.stderr)
    for warning in (*made.warnings, *made.advice):
        report.line(warning, sys.stderr, "warning")


def write(made: LaunchPlan, environ: MutableMapping[str, str]) -> None:
    """Write the plan into the environment of the script."""
    environ.pop(AGENT_STORE, None)
    environ.update({k: str(v.value) for k, v in made.environment.items()})


def _check_workers(line: Line, job: Job, command: str) -> None:
    """Refuse several workers in each of several tasks.

    Raises:
        LaunchError: A number above 1 was typed, or what torch counts is above 1.
    """
    typed = line.options.get("nproc_per_node")
    if typed is None or typed.value == "1":
        return
    from torchrun_hpc import checks  # noqa: PLC0415 - it imports torch, to count

    args = argparse.Namespace(nproc_per_node=typed.value)
    if checks.number_of_workers(args, line.options) > 1:
        raise plan.several_tasks(job, command, typed)


def _check_script(line: Line) -> None:
    """See that there is what is to be run.

    Raises:
        LaunchError: There is not.
    """
    if "no_python" in line.options:
        grammar.check_program(line.script)
    elif not line.options.keys() & {"module", "hpc_dry_run"}:
        grammar.check_script(line.script)  # a dry run needs none


def _program(line: Line) -> list[str]:
    """Return what to run, as torchrun writes it."""
    words = [line.script, *line.arguments]
    if "no_python" in line.options:
        return words
    python = [os.environ.get("PYTHON_EXEC") or sys.executable, "-u"]
    return [*python, *(["-m"] if "module" in line.options else []), *words]


def _check_port(made: LaunchPlan) -> None:
    if made.listen is None:
        return
    address, port = made.listen
    problem = endpoints.is_number(address) and network.port_problem(address, port)
    if problem:
        raise LaunchError(
            "HPC132",
            f"port {port} on {address}, where rank 0 is to be reached, cannot be used: "
            f"{problem}. Export another one on all nodes: {endpoints.MASTER_PORT}=PORT",
        )


def described(line: Line, q: Inputs, made: LaunchPlan) -> Description:
    """Describe what a task would do."""
    from importlib import metadata  # noqa: PLC0415 - slow to import

    from torchrun_hpc import describing  # noqa: PLC0415 - so is this

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "unknown"
    return describing.description(q, made, torch, [], _program(line))


def _dry_run(line: Line, q: Inputs, made: LaunchPlan) -> int:
    """Print on task 0 what it would do; return the exit code."""
    if made.speaks:
        form = line.options["hpc_dry_run"].value
        report.print_dry_run(form, [described(line, q, made)], [], 0)
    return 0

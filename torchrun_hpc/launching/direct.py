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

from torchrun_hpc import network, schedulers, sites
from torchrun_hpc.commandline import options as hpc_options
from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.launching import signals
from torchrun_hpc.planning import endpoints, network_env, plan, resources
from torchrun_hpc.planning.inputs import DIRECT, Inputs
from torchrun_hpc.planning.plan import LaunchPlan
from torchrun_hpc.reporting import report, streams
from torchrun_hpc.schedulers import pmi
from torchrun_hpc.schedulers.allocation import as_launch_id
from torchrun_hpc.schedulers.job import Job, LaunchContext, Task, same_host
from torchrun_hpc.schedulers.slurm import SRUN, port_of_hook
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    from torchrun_hpc.reporting.description import Description

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

    options: Mapping[str, Setting]
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
    problem = plan.nested(os.environ, job.launch_id)
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
    nodes = {"nnodes": Setting(args.nnodes, "--nnodes")} if args.nnodes else {}
    if args.help or args.standalone or plan.asks_for_one_node(nodes):
        return None
    if others and any(word.startswith(("--nn", "--stand")) for word in argv):
        return None  # what follows an unknown option may be its value
    bare, _ = hpc_options.without_defaults(_parser()).parse_known_args(list(argv))
    options = hpc_options.options_of(made)
    explicit = {
        action.dest: Setting(
            getattr(args, action.dest),
            action.option_strings[-1]
            if hasattr(bare, action.dest)
            else hpc_options.variable_of(action.dest),
        )
        for action in options
        if getattr(args, action.dest) not in _UNSET
    }
    known = {hpc_options.variable_of(action.dest) for action in options}
    refused = [option for option in others if option.startswith("-")]
    refused += [str(explicit["nnodes"])] if "nnodes" in explicit else []
    refused += [
        f"{name}={value}"
        for name, value in environ.items()
        if name.startswith("PET_") and name not in known
    ]
    form = explicit.get("hpc_dry_run")
    if form is not None and form.value not in hpc_options.DRY_RUN:
        hpc_options.wrong_line(f"{form}: type one of {', '.join(hpc_options.DRY_RUN)}")
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
        hpc_options.wrong_line("the script is missing")
    return Line(explicit, words[0], tuple(words[1:]))


_UNSET = (None, "", False)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(hpc_options.PROGRAM, add_help=False)
    flag, value = hpc_options.Flag, hpc_options.OrVariable
    try:
        hpc_options.add_ours(made)
        made.add_argument("-h", "--help", action="store_true")
        made.add_argument("-m", "--module", action=flag)
        made.add_argument("--no-python", "--no_python", action=flag)
        made.add_argument("--virtual-local-rank", "--virtual_local_rank", action=flag)
        made.add_argument("--nproc-per-node", "--nproc_per_node", action=value)
        # With these a user asks for one node.
        made.add_argument("--standalone", action=flag)
        made.add_argument("--nnodes", action=value)
    except ValueError as error:
        hpc_options.wrong_variable(error)
    made.add_argument("script", nargs=argparse.REMAINDER)
    made.error = hpc_options.wrong_line  # type: ignore[method-assign]
    return made


# --- the plan -----------------------------------------------------------------------


def make_plan(inputs: Inputs, job: Job) -> LaunchPlan:
    """Decide what a worker gets that is a task of a step.

    Raises:
        LaunchError: Something that the user typed, or set, cannot work.
    """
    network_env.check_gloo(inputs.environ, inputs.network)
    rank, index = job.node_rank, job.index
    if rank is None or index is None:
        raise plan.outside()
    environment: dict[str, Setting] = {}
    warnings: tuple[Message, ...] = ()
    master, notes = _master(inputs, job)
    if master is not None:
        inputs = replace(inputs, options={**inputs.options, "rdzv_endpoint": master})
    if len(job.nodes) == 1:
        host, port, _ = endpoints.explicit_endpoint(
            inputs, plan.LOOPBACK, endpoints.port_of(job.launch_id)
        )
        endpoint, address = network.join_endpoint(host, port), host
        source = "one node"
    else:
        meeting = endpoints.endpoint_of(inputs, job)
        option = f"export {endpoints.MASTER_ADDR}="
        endpoints.check_first_is_known(job, meeting, option)
        here = endpoints.view(inputs, job, index, meeting)
        if not here.connect_host:
            raise plan.unreachable(inputs, job, meeting, here)
        if job.task.rank == 0 and plan.is_foreign(inputs, here.connect_host):
            own = [str(a.ip) for i in inputs.network.interfaces for a in i.addresses]
            raise LaunchError(
                "HPC135",
                f"rank 0 is to be reached at {here.connect_host} ({here}), which no interface "
                f"of this node has: there are {', '.join(own)}. A container with a "
                "network of its own has to use the host's",
            )
        endpoint, address, port = str(here), here.connect_host, here.port
        source = plan.endpoint_source(inputs, job, meeting, here)
        environment = network_env.network(inputs, here.own)
        warnings = plan.warnings_of(inputs, job, rank, here)
    if inputs.explicit("hpc_debug"):
        environment |= network_env.debugging(inputs.environ)
    environment |= _agents_variables(inputs, job, Setting(address, source), port)
    task = job.task
    shape = f"{count(len(job.nodes), 'node')}, {count(task.size, 'task')}"
    if task.size == task.local_size * len(job.nodes):
        shape = f"{count(len(job.nodes), 'node')} x {count(task.local_size, 'task')}"
    return LaunchPlan(
        title=plan.title_of(inputs, len(job.nodes)),
        shape=shape,
        nodes=len(job.nodes),
        node_rank=rank,
        workers=task.local_size,
        is_reporter=task.rank == 0,
        endpoint=endpoint,
        launch_id=job.launch_id,
        backend=DIRECT,
        connect_host=address,
        ports=(port,),
        hosts=plan.hosts_of(job),
        site=plan.site_of(inputs) if len(job.nodes) > 1 else None,
        interface=network_env.interface_name(inputs.environ, environment),
        address=address if task.rank == 0 else None,
        listen=(address, port) if task.rank == 0 else None,
        environment=environment,
        notes=(*notes, *plan.unused(inputs, "direct mode", ("hpc_rendezvous",))),
        advice=resources.task_advice(inputs, job),
        warnings=warnings if task.local_rank == 0 else (),
    )


def _master(inputs: Inputs, job: Job) -> tuple[Setting | None, tuple[Message, ...]]:
    """Take the ``MASTER_ADDR`` and ``MASTER_PORT`` that the user has exported.

    In a script without a launcher they are how a user says where rank 0 is. But hooks
    of containers export them too, for another step.
    """
    address = inputs.environ.get(endpoints.MASTER_ADDR, "")
    port = endpoints.port_of(job.launch_id)
    explicit_port = inputs.environ.get(endpoints.MASTER_PORT, "")
    if explicit_port == port_of_hook(inputs.environ) or not job.nodelist_is_shared:
        explicit_port = ""  # the same for all steps of a job; or not on all nodes
    if address and not _is_first_node(inputs, job, address):
        first = job.nodes[0] or "this one"
        text = (
            f"{endpoints.MASTER_ADDR}={address} is not node 0 of this step, {first}, "
            "and is replaced"
        )
        return None, (Message("HPC078", text),)
    if explicit_port:
        port = endpoints.port_number(explicit_port, endpoints.MASTER_PORT)
    if not address and not explicit_port:
        return None, ()
    source = endpoints.MASTER_ADDR if address else endpoints.MASTER_PORT
    if not address:
        address = job.nodes[0] if len(job.nodes) > 1 else plan.LOOPBACK
    if not address or (source == endpoints.MASTER_PORT and not job.is_ranked):
        return None, ()  # only the launcher knows where rank 0 is
    where = network.join_endpoint(address, port)
    return Setting(where, source), ()


def _is_first_node(inputs: Inputs, job: Job, address: str) -> bool:
    first = job.nodes[0]
    if len(job.nodes) == 1:
        return inputs.network.local_address(address) is not None
    if job.head_candidates or not first:
        return True  # nobody else knows; node 0 will see
    firsts = (first,) if job.is_ranked else job.nodes  # rank 0 will see
    names = (name for node in firsts for name in (node, inputs.rewrite(node)))
    if any(_is_named(address, name) for name in names):
        return True
    # Only the node itself knows that of a number; rank 0 will see.
    return bool(network.is_number(address) and inputs.network.addresses_of(address))


def _is_named(address: str, node: str) -> bool:
    """Say whether an address may be a node's: its name, or one made of it.

    ``n9i`` and ``n9-ib0`` are common names of a node n9 on its other networks.
    """
    label = re.escape(node.partition(".")[0])
    made = re.fullmatch(rf"{label}([^0-9].*)?", address) is not None
    return same_host(address, node) or made


def _agents_variables(
    inputs: Inputs, job: Job, master: Setting, port: int
) -> dict[str, Setting]:
    """Return what torchrun's agent sets: LocalElasticAgent._start_workers."""
    task, provenance = job.task, job.provenance
    size, rank = provenance.get("tasks", ""), provenance.get("task", "")
    local_rank = (task.local_rank, rank)
    if inputs.explicit("virtual_local_rank"):
        local_rank = (0, "--virtual-local-rank")
    found = {
        "RANK": (task.rank, rank),
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": (task.size, size),
        "LOCAL_WORLD_SIZE": (task.local_size, size),
        "GROUP_RANK": (job.node_rank, provenance.get("node_rank", "")),
        "GROUP_WORLD_SIZE": (len(job.nodes), provenance.get("nodes", "")),
        "ROLE_RANK": (task.rank, rank),
        "ROLE_WORLD_SIZE": (task.size, size),
        "ROLE_NAME": (_ROLE, "default"),
        endpoints.MASTER_ADDR: (master.value, master.source),
        endpoints.MASTER_PORT: (port, master.source),
        plan.RUN_ID: (job.launch_id, provenance.get("launch_id", "")),
        "TORCHELASTIC_RESTART_COUNT": (0, "no agent"),
        "TORCHELASTIC_MAX_RESTARTS": (0, "no agent"),
    }
    if not inputs.environ.get(_ASYNC_ERRORS):
        found[_ASYNC_ERRORS] = (1, "as torchrun")
    threads = resources.worker_threads(inputs)  # of one worker
    gpu = (
        resources.own_gpu(inputs, job) if inputs.explicit("virtual_local_rank") else {}
    )
    return (
        {k: Setting(str(v), source) for k, (v, source) in found.items()} | threads | gpu
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
    inputs = Inputs(
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
    return inputs, make_plan(inputs, job)


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
    inputs, made = plan_of(line, job, command)
    _check_script(line)
    if line.options.get("hpc_dry_run"):
        sys.exit(_dry_run(line, inputs, made))
    words = _program(line)
    _check_port(made)
    announce(made)
    write(made, os.environ)
    if job.pmi_is_open:
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
    variables_of = {name: hpc_options.variable_of(name) for name in ours}
    explicit = {
        name: Setting(os.environ[variable], variable)
        for name, variable in variables_of.items()
        if os.environ.get(variable)
    }
    _, made = plan_of(Line(explicit, "", ()), job, command)
    if job.task.size == 1 and not os.environ.get(endpoints.MASTER_PORT):
        port = str(network.free_port(plan.LOOPBACK))
        made = replace(
            made,
            endpoint=network.join_endpoint(plan.LOOPBACK, port),
            environment={
                **made.environment,
                endpoints.MASTER_PORT: Setting(port, "alone"),
            },
        )
    else:
        _check_port(made)
    announce(made)
    write(made, os.environ)
    if job.pmi_is_open:
        pmi.finalize_at_end(os.environ)
    return {name: str(value.value) for name, value in made.environment.items()}


def _no_job(hostname: str) -> Job:
    """Describe a process that nobody has started but a person."""
    return Job(
        scheduler=plan.NO_SCHEDULER,
        launch_id=as_launch_id(f"{hostname.partition('.')[0]}.{os.getpid()}"),
        start=LaunchContext.STEP,
        launcher=SRUN,
        nodes=(hostname,),
        node_rank=0,
        task=Task(),
        allocated_nodes=1,
        provenance={},
    )


def announce(made: LaunchPlan) -> None:
    """Print the start line, and the warnings."""
    if made.is_reporter:
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
    explicit = line.options.get("nproc_per_node")
    if explicit is None or explicit.value == "1":
        return
    from torchrun_hpc.commandline import validation  # noqa: PLC0415 - it imports torch, to count

    args = argparse.Namespace(nproc_per_node=explicit.value)
    if validation.number_of_workers(args, line.options) > 1:
        raise plan.several_tasks(job, command, explicit)


def _check_script(line: Line) -> None:
    """See that there is what is to be run.

    Raises:
        LaunchError: There is not.
    """
    if "no_python" in line.options:
        hpc_options.check_program(line.script)
    elif not line.options.keys() & {"module", "hpc_dry_run"}:
        hpc_options.check_script(line.script)  # a dry run needs none


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
    problem = network.is_number(address) and network.port_problem(address, port)
    if problem:
        raise LaunchError(
            "HPC132",
            f"port {port} on {address}, where rank 0 is to be reached, cannot be used: "
            f"{problem}. Export another one on all nodes: {endpoints.MASTER_PORT}=PORT",
        )


def described(line: Line, inputs: Inputs, made: LaunchPlan) -> Description:
    """Describe what a task would do."""
    from importlib import metadata  # noqa: PLC0415 - slow to import

    from torchrun_hpc.reporting import description  # noqa: PLC0415 - so is this

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "unknown"
    return description.description(inputs, made, torch, [], _program(line))


def _dry_run(line: Line, inputs: Inputs, made: LaunchPlan) -> int:
    """Print on task 0 what it would do; return the exit code."""
    if made.is_reporter:
        form = line.options["hpc_dry_run"].value
        report.print_dry_run(form, [described(line, inputs, made)], [], 0)
    return 0

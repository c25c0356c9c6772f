"""The meeting of several nodes of a step, with an agent on each, and its spares."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc import limits
from torchrun_hpc.errors import LaunchError, Message, Setting, count, to_copy
from torchrun_hpc.host.network import join_endpoint
from torchrun_hpc.options.options import EQUAL, OF_STATIC
from torchrun_hpc.options.values import C10D, SCHEDULER, STATIC
from torchrun_hpc.planning import head_node, messages, network_env, resources
from torchrun_hpc.planning.meeting import (
    Meeting,
    Spares,
    hosts_of,
    key_file,
    meeting_of,
    place_of,
    with_environment,
)
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.variables import OMP

if TYPE_CHECKING:
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.head_node import HeadNode
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.schedulers.job import Job


_SHORT = 160  # characters of a command: its end has the script and its arguments


OF_ENDPOINT = (*head_node.ENDPOINT, "rdzv_conf")  # which can name the host


def meet(inputs: Inputs, job: Job) -> Meeting:
    """Return where the nodes of a step meet; refuse options that do not fit it."""
    _check_nnodes(inputs, job)
    problem = messages.nested(inputs.environ, job.launch_id)
    if problem and not head_node.is_explicit(inputs.options):
        raise problem
    head = _head_node(inputs, job)
    meeting = _meeting(inputs, job, head)
    return replace(
        meeting,
        options=_options(inputs, job, head),
        notes=(*_notes(inputs, head), *messages.interactive_note(inputs)),
        advice=_advice_on_spares(inputs) + network_env.advice(inputs),
        warnings=messages.warnings(inputs, head, meeting.hosts[meeting.node_rank]),
    )


def meeting_to_give_up(inputs: Inputs, job: Job) -> Meeting:
    """Return where a node that cannot start tells the others; without derived options.

    Wrong options count as not set. If the explicit endpoint is at fault, all nodes with
    that fault meet without it.

    Raises:
        LaunchError: This node does not know the head node, or cannot reach it.
    """
    wrong = ("local_addr", *inputs.options.wrong)
    with contextlib.suppress(LaunchError):
        return _meeting_without(inputs, job, *wrong)
    return _meeting_without(inputs, job, *wrong, *OF_ENDPOINT)


def _meeting_without(inputs: Inputs, job: Job, *names: str) -> Meeting:
    options = inputs.options.without(*names)
    if options.problem is not None:
        raise options.problem
    if inputs.site is not None:
        options = options.with_site(inputs.site.name, inputs.site.options)
    inputs = replace(inputs, options=options)
    return _meeting(inputs, job, _head_node(inputs, job))


def _head_node(inputs: Inputs, job: Job) -> HeadNode:
    """Return the head node as this node sees it; refuse one that nodes cannot use."""
    options = inputs.options
    node_rank, _ = place_of(job)
    by_name = head_node.by_name(inputs, job)
    if options.is_static:
        head_node.check_first_is_known(job, by_name, "--master_addr=")
        _check_static(inputs, job, node_rank, by_name)
    head = head_node.on_this_node(inputs, job, by_name)
    if _may_grow(inputs, job) and len(job.nodes) == 1 and head.index is None:
        # The endpoint belongs to another launch, unless this node has its address.
        is_local = inputs.network.own_address(head.host) is not None
        head = replace(head, is_local=is_local)
    if (options.is_static or options.is_c10d) and not head.connect_host:
        raise head_node.unreachable(inputs, job, head)
    if options.is_static and head.is_local != (node_rank == 0):
        source = head.setting or head.plain
        raise _not_on_node_0(job, f"{source} is not an address of node 0")
    return head


def _meeting(inputs: Inputs, job: Job, head: HeadNode) -> Meeting:
    """Return the nodes and where they meet, for a launch or to give up."""
    options = inputs.options
    meets_there = options.is_static or options.is_c10d
    explicit = options.rdzv_conf.is_host
    is_host = head.is_local if explicit is None else explicit
    # A host with another name on other nodes must listen on all addresses.
    address = None
    if meets_there and is_host and not head.others_may_differ:
        address = inputs.network.own_address(head.connect_host)
    by_ours = meets_by_ours(inputs)
    # Our rendezvous tries other ports unless the user chose one.
    ports, notice_ports = head_node.ports_of(job.launch_id)
    tries_others = by_ours and head.port == ports[0]
    interface = inputs.network.owner(head.local_address)
    meeting = replace(
        meeting_of(inputs, job, SCHEDULER if by_ours else options.backend),
        started_by=job.started_by,
        started="" if job.names_instance else _started(inputs),
        fewest=options.nnodes.low if "nnodes" in options else 0,
        may_grow=_may_grow(inputs, job),
        silence_timeout=options.rdzv_conf.silence_timeout,
        spares=_spares_of(options, job),
        key=key_file(inputs),
        site=inputs.site_setting,
        compared=_compared(inputs, job),
        endpoint=str(head) if meets_there else options.rdzv_endpoint,
        connect_host=head.connect_host,
        ports=ports if tries_others else (head.port,),
        notice_ports=notice_ports,
        coordinator=head.index if job.is_ranked else None,
        is_coordinator=meets_there and is_host,
        local_address=None if head.local_address is None else str(head.local_address),
        listen=(str(address), head.port) if address else None,
        may_join=_may_grow(inputs, job) and head_node.may_join(options),
        hint=_hint(inputs, job),
        network_hint=head_node.network_hint(job, interface),
    )
    environment = network_env.network(inputs, head.local_address)
    return with_environment(inputs, meeting, environment)


def meets_by_ours(inputs: Inputs) -> bool:
    """Return whether the nodes meet by the scheduler's ranks.

    Torch's own c10d stays for a range of nodes. It also stays for torch's own agents:
    they leave without notice, which our coordinator takes for a failure.
    """
    options = inputs.options
    is_wanted = options.hpc_rendezvous != C10D and not inputs.lacks("agent")
    return options.is_c10d and len({*options.nnodes}) == 1 and is_wanted


def _started(inputs: Inputs) -> str:
    """Return what must be equal on all nodes: options, script and arguments."""
    options, command = inputs.options, inputs.command
    if options.words:  # otherwise, the line cannot be parsed
        equal = (f"--{name}={options[name].value}" for name in EQUAL if name in options)
        command = shlex.join([*equal, *options.words])
    digest = hashlib.sha256(command.encode(errors="replace")).hexdigest()
    return f"{command[-_SHORT:]} [{digest[:8]}]" if command else ""


def _may_grow(inputs: Inputs, job: Job) -> bool:
    return inputs.options.nnodes.high > len(job.nodes)


def _compared(inputs: Inputs, job: Job) -> str:
    """Return the site, and the threads that the user has perhaps set on this node only.

    Over ssh, a node without the scheduler's variables cannot know who has set it.
    """
    threads = "" if job.nodelist_is_shared else resources.chosen_threads(inputs)
    site = str(inputs.site_setting.value) if inputs.site_setting else ""
    return ", ".join(filter(None, (site, threads and f"{OMP}={threads}")))


def _not_on_node_0(job: Job, fault: str, *, everywhere: bool = False) -> LaunchError:
    first = hosts_of(job)[0] if job.is_ranked or not job.node_rank else ""
    node_0 = f"node 0, {first}" if first else "node 0"
    text = f"{fault}, but the static rendezvous is on {node_0}. Remove the option, or "
    text += "pass --rdzv_backend=c10d"
    return LaunchError("HPC069", text, everywhere=everywhere)


def _options(inputs: Inputs, job: Job, head: HeadNode) -> dict[str, Setting]:
    asked = inputs.options
    source = job.provenance["nodes"]
    if asked.hpc_spares:
        source = f"{source} - {asked['hpc_spares']}"
    active = len(job.nodes) - asked.hpc_spares
    # The name if no address is known: torch's own choice does not always resolve.
    address = str(head.local_address or head.local_name)
    derived = {
        "nnodes": Setting(str(active), source),
        "rdzv_id": Setting(job.launch_id, job.provenance["launch_id"]),
        "rdzv_backend": Setting(STATIC if asked.is_static else C10D, "default"),
        "local_addr": Setting(address, "this node's address"),
    }
    options = {k: v for k, v in derived.items() if k not in asked}
    # Only static uses it. Otherwise torch would warn.
    node_rank = job.node_rank if asked.is_static else 0
    options["node_rank"] = Setting(node_rank, _source_of_rank(job))
    if asked.is_static or asked.is_c10d:
        endpoint = join_endpoint(head.connect_host, head.port)
        source = head_node.source_of(inputs, job, head)
        options["rdzv_endpoint"] = Setting(endpoint, source)
    if asked.is_c10d:
        source = "defaults"
        if "rdzv_conf" in asked:
            source = f"{asked['rdzv_conf'].source} and defaults"
        conf = asked.rdzv_conf.filled(
            is_host=int(head.is_local),
            read_timeout=limits.READ_TIMEOUT,
            join_timeout=limits.JOIN_TIMEOUT,
        )
        options["rdzv_conf"] = Setting(conf, source)
    return options


def _source_of_rank(job: Job) -> str:
    return job.provenance.get("node_rank", job.provenance["nodes"])


def check_rendezvous(inputs: Inputs) -> None:
    """Check that ``--hpc-rendezvous=scheduler`` is possible."""
    options = inputs.options
    is_wanted = options.hpc_rendezvous == SCHEDULER and inputs.job is not None
    if inputs.mode.is_direct or not is_wanted or meets_by_ours(inputs):
        return
    names = ("rdzv_backend", "nnodes", "rdzv_conf", *OF_STATIC)
    others = [str(options[name]) for name in names if name in options]
    if "agent" in options.hpc_without_patches:
        others.append(str(options["hpc_without_patches"]))
    elif inputs.lacks("agent"):
        others.append("a torch whose agent has changed")
    text = (
        f"{options['hpc_rendezvous']} needs a fixed number of nodes, and only replaces "
        f"--rdzv_backend=c10d. It does not work with {', '.join(others)}. Remove one "
        "of them"
    )
    raise LaunchError("HPC126", text, everywhere=True)


def _check_nnodes(inputs: Inputs, job: Job) -> None:
    options, nodes = inputs.options, len(job.nodes)
    (low, high), spares = options.nnodes, options.hpc_spares
    if "nnodes" not in options or low <= nodes - spares <= high:
        return
    text = f"{options['nnodes']}, but this was started on {count(nodes, 'node')}"
    if spares:
        text += f", and with {options['hpc_spares']} the world has {nodes - spares}. "
        raise LaunchError("HPC204", f"{text}Remove --nnodes", everywhere=True)
    wanted = min(high, job.allocated_nodes)
    explicit = str(options["nnodes"].value).replace(":", " to ")
    fix = f"start it on {explicit} nodes"
    if wanted >= low and job.launcher.takes_number:
        fix = f"run:{to_copy(job.once_per_node(inputs.command, nodes=wanted))}"
    text += f" ({job.provenance['nodes']}). Remove the option, or {fix}"
    raise LaunchError("HPC070", text, everywhere=True)


def _check_static(inputs: Inputs, job: Job, rank: int, head: HeadNode) -> None:
    options = inputs.options
    high = options.nnodes.high
    if high > len(job.nodes):
        text = (
            f"{options['nnodes']}, but the static rendezvous waits for "
            f"{count(high, 'node')}, and this was started on "
            f"{count(len(job.nodes), 'node')} ({job.provenance['nodes']}). Remove the "
            "option, or pass --rdzv_backend=c10d, which nodes can join later"
        )
        raise LaunchError("HPC157", text, everywhere=True)
    if "node_rank" in options and options.node_rank != rank:
        variable = job.launcher.node_variable
        cause = f"Perhaps the batch script expanded ${variable}, which is 0 there. "
        text = (
            f"{options['node_rank']}, but this is node {rank} of the step "
            f"({_source_of_rank(job)}), and the static rendezvous would wait "
            f"forever. {cause if variable else ''}Remove the option"
        )
        raise LaunchError("HPC071", text)
    # Slurm's ranks may be no places in its list. Then rank 0 checks the address.
    if job.started_by and head.index not in (None, 0):
        fault = f"{head.setting} is node {head.index} of the step"
        raise _not_on_node_0(job, fault, everywhere=True)


def _notes(inputs: Inputs, head: HeadNode) -> list[Message]:
    notes, options = [], inputs.options
    if head.setting and head.plain != head.host and inputs.site:
        text = f"{head.plain} rewritten to {head.host} (site {inputs.site.name})"
        notes.append(Message("HPC074", text))
    if not options.is_static and "node_rank" in options:
        text = f"{options['node_rank']} is ignored: the scheduler numbers the nodes"
        notes.append(Message("HPC075", text))
    return notes + network_env.notes(inputs, head.local_address)


def _hint(inputs: Inputs, job: Job) -> str:
    if job.started_by and not job.started_by.ends_others:
        name = job.started_by.name
        return f"{name} does not end other tasks: see what these nodes have printed"
    if meets_by_ours(inputs) and not inputs.options.hpc_spares:
        return messages.fail_together(job.launcher)
    if inputs.options.is_static and "node_rank" in inputs.options:
        return f"is {inputs.options['node_rank']} set on every node?"
    return ""


# --- spares ---------------------------------------------------------------------------

_OF_SPARES = ("hpc_spare_after", "hpc_health_check", "hpc_health_check_timeout")


def check_spares(inputs: Inputs) -> None:
    """Check that spares, and the options for them, fit the launch."""
    options, job = inputs.options, inputs.job
    spares = options.hpc_spares
    others = [options[name] for name in _OF_SPARES if name in options]
    if others and not spares:
        text = f"{others[0]} needs spare nodes. Set --hpc-spares=NUMBER, or remove "
        raise LaunchError("HPC203", f"{text}this option", everywhere=True)
    if not spares:
        return
    if job is None or inputs.mode is not Mode.SEVERAL_NODES:
        raise _spares_not_possible(inputs)
    nodes = len(job.nodes)
    if spares >= nodes - spares:
        text = (
            f"{options['hpc_spares']} of {count(nodes, 'node')}: fewer nodes must wait "
            f"than train. Set {(nodes - 1) // 2} at most, or start on "
            f"{count(2 * spares + 1, 'node')} or more"
        )
        raise LaunchError("HPC202", text, everywhere=True)
    if not meets_by_ours(inputs) or inputs.lacks("watch_workers"):
        raise _spares_not_possible(inputs)


def _spares_of(options: Options, job: Job) -> Spares:
    if not options.hpc_spares:
        return Spares()
    return Spares(
        number=options.hpc_spares,
        after=options.hpc_spare_after,
        health_check=options.hpc_health_check,
        health_check_timeout=max(1, options.hpc_health_check_timeout),
        exclude=job.launcher.exclude,
    )


def _advice_on_spares(inputs: Inputs) -> tuple[Message, ...]:
    """Return advice if no restart is allowed: each replacement needs one."""
    if not inputs.options.hpc_spares or inputs.options.max_restarts:
        return ()
    text = f"{inputs.options['hpc_spares']}, but no restart is allowed, so the job "
    text += "ends with the first lost node. Set --max-restarts=20"
    return (Message("HPC216", text),)


def _spares_not_possible(inputs: Inputs) -> LaunchError:
    text = (
        f"{inputs.options['hpc_spares']} needs several nodes, a fixed number of them, "
        "one agent on each, and the scheduler rendezvous (docs/internals.md). Remove "
        "this option, or the one that conflicts with it"
    )
    return LaunchError("HPC201", text, everywhere=True)

"""Nodes and environments for the tests, made of dictionaries."""

from __future__ import annotations

import ipaddress
import json
from contextlib import suppress
from dataclasses import fields, replace

from tests.support import ROOT
from torchrun_hpc import schedulers, sites
from torchrun_hpc.errors import LaunchError, Message, Setting
from torchrun_hpc.host.network import Interface, Network
from torchrun_hpc.options.command_line import CommandLine
from torchrun_hpc.options.options import read
from torchrun_hpc.planning.inputs import Inputs, Node
from torchrun_hpc.planning.mode import Mode, choose_mode
from torchrun_hpc.preflight import Preflight
from torchrun_hpc.schedulers import pbs, slurm
from torchrun_hpc.schedulers.job import Job, LaunchContext, Task
from torchrun_hpc.schedulers.slurm import SRUN

ENVIRONMENTS = ROOT / "tests" / "unit" / "environments"


def recordings(*prefixes):
    """Return the names of the recorded launches that begin with one of these."""
    names = sorted(path.stem for path in ENVIRONMENTS.glob("*.json"))
    return [name for name in names if name.startswith(prefixes)]


# Those of srun, sbatch and salloc: not of what was started inside of them.
RECORDED = recordings(
    "slurm-array", "slurm-het", "slurm-salloc", "slurm-sbatch", "slurm-srun"
)

HOSTNAME = "(hostname)"


def recorded(name):
    """Return the environment and the host name of every task of a recorded launch."""
    tasks = json.loads((ENVIRONMENTS / f"{name}.json").read_text())["tasks"]
    return [
        ({k: v for k, v in task.items() if k != HOSTNAME}, task[HOSTNAME])
        for task in tasks
    ]


def node_file(name):
    """Return the text of the node file of a launch that was recorded in a PBS job."""
    lines = json.loads((ENVIRONMENTS / f"{name}.json").read_text())["node file"]
    return "".join(f"{line}\n" for line in lines)


def reader(files):
    """Return a function that reads these files, and no others."""
    return files.get


def detected(process):
    """Return the job of a process, by the variables that are not left over."""
    return schedulers.detect(schedulers.weigh(process))


def outcome(process):
    """Return the job, or the code and the message of a refusal."""
    try:
        return detected(process)
    except LaunchError as error:
        return str(Message(error.code, str(error)))


def tasks_at(places):
    """Return the tasks of a launch; ``places`` has for each rank its node."""
    return [
        Task(rank, len(places), places[:rank].count(node), places.count(node))
        for rank, node in enumerate(places)
    ]


def changed(environ, changes):
    """Return a copy of an environment; a value of None removes the variable."""
    return {k: v for k, v in (environ | changes).items() if v is not None}


def make_network(interfaces, hosts=None, routes=None, down=()):
    """Describe the network of a node.

    Args:
        interfaces: Name to addresses with prefixes, between blanks.
        hosts: Host name to addresses, between blanks, as /etc/hosts would give them.
        routes: Network to the address that is sent from. Networks of the interfaces
            need none.
        down: Names of the interfaces that are down.
    """
    found = tuple(
        Interface(
            name, tuple(map(ipaddress.ip_interface, text.split())), name not in down
        )
        for name, text in interfaces.items()
    )

    def resolve(host):
        try:
            return (ipaddress.ip_address(host),)
        except ValueError:
            known = ({"localhost": "127.0.0.1"} | (hosts or {})).get(host, "").split()
            return tuple(map(ipaddress.ip_address, known))

    def source_toward(address):
        for interface in found:
            for own in interface.addresses:
                if address in own.network:
                    return own.ip
        for network, source in (routes or {}).items():
            if address in ipaddress.ip_network(network):
                return ipaddress.ip_address(source)
        return None

    return Network(lambda: found, resolve, source_toward)


# --- three nodes at Jülich ----------------------------------------------------------

JSC = sites.find({}, "", Setting("jsc", "--hpc-site"))

COMMAND = "python -m torchrun_hpc --nproc_per_node=2 train.py --lr 0.1"

PROVENANCE = {
    "nodes": "SLURM_STEP_NODELIST",
    "node_rank": "SLURMD_NODENAME",
    "tasks": "SLURM_STEP_TASKS_PER_NODE",
    "task": "SLURM_PROCID",
    "local_rank": "SLURM_LOCALID",
    "launch_id": "SLURM_JOB_ID, SLURM_STEP_ID",
}
THREE = ("jwb0001", "jwb0002", "jwb0003")


def step(rank=0, *, nodes=THREE, **changes):
    """Describe a step, one task on every node, as seen from one of its nodes."""
    job = Job(
        scheduler="Slurm",
        launch_id="19.0",
        context=LaunchContext.STEP,
        nodes=nodes,
        node_rank=rank,
        launcher=SRUN,
        task=Task(rank, len(nodes)),
        allocated_nodes=len(nodes),
        provenance=PROVENANCE,
    )
    return replace(job, **changes)


def outside_a_step(context, nodes=THREE, rank=0):
    """Describe a job as seen from its batch script, or from a shell."""
    return Job(
        scheduler="Slurm",
        launch_id=f"19.{context.name.lower()}",
        context=context,
        nodes=nodes,
        node_rank=rank,
        launcher=SRUN,
        task=Task(),
        allocated_nodes=3,
        provenance={
            "nodes": "SLURM_JOB_NODELIST",
            "node_rank": "SLURM_NODEID",
            "launch_id": "SLURM_JOB_ID",
        },
    )


BATCH = outside_a_step(LaunchContext.BATCH_SCRIPT)
SHELL = outside_a_step(LaunchContext.ALLOCATION_SHELL, rank=None)
INTERACTIVE = replace(
    outside_a_step(LaunchContext.INTERACTIVE_STEP, ("jwb0001",)),
    provenance={"nodes": "SLURM_STEP_NODELIST", "launch_id": "SLURM_JOB_ID"},
)


HOSTS = {
    "jwb0001": "10.10.0.1",
    "jwb0002": "10.10.0.2",
    "jwb0003": "10.10.0.3",
    "jwb0001i": "10.20.0.1",
    "jwb0002i": "10.20.0.2",
    "jwb0003i": "10.20.0.3",
}


def juelich(rank=0, *, hosts=None, interfaces=None, routes=None, down=()):
    """Describe one of Jülich's nodes: slow eth0, fast ib0."""
    number = rank + 1
    found = {
        "lo": "127.0.0.1/8 ::1/128",
        "eth0": f"10.10.0.{number}/24",
        "ib0": f"10.20.0.{number}/24",
    }
    return make_network(
        found if interfaces is None else interfaces, HOSTS | (hosts or {}), routes, down
    )


def explicit(options):
    return {name: Setting(value, f"--{name}") for name, value in options.items()}


def mode_of(inputs, **how):
    """Choose the mode as the command does; with ``has_agent=True`` as for auto."""
    seen = Preflight(inputs.job, None, inputs.environ, "", inputs.command)
    line = CommandLine(replace(inputs.options, words=("train.py",)))
    return choose_mode(seen, line, lambda options: options.nproc_per_node, **how)


_OF_NODE = {each.name for each in fields(Node)}


def make_inputs(rank=0, *, options=None, network=None, **changes):
    """Return the inputs of a plan; by default, Jülich's as seen from one node.

    Args:
        rank: Rank of the node.
        options: Values as typed, by the names of the options.
        network: The node's network.
        changes: Other fields of the inputs, or of what the node has.
    """
    node = {"workers": 2, "cpus": 8} | {
        name: changes.pop(name) for name in _OF_NODE.intersection(changes)
    }
    job = changes.setdefault("job", step(rank))
    site = changes.setdefault("site", JSC)
    environ = changes.setdefault("environ", {})
    of = pbs if environ.get("PBS_JOBID") else slurm
    changes.setdefault("promise", of.promise(environ))
    typed = read(explicit(options or {}), has_job=job is not None)
    if site is not None:
        typed = typed.with_site(site.name, site.options)
    inputs = Inputs(
        mode=Mode.SEVERAL_NODES,
        network=network or juelich(rank),
        options=typed,
        node=Node(**node),
        **{"command": COMMAND} | changes,
    )
    with suppress(LaunchError):  # what is refused has no mode
        inputs = replace(inputs, mode=mode_of(inputs))
    return inputs

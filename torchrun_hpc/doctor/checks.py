"""What is wrong with the nodes, by what they show of themselves: pure functions."""

from __future__ import annotations

import re
from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc.doctor import differences
from torchrun_hpc.doctor.differences import spans, torch_of
from torchrun_hpc.doctor.results import Finding
from torchrun_hpc.doctor.units import size
from torchrun_hpc.errors import count
from torchrun_hpc.names import fold_ranks, ranges
from torchrun_hpc.planning.endpoints import PORTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrun_hpc.doctor.results import Gpu, Node

# The largest share of the nodes that may have a fault, for it to be suspect. What most
# of them have is how the site is, and jobs run there.
_NEVER, _MINORITY, _ALWAYS = 0.0, 0.5, 1.0

_FREE, _FREE_SHARE = 100 * 10**6, 0.01  # a folder with less bytes, and less, is full
_SHM, _SMALL = "/dev/shm", 64 * 2**20  # noqa: S108 - bytes; a container's default
_OF_SITES = {"Read-only file system", "Permission denied", "No such file or directory"}
_TIMES, _MORE_S = 3.0, 5.0  # a slow import takes so many times, and so much more
_FABRIC = re.compile("ib|hsn")  # interfaces of networks that lock memory
# What a free GPU has in use, of its driver: fewer bytes, or a smaller share of all.
_TAKEN, _TAKEN_SHARE = 2**30, 0.02
NO_TORCH = "torch cannot be imported"  # the launcher says so, too
_MOST_PIDS = 5
_MOST_ALIKE = 3  # findings of a kind
_RESOLVER_S = 1.0
_RESOLVERS = {
    "silent": "the name server does not answer",
    "down": "no name server can be reached",
}
# By the names of limits: the least, its unit, and what is wrong with less.
_LEAST = {
    "files": (
        4096,
        1,
        "files may be open (ulimit -Hn): node 0 needs one for each worker",
    ),
    "processes": (1024, 1, "processes and threads may run (ulimit -u)"),
    "locked memory": (
        *(64 * 2**20, 1024),
        "KiB may be locked in memory (ulimit -l): RDMA needs more",
    ),
}


class _Fault(NamedTuple):
    """What is wrong, what to do, and on which share of the nodes it is suspect."""

    text: str
    remedy: str
    suspect: float = _ALWAYS


def findings(nodes: Sequence[Node], hosts: Sequence[str]) -> list[Finding]:
    """Return what is wrong with nodes; `hosts` are the names of all, by rank."""
    found = [*differences.findings(nodes, hosts)]
    for code, check in _CHECKS.items():
        groups: dict[_Fault, list[int]] = defaultdict(list)
        seen = [n for n in nodes if n.torch] if check is _imports else nodes
        for node in seen:
            for fault in check(node, nodes):
                groups[fault].append(node.rank)
        for fault, ranks in _merged(groups):
            where, blamed = fold_ranks(ranks, hosts), tuple(ranks)
            if len(ranks) == len(seen) > 1:
                every = f"{len(seen)} of {len(hosts)}"
                where = every if len(seen) < len(hosts) else f"all {len(hosts)}"
                where, blamed = f"{where} nodes", ()
            is_suspect = len(ranks) <= fault.suspect * len(seen)
            text = f"{where}: {fault.text}"
            found.append(Finding(code, text, fault.remedy, blamed, is_suspect))
    return found


def fabrics(node: Node) -> list[str]:
    """Return the interfaces of fast networks that are up: InfiniBand, Slingshot."""
    return [i.name for i in node.interfaces if i.is_up and _FABRIC.match(i.name)]


def _merged(groups: Mapping[_Fault, list[int]]) -> Iterator[tuple[_Fault, list[int]]]:
    """Make one of many faults that differ in a name or a number only."""
    kinds: dict[tuple[str, float], list[_Fault]] = defaultdict(list)
    for fault in groups:
        kinds[fault.remedy, fault.suspect].append(fault)
    for faults in kinds.values():
        if len(faults) <= _MOST_ALIKE:
            yield from ((fault, groups[fault]) for fault in faults)
            continue
        ranks = {rank for fault in faults for rank in groups[fault]}
        first = faults[0]
        yield first._replace(text=f"{first.text}; others alike"), sorted(ranks)


def _names(node: Node, nodes: Sequence[Node]) -> Iterator[_Fault]:
    remedy = "correct /etc/hosts on this node, or what its name server has"
    own = {address for i in node.interfaces for address in i.addresses}
    for name, found in node.names.items():
        means = f"{name} means {', '.join(found)}"
        owner = next((other for other in nodes if other.fast_host == name), None)
        if not found:
            yield _Fault(f"{name} does not resolve", remedy)
        elif owner is node:  # an address of loopback is usual for the own name
            if own and {a for a in found if not a.startswith(("127.", "::1"))} - own:
                yield _Fault(f"{means}, which no interface of it has", remedy)
        elif owner and owner.address not in ("", *found):
            text = f"{means} there, and has the address {owner.address}"
            yield _Fault(text, remedy)
        source = node.routes.get(name, node.address)
        if node.address and source != node.address:
            text = f"it sends to {name} from {source or 'nowhere'}, and its address is "
            route = "correct the routes, if that is not meant: ip route get ADDRESS"
            yield _Fault(f"{text}{node.address}", route, _NEVER)


def _folders(node: Node, _nodes: Sequence[Node]) -> Iterator[_Fault]:
    remedy = "make room there; or export another TMPDIR, or for HOME, XDG_CACHE_HOME"
    for folder in node.folders:
        path, problem = folder.path, folder.problem
        if problem:
            share = _MINORITY if problem in _OF_SITES else _ALWAYS
            yield _Fault(f"cannot write to {path}: {problem}", remedy, share)
        elif folder.free < min(_FREE, _FREE_SHARE * folder.size):
            yield _Fault(f"{path} is full: less than 100 MB and 1 % are free", remedy)
        if path == _SHM and 0 < folder.size <= _SMALL:
            text = (
                f"{path} has {folder.size >> 20} MiB, too few for DataLoader's workers"
            )
            container = "start the container with --ipc=host, or --shm-size=16g"
            yield _Fault(text, container, _NEVER)


def _imports(node: Node, nodes: Sequence[Node]) -> Iterator[_Fault]:
    torch, problem = torch_of(node), node.torch and node.torch.problem
    usual = median([t.import_s for t in map(torch_of, nodes) if t] or [0.0])
    if problem:
        remedy = "python -c 'import torch' on this node shows all of the error"
        yield _Fault(f"{NO_TORCH}: {problem}", remedy)
    elif torch and torch.import_s > max(_TIMES * usual, usual + _MORE_S):
        took = f"{torch.import_s:.0f} s, and {usual:.0f} s is usual"
        remedy = "it reads files slowly, or for the first time: examine it again"
        yield _Fault(f"importing torch took {took}", remedy, _NEVER)


def _limits(node: Node, _nodes: Sequence[Node]) -> Iterator[_Fault]:
    remedy = "ask the administrator for a higher limit, also of the scheduler's daemon"
    has_fabric = bool(fabrics(node))
    for name, (least, unit, text) in _LEAST.items():
        value = node.limits.get(name, -1)
        if 0 <= value < least and (has_fabric or name != "locked memory"):
            yield _Fault(f"{value // unit} {text}", remedy, _NEVER)


def _gpus(node: Node, _nodes: Sequence[Node]) -> Iterator[_Fault]:
    gpus, torch = node.gpus, torch_of(node)
    seen = torch.gpus if torch else len(gpus)
    # Of another job, perhaps, on a GPU that this one does not see.
    share = _NEVER if seen < len(gpus) else _ALWAYS
    for number, gpu in enumerate(gpus):
        if gpu.ecc_errors > 0:
            errors = count(gpu.ecc_errors, "uncorrected memory error")
            remedy = "leave the node out, and tell the administrator"
            yield _Fault(f"GPU {number} has had {errors}", remedy)
    if busy := [number for number, gpu in enumerate(gpus) if gpu.processes]:
        pids = sorted({pid for gpu in gpus for pid in gpu.processes})
        shown = ", ".join(map(str, pids[:_MOST_PIDS]))
        text = f"other processes compute on GPU {ranges(busy)}: pid {shown}"
        remedy = "GPUs must be free: end these processes, or leave the node out"
        yield _Fault(text, remedy, share)
    if taken := [number for number, gpu in enumerate(gpus) if _is_taken(gpu)]:
        most = size(max(gpus[number].memory_used for number in taken))
        text = f"up to {most} of memory are taken on GPU {ranges(taken)}, by no process"
        remedy = "GPUs must be free: end what nvidia-smi shows, or leave the node out"
        yield _Fault(f"{text} that is known", remedy, share)
    if node.wants_gpus and torch and not torch.gpus:
        remedy = "ask for GPUs, and use a torch that is built for them"
        yield _Fault("--nproc_per_node=gpu, and torch sees no GPU", remedy)
    elif seen < len(gpus):
        text = f"torch sees {seen} of {count(len(gpus), 'GPU')}"
        remedy = (
            "if the job has asked for more: unset CUDA_VISIBLE_DEVICES, and use a "
            "torch that is built for these GPUs"
        )
        yield _Fault(text, remedy, _NEVER)


def _is_taken(gpu: Gpu) -> bool:
    least = max(_TAKEN, _TAKEN_SHARE * gpu.memory)
    return not gpu.processes and gpu.memory_used > least


def _ports(node: Node, _nodes: Sequence[Node]) -> Iterator[_Fault]:
    first, last = node.local_ports
    parts = spans(node.reserved_ports)
    reserved = [port for port in PORTS if any(port in part for part in parts)]
    own = f"the launcher's ports ({PORTS[0]} to {PORTS[-1]})"
    if any(first <= port <= last for port in {*PORTS}.difference(reserved)):
        text = f"the system gives ports {first} to {last} to connections, also {own}"
        remedy = (
            'ask the administrator for sysctl -w net.ipv4.ip_local_port_range="32768 '
            f'60999", or net.ipv4.ip_local_reserved_ports={PORTS[0]}-{PORTS[-1]}'
        )
        yield _Fault(f"{text}: another program may have one", remedy, _NEVER)
    if 0 < len(reserved) < len(PORTS):  # all are reserved for the launcher
        text = f"{ranges(reserved)} of {own} are reserved: a service may take one"
        remedy = "if the launcher finds a port taken: --rdzv_endpoint=HOST:PORT"
        yield _Fault(text, remedy, _NEVER)


def _resolvers(node: Node, _nodes: Sequence[Node]) -> Iterator[_Fault]:
    text = _RESOLVERS.get(node.resolver, "")
    if not text and node.resolver_s > _RESOLVER_S:
        text = f"resolving the names of nodes takes more than {_RESOLVER_S:g} s"
    if text:
        remedy = "tell the administrator if other programs are slow: training is not"
        yield _Fault(text, remedy, _NEVER)


_CHECKS = {
    "HPC182": _names,
    "HPC184": _folders,
    "HPC185": _imports,
    "HPC186": _limits,
    "HPC187": _gpus,
    "HPC188": _resolvers,
    "HPC241": _ports,
}

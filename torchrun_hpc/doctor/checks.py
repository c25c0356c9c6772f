"""Findings about single nodes: pure functions of the nodes' records."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc.doctor import differences
from torchrun_hpc.doctor.differences import torch_of
from torchrun_hpc.doctor.results import EXCLUDE, Finding
from torchrun_hpc.doctor.units import size
from torchrun_hpc.errors import count
from torchrun_hpc.names import fold_ranks, listed, numbers_in, ranges
from torchrun_hpc.planning.head_node import PORTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torchrun_hpc.doctor.results import Node

# The largest share of the nodes with a fault for which it is suspect. If most nodes
# have it, the site is like that, and jobs run there.
_NEVER, _MINORITY, _ALWAYS = 0.0, 0.5, 1.0

_MOST_ALIKE = 3  # findings of a kind
_OF_SITES = {"Read-only file system", "Permission denied", "No such file or directory"}
_FABRIC = re.compile("ib|hsn")  # interfaces of networks that lock memory
# By name of a limit: the least value, its unit, and the text for less.
_LEAST = {
    "files": (4096, 1, "files can be open (ulimit -Hn); node 0 needs one per worker"),
    "processes": (1024, 1, "processes and threads can run (ulimit -u)"),
    "locked memory": (2**26, 2**10, "KiB can be locked (ulimit -l); RDMA needs more"),
}


class _Fault(NamedTuple):
    """A problem, its remedy, and the largest share of nodes for a suspect."""

    text: str
    remedy: str
    suspect: float = _ALWAYS


def findings(nodes: Sequence[Node], hosts: Sequence[str]) -> Iterator[Finding]:
    """Yield findings about nodes; `hosts` are the names of all nodes, by rank."""
    yield from differences.findings(nodes, hosts)
    for code, check in _CHECKS.items():
        kinds = defaultdict[tuple[str, float], dict[str, list[int]]](dict)
        for node in nodes:
            for text, remedy, share in check(node, nodes):
                kinds[remedy, share].setdefault(text, []).append(node.rank)
        for (remedy, share), texts in kinds.items():
            for text, ranks in _merged(texts).items():
                where, blamed = fold_ranks(ranks, hosts), tuple(ranks)
                if len(ranks) == len(nodes) > 1:
                    every = "all" if len(nodes) == len(hosts) else f"{len(nodes)} of"
                    where, blamed = f"{every} {len(hosts)} nodes", ()
                is_suspect = len(ranks) <= share * len(nodes)
                yield Finding(code, f"{where}: {text}", remedy, blamed, is_suspect)


def fabrics(node: Node) -> list[str]:
    """Return the interfaces of fast networks that are up: InfiniBand, Slingshot."""
    return [i.name for i in node.interfaces if i.is_up and _FABRIC.match(i.name)]


def _merged(texts: dict[str, list[int]]) -> dict[str, list[int]]:
    if len(texts) <= _MOST_ALIKE:
        return texts
    return {f"{next(iter(texts))}, and others": sorted({*chain(*texts.values())})}


def _names(node: Node, nodes: Sequence[Node]) -> Iterator[_Fault]:
    if not node.address and len(nodes) > 1:
        text = "no interface has an address for the job, so no pair was measured"
        to_do = "give a container the host's network, and pass no loopback address"
        yield _Fault(text, to_do, _NEVER)
    remedy = "correct /etc/hosts on this node, or the entry of its name server"
    own = {address for i in node.interfaces for address in i.addresses}
    theirs = {n.fast_host: n.address for n in nodes if n.fast_host != node.fast_host}
    for name, found in node.names.items():
        means = f"{name} resolves to {', '.join(found)}, but"
        # A loopback address is usual for the own name.
        strange = {a for a in found if not a.startswith(("127.", "::1"))} - own
        if not found:
            yield _Fault(f"{name} does not resolve", remedy)
        elif name == node.fast_host and own and strange:
            yield _Fault(f"{means} no interface has {listed(sorted(strange))}", remedy)
        elif (address := theirs.get(name, "")) not in ("", *found):
            yield _Fault(f"{means} its address is {address}", remedy)
        source = node.routes.get(name, node.address)
        if node.address and source != node.address:
            text = f"it sends to {name} from {source}, and not from {node.address}"
            routes = "look at ip route get ADDRESS, and correct unintended routes"
            yield _Fault(text if source else f"no route to {name}", routes, _NEVER)


def _folders(node: Node, _nodes: object) -> Iterator[_Fault]:
    remedy = "free some space, or export another TMPDIR (for HOME: XDG_CACHE_HOME)"
    for folder in node.folders:
        path, problem = folder.path, folder.problem
        if problem:
            share = _MINORITY if problem in _OF_SITES else _ALWAYS
            yield _Fault(f"cannot write to {path}: {problem}", remedy, share)
        elif folder.free < min(100 * 10**6, folder.size / 100):
            yield _Fault(f"{path} is full: less than 100 MB and 1 % are free", remedy)
        if path == "/dev/shm" and 0 < folder.size <= 64 * 2**20:  # noqa: S108
            few = f"{size(folder.size)}, not enough for DataLoader's workers"
            container = "start the container with --ipc=host or --shm-size=16g"
            yield _Fault(f"{path} has {few}", container, _NEVER)


def _imports(node: Node, nodes: Sequence[Node]) -> Iterator[_Fault]:
    seconds = [each.torch.import_s for each in nodes if each.torch]
    own, usual = node.torch.import_s if node.torch else 0, median(seconds or [0])
    if own > max(3 * usual, usual + 5):
        took = f"{own:.0f} s (median: {usual:.0f} s)"
        remedy = "run the doctor again. If it stays slow, use a local environment"
        yield _Fault(f"importing torch took {took}", remedy, _NEVER)


def _limits(node: Node, _nodes: object) -> Iterator[_Fault]:
    remedy = "ask the administrator to raise the limit, also for the scheduler's daemon"
    for name, (least, unit, text) in _LEAST.items():
        value = node.limits.get(name, -1)
        if 0 <= value < least and (name != "locked memory" or fabrics(node)):
            yield _Fault(f"only {value // unit} {text}", remedy, _NEVER)


def _gpus(node: Node, _nodes: object) -> Iterator[_Fault]:
    gpus, torch = node.gpus, torch_of(node)
    seen = torch.gpus if torch else len(gpus)
    # Another job perhaps uses a GPU that this one does not see.
    share = _NEVER if seen < len(gpus) else _ALWAYS
    busy, taken = list[int](), dict[int, int]()
    for number, gpu in enumerate(gpus):
        if gpu.ecc_errors > 0:
            errors = count(gpu.ecc_errors, "uncorrected memory error")
            yield _Fault(f"GPU {number} has had {errors}", EXCLUDE)
        if gpu.processes:
            busy.append(number)
        elif gpu.memory_used > max(2**30, gpu.memory / 50):  # its driver uses less
            taken[number] = gpu.memory_used
    if busy:
        pids = sorted({pid for gpu in gpus for pid in gpu.processes})
        shown = listed([*map(str, pids)])
        text = f"other processes compute on GPU {ranges(busy)}: PID {shown}"
        remedy = "end these processes, or exclude the node"
        yield _Fault(text, remedy, share)
    if taken:
        most = f"up to {size(max(taken.values()))} of memory are in use"
        text = f"{most} on GPU {ranges(taken)}, by an unknown process"
        remedy = "end the processes that nvidia-smi shows, or exclude the node"
        yield _Fault(text, remedy, share)
    if seen < len(gpus):
        text = f"torch sees {seen} of {count(len(gpus), 'GPU')}"
        remedy = "request all, unset CUDA_VISIBLE_DEVICES, or install torch for them"
        yield _Fault(text, remedy, _NEVER)


@functools.cache  # nearly all nodes have the same
def _ports(first: int, last: int, reserved_ports: str) -> list[_Fault]:
    found = list[_Fault]()
    reserved = sorted(numbers_in(reserved_ports).intersection(PORTS))
    own = f"the launcher's ports ({PORTS[0]} to {PORTS[-1]})"
    if any(first <= port <= last for port in {*PORTS}.difference(reserved)):
        text = f"the system gives connections ports from {first} to {last}, also {own}"
        remedy = (
            'ask the administrator to set net.ipv4.ip_local_port_range="32768 60999", '
            f"or net.ipv4.ip_local_reserved_ports={PORTS[0]}-{PORTS[-1]}"
        )
        found += [_Fault(f"{text}. Another program can get one", remedy, _NEVER)]
    if 0 < len(reserved) < len(PORTS):  # all are reserved for the launcher
        text = f"{ranges(reserved)} of {own} are reserved, so a service can use one"
        remedy = "pass --rdzv_endpoint=HOST:PORT if the launcher finds its port taken"
        found += [_Fault(text, remedy, _NEVER)]
    return found


def _resolvers(node: Node, _nodes: object) -> Iterator[_Fault]:
    if node.resolver_s > 1:
        remedy = "report it if other programs are slow. Training is not affected"
        yield _Fault("resolving node names takes more than 1 s", remedy, _NEVER)


_CHECKS: Mapping[str, Callable[[Node, Sequence[Node]], Iterable[_Fault]]] = {
    "HPC182": _names,
    "HPC184": _folders,
    "HPC185": _imports,
    "HPC186": _limits,
    "HPC187": _gpus,
    "HPC188": _resolvers,
    "HPC241": lambda node, _: _ports(*node.local_ports, node.reserved_ports),
}

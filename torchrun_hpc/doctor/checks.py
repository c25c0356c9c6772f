"""Findings about nodes and workers: pure functions of what they report.

Nodes and workers are compared with each other, not with data sheets.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from os.path import commonprefix
from statistics import median, median_low, mode
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc.doctor.results import EXCLUDE, Finding, WorkerReport, size, speed
from torchrun_hpc.errors import count
from torchrun_hpc.names import (
    fold_ranks,
    listed,
    numbers_in,
    ranges,
    rank_list,
    ranks_by,
)
from torchrun_hpc.planning.head_node import PORTS
from torchrun_hpc.variables import (
    CACHE_HOME,
    CUDA_VISIBLE,
    GLOO,
    HOME,
    NCCL_DEBUG,
    TMPDIR,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchrun_hpc.doctor.launch import Cause
    from torchrun_hpc.doctor.results import Collective, NodeReport, Torch

    Findings = Iterator[Finding]
    Nodes = Sequence[NodeReport]
    NodesByRank = Mapping[int, NodeReport]
    Workers = Sequence[WorkerReport]
    Traits = Mapping[str, str | float]  # values by name; empty or 0 is unknown

# A fault is suspect if at most this share of the nodes has it. If most nodes have a
# fault, the site is like that, and jobs run there.
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


def findings(nodes: Nodes, hosts: Sequence[str]) -> Findings:
    """Yield findings about nodes; ``hosts`` are the names of all nodes, by rank."""
    yield from _differences(nodes, hosts)
    for code, check in _NODE_CHECKS.items():
        kinds = defaultdict[tuple[str, float], dict[str, list[int]]](dict)
        for node in nodes:
            for text, remedy, share in check(node, nodes):
                kinds[remedy, share].setdefault(text, []).append(node.rank)
        for (remedy, share), texts in kinds.items():
            for text, ranks in _merged(texts).items():
                names, blamed = fold_ranks(ranks, hosts), tuple(ranks)
                if len(ranks) == len(nodes) > 1:
                    every = "all" if len(nodes) == len(hosts) else f"{len(nodes)} of"
                    names, blamed = f"{every} {len(hosts)} nodes", ()
                is_suspect = len(ranks) <= share * len(nodes)
                yield Finding(code, f"{names}: {text}", remedy, blamed, is_suspect)


def fabrics(node: NodeReport) -> list[str]:
    """Return the interfaces of fast networks that are up: InfiniBand, Slingshot."""
    return [i.name for i in node.interfaces if i.is_up and _FABRIC.match(i.name)]


def torch_of(node: NodeReport) -> Torch | None:
    """Return the record of torch if a worker has imported it."""
    return node.torch if node.torch and node.torch.version else None


def _merged(texts: dict[str, list[int]]) -> dict[str, list[int]]:
    if len(texts) <= _MOST_ALIKE:
        return texts
    first, *_ = texts
    return {f"{first}, and others": sorted({*chain(*texts.values())})}


# --- single nodes -----------------------------------------------------------------


def _names(node: NodeReport, nodes: Nodes) -> Iterator[_Fault]:
    if not node.address and len(nodes) > 1:
        text = "no interface has an address for the job, so no pair was measured"
        to_do = "give a container the host's network, and pass no loopback address"
        yield _Fault(text, to_do, _NEVER)
    remedy = "correct /etc/hosts on this node, or the entry of its name server"
    local = {address for i in node.interfaces for address in i.addresses}
    theirs = {n.fast_host: n.address for n in nodes if n.fast_host != node.fast_host}
    for name, addresses in node.names.items():
        address = theirs.get(name)
        means = f"{name} resolves to {', '.join(addresses)}, but"
        # A loopback address is usual for the node's own name.
        strange = {a for a in addresses if not a.startswith(("127.", "::1"))} - local
        if not addresses:
            yield _Fault(f"{name} does not resolve", remedy)
        elif name == node.fast_host and local and strange:
            text = f"{means} no interface has {listed(sorted(strange))}"
            yield _Fault(text, remedy)
        elif address and address not in addresses:
            yield _Fault(f"{means} its address is {address}", remedy)
        source = node.routes.get(name, node.address)
        if node.address and source != node.address:
            text = f"it sends to {name} from {source}, and not from {node.address}"
            routes = "look at ip route get ADDRESS, and correct unintended routes"
            yield _Fault(text if source else f"no route to {name}", routes, _NEVER)


def _folders(node: NodeReport, _nodes: object) -> Iterator[_Fault]:
    remedy = f"free some space, or export another {TMPDIR} (for {HOME}: {CACHE_HOME})"
    for folder in node.folders:
        path, problem = folder.path, folder.problem
        if problem:
            share = _MINORITY if problem in _OF_SITES else _ALWAYS
            yield _Fault(f"cannot write to {path}: {problem}", remedy, share)
        elif folder.free < min(100 * 10**6, folder.size / 100):
            text = f"{path} is full: less than 100 MB and 1 % are free"
            yield _Fault(text, remedy)
        if path == "/dev/shm" and 0 < folder.size <= 64 * 2**20:  # noqa: S108
            few = f"{size(folder.size)}, not enough for DataLoader's workers"
            container = "start the container with --ipc=host or --shm-size=16g"
            yield _Fault(f"{path} has {few}", container, _NEVER)


def _imports(node: NodeReport, nodes: Nodes) -> Iterator[_Fault]:
    seconds = node.torch.import_s if node.torch else 0
    usual = median([each.torch.import_s for each in nodes if each.torch] or [0])
    if seconds > max(3 * usual, usual + 5):
        took = f"{seconds:.0f} s (median: {usual:.0f} s)"
        remedy = "run the doctor again. If it stays slow, use a local environment"
        yield _Fault(f"importing torch took {took}", remedy, _NEVER)


def _limits(node: NodeReport, _nodes: object) -> Iterator[_Fault]:
    remedy = "ask the administrator to raise the limit, also for the scheduler's daemon"
    for name, (least, unit, text) in _LEAST.items():
        value = node.limits.get(name, -1)
        if 0 <= value < least and (name != "locked memory" or fabrics(node)):
            yield _Fault(f"only {value // unit} {text}", remedy, _NEVER)


def _gpus(node: NodeReport, _nodes: object) -> Iterator[_Fault]:
    gpus, torch = node.gpus, torch_of(node)
    visible = torch.gpus if torch else len(gpus)
    # Another job perhaps uses a GPU that this one does not see.
    share = _NEVER if visible < len(gpus) else _ALWAYS
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
        text = f"other processes compute on GPU {ranges(busy)}: PID "
        remedy = "end these processes, or exclude the node"
        yield _Fault(text + listed([*map(str, pids)]), remedy, share)
    if taken:
        most = f"up to {size(max(taken.values()))} of memory are in use"
        text = f"{most} on GPU {ranges(taken)}, by an unknown process"
        remedy = "end the processes that nvidia-smi shows, or exclude the node"
        yield _Fault(text, remedy, share)
    if visible < len(gpus):
        text = f"torch sees {visible} of {count(len(gpus), 'GPU')}"
        remedy = f"request all, unset {CUDA_VISIBLE}, or install torch for them"
        yield _Fault(text, remedy, _NEVER)


@functools.cache  # nearly all nodes have the same
def _ports(first: int, last: int, reserved_ports: str) -> list[_Fault]:
    faults = list[_Fault]()
    reserved = sorted(numbers_in(reserved_ports).intersection(PORTS))
    ports = f"the launcher's ports ({PORTS[0]} to {PORTS[-1]})"
    if any(first <= port <= last for port in {*PORTS}.difference(reserved)):
        text = f"the system gives connections ports from {first} to {last}, also "
        remedy = (
            'ask the administrator to set net.ipv4.ip_local_port_range="32768 60999", '
            f"or net.ipv4.ip_local_reserved_ports={PORTS[0]}-{PORTS[-1]}"
        )
        text += f"{ports}. Another program can get one"
        faults.append(_Fault(text, remedy, _NEVER))
    if 0 < len(reserved) < len(PORTS):  # all are reserved for the launcher
        text = f"{ranges(reserved)} of {ports} are reserved, so a service can use one"
        remedy = "pass --rdzv_endpoint=HOST:PORT if the launcher finds its port taken"
        faults.append(_Fault(text, remedy, _NEVER))
    return faults


def _resolvers(node: NodeReport, _nodes: object) -> Iterator[_Fault]:
    if node.resolver_s > 1:
        remedy = "report it if other programs are slow. Training is not affected"
        yield _Fault("resolving node names takes more than 1 s", remedy, _NEVER)


_NODE_CHECKS: Mapping[str, Callable[[NodeReport, Nodes], Iterable[_Fault]]] = {
    "HPC182": _names,
    "HPC184": _folders,
    "HPC185": _imports,
    "HPC186": _limits,
    "HPC187": _gpus,
    "HPC188": _resolvers,
    "HPC241": lambda node, _: _ports(*node.local_ports, node.reserved_ports),
}

# --- differences between nodes ----------------------------------------------------

_LONGEST = 60  # characters of a value
_NEAR = 0.05  # sizes that differ by this share or less are equal

# Variables that can differ on each node, and variables that must be equal.
_OF_NODES = re.compile(r"\w+(VISIBLE_DEVICES|HOSTID|_FILE|_DIR)")
_EQUAL = re.compile(
    rf"(NCCL|RCCL|FI|UCX)_(?!DEBUG|LOG|\w*(IFNAME|HCA|DEVICES))\w+|{GLOO}"
)

_LOAD = "activate the same environment in the job script, from a shared folder"
_EXPORT = "export it in the job script before the launcher, not in a profile"
_MACHINE = "exclude the nodes that differ, and report them to the administrator"
_COMPARE = "do nothing unless the nodes that differ are slow or fail"


def _differences(nodes: Nodes, hosts: Sequence[str]) -> Findings:
    """Yield differences between nodes. The minority is to blame."""
    for traits_of, remedy, is_suspect, absent in _KINDS:
        traits = {node.rank: traits_of(node) for node in nodes}
        for trait in dict.fromkeys(chain.from_iterable(traits.values())):
            groups = _by_value({r: t.get(trait, absent) for r, t in traits.items()})
            if len(groups) < 2:  # noqa: PLR2004 - all are equal
                continue
            *minority, most = groups.values()
            others = sorted(chain(*minority))
            names = [fold_ranks(ranks, hosts) for ranks in groups.values()]
            if has_majority := len(most) > len(others):
                names[-1] = count(len(most), "other")
            values = [*groups]
            if max(map(len, values)) > _LONGEST:  # folders: without the equal part
                equal = len(commonprefix(values))  # noqa: RUF071 - in characters
                dots = "..." if equal else ""
                values = [dots + value[equal:][:_LONGEST] for value in values]
            parts = (f"{v} on {nodes}" for v, nodes in zip(values, names, strict=True))
            # If a profile sets a variable, another node does not help.
            blamed = others if has_majority and not absent else ()
            text = f"{trait}: {'; '.join(parts)}"
            yield Finding("HPC181", text, remedy, tuple(blamed), is_suspect)


def _by_value(values: Mapping[int, str | float]) -> dict[str, list[int]]:
    """Return the ranks of each value, those of the most frequent one last."""
    present = {rank: value for rank, value in values.items() if value}
    usual = mode(present.values()) if present else ""
    groups = ranks_by(
        {r: str(usual if _is_near(v, usual) else v) for r, v in present.items()}
    )
    return dict(sorted(groups.items(), key=lambda group: (len(group[1]), group[1])))


def _is_near(value: str | float, usual: str | float) -> bool:
    if isinstance(value, str) or isinstance(usual, str):
        return value == usual
    return abs(value - usual) <= _NEAR * usual


def _software(node: NodeReport) -> Traits:
    torch = torch_of(node)
    libraries = {"torch": torch.version, **torch.libraries} if torch else {}
    return {**node.versions, **libraries, "kernel": ""}  # see _system()


def _machine(node: NodeReport) -> Traits:
    models, torch = Counter(gpu.model for gpu in node.gpus), torch_of(node)
    mtu, speed = node.job_interface.mtu, node.job_interface.speed_mbit
    return {
        "GPUs": ", ".join(f"{models[m]} x {m}" for m in sorted(models)) or "none",
        "number of GPUs that torch sees": str(torch.gpus) if torch else "",
        "MTU of the job's interface": str(mtu or ""),
        "speed of the job's interface": f"{speed} Mbit/s" if speed else "",
    }


def _system(node: NodeReport) -> Traits:
    shm = {f.path: f.size for f in node.folders}.get("/dev/shm", 0)  # noqa: S108
    limits = node.limits.items()
    return {
        "kernel": node.versions.get("kernel", ""),
        "GPU driver": node.driver,
        "name of the job's interface": node.interface,
        "number of CPUs": str(node.cores),
        "number of workers": str(node.workers),
        "number of CPUs in the affinity mask": str(len(numbers_in(node.cpus))),
        # Unless set, these follow from the size of the memory.
        "GiB of /dev/shm": round(shm / 2**30, 2),
        **{f"limit of {name}": "none" if v < 0 else v for name, v in limits},
    }


def _variables(node: NodeReport, *, equal: bool) -> Traits:
    # Gloo's default is the job's interface.
    usual = GLOO, node.interface
    return {
        name: value
        for name, value in node.variables.items()
        if not _OF_NODES.fullmatch(name) and bool(_EQUAL.fullmatch(name)) == equal
        if (name, value) != usual
    }


# Traits, the remedy if they differ, whether a difference is suspect, and the value of a
# node without the trait: only variables have one.
_KINDS: tuple[tuple[Callable[[NodeReport], Traits], str, bool, str], ...] = (
    (_software, _LOAD, True, ""),
    (_machine, _MACHINE, True, ""),
    (partial(_variables, equal=True), _EXPORT, True, "not set"),
    (_system, _COMPARE, False, ""),
    (partial(_variables, equal=False), _EXPORT, False, "not set"),
)

# --- workers ----------------------------------------------------------------------

_SLOW = 0.75  # of the median
_NORM = 1e-3  # share by which a norm can differ: devices round differently
_LATE_S, _LATE = 0.05, 3.0  # seconds that a worker can be late; times the median

_BUSY = "look for other programs and a high temperature there, or exclude the node"
_NCCL = f"unset NCCL_IB_DISABLE and NCCL_NET. {NCCL_DEBUG}=INFO shows what is missing"


class _WorkerFault(NamedTuple):
    """A problem of a worker. The most severe one of a node is shown."""

    worker: WorkerReport
    text: str
    severity: float = 0.0
    is_certain: bool = True  # whether this worker is to blame


def of_workers(workers: Workers, nodes: NodesByRank, hosts: Sequence[str]) -> Findings:
    """Yield one finding for each node and check; ``nodes`` are by rank."""
    for check, (code, remedy) in _WORKER_CHECKS.items():
        groups = defaultdict[tuple[int, ...], list[_WorkerFault]](list)
        for fault in check(workers, nodes):
            to_blame = (fault.worker.node,) if fault.is_certain else ()
            groups[to_blame].append(fault)
        for blamed, faults in groups.items():
            ranks = rank_list([fault.worker.rank for fault in faults])
            names = fold_ranks(sorted({fault.worker.node for fault in faults}), hosts)
            worst = max(faults, key=lambda fault: fault.severity)
            yield Finding(code, f"{ranks} ({names}): {worst.text}", remedy, blamed)


def _wrong(workers: Workers, nodes: NodesByRank) -> Iterator[_WorkerFault]:
    """Compare products bit by bit; on different devices, compare their norms."""
    groups = defaultdict[tuple[str, ...], list[WorkerReport]](list)
    # Another release of torch can round differently, which is no defect.
    releases = {rank: n.torch.version for rank, n in nodes.items() if n.torch}
    for worker in workers:
        if worker.wrong > 0:
            text = f"{count(worker.wrong, 'element')} of its products are not finite"
            yield _WorkerFault(worker, text, worker.wrong)
        elif len({*worker.digests}) > 1:
            yield _WorkerFault(worker, "its second product differs from the first one")
        else:
            kind = worker.device, worker.dtype, releases.get(worker.node, "")
            groups[kind].append(worker)
    alike = list[WorkerReport]()
    for same in groups.values():
        ((usual, most),) = Counter(worker.digests for worker in same).most_common(1)
        is_certain = 2 * most > len(same)
        like = count(most, "worker") if is_certain else "other workers"
        text = f"{like} on the same kind of device have another product"
        for worker in same:
            if worker.digests == usual and is_certain:
                alike.append(worker)
            else:
                yield _WorkerFault(worker, text, is_certain=is_certain)
    middle = median([worker.norm for worker in alike] or [0])
    off = [worker for worker in alike if abs(worker.norm - middle) > _NORM * middle]
    for worker in off:
        text = f"the norm of its product is {worker.norm:.6g} (median: {middle:.6g})"
        is_certain = 2 * len(off) < len(alike)
        yield _WorkerFault(worker, text, abs(worker.norm - middle), is_certain)


def _slow(workers: Workers, _nodes: object) -> Iterator[_WorkerFault]:
    best = {worker: max(worker.flops) for worker in workers if worker.flops}
    usual = median([*best.values()] or [0])
    for worker, flops in best.items():
        if flops < _SLOW * usual:
            text = f"{speed(flops)} at best (median: {speed(usual)})"
            yield _WorkerFault(worker, text, -flops)


def _late(workers: Workers, _nodes: object) -> Iterator[_WorkerFault]:
    usual = median_low([worker.late_s for worker in workers] or [0])
    for worker in workers:
        if worker.late_s > max(_LATE_S, _LATE * usual):
            text = f"the others wait {worker.late_s:.2f} s for it before each operation"
            yield _WorkerFault(worker, text, worker.late_s)


def _sockets(workers: Workers, nodes: NodesByRank) -> Iterator[_WorkerFault]:
    if len({worker.node for worker in workers}) == 1:  # they need no network
        return
    up = {rank: ", ".join(fabrics(node)) for rank, node in nodes.items()}
    on_sockets = [w for w in workers if w.transport == "Socket" and up.get(w.node)]
    is_certain = 2 * len(on_sockets) < len(workers)
    for worker in on_sockets:
        text = f"NCCL uses sockets instead of {up[worker.node]}, which is up"
        yield _WorkerFault(worker, text, is_certain=is_certain)


# By check: the code, and the remedy.
_WORKER_CHECKS: Mapping[Callable[..., Iterator[_WorkerFault]], tuple[str, str]] = {
    _sockets: ("HPC242", _NCCL),
    _wrong: ("HPC243", EXCLUDE),
    _slow: ("HPC243", _BUSY),
    _late: ("HPC244", _BUSY),
}

# --- collectives ------------------------------------------------------------------

_SHOWN = 10  # findings


def of_collectives(rows: Sequence[Collective], causes: Iterable[Cause]) -> Findings:
    """Yield findings about failed operations, wrong results, and early ends."""
    problems = [*causes]
    for row in rows:
        if row.wrong > 0:
            wrong = count(row.wrong, "wrong element")
            what = f"{row.operation} of {size(row.size)} {row.scope}".rstrip()
            problems.append((f"{what}: {wrong} of {row.count}", ()))
    remedy = "see the other findings, and add --hpc-debug to the job's launch line"
    for text, nodes in problems[:_SHOWN]:
        yield Finding("HPC193", f"torch's collectives: {text}", remedy, nodes)

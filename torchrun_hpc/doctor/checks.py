"""What is wrong with the nodes, by what they show of themselves: pure functions."""

from __future__ import annotations

import re
from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc.doctor import differences
from torchrun_hpc.doctor.results import Finding
from torchrun_hpc.errors import count
from torchrun_hpc.reporting.names import ranges

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrun_hpc.doctor.results import Node, Torch

    Faults = Iterator[tuple[Node, "_Fault"]]

# The largest share of the nodes that may have a fault, for it to be suspect. What most
# of them have is how the site is, and jobs run there.
_NEVER, _MINORITY, _ALWAYS = 0.0, 0.5, 1.0

_FREE, _FREE_SHARE = 100 * 10**6, 0.01  # a folder with less bytes, and less, is full
_SHM, _SMALL = "/dev/shm", 64 * 2**20  # noqa: S108 - bytes; a container's default
_OF_SITES = {"Read-only file system", "Permission denied", "No such file or directory"}
_TIMES, _MORE_S = 3.0, 5.0  # a slow import takes so many times, and so much more
_FABRIC = re.compile("ib|hsn")  # interfaces of networks that lock memory
_MOST_PIDS = 5
_RESOLVER_S = 1.0
_RESOLVERS = {
    "silent": "the name server does not answer",
    "down": "no name server can be reached",
}
_HIGHER = "ask the administrator for a higher limit, also of the scheduler's daemon"
# By the names of limits: the least, and what is wrong with less.
_LEAST = {
    "files": (
        4096,
        "{0} files may be open (ulimit -Hn): one is needed for each worker on node 0",
    ),
    "processes": (1024, "{0} processes and threads may run (ulimit -u)"),
    "locked memory": (
        64 * 2**20,
        "{1} KiB may be locked in memory (ulimit -l): RDMA needs more",
    ),
}


class _Fault(NamedTuple):
    """Something that is wrong with a node, and may be with others alike.

    Attributes:
        text: What it is.
        remedy: What to do.
        suspect: It is suspect if no more than this share of the nodes have it.
    """

    text: str
    remedy: str
    suspect: float = _ALWAYS


def findings(nodes: Sequence[Node], hosts: Sequence[str]) -> list[Finding]:
    """Say what is wrong with the nodes.

    Args:
        nodes: Those that have come.
        hosts: Names of all nodes of the job, by rank.
    """
    found = [*differences.findings(nodes, hosts)]
    for code, check in _CHECKS.items():
        groups: dict[_Fault, list[int]] = defaultdict(list)
        for node, fault in check(nodes):
            groups[fault].append(node["rank"])
        for fault, ranks in groups.items():
            have_all = len(ranks) == len(nodes) > 1
            where = f"all {len(nodes)} nodes"
            if not have_all:
                where = differences.names(ranks, hosts)
            found.append(
                Finding(
                    code=code,
                    text=f"{where}: {fault.text}",
                    remedy=fault.remedy,
                    nodes=[] if have_all else ranks,
                    is_suspect=len(ranks) <= fault.suspect * len(nodes),
                )
            )
    return found


def _torch_of(node: Node) -> Torch | None:
    """Return torch, if it can be imported."""
    return node["torch"] if node["torch"] and not node["torch"]["problem"] else None


def _names(nodes: Sequence[Node]) -> Faults:
    owners = {node["fast_host"]: node for node in nodes}
    for node in nodes:
        for name, found in node["names"].items():
            if text := _wrong(name, found, node, owners.get(name)):
                remedy = "correct /etc/hosts on this node, or what its name server has"
                yield node, _Fault(text, remedy)


def _wrong(name: str, found: list[str], node: Node, owner: Node | None) -> str:
    """Say what is wrong with what a node knows of a name; empty if nothing is."""
    means = f"{name} means {', '.join(found)}"
    own = {address for i in node["interfaces"] for address in i["addresses"]}
    if not found:
        return f"{name} does not resolve"
    if owner is node:  # an address of loopback is usual for the own name
        foreign = {a for a in found if not a.startswith(("127.", "::1"))} - own
        return f"{means}, which no interface of it has" if own and foreign else ""
    if owner and owner["address"] and owner["address"] not in found:
        return f"{means} there, and has the address {owner['address']}"
    return ""


def _folders(nodes: Sequence[Node]) -> Faults:
    remedy = "make room there; or export another TMPDIR, or for HOME, XDG_CACHE_HOME"
    for node in nodes:
        for folder in node["folders"]:
            path, size, problem = folder["path"], folder["size"], folder["problem"]
            if problem:
                share = _MINORITY if problem in _OF_SITES else _ALWAYS
                yield node, _Fault(f"cannot write to {path}: {problem}", remedy, share)
            elif folder["free"] < min(_FREE, _FREE_SHARE * size):
                text = f"{path} is full: less than 100 MB and 1 % are free"
                yield node, _Fault(text, remedy)
            if path == _SHM and 0 < size <= _SMALL:
                text = f"{path} has {size >> 20} MiB, too few for DataLoader's workers"
                container = "start the container with --ipc=host, or --shm-size=16g"
                yield node, _Fault(text, container, _NEVER)


def _imports(nodes: Sequence[Node]) -> Faults:
    times = [torch["import_s"] for torch in map(_torch_of, nodes) if torch]
    usual = median(times or [0.0])
    for node in nodes:
        problem = node["torch"]["problem"] if node["torch"] else ""
        torch = _torch_of(node)
        if problem:
            remedy = "python -c 'import torch' on this node shows all of the error"
            yield node, _Fault(f"torch cannot be imported: {problem}", remedy)
        elif torch and torch["import_s"] > max(_TIMES * usual, usual + _MORE_S):
            took = f"{torch['import_s']:.0f} s, and {usual:.0f} s is usual"
            remedy = "it reads files slowly, or for the first time: examine it again"
            yield node, _Fault(f"importing torch took {took}", remedy, _NEVER)


def _limits(nodes: Sequence[Node]) -> Faults:
    for node in nodes:
        up = [i["name"] for i in node["interfaces"] if i["is_up"]]
        for name, (least, text) in _LEAST.items():
            value = node["limits"].get(name, -1)
            is_needed = name != "locked memory" or any(map(_FABRIC.match, up))
            if 0 <= value < least and is_needed:
                shown = text.format(value, value >> 10)
                yield node, _Fault(shown, _HIGHER, _NEVER)


def _gpus(nodes: Sequence[Node]) -> Faults:
    for node in nodes:
        gpus, torch = node["gpus"], _torch_of(node)
        seen = torch["gpus"] if torch else len(gpus)
        for number, gpu in enumerate(gpus):
            if gpu["ecc_errors"] > 0:
                errors = count(gpu["ecc_errors"], "uncorrected memory error")
                remedy = "leave the node out, and tell the administrator"
                yield node, _Fault(f"GPU {number} has had {errors}", remedy)
        if busy := [number for number, gpu in enumerate(gpus) if gpu["processes"]]:
            pids = sorted({pid for gpu in gpus for pid in gpu["processes"]})
            shown = ", ".join(map(str, pids[:_MOST_PIDS]))
            text = f"other processes compute on GPU {ranges(busy)}: pid {shown}"
            remedy = "GPUs must be free: end these processes, or leave the node out"
            # Of another job, perhaps, on a GPU that this one does not see.
            yield node, _Fault(text, remedy, _NEVER if seen < len(gpus) else _ALWAYS)
        if seen < len(gpus):
            text = f"torch sees {seen} of {count(len(gpus), 'GPU')}"
            remedy = (
                "if the job has asked for more: unset CUDA_VISIBLE_DEVICES, and use a "
                "torch that is built for these GPUs"
            )
            yield node, _Fault(text, remedy, _NEVER)


def _resolvers(nodes: Sequence[Node]) -> Faults:
    remedy = "training does without; tell the administrator if other programs are slow"
    for node in nodes:
        text = _RESOLVERS.get(node["resolver"], "")
        if not text and node["resolver_s"] > _RESOLVER_S:
            text = f"resolving the names of nodes takes more than {_RESOLVER_S:g} s"
        if text:
            yield node, _Fault(text, remedy, _MINORITY)


_CHECKS = {
    "HPC182": _names,
    "HPC184": _folders,
    "HPC185": _imports,
    "HPC186": _limits,
    "HPC187": _gpus,
    "HPC188": _resolvers,
}

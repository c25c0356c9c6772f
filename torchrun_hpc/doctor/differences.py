"""Findings about differences between nodes that should be equal."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from functools import partial
from itertools import chain
from os.path import commonprefix
from typing import TYPE_CHECKING

from torchrun_hpc.doctor.results import Finding
from torchrun_hpc.errors import count
from torchrun_hpc.names import fold_ranks, numbers_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrun_hpc.doctor.results import Node, Torch

    Traits = Mapping[str, str | float]  # values by name; empty or 0 is unknown

_LONGEST = 60  # characters of a value
_NEAR = 0.05  # sizes that differ by this share or less are equal

# Variables that can differ on each node, and variables that must be equal.
_OWN = re.compile(r"\w+(VISIBLE_DEVICES|HOSTID|_FILE|_DIR)")
_EQUAL = re.compile(
    r"(NCCL|RCCL|FI|UCX)_(?!DEBUG|LOG|\w*(IFNAME|HCA|DEVICES))\w+|GLOO_SOCKET_IFNAME"
)

_LOAD = "activate the same environment in the job script, from a shared folder"
_EXPORT = "export it in the job script before the launcher, not in a profile"
_MACHINE = "exclude the nodes that differ, and report them to the administrator"
_COMPARE = "do nothing unless the nodes that differ are slow or fail"


def findings(nodes: Sequence[Node], hosts: Sequence[str]) -> Iterator[Finding]:
    """Yield differences between nodes. The minority is to blame."""
    for traits_of, remedy, is_suspect, absent in _KINDS:
        traits = {node.rank: traits_of(node) for node in nodes}
        for trait in dict.fromkeys(chain.from_iterable(traits.values())):
            groups = _by_value({r: own.get(trait, absent) for r, own in traits.items()})
            if len(groups) < 2:  # noqa: PLR2004 - all are equal
                continue
            values, ranks = map(list, zip(*groups, strict=True))
            others, most = sorted(chain(*ranks[:-1])), len(ranks[-1])
            where = [fold_ranks(each, hosts) for each in ranks]
            if has_majority := most > len(others):
                where[-1] = count(most, "other")
            if max(map(len, values)) > _LONGEST:  # folders: without the equal part
                equal = len(commonprefix(values))  # noqa: RUF071 - in characters
                values = ["..." * bool(equal) + v[equal:][:_LONGEST] for v in values]
            parts = (f"{v} on {nodes}" for v, nodes in zip(values, where, strict=True))
            # If a profile sets it, another node does not help.
            blamed = others if has_majority and remedy is not _EXPORT else ()
            text = f"{trait}: {'; '.join(parts)}"
            yield Finding("HPC181", text, remedy, tuple(blamed), is_suspect)


def torch_of(node: Node) -> Torch | None:
    """Return the record of torch if a worker has imported it."""
    return node.torch if node.torch and node.torch.version else None


def _by_value(own: Mapping[int, str | float]) -> list[tuple[str, list[int]]]:
    known = {rank: value for rank, value in own.items() if value}
    groups: dict[str, list[int]] = defaultdict(list)
    for usual, _ in Counter(known.values()).most_common(1):
        for rank, value in known.items():
            groups[str(usual if _is_near(value, usual) else value)].append(rank)
    return sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))


def _is_near(value: str | float, usual: str | float) -> bool:
    if isinstance(value, str) or isinstance(usual, str):
        return value == usual
    return abs(value - usual) <= _NEAR * usual


def _software(node: Node) -> Traits:
    torch = torch_of(node)
    known = {"torch": torch.version, **torch.libraries} if torch else {}
    return {**node.versions, **known, "kernel": ""}  # see _system()


def _machine(node: Node) -> Traits:
    models, torch = Counter(gpu.model for gpu in node.gpus), torch_of(node)
    own = {i.name: i for i in node.interfaces}.get(node.interface)
    mtu, speed = (own.mtu, own.speed_mbit) if own else (0, 0)
    return {
        "GPUs": ", ".join(f"{models[m]} x {m}" for m in sorted(models)) or "none",
        "number of GPUs that torch sees": str(torch.gpus) if torch else "",
        "MTU of the job's interface": str(mtu or ""),
        "speed of the job's interface": f"{speed} Mbit/s" if speed else "",
    }


def _system(node: Node) -> Traits:
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


def _variables(node: Node, *, equal: bool) -> Traits:
    # Gloo's default is the job's interface.
    usual = "GLOO_SOCKET_IFNAME", node.interface
    return {
        name: value
        for name, value in node.variables.items()
        if not _OWN.fullmatch(name) and bool(_EQUAL.fullmatch(name)) == equal
        if (name, value) != usual
    }


# Traits, the remedy if they differ, whether a difference is suspect, and the value of a
# node without the trait.
_KINDS: tuple[tuple[Callable[[Node], Traits], str, bool, str], ...] = (
    (_software, _LOAD, True, ""),
    (_machine, _MACHINE, True, ""),
    (partial(_variables, equal=True), _EXPORT, True, "not set"),
    (_system, _COMPARE, False, ""),
    (partial(_variables, equal=False), _EXPORT, False, "not set"),
)

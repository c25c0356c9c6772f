"""What should be equal on all nodes, and is not: a pure function of their records."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from os.path import commonprefix
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc.doctor.results import Finding
from torchrun_hpc.errors import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrun_hpc.doctor.results import Node

    Traits = Mapping[str, str | float]  # values by their names; empty or 0: not known

_MOST_NAMES = 10
_LONGEST = 60  # characters of a value
_NEAR = 0.05  # sizes that differ by no more than this share are equal

# Variables of which each node may have its own value, and those that must be equal.
_OWN = re.compile(r"\w+(VISIBLE_DEVICES|HOSTID|_FILE|_DIR|_HOME)")
_EQUAL = re.compile(r"(NCCL|RCCL|FI|UCX)_(?!DEBUG|LOG|\w*(IFNAME|HCA|DEVICES))\w+")

_ENVIRONMENT = (
    "use one environment on all nodes: in the job script, in front of the launcher, "
    "load its modules or activate it, from a file system that they share"
)
_EXPORT = "export it in the job script, in front of the launcher, and in no profile"
_MACHINE = "leave the nodes out that differ, and tell the administrator"
_COMPARE = "none is needed, unless the nodes that differ are slow, or fail"


def findings(nodes: Sequence[Node], hosts: Sequence[str]) -> Iterator[Finding]:
    """Say what differs between the nodes; the minority is to blame.

    Args:
        nodes: Those that have come.
        hosts: Names of all nodes of the job, by rank.
    """
    for kind in _KINDS:
        known = {node["rank"]: kind.traits(node) for node in nodes}
        seen = {rank: traits for rank, traits in known.items() if traits is not None}
        for name in dict.fromkeys(name for traits in seen.values() for name in traits):
            own = {rank: v.get(name, kind.absent) for rank, v in seen.items()}
            groups = _by_value({rank: value for rank, value in own.items() if value})
            others = sorted(rank for _, ranks in groups[:-1] for rank in ranks)
            if not others:
                continue
            where = [names(ranks, hosts) for _, ranks in groups]
            has_majority = len(groups[-1][1]) > len(others)
            if has_majority:
                where[-1] = count(len(groups[-1][1]), "other")
            values = _shortened([value for value, _ in groups])
            pairs = zip(values, where, strict=True)
            yield Finding(
                code="HPC181",
                text=f"{name}: " + "; ".join(f"{v} on {place}" for v, place in pairs),
                remedy=kind.remedy,
                nodes=others if has_majority else [],
                is_suspect=kind.is_suspect,
            )


def names(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Write nodes by name, not too many of them."""
    known = dict(enumerate(hosts))
    shown = [known.get(rank) or f"node {rank}" for rank in ranks[:_MOST_NAMES]]
    more = len(ranks) - _MOST_NAMES
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _by_value(own: Mapping[int, str | float]) -> list[tuple[str, list[int]]]:
    """Return the values and the nodes that have them, the most usual one last."""
    usual = Counter(own.values()).most_common(1)[0][0] if own else ""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, value in own.items():
        groups[str(usual if _is_near(value, usual) else value)].append(rank)
    return sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))


def _is_near(value: str | float, usual: str | float) -> bool:
    if isinstance(value, str) or isinstance(usual, str):
        return value == usual
    return abs(value - usual) <= _NEAR * usual


def _shortened(values: Sequence[str]) -> list[str]:
    """Cut long values, which are lists of folders, to where they differ."""
    if max(map(len, values)) <= _LONGEST:
        return [*values]
    equal = len(commonprefix(values))  # noqa: RUF071 - in characters
    return ["..." * bool(equal) + value[equal:][:_LONGEST] for value in values]


# --- what is compared -----------------------------------------------------------------


def _software(node: Node) -> Traits:
    return {name: v for name, v in node["versions"].items() if name != "kernel"}


def _torch(node: Node) -> Traits | None:
    torch = node["torch"]
    if torch is None or torch["problem"]:
        return None
    return {"torch": torch["version"], **torch["libraries"]}


def _machine(node: Node) -> Traits:
    models, torch = Counter(gpu["model"] for gpu in node["gpus"]), node["torch"]
    gpus = ", ".join(f"{models[model]} x {model}" for model in sorted(models))
    seen = str(torch["gpus"]) if torch and not torch["problem"] else ""
    own = {i["name"]: i for i in node["interfaces"]}.get(node["interface"])
    speed = f"{own['speed_mbit']} Mbit/s" if own and own["speed_mbit"] else ""
    return {
        "GPUs": gpus or "none",
        "number of GPUs that torch sees": seen,
        "MTU of the job's interface": str(own["mtu"]) if own and own["mtu"] else "",
        "speed of the job's interface": speed,
    }


def _system(node: Node) -> Traits:
    parts = re.findall("([0-9]+)(?:-([0-9]+))?", node["cpus"])
    usable = sum(int(last or first) - int(first) + 1 for first, last in parts)
    shm = {f["path"]: f["size"] for f in node["folders"]}.get("/dev/shm", 0)  # noqa: S108
    limits = node["limits"].items()
    return {
        "kernel": node["versions"].get("kernel", ""),
        "driver of the GPUs": node["driver"],
        "name of the job's interface": node["interface"],
        "number of CPUs": str(node["cores"]),
        "number of CPUs in the affinity mask": str(usable),
        # These follow from the size of the memory, where nobody has set them.
        "GiB of /dev/shm": round(shm / 2**30, 2),
        **{f"limit of {name}": "none" if v < 0 else v for name, v in limits},
    }


def _equal_variables(node: Node) -> Traits:
    return {n: v for n, v in _variables(node).items() if _EQUAL.fullmatch(n)}


def _other_variables(node: Node) -> Traits:
    return {n: v for n, v in _variables(node).items() if not _EQUAL.fullmatch(n)}


def _variables(node: Node) -> dict[str, str]:
    return {n: v for n, v in node["variables"].items() if not _OWN.fullmatch(n)}


class _Kind(NamedTuple):
    """Traits that have the same consequence.

    Attributes:
        traits: Returns those of a node; ``None`` if they are not known.
        is_suspect: Whether a job is likely to be slow, or to fail, if they differ.
        remedy: What to do then.
        absent: What a node has that lacks one of them; empty if it is not known.
    """

    traits: Callable[[Node], Traits | None]
    is_suspect: bool
    remedy: str
    absent: str = ""


_KINDS = (
    _Kind(_software, is_suspect=True, remedy=_ENVIRONMENT, absent="none"),
    _Kind(_torch, is_suspect=True, remedy=_ENVIRONMENT, absent="none"),
    _Kind(_machine, is_suspect=True, remedy=_MACHINE),
    _Kind(_equal_variables, is_suspect=True, remedy=_EXPORT, absent="not set"),
    _Kind(_system, is_suspect=False, remedy=_COMPARE),
    _Kind(_other_variables, is_suspect=False, remedy=_EXPORT, absent="not set"),
)

"""Findings about workers, which are compared with each other, not with data sheets."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median, median_low
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc.doctor.checks import fabrics
from torchrun_hpc.doctor.results import EXCLUDE, Finding, Worker
from torchrun_hpc.doctor.units import speed
from torchrun_hpc.errors import count
from torchrun_hpc.names import fold_ranks, ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrun_hpc.doctor.results import Node

_SLOW = 0.75  # of the median
_NORM = 1e-3  # share by which a norm can differ: devices round differently
_LATE_S, _LATE = 0.05, 3.0  # seconds that a worker can be late; times the median

_BUSY = "look for other programs and a high temperature there, or exclude the node"
_NCCL = "unset NCCL_IB_DISABLE and NCCL_NET. NCCL_DEBUG=INFO shows what is missing"


class _Fault(NamedTuple):
    """A problem of a worker. The most severe one of a node is shown."""

    worker: Worker
    text: str
    severity: float = 0.0
    is_known: bool = True  # whether this worker is to blame


def findings(
    workers: Sequence[Worker], nodes: Mapping[int, Node], hosts: Sequence[str]
) -> Iterator[Finding]:
    """Yield one finding for each node and check; ``hosts`` has all nodes of the job."""
    for check, (code, remedy) in _CHECKS.items():
        groups = defaultdict[tuple[int, ...], list[_Fault]](list)
        for fault in check(workers, nodes):
            groups[(fault.worker.node,) if fault.is_known else ()].append(fault)
        for blamed, faults in groups.items():
            ranks = ranges(fault.worker.rank for fault in faults)
            where = fold_ranks(sorted({fault.worker.node for fault in faults}), hosts)
            worst = max(faults, key=lambda fault: fault.severity)
            text = f"rank{'s'[: len(faults) - 1]} {ranks} ({where}): {worst.text}"
            yield Finding(code, text, remedy, blamed)


def _wrong(workers: Sequence[Worker], nodes: Mapping[int, Node]) -> Iterator[_Fault]:
    """Compare products bit by bit; on different devices, compare their norms."""
    groups = defaultdict[tuple[str, ...], list[Worker]](list)
    # Another release of torch can round differently, which is no defect.
    releases = {rank: n.torch.version for rank, n in nodes.items() if n.torch}
    for worker in workers:
        if worker.wrong > 0:
            text = f"{count(worker.wrong, 'element')} of its products are not finite"
            yield _Fault(worker, text, worker.wrong)
        elif len({*worker.digests}) > 1:
            yield _Fault(worker, "its second product differs from the first one")
        else:
            kind = worker.device, worker.dtype, releases.get(worker.node, "")
            groups[kind].append(worker)
    alike = list[Worker]()
    for same in groups.values():
        ((usual, most),) = Counter(worker.digests for worker in same).most_common(1)
        is_known = 2 * most > len(same)
        like = count(most, "worker") if is_known else "other workers"
        text = f"{like} on the same kind of device have another product"
        for worker in same:
            if worker.digests == usual and is_known:
                alike.append(worker)
            else:
                yield _Fault(worker, text, is_known=is_known)
    middle = median([worker.norm for worker in alike] or [0])
    off = [worker for worker in alike if abs(worker.norm - middle) > _NORM * middle]
    for worker in off:
        text = f"the norm of its product is {worker.norm:.6g} (median: {middle:.6g})"
        is_known = 2 * len(off) < len(alike)
        yield _Fault(worker, text, abs(worker.norm - middle), is_known)


def _slow(workers: Sequence[Worker], _nodes: object) -> Iterator[_Fault]:
    best = {worker: max(worker.flops) for worker in workers if worker.flops}
    usual = median([*best.values()] or [0])
    for worker, own in best.items():
        if own < _SLOW * usual:
            text = f"{speed(own)} at best (median: {speed(usual)})"
            yield _Fault(worker, text, -own)


def _late(workers: Sequence[Worker], _nodes: object) -> Iterator[_Fault]:
    usual = median_low([worker.late_s for worker in workers] or [0])
    for worker in workers:
        if worker.late_s > max(_LATE_S, _LATE * usual):
            text = f"the others wait {worker.late_s:.2f} s for it before each operation"
            yield _Fault(worker, text, worker.late_s)


def _sockets(workers: Sequence[Worker], nodes: Mapping[int, Node]) -> Iterator[_Fault]:
    up = {rank: ", ".join(fabrics(node)) for rank, node in nodes.items()}
    found = [w for w in workers if w.transport == "Socket" and up.get(w.node)]
    has_network = len({worker.node for worker in workers}) > 1
    for worker in found if has_network else ():
        text = f"NCCL uses sockets instead of {up[worker.node]}, which is up"
        yield _Fault(worker, text, is_known=2 * len(found) < len(workers))


_WRONG = "HPC243"
# By check: the code, and the remedy.
_CHECKS: Mapping[Callable[..., Iterator[_Fault]], tuple[str, str]] = {
    _sockets: ("HPC242", _NCCL),
    _wrong: (_WRONG, EXCLUDE),
    _slow: (_WRONG, _BUSY),
    _late: ("HPC244", _BUSY),
}

"""This node's CPUs and GPUs, from Linux's ``/sys`` and ``/proc``, without drivers.

Sources: the kernel's ``Documentation/ABI/stable/sysfs-devices-system-cpu``,
``.../sysfs-devices-node`` and ``.../testing/sysfs-bus-pci``. For NVIDIA GPUs: the
appendix "The /proc Filesystem Interface" of the driver's README. For AMD GPUs:
``drivers/gpu/drm/amd/amdkfd/kfd_topology.c``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchrun_hpc.host import procfs
from torchrun_hpc.names import numbers_in, ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"
_PCI = "sys/bus/pci/devices"
_NVIDIA = "proc/driver/nvidia/gpus"
_AMD = "sys/class/kfd/kfd/topology/nodes"

_L3 = "3"


@dataclass(frozen=True)
class Core:
    """A core, with those of its CPUs that this process may use."""

    cpus: tuple[int, ...]  # numbers of its CPUs (hardware threads), in ascending order
    node: int = 0  # number of its NUMA node; 0 if unknown
    cache: str = ""  # CPUs that share its L3 cache: ``0-7,64-71``; empty if unknown

    @property
    def domain(self) -> tuple[int, str]:
        """The NUMA node and the L3 cache: cores that share both are near each other."""
        return self.node, self.cache


@dataclass(frozen=True)
class Gpu:
    """A GPU of the node."""

    address: str  # PCI address: ``0000:c1:00.0``
    cpus: frozenset[int]  # its local CPUs; empty if unknown
    uuid: str = ""  # its name in lists of visible devices: ``GPU-...``; or empty
    is_usable: bool = True  # whether this process may open it
    is_amd: bool = False  # otherwise it is NVIDIA's
    model: str = ""


@dataclass(frozen=True)
class Topology:
    """The node, as this process sees it."""

    cores: tuple[Core, ...] = ()  # the cores of the affinity mask
    gpus: tuple[Gpu, ...] = ()  # all GPUs of the node, in CUDA's or ROCm's order
    cpus: int = 0  # number of the node's online CPUs; 0 if unknown

    @property
    def mask(self) -> frozenset[int]:
        """The CPUs that this process may run on."""
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    @property
    def online(self) -> int:
        """Number of the node's CPUs; if unknown, of the mask."""
        return max(self.cpus, len(self.mask))


def this_node(root: Path = Path("/"), mask: Iterable[int] | None = None) -> Topology:
    """Describe this node.

    The folder ``root`` contains ``sys``, ``proc`` and ``dev``. ``mask`` replaces the
    affinity mask.
    """
    cpus = own_cpus() if mask is None else mask
    online = len(_cpus(root / _CPUS / "online"))
    return Topology(tuple(_cores(root, cpus)), (*_nvidia(root), *_amd(root)), online)


def own_cpus() -> set[int]:
    """Return the CPUs that this process may run on: its affinity mask."""
    return os.sched_getaffinity(0)


def is_bound() -> bool:
    """Return whether the affinity mask lacks some of the node's CPUs."""
    return len(own_cpus()) != os.cpu_count()


def gpu_files() -> int:
    """Return the number of NVIDIA's device files; the driver is not called."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _cores(root: Path, mask: Iterable[int]) -> Iterator[Core]:
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in (root / _NODES).glob("node[0-9]*")
        if folder.name.removeprefix("node").isdecimal()
        for cpu in _cpus(folder / "cpulist")
    }
    caches: dict[int, str] = {}
    rest = set(mask)
    while rest:
        cpu = min(rest)
        folder = root / _CPUS / f"cpu{cpu}"
        siblings = _cpus(folder / "topology/thread_siblings_list") & rest
        cpus = siblings | {cpu}
        rest -= cpus
        if cpu not in caches:
            shared = _cache(folder)
            cache = ranges(shared, most=len(shared))
            caches |= dict.fromkeys((cpu, *shared), cache)
        yield Core(tuple(sorted(cpus)), nodes.get(cpu, 0), caches[cpu])


def _cache(folder: Path) -> frozenset[int]:
    for index in sorted(folder.glob("cache/index[0-9]*")):
        if _text(index / "level").strip() == _L3:
            return _cpus(index / "shared_cpu_list")
    return frozenset()


def _nvidia(root: Path) -> Iterator[Gpu]:
    for folder in sorted((root / _NVIDIA).glob("*:*")):
        facts = procfs.pairs(str(folder / "information"))
        minor, uuid = facts.get("Device Minor"), facts.get("GPU UUID", "")
        device = root / f"dev/nvidia{minor}"
        yield Gpu(
            folder.name,
            _local(root, folder.name),
            uuid if uuid.startswith("GPU-") else "",
            is_usable=minor is None or _may_open(device),
            model=facts.get("Model", ""),
        )


def _amd(root: Path) -> Iterator[Gpu]:
    """Yield the AMD GPUs that this process may use, in the driver's order."""
    folders = [f for f in (root / _AMD).glob("*") if f.name.isdecimal()]
    for folder in sorted(folders, key=lambda folder: int(folder.name)):
        pairs = (line.split() for line in _text(folder / "properties").splitlines())
        facts = {p[0]: int(p[1]) for p in pairs if p[1:] and p[1].isdecimal()}
        if not facts.get("simd_count"):
            continue  # a CPU, or a GPU that this process cannot open
        # The PCI function may be the number of a partition.
        bus, device = divmod(facts.get("location_id", 0) & 0xFFFF, 256)
        address = f"{facts.get('domain', 0):04x}:{bus:02x}:{device >> 3:02x}.0"
        minor = facts.get("drm_render_minor")
        yield Gpu(
            address,
            _local(root, address),
            f"GPU-{facts.get('unique_id', 0):016x}",
            is_usable=not minor or _may_open(root / f"dev/dri/renderD{minor}"),
            is_amd=True,
        )


def _may_open(device: Path) -> bool:
    """Return whether permissions and the device cgroup let this process open a file."""
    return os.access(device, os.R_OK | os.W_OK)


def _local(root: Path, address: str) -> frozenset[int]:
    return _cpus(root / _PCI / address / "local_cpulist")


def _cpus(path: Path) -> frozenset[int]:
    return numbers_in(_text(path))


def _text(path: Path) -> str:
    return procfs.read(str(path)) or ""

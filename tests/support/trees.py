"""Machines as Linux shows them in /sys and /proc, written into a folder.

Each is described as its centre, or its vendor, documents it; the source is beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchrun_hpc.names import ranges

if TYPE_CHECKING:
    from pathlib import Path

NVIDIA, AMD = "NVIDIA", "AMD"


@dataclass(frozen=True)
class Machine:
    """A node: its CPUs, NUMA nodes and GPUs.

    Attributes:
        cores: Number of cores.
        threads: CPUs of a core; the second of core N is N + ``cores``.
        cache: Cores that share an L3 cache; 0 if Linux does not say.
        node: Cores of a NUMA node.
        gpus: By PCI address, in the order of the driver, the NUMA node.
        driver: Whose GPUs these are.
        memory_nodes: NUMA nodes that have memory only.
        hidden: Numbers of the GPUs that this process cannot open.
        models: Names of the GPUs; by default they are alike.
    """

    cores: int
    threads: int
    cache: int
    node: int
    gpus: dict[str, int]
    driver: str = NVIDIA
    memory_nodes: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    models: tuple[str, ...] = ()

    def cpus(self, first: int, number: int) -> list[int]:
        """Return the CPUs of some cores that follow each other."""
        starts = range(0, self.cores * self.threads, self.cores)
        return [
            start + core for start in starts for core in range(first, first + number)
        ]

    @property
    def mask(self) -> set[int]:
        """All CPUs."""
        return set(range(self.cores * self.threads))


# OLCF's Frontier User Guide, "Frontier Compute Nodes" and the output of hello_jobstep
# there: which GCD is near which L3 region, and the buses.
FRONTIER = Machine(
    cores=64,
    threads=2,
    cache=8,
    node=16,
    gpus={
        f"0000:{bus}:00.0": node
        for bus, node in zip(
            ("c1", "c6", "c9", "ce", "d1", "d6", "d9", "de"),
            (3, 3, 1, 1, 0, 0, 2, 2),
            strict=True,
        )
    },
    driver=AMD,
)

# LUMI's documentation, "LUMI-G" and "Distribution and binding": the same node.
LUMI = FRONTIER

# JUWELS Booster: 2 EPYC 7402 in NPS-4 (JSC, "Booster overview"); by nvidia-smi topo -mp
# GPU 0 is at NUMA node 3 (CPUs 18-23,66-71), 1 at 1, 2 at 7, 3 at 5. The three cores of
# an L3 cache are that processor's, the addresses those of another node with four A100.
JUWELS_BOOSTER = Machine(
    cores=48,
    threads=2,
    cache=3,
    node=6,
    gpus={"0000:03:00.0": 3, "0000:44:00.0": 1, "0000:84:00.0": 7, "0000:c4:00.0": 5},
)

# NVIDIA's mlperf-common, bindpcie, and nvidia-smi topo -m: 0-55,112-167 for GPU 0 to 3.
DGX_H100 = Machine(
    cores=112,
    threads=2,
    cache=56,
    node=56,
    gpus={
        f"0000:{bus}:00.0": number // 4
        for number, bus in enumerate(("1b", "43", "52", "61", "9d", "c3", "d1", "df"))
    },
)

# A tray of GB200 NVL72: two Grace; the memory of each GPU is a NUMA node (vllm#39361).
GB200 = Machine(
    cores=144,
    threads=1,
    cache=72,
    node=72,
    gpus={
        "0008:01:00.0": 0,
        "0009:01:00.0": 0,
        "0018:01:00.0": 1,
        "0019:01:00.0": 1,
    },
    memory_nodes=(2, 10, 18, 26),
)

# A virtual machine that shows no caches, nor where its GPU is.
VIRTUAL = Machine(cores=8, threads=1, cache=0, node=8, gpus={"0000:00:05.0": -1})


def hiding(machine: Machine, *gpus: int) -> Machine:
    return replace(machine, hidden=gpus)


def write(machine: Machine, root: Path) -> Path:
    """Write the files of a machine, and return the folder that has them."""
    system = root / "sys/devices/system"
    everything = range(machine.cores)
    _put(system / "cpu/online", ranges(machine.mask))
    for core in everything:
        own = machine.cpus(core, 1)
        for cpu in own:
            folder = system / f"cpu/cpu{cpu}"
            _put(folder / "topology/thread_siblings_list", ranges(own))
            levels = {"index0": ("1", own), "index2": ("2", own)}
            if machine.cache:
                start = core - core % machine.cache
                levels["index3"] = ("3", machine.cpus(start, machine.cache))
            for name, (level, shared) in levels.items():
                _put(folder / f"cache/{name}/level", level)
                _put(folder / f"cache/{name}/shared_cpu_list", ranges(shared))
    nodes = {
        number: ranges(machine.cpus(start, machine.node))
        for number, start in enumerate(everything[:: machine.node])
    }
    nodes |= dict.fromkeys(machine.memory_nodes, "")
    for number, cpus in nodes.items():
        _put(system / f"node/node{number}/cpulist", cpus)
    nodes[-1] = ranges(machine.mask)
    places = enumerate(machine.gpus.items())
    for number, (address, node) in places:
        pci = root / "sys/bus/pci/devices" / address
        _put(pci / "local_cpulist", nodes[node])
        _put(pci / "numa_node", str(node))
        model = (machine.models or (machine.driver,) * len(machine.gpus))[number]
        device = f"nvidia{number}"
        if machine.driver == NVIDIA:
            text = f"Model: \t\t {model}\nIRQ:   \t\t 7\nGPU UUID: \t {uuid(number)}\n"
            text += f"Bus Location: \t {address}\nDevice Minor: \t {number}"
            _put(root / "proc/driver/nvidia/gpus" / address / "information", text)
        else:
            device = f"dri/renderD{128 + number}"
            _write_amd(root, machine, number, address)
        if number not in machine.hidden:
            _put(root / "dev" / device, "")
    return root


def uuid(number: int) -> str:
    """Return the name of a GPU in a list of visible devices."""
    return f"GPU-{number + 1:016x}"


def _write_amd(root: Path, machine: Machine, number: int, address: str) -> None:
    """Write a GPU as a node of KFD, after the nodes of the CPUs."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    processors = machine.cores // machine.node
    for processor in range(processors):
        _put(nodes / str(processor) / "properties", "cpu_cores_count 32\nsimd_count 0")
    domain, bus, device = address.split(":")
    place = int(bus, 16) << 8 | int(device.partition(".")[0], 16) << 3
    text = f"simd_count 440\nlocation_id {place}\ndomain {int(domain, 16)}\n"
    text += f"drm_render_minor {128 + number}\nunique_id {number + 1}"
    if number in machine.hidden:  # the kernel lets nobody read it
        text = ""
    _put(nodes / str(processors + number) / "properties", text)


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="ascii")

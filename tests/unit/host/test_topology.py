"""The topology of a node, and the other tasks on it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.support.trees import AMD, VIRTUAL, Machine, hiding, uuid, write
from torchrun_hpc.host.topology import Core, Gpu, Topology, this_node

# Two GPUs of each maker, the first one at the second NUMA node.
SMALL = Machine(
    cores=8, threads=2, cache=2, node=4, gpus={"0000:01:00.0": 1, "0000:02:00.0": 0}
)
SMALL_AMD = replace(SMALL, driver=AMD)


def test_cores(tmp_path):
    found = this_node(write(SMALL, tmp_path), {1, 9, 10, 2, 15})
    assert found.cores == (
        Core((1, 9), 0, "0-1,8-9"),
        Core((2, 10), 0, "2-3,10-11"),
        Core((15,), 1, "6-7,14-15"),
    )
    assert found.cpus == 16
    assert found.mask == {1, 9, 10, 2, 15}


def test_a_machine_without_caches(tmp_path):
    found = this_node(write(VIRTUAL, tmp_path), {0, 3})
    assert found.cores == (Core((0,)), Core((3,)))
    (gpu,) = found.gpus
    assert gpu.cpus == set(range(8))  # so does Linux where no NUMA node is known


def test_nodes_that_have_memory_only(tmp_path):
    machine = replace(SMALL, memory_nodes=(2, 10))
    found = this_node(write(machine, tmp_path), {0, 7})
    assert [core.node for core in found.cores] == [0, 1]


def test_nothing_can_be_read(tmp_path):
    assert this_node(tmp_path, {4, 2}) == Topology((Core((2,)), Core((4,))))


@pytest.mark.parametrize("text", ["", "?", "0-7,???", "0xff", "-1"])
def test_files_that_cannot_be_read(text, tmp_path):
    """Then nothing is known of it, and nothing fails."""
    root = write(SMALL_AMD, tmp_path)
    cpu = root / "sys/devices/system/cpu"
    for name in ("topology/thread_siblings_list", "cache/index3/shared_cpu_list"):
        (cpu / "cpu1" / name).write_text(text)
    (cpu / "online").write_text(text)
    node = root / "sys/devices/system/node"
    (node / "node0/cpulist").write_text(text)
    (node / "node5x").mkdir()
    kfd = root / "sys/class/kfd/kfd/topology/nodes"
    (kfd / "2/properties").write_text(f"simd_count {text}\nlocation_id")
    (kfd / "5x").mkdir()
    found = this_node(root, {1, 9, 4})
    assert found.cores == (
        Core((1,)),
        Core((4,), 1, "4-5,12-13"),
        Core((9,), 0, "0-1,8-9"),
    )
    assert len(found.gpus) == 1
    assert found.cpus == 0


def test_gpus_of_nvidia(tmp_path):
    local = frozenset({4, 5, 6, 7, 12, 13, 14, 15})
    first, second = this_node(write(hiding(SMALL, 1), tmp_path), {0}).gpus
    assert first == Gpu("0000:01:00.0", local, uuid(0), model="NVIDIA")
    assert (first.is_usable, second.is_usable) == (True, False)


def test_a_gpu_of_nvidia_that_says_nothing(tmp_path):
    root = write(VIRTUAL, tmp_path)
    (root / "proc/driver/nvidia/gpus/0000:00:05.0/information").write_text("???\n")
    (gpu,) = this_node(root, {0}).gpus
    assert (gpu.uuid, gpu.is_usable) == ("", True)


def test_gpus_of_amd(tmp_path):
    """The kernel lets nobody read of one that a cgroup hides."""
    (found,) = this_node(write(hiding(SMALL_AMD, 0), tmp_path), {0}).gpus
    local = frozenset({0, 1, 2, 3, 8, 9, 10, 11})
    assert found == Gpu("0000:02:00.0", local, uuid(1), is_amd=True)


def test_this_machine():
    found = this_node()
    assert found.mask == os.sched_getaffinity(0)
    assert found.cpus >= len(found.mask)
    siblings = [cpu for core in found.cores for cpu in core.cpus]
    assert len(siblings) == len({*siblings})

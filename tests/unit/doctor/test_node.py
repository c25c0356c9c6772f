"""A node's report about itself, also if something is missing."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.support.networks import make_network
from tests.support.patience import NEVER_S, PATIENCE
from torchrun_hpc import __version__, limits, wire
from torchrun_hpc.doctor import node
from torchrun_hpc.doctor.results import (
    GpuReport,
    InterfaceReport,
    NodeReport,
    printable,
)
from torchrun_hpc.host.network import this_node
from torchrun_hpc.schedulers.job import Task

if TYPE_CHECKING:
    from torchrun_hpc.doctor.place import Place

NETWORK = make_network(
    {
        "lo": "127.0.0.1/8 ::1/128",
        "eth0": "10.10.0.1/24",
        "ib0": "10.20.0.1/24 fd00::1/64",
        "ib1": "",
    },
    hosts={"n0i": "10.20.0.1", "n1i": "10.10.0.2 10.20.0.2"},
    down=("ib1",),
)


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Let no time be over."""
    monkeypatch.setattr(limits, "PROBES_TIMEOUT", float(PATIENCE))


@pytest.fixture
def only_first(monkeypatch):
    """Let the time be over when so many questions are answered; return the limit."""

    def wait_for(number):
        times = iter([0.0] * (1 + number))

        def monotonic():
            is_asker = threading.current_thread() is threading.main_thread()
            return next(times, float(NEVER_S)) if is_asker else 0.0

        clock = SimpleNamespace(monotonic=monotonic)
        monkeypatch.setattr(node, "time", clock)
        return PATIENCE

    return wait_for


def examined(names=(), network=NETWORK, environ=None, address="10.20.0.1"):
    place = SimpleNamespace(
        node_rank=0,
        host="n0",
        fast_host="n0i",
        address=address,
        workers=4,
        task=Task(),
        names=names,
        facts=SimpleNamespace(environ=environ or {}),
    )
    found = node.examine(cast("Place", place), 40000, network)
    told = json.loads(json.dumps(wire.encode(printable(found))))  # by the task
    wire.decode(NodeReport, told)
    return found


# --- all of it ------------------------------------------------------------------------


def test_this_machine():
    found = examined(["localhost"], this_node(), os.environ, "")
    assert (found.rank, found.host, found.fast_host) == (0, "n0", "n0i")
    assert (found.interface, found.port, found.workers) == ("", 40000, 4)
    assert found.torch is None
    assert "127.0.0.1" in found.names["localhost"]
    assert found.routes == {"localhost": "127.0.0.1"}
    assert found.cores == os.cpu_count()
    assert found.versions["torchrun_hpc"] == __version__
    assert found.versions["python"] == sys.version.split()[0]
    assert found.versions["kernel"] == os.uname().release
    assert all(folder.size for folder in found.folders)


def test_limits(monkeypatch):
    numbers = resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK
    monkeypatch.setattr(
        resource, "getrlimit", lambda n: (numbers.index(n), 10 + numbers.index(n))
    )
    # The launcher raises the soft one of files.
    expected = {"files": 10, "processes": 1, "locked memory": 2}
    assert examined().limits == expected


# --- the network ----------------------------------------------------------------------


def test_interfaces():
    known = [
        replace(interface, mtu=4092, speed_mbit=200000)
        if interface.name == "ib0"
        else interface
        for interface in NETWORK.interfaces
    ]
    found = examined(network=replace(NETWORK, list_interfaces=lambda: tuple(known)))
    assert found.interfaces == (
        InterfaceReport("eth0", ("10.10.0.1",), is_up=True, mtu=0, speed_mbit=0),
        InterfaceReport(
            "ib0", ("10.20.0.1", "fd00::1"), is_up=True, mtu=4092, speed_mbit=200000
        ),
        InterfaceReport("ib1", (), is_up=False, mtu=0, speed_mbit=0),
    )


def test_ports_of_the_system(monkeypatch):
    monkeypatch.setattr(node, "local_ports", lambda: (32768, 60999))
    monkeypatch.setattr(node, "reserved_ports", lambda: "8080")
    found = examined()
    assert (found.local_ports, found.reserved_ports) == ((32768, 60999), "8080")


def test_the_interface_of_an_address():
    found = {"10.20.0.1": "ib0", "fd00::1": "ib0", "": "", "192.0.2.1": ""}
    assert {own: examined(address=own).interface for own in found} == found


def test_names():
    found = examined(["n0i", "n1i", "n2i"])
    assert found.names == {
        "n0i": ("10.20.0.1",),
        "n1i": ("10.10.0.2", "10.20.0.2"),
        "n2i": (),
    }
    assert 0 < found.resolver_s < limits.PROBES_TIMEOUT


def test_a_name_server_that_hangs(only_first):
    """It is known which names it has answered, and nothing of the others."""
    limit, goes_on = only_first(1), threading.Event()

    def resolve(name):
        if name != "n0i":
            goes_on.wait(NEVER_S)
        return NETWORK.resolve(name)

    found = examined(["n0i", "n1i", "n2i"], replace(NETWORK, resolve=resolve))
    goes_on.set()
    assert found.resolver_s == limit
    assert found.names == {"n0i": ("10.20.0.1",)}


# --- folders --------------------------------------------------------------------------


def folders(**environ):
    """Return the folders of an environment by their paths."""
    return {found.path: found for found in examined(environ=environ).folders}


def test_which_folders():
    usual, other = ["/dev/shm", "/tmp"], "/usr"  # noqa: S108
    assert list(folders()) == usual
    assert list(folders(TMPDIR="", HOME="")) == usual
    assert list(folders(TMPDIR="/dev/shm", HOME=other)) == ["/dev/shm", other]  # noqa: S108
    assert list(folders(HOME="/tmp")) == usual  # noqa: S108


def test_folders_that_are_none(tmp_path):
    (tmp_path / "file").touch()
    missing, file = str(tmp_path / "missing"), str(tmp_path / "file")
    found = folders(TMPDIR=missing, HOME=file)
    assert found[missing].problem == "No such file or directory"
    assert found[missing].size == 0
    assert found[file].problem == "Not a directory"


def test_a_file_system_that_hangs(monkeypatch, only_first):
    limit = only_first(2)
    goes_on, statvfs = threading.Event(), os.statvfs

    def hang(path):
        if path == "/dead":
            goes_on.wait(NEVER_S)
        return statvfs(path)

    monkeypatch.setattr(os, "statvfs", hang)
    found = folders(HOME="/dead", TMPDIR="/usr")
    goes_on.set()
    assert found["/dead"].problem == f"no answer within {limit} s"
    assert found["/usr"].size > 0


# --- versions, variables, CPUs --------------------------------------------------------


def test_versions():
    found = examined().versions
    assert set(found) == {"python", "torchrun_hpc", "kernel"}
    assert found["torchrun_hpc"] == __version__


SHOWN = """
NCCL_ALGO NCCL_IB_PKEY GLOO_SOCKET_IFNAME FI_PROVIDER UCX_TLS TORCH_NCCL_BLOCKING_WAIT
PYTORCH_CUDA_ALLOC_CONF OMP_NUM_THREADS TORCH_DISTRIBUTED_DEBUG CUDA_VISIBLE_DEVICES
ROCR_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING LD_LIBRARY_PATH LD_PRELOAD PYTHONPATH
"""
NOT_SHOWN = """
TORCH_API_KEY FI_OPX_UUID HF_TOKEN http_proxy AWS_SECRET_ACCESS_KEY PATH MY_NCCL_ALGO
NCCL CUDA_HOME LD_LIBRARY_PATH_modshare WANDB_API_KEY
"""


def test_variables():
    shown = dict.fromkeys(sorted(SHOWN.split()), "1")
    environ = shown | dict.fromkeys(NOT_SHOWN.split(), "1") | {"NCCL_DEBUG": ""}
    found = examined(environ=environ | {"NCCL_ALGO": "Ring\n" + 1000 * "x"})
    assert found.variables == shown | {"NCCL_ALGO": "Ring\n" + 495 * "x"}


def test_cpus(monkeypatch):
    for numbers, written in (
        ({0}, "0"),
        ({8, 0, 1, 2, 3}, "0-3,8"),
        (range(0, 60, 2), ",".join(map(str, range(0, 60, 2)))),  # all of them
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, seen=numbers: seen)
        assert examined().cpus == written


# --- GPUs -----------------------------------------------------------------------------


class NVMLError(Exception):
    pass


def fail(*_arguments):
    raise NVMLError


# The functions that nvidia-ml-py documents, of two GPUs.
NVML = {
    "NVMLError": NVMLError,
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
    "NVML_VOLATILE_ECC": 0,
    "nvmlInit": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: "580.95.05",
    "nvmlDeviceGetCount": lambda: 2,
    "nvmlDeviceGetHandleByIndex": "gpu{}".format,
    "nvmlDeviceGetName": lambda gpu: "NVIDIA H100" if gpu else fail(),
    "nvmlDeviceGetTotalEccErrors": lambda gpu, *_of: (
        {"gpu0": 0, "gpu1": 3}[gpu] if gpu else fail()
    ),
    "nvmlDeviceGetComputeRunningProcesses": lambda gpu: (
        [SimpleNamespace(pid=77, usedGpuMemory=10)] if gpu == "gpu0" else []
    ),
    "nvmlDeviceGetMemoryInfo": lambda gpu: (
        SimpleNamespace(used=2**30, total=2**36) if gpu else fail()
    ),
}


def gpu(**changes):
    usual = GpuReport("NVIDIA H100", ecc_errors=0, memory_used=2**30, memory=2**36)
    return replace(usual, **changes)


# Other functions than in `NVML`, and the reports about the GPUs.
BY_NVML: dict[str, tuple[dict[str, Any], list[GpuReport]]] = {
    "all": ({}, [gpu(processes=(77,)), gpu(ecc_errors=3)]),
    "no error correction": (
        {"nvmlDeviceGetTotalEccErrors": fail},
        [gpu(ecc_errors=-1, processes=(77,)), gpu(ecc_errors=-1)],
    ),
    "processes are hidden": (
        {"nvmlDeviceGetComputeRunningProcesses": fail, "nvmlDeviceGetMemoryInfo": fail},
        [gpu(memory_used=0, memory=0), gpu(memory_used=0, memory=0, ecc_errors=3)],
    ),
    "one is lost": (
        {"nvmlDeviceGetHandleByIndex": lambda i: fail() if i == 0 else f"gpu{i}"},
        [GpuReport(model="unknown"), gpu(ecc_errors=3)],
    ),
    "none": ({"nvmlDeviceGetCount": lambda: 0}, []),
    "no release": (
        {"nvmlSystemGetDriverVersion": fail},
        [gpu(processes=(77,)), gpu(ecc_errors=3)],
    ),
    "no driver": ({"nvmlInit": fail}, []),
}


@pytest.mark.parametrize("case", BY_NVML)
def test_gpus(monkeypatch, case):
    changes, gpus = BY_NVML[case]
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**NVML | changes))
    found = examined()
    assert found.gpus == tuple(gpus)
    is_silent = case in {"no release", "no driver"}
    assert found.driver == ("" if is_silent else "580.95.05")


def test_a_driver_that_hangs(monkeypatch, only_first):
    only_first(2)
    goes_on = threading.Event()
    hangs = {"nvmlInit": lambda: goes_on.wait(NEVER_S)}
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**NVML | hangs))
    assert examined().gpus == ()
    goes_on.set()

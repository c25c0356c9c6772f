"""The record of one node, made in a few seconds and without torch.

File systems, name servers and drivers can hang: each is asked in its own thread.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import tempfile
import time
from functools import partial
from ipaddress import ip_address
from threading import Thread
from typing import TYPE_CHECKING, Any

from torchrun_hpc import __version__, limits
from torchrun_hpc.doctor.results import (
    Folder,
    GpuReport,
    InterfaceReport,
    NodeReport,
)
from torchrun_hpc.host.network import local_ports, reserved_ports
from torchrun_hpc.host.topology import own_cpus
from torchrun_hpc.names import ranges
from torchrun_hpc.variables import HOME, LD_PRELOAD, OMP, TMPDIR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torchrun_hpc.doctor.place import Place
    from torchrun_hpc.host.network import Network

_LONGEST = 500  # characters of a variable

# No secrets: libfabric's UUIDs keep other users out.
_VARIABLES = re.compile(
    r"(NCCL|RCCL|GLOO|UCX|TORCH_NCCL|TORCH_DISTRIBUTED)_\w+|FI_(?!\w*UUID)\w+"
    rf"|PYTORCH_\w*ALLOC_CONF|{OMP}|(CUDA|HIP|ROCR)_VISIBLE_DEVICES"
    "|CUDA_(DEVICE_ORDER|DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING|MODULE_LOADING)"
    f"|LD_LIBRARY_PATH|{LD_PRELOAD}|PYTHONPATH"
)


def examine(place: Place, port: int, network: Network) -> NodeReport:
    """Return the record of this node, in little more than `limits.PROBES_TIMEOUT`.

    ``network`` must not have resolved names before. ``port`` is for the other nodes.
    """
    names, environ = place.names, place.facts.environ
    cpus = own_cpus()
    temporary = environ.get(TMPDIR) or "/tmp"  # noqa: S108 - the system's default
    paths = ("/dev/shm", temporary, environ.get(HOME, ""))  # noqa: S108 - to look at
    folders = [path for path in dict.fromkeys(paths) if path]
    answers = _ask(
        {("name", name): partial(_resolve, name, network) for name in names}
        | {("folder", path): partial(_folder, path) for path in folders}
        | {"gpus": _gpus}
    )
    resolved = {n: answers["name", n] for n in names if ("name", n) in answers}
    slowest = max((seconds for _, seconds in resolved.values()), default=0.0)
    gpus, driver = answers.get("gpus", ((), ""))
    interfaces = tuple(_interfaces(network))
    of_job = (each.name for each in interfaces if place.address in each.addresses)
    late = f"no answer within {limits.PROBES_TIMEOUT:g} s"
    return NodeReport(
        rank=place.node_rank,
        host=place.host,
        address=place.address,
        interface=next(of_job, ""),
        fast_host=place.fast_host,
        port=port,
        workers=place.workers * place.task.local_size,
        interfaces=interfaces,
        names={name: addresses for name, (addresses, _) in resolved.items()},
        routes={
            name: str(network.source_toward(ip_address(addresses[0])) or "")
            for name, (addresses, _) in resolved.items()
            if addresses and name != place.fast_host
        },
        resolver_s=slowest if len(resolved) == len(names) else limits.PROBES_TIMEOUT,
        limits={
            # The launcher raises the soft limit to the hard one.
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            "processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
            "locked memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        },
        folders=tuple(
            answers.get(("folder", path), Folder(path[:_LONGEST], 0, 0, late))
            for path in folders
        ),
        cpus=ranges(cpus, most=len(cpus)),
        cores=os.cpu_count() or 0,
        gpus=gpus,
        driver=driver,
        versions={
            "python": platform.python_version(),
            "torchrun_hpc": __version__,
            "kernel": platform.release(),
        },
        variables={
            name: value[:_LONGEST]
            for name, value in sorted(environ.items())
            if value and _VARIABLES.fullmatch(name)
        },
        local_ports=local_ports(),
        reserved_ports=reserved_ports(),
    )


def _ask(questions: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
    answers = {}

    def ask(key: Any, question: Callable[[], Any]) -> None:
        with contextlib.suppress(Exception):  # of a driver, or a file system
            answers[key] = question()

    threads = [Thread(target=ask, args=each, daemon=True) for each in questions.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limits.PROBES_TIMEOUT
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    return answers.copy()  # a late thread must not change it


def _interfaces(network: Network) -> Iterator[InterfaceReport]:
    for each in network.interfaces:
        ips = [address.ip for address in each.addresses]
        if not any(ip.is_loopback for ip in ips):
            texts = tuple(map(str, ips))
            speed_mbit = each.speed_mbit
            yield InterfaceReport(each.name, texts, each.up, each.mtu, speed_mbit)


def _resolve(name: str, network: Network) -> tuple[tuple[str, ...], float]:
    start = time.monotonic()
    return tuple(map(str, network.resolve(name))), time.monotonic() - start


def _folder(path: str) -> Folder:
    free, size, problem = 0, 0, ""
    try:
        state = os.statvfs(path)
        free, size = (n * state.f_frsize for n in (state.f_bavail, state.f_blocks))
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(4096))
    except OSError as error:
        problem = error.strerror or type(error).__name__
    return Folder(path[:_LONGEST], free, size, problem)


def _gpus() -> tuple[tuple[GpuReport, ...], str]:
    """Return the GPUs, and the release of NVIDIA's driver; raise without a driver.

    The driver answers by NVML, whose library the extra ``doctor`` installs.
    """
    import pynvml as nvml  # noqa: PLC0415 - of an extra

    def ask(question: Callable[..., Any], *about: Any, instead: Any) -> Any:
        try:
            return question(*about)
        except nvml.NVMLError:  # the GPU does not support it, or is lost
            return instead

    nvml.nvmlInit()
    reports = []
    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = ask(nvml.nvmlDeviceGetHandleByIndex, index, instead=None)
        name = ask(nvml.nvmlDeviceGetName, gpu, instead="unknown")
        errors = ask(nvml.nvmlDeviceGetTotalEccErrors, gpu, *uncorrected, instead=-1)
        running = ask(nvml.nvmlDeviceGetComputeRunningProcesses, gpu, instead=[])
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, gpu, instead=None)
        sizes = getattr(memory, "used", 0), getattr(memory, "total", 0)
        pids = tuple(process.pid for process in running)
        reports.append(GpuReport(str(name), errors, pids, *sizes))
    return tuple(reports), str(ask(nvml.nvmlSystemGetDriverVersion, instead=""))

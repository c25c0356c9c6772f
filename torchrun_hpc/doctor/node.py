"""What one node shows of itself: in a few seconds, and without torch.

What cannot be read is left out. What may hang, a file system, a name server, a driver,
is asked in a thread, and not waited for longer than `_LIMIT`.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import tempfile
import threading
import time
from concurrent.futures import Future, wait
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from torchrun_hpc import __version__
from torchrun_hpc.doctor.results import Folder, Gpu, Interface, Node
from torchrun_hpc.launching.resolver import ResolverCheck
from torchrun_hpc.planning.inputs import Resolver
from torchrun_hpc.reporting.console import printable
from torchrun_hpc.schedulers.process import read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torchrun_hpc.network import Network

_LIMIT = 5.0  # seconds
_RESOLVER_S = 1.0  # seconds that the resolver has: a Python must start, and ask
_LONGEST = 500  # characters of a variable
_FILE = bytes(4096)  # is written to each folder

# The launcher raises the soft limit of open files to the hard one: that counts.
_SOFT, _HARD = 0, 1
_LIMITS = {
    "files": (resource.RLIMIT_NOFILE, _HARD),
    "processes": (resource.RLIMIT_NPROC, _SOFT),
    "locked memory": (resource.RLIMIT_MEMLOCK, _SOFT),
}

# Files in LD_LIBRARY_PATH; their real names have the version.
_PLUGINS = {"nccl plugin": "lib[nr]ccl-net*.so*", "libfabric": "libfabric.so.*"}

_VARIABLES = re.compile(
    r"(NCCL|RCCL|GLOO|FI|TORCH|PYTORCH|UCX)_\w+|OMP_NUM_THREADS"
    "|(CUDA|HIP|ROCR)_VISIBLE_DEVICES|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH"
    "|CUDA_(DEVICE_ORDER|DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING|MODULE_LOADING)"
)
# NCCL_IB_PKEY is the number of a partition. PSM's UUID keeps other users out.
_SECRETS = re.compile(
    "TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|UUID|(?<!IB_P)KEY", re.IGNORECASE
)

_DRIVER = Path("/proc/driver/nvidia")

_Found = TypeVar("_Found")


def examine(  # noqa: PLR0913, PLR0917 - what the launcher knows of a node
    rank: int,
    host: str,
    fast_host: str,
    address: str,
    workers: int,
    names: Sequence[str],
    network: Network,
    environ: Mapping[str, str],
) -> Node:
    """Look at this node; it takes little more than `_LIMIT` at most.

    Args:
        rank: Its rank.
        host: Its name in the job.
        fast_host: Its name on the job's network.
        address: Its address for the job; empty if it is not known.
        workers: How many workers it starts.
        names: Names of nodes, to be resolved.
        network: Its network, which was not asked for these names before.
        environ: The environment of the job.
    """
    start = time.monotonic()
    check = _begin(ResolverCheck, network)
    asked = {name: _begin(_resolve, name, network) for name in names}
    folders = {path: _begin(_folder, path) for path in _paths(environ)}
    interfaces = _begin(_interfaces, network)
    nvml, driver = _begin(_by_nvml), _begin(_by_driver)
    plugins = _begin(_plugins, environ)

    is_silent = bool(wait(asked.values(), _LIMIT).not_done)
    resolver_s = time.monotonic() - start if asked else 0.0
    others: list[Future[Any]] = [check, *folders.values(), interfaces, nvml, driver]
    wait([*others, plugins], max(start + _LIMIT - time.monotonic(), 0.0))
    time.sleep(max(start + _RESOLVER_S - time.monotonic(), 0.0))
    resolver = check.result().result() if _is_known(check) else Resolver.UNKNOWN
    no_gpus: tuple[list[Gpu], str] = ([], "")
    gpus, release = _known(nvml, _known(driver, no_gpus))
    found = _known(interfaces, [])
    late = f"no answer within {_LIMIT:g} s"
    return Node(
        rank=rank,
        host=host,
        address=address,
        interface=next((i["name"] for i in found if address in i["addresses"]), ""),
        fast_host=fast_host,
        port=0,
        workers=workers,
        interfaces=found,
        names={name: ips.result() for name, ips in asked.items() if _is_known(ips)},
        resolver=(Resolver.SILENT if is_silent else resolver).value,
        resolver_s=resolver_s,
        limits={k: resource.getrlimit(n)[which] for k, (n, which) in _LIMITS.items()},
        folders=[_known(f, _unknown(path, late)) for path, f in folders.items()],
        cpus=_ranges(os.sched_getaffinity(0)),
        cores=os.cpu_count() or 0,
        gpus=gpus,
        driver=release,
        versions=_versions() | _known(plugins, {}),
        torch=None,
        variables=_variables(environ),
        findings=[],
    )


def _begin(function: Callable[..., _Found], *arguments: Any) -> Future[_Found]:
    """Run a function in a thread that keeps no process from ending."""
    future: Future[_Found] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - of a driver, or a file system
            future.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError as error:  # no more threads
        future.set_exception(error)
    return future


def _is_known(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None


def _known(future: Future[_Found], instead: _Found) -> _Found:
    """Return what a function has found by now, if it has."""
    return future.result() if _is_known(future) else instead


# --- network and files ----------------------------------------------------------------


def _interfaces(network: Network) -> list[Interface]:
    states: Mapping[str, Any] = psutil.net_if_stats()
    return [
        Interface(
            name=interface.name,
            addresses=[str(own.ip) for own in interface.addresses],
            is_up=interface.up,
            mtu=getattr(states.get(interface.name), "mtu", 0),
            speed_mbit=getattr(states.get(interface.name), "speed", 0),
        )
        for interface in network.interfaces
        if not any(own.ip.is_loopback for own in interface.addresses)
    ]


def _resolve(name: str, network: Network) -> list[str]:
    return [str(address) for address in network.resolve(name)]


def _paths(environ: Mapping[str, str]) -> list[str]:
    temporary = environ.get("TMPDIR") or "/tmp"  # noqa: S108 - the system's default
    paths = ("/dev/shm", temporary, environ.get("HOME", ""))  # noqa: S108 - to look at
    return list(dict.fromkeys(filter(None, paths)))


def _unknown(path: str, problem: str = "") -> Folder:
    return Folder(path=printable(path, _LONGEST), free=0, size=0, problem=problem)


def _folder(path: str) -> Folder:
    """Look at a folder, and write a file that is gone when it is closed."""
    found = _unknown(path)
    try:
        state = os.statvfs(path)
        found["size"] = state.f_blocks * state.f_frsize
        found["free"] = state.f_bavail * state.f_frsize
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(_FILE)
    except OSError as error:
        found["problem"] = error.strerror or type(error).__name__
    return found


def _versions() -> dict[str, str]:
    python, kernel = platform.python_version(), platform.release()
    return {"python": python, "torchrun_hpc": __version__, "kernel": kernel}


def _plugins(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the files that NCCL would find first in LD_LIBRARY_PATH."""
    folders = filter(None, environ.get("LD_LIBRARY_PATH", "").split(":"))
    paths = [Path(folder) for folder in folders]
    found = {}
    for name, pattern in _PLUGINS.items():
        files = (file for path in paths for file in sorted(path.glob(pattern)))
        if file := next(files, None):
            found[name] = printable(file.resolve().name, _LONGEST)
    return found


# --- CPUs, GPUs, variables ------------------------------------------------------------


def _ranges(numbers: Iterable[int]) -> str:
    """Write all numbers: those of `reporting.names` are for a person, and are cut."""
    pairs = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in pairs]
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def _by_nvml() -> tuple[list[Gpu], str]:
    """Return the GPUs and the release of their driver.

    Raises:
        ImportError: The package is not installed.
        pynvml.NVMLError: There is no such driver.
    """
    import pynvml  # noqa: PLC0415 - of an extra

    def ask(question: Callable[..., _Found], *about: Any, instead: _Found) -> _Found:
        try:
            return question(*about)
        except pynvml.NVMLError:  # this GPU has none, or is lost
            return instead

    pynvml.nvmlInit()
    gpus = []
    uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu: Any = ask(pynvml.nvmlDeviceGetHandleByIndex, index, instead=None)
        if gpu is None:
            continue
        errors = ask(pynvml.nvmlDeviceGetTotalEccErrors, gpu, *uncorrected, instead=-1)
        running: Any = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu, instead=[])
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo, gpu, instead=None)
        gpus.append(
            Gpu(
                model=_text(ask(pynvml.nvmlDeviceGetName, gpu, instead="unknown")),
                ecc_errors=errors,
                processes=[process.pid for process in running],
                memory_used=getattr(memory, "used", 0),
            )
        )
    release = _text(ask(pynvml.nvmlSystemGetDriverVersion, instead=""))
    ask(pynvml.nvmlShutdown, instead=None)
    return gpus, release


def _by_driver() -> tuple[list[Gpu], str]:
    """Return the same by NVIDIA's files in /proc, as far as these know it."""
    texts = [read(str(path)) for path in sorted(_DRIVER.glob("gpus/*/information"))]
    models = [re.search(r"^Model:\s*(.+)", text or "", re.MULTILINE) for text in texts]
    release = re.search(
        r"Module(?: for \S+)?\s+([0-9.]+)", read(str(_DRIVER / "version")) or ""
    )
    return [
        Gpu(model=_text(model[1]), ecc_errors=-1, processes=[], memory_used=0)
        for model in models
        if model
    ], release[1] if release else ""


def _text(value: str | bytes) -> str:
    """Read a text of NVML's, which older releases of its package give as bytes."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return printable(text, _LONGEST).strip()


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: printable(value, _LONGEST)
        for name, value in sorted(environ.items())
        if value and _VARIABLES.fullmatch(name) and not _SECRETS.search(name)
    }

"""The imports of a process before its forks, and checks that forks are possible."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torchrun_hpc import files, limits
from torchrun_hpc.errors import LaunchError, count
from torchrun_hpc.host import procfs
from torchrun_hpc.preload import worker
from torchrun_hpc.schedulers.process import environment
from torchrun_hpc.variables import (
    GROUP_RANK,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    RANK,
    WORLD_SIZE,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# An agent sets these for each worker, so they do not exist at the import.
_OF_A_WORKER = {RANK, LOCAL_RANK, GROUP_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE}
_OF_A_WORKER |= {MASTER_ADDR, MASTER_PORT}

# Files of Linux itself. Other files in /dev belong to GPUs and networks.
_NO_DEVICE = re.compile(
    "/dev/(null|zero|full|u?random|tty|console|pts/|shm/)|(?!/dev/)"
)

_MODULES = (".py", ".pyc", ".so")


class ForkError(Exception):
    """Explains why no worker can be a fork of this process."""


class _WatchedEnvironment(type(environment())):  # type: ignore[misc]
    read: set[str]

    def __getitem__(self, key: str) -> str:
        if key in _OF_A_WORKER:
            self.read.add(key)
        return str(super().__getitem__(key))


def torch_version() -> str:
    """Return torch's version without importing it; empty if torch is not installed."""
    from importlib import metadata  # noqa: PLC0415 - slow to import

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def import_torch() -> None:
    """Import torch, which takes a second or more, and check its release."""
    try:
        with worker.restored_after_import():
            import torch  # noqa: F401, PLC0415
    except Exception as error:  # noqa: BLE001 - a library of its own may be missing
        raise LaunchError(
            "HPC018",
            f"torch cannot be imported by {sys.executable}: {error}. Load the module "
            "or activate the environment that has torch",
        ) from None
    from torchrun_hpc.host import capabilities  # noqa: PLC0415

    capabilities.check_release()


def import_all(names: Iterable[str]) -> None:
    """Import modules; raise `ForkError` if a fork could not use them."""
    folder, environ = Path.cwd(), cast("Any", environment())
    plain = type(environ)
    _WatchedEnvironment.read = set()
    environ.__class__ = _WatchedEnvironment
    try:
        for name in names:
            _import(name)
            if _WatchedEnvironment.read:
                read = ", ".join(sorted(_WatchedEnvironment.read))
                text = f"{name} reads {read} at its import"
                raise ForkError(f"{text}, but each worker has its own value")
    finally:
        environ.__class__ = plain
    if Path.cwd() != folder:
        raise ForkError("the import changes the working directory")


def _import(name: str) -> None:
    try:
        with worker.restored_after_import():
            importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may do anything
        first = str(error).partition("\n")[0]
        text = f"{name} cannot be imported ({type(error).__name__}: {first})"
        raise ForkError(text) from None


def check_devices(opened: Iterable[int]) -> None:
    """Raise `ForkError` if an import has ``opened`` a device, such as a GPU."""
    paths = [path for path in map(procfs.target, opened) if not _NO_DEVICE.match(path)]
    if paths:
        raise ForkError(f"the import initialised a device ({paths[0]})")


def build_problem() -> str:
    """Return why forks were never tried with this torch; empty if they were."""
    torch: Any = sys.modules["torch"]
    backend = getattr(torch._C, "_get_privateuse1_backend_name", str)()  # noqa: SLF001
    devices = [name for name in ("hip", "xpu") if getattr(torch.version, name, None)]
    devices += [backend] if backend not in ("", "privateuseone") else []
    return f"this PyTorch is for {devices[0]}" if devices else ""


def check_names(folder: str) -> None:
    """Raise `ForkError` if a module in ``folder`` has an imported module's name.

    A script in this folder would import the folder's module.
    """
    for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
        module = sys.modules.get(path.name.partition(".")[0])
        file = Path(getattr(module, "__file__", None) or path)
        if module is None or path in (file, file.parent):
            continue
        if path.suffix in _MODULES or files.exists(f"{path}/__init__.py"):
            raise ForkError(f"{path} has the name of a module that is imported already")


def check_threads() -> None:
    """Raise `ForkError` if there are threads, which a fork would not have."""
    if _other_threads():
        _fails_in_fork(lambda: False)  # before a fork, OpenBLAS ends its threads
    if _other_threads():
        names = ", ".join(thread.name for thread in threading.enumerate()[1:])
        text = f"the import leaves {count(_other_threads(), 'thread')} behind"
        raise ForkError(f"{text} ({names})" if names else text)


def check_openmp(*, is_bound: bool) -> None:
    """Raise `ForkError` if OpenMP hangs in a fork, or leaves a bound fork's CPUs."""
    # Without torch, the trial uses no OpenMP. A library that binds shows it at import.
    is_moved = is_bound and bool(worker.chosen_by_import)
    if is_moved or _fails_in_fork(lambda: _leaves_cpus(is_bound=is_bound)):
        raise ForkError("in a fork, OpenMP hangs or leaves the fork's CPUs")


def _fails_in_fork(fails: Callable[[], bool]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads
        child = os.fork()
    if child == 0:
        try:
            os._exit(fails())
        finally:  # this process must not continue
            os._exit(1)
    return os.waitpid(child, 0)[1] != 0


def _leaves_cpus(*, is_bound: bool) -> bool:
    """Return whether threads of this fork leave the CPUs to which it binds itself.

    If OpenMP hangs, SIGALRM ends this fork.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.alarm(limits.FORK_TRIAL_TIMEOUT)
    cpu = {min(os.sched_getaffinity(0))}
    if is_bound:
        os.sched_setaffinity(0, cpu)
    if "torch" in sys.modules:
        import torch  # noqa: PLC0415 - only if an import has loaded it

        torch.set_num_threads(2)
        torch.ones(2**16, device="cpu").add_(1)  # GRAIN_SIZE (2**15) for each thread
    masks = map(os.sched_getaffinity, procfs.threads())
    return is_bound and any(mask != cpu for mask in masks)


def _other_threads() -> int:
    return len(procfs.threads()) - 1

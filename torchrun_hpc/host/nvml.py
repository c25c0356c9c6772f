"""The GPUs of this node as NVIDIA's driver describes them, by NVML.

The library is one of the extra ``doctor``. A driver may hang: ask in a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Gpu:
    """A GPU, as NVML knows it.

    Attributes:
        model: Its name; ``unknown`` if the driver does not report it.
        ecc_errors: Uncorrected errors since the driver was loaded; -1 if unknown.
        processes: Process ids that compute on it.
        memory_used: Used bytes of its memory; 0 if unknown.
        memory: Bytes of its memory; 0 if unknown.
    """

    model: str
    ecc_errors: int = -1
    processes: tuple[int, ...] = ()
    memory_used: int = 0
    memory: int = 0


def gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs and the release of their driver.

    Raises:
        ImportError: The library is missing.
        Exception: One of the library's: there is no driver.
    """
    import pynvml as nvml  # noqa: PLC0415 - of an extra

    def ask(question: Callable[..., Any], *about: Any, instead: Any) -> Any:
        try:
            return question(*about)
        except nvml.NVMLError:  # this GPU has none, or is lost
            return instead

    nvml.nvmlInit()
    found = []
    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = ask(nvml.nvmlDeviceGetHandleByIndex, index, instead=None)
        name = ask(nvml.nvmlDeviceGetName, gpu, instead="unknown")
        errors = ask(nvml.nvmlDeviceGetTotalEccErrors, gpu, *uncorrected, instead=-1)
        running = ask(nvml.nvmlDeviceGetComputeRunningProcesses, gpu, instead=[])
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, gpu, instead=None)
        sizes = getattr(memory, "used", 0), getattr(memory, "total", 0)
        found.append(Gpu(str(name), errors, tuple(p.pid for p in running), *sizes))
    return tuple(found), str(ask(nvml.nvmlSystemGetDriverVersion, instead=""))

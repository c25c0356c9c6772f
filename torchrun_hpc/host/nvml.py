"""This node's GPUs, from NVIDIA's driver by NVML.

The extra ``doctor`` installs the library. A driver may hang, so call this in a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class GpuReport:
    """A GPU that NVML lists.

    Attributes:
        model: The GPU's model, or ``unknown``.
        ecc_errors: Uncorrected errors since the driver was loaded; -1 if unknown.
        processes: Pids of the processes that compute on this GPU.
        memory_used: Bytes of the GPU's memory that are in use; 0 if unknown.
        memory: Size of the GPU's memory in bytes; 0 if unknown.
    """

    model: str
    ecc_errors: int = -1
    processes: tuple[int, ...] = ()
    memory_used: int = 0
    memory: int = 0


def gpus() -> tuple[tuple[GpuReport, ...], str]:
    """Return the GPUs, and their driver's release; without library or driver, raise."""
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

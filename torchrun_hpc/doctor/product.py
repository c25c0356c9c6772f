"""The compute test: the product of two matrices, equal on all devices."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
import time
from typing import TypeAlias

import torch

from torchrun_hpc.host import procfs

# As in `results.Worker`: flops, digest, norm, and wrong.
Product: TypeAlias = tuple[float, str, float, int]

# Rows of a matrix, enough to keep the device busy; type of its elements.
_MATRICES = {"cpu": (512, torch.float32), "cuda": (4096, torch.bfloat16)}
_FACTORS = 0.6180339887498949, 0.4142135623730951  # no simple fractions
_LONG_ENOUGH, _LEAST = 0.1, 5  # seconds to repeat it; repetitions
# For x86, POWER, and ARM, whose kernel writes numbers.
_MODEL = re.compile(r"(?m)^(?:model name|cpu|CPU implementer|CPU part)\s*: (.+)")


def kind(device: torch.device) -> tuple[str, str]:
    """Return a device's model, which decides how it rounds, and the type of elements.

    The library's choice of instructions does not count: if it differs on one node, the
    test must find that.
    """
    dtype = str(_MATRICES[device.type][1]).removeprefix("torch.")
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), dtype
    names = dict.fromkeys(_MODEL.findall(procfs.read("/proc/cpuinfo") or ""))
    return " ".join(names) or platform.machine(), dtype


def multiply(device: torch.device) -> Product:
    """Multiply the matrices several times."""
    size, dtype = _MATRICES[device.type]
    # IEEE 754 defines how all of this is rounded.
    numbers = torch.arange(size * size, dtype=torch.float64).reshape(size, size)
    pair = [(numbers * each % 1 - 0.5).to(device, dtype) for each in _FACTORS]
    threads = torch.get_num_threads()
    if device.type == "cpu":  # waiting threads would also use time
        torch.set_num_threads(1)
    # Other programs on a shared machine are not the fault of its CPU.
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds: list[float] = []
    product = torch.matmul(*pair)  # also loads libraries
    while len(seconds) < _LEAST or sum(seconds) < _LONG_ENOUGH:
        synchronize(device)
        start = clock()
        product = torch.matmul(*pair)
        synchronize(device)
        seconds.append(clock() - start)
    torch.set_num_threads(threads)
    wrong = product.numel() - int(product.isfinite().sum())
    norm = 0.0 if wrong else float(product.double().norm())
    data = product.cpu()
    content = ctypes.string_at(data.data_ptr(), data.numel() * data.element_size())
    digest = hashlib.sha256(content).hexdigest()[:16]
    return 2 * size**3 / min(seconds), digest, norm, wrong


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

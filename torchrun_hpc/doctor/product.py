"""The compute test: the product of two matrices, which are the same on all devices."""

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

# Rows of a matrix, so many that the device is busy, and the type of its elements.
_MATRICES = {"cpu": (512, torch.float32), "cuda": (4096, torch.bfloat16)}
_FACTORS = 0.6180339887498949, 0.4142135623730951  # no simple fractions
_LONG_ENOUGH, _LEAST = 0.1, 5  # seconds to repeat it; repetitions
# Of x86, of POWER, and of ARM, whose kernel writes numbers.
_MODEL = re.compile(r"(?m)^(?:model name|cpu|CPU implementer|CPU part)\s*: (.+)")


def kind(device: torch.device) -> tuple[str, str]:
    """Return the model of a device, which decides how it rounds, and the type.

    The instructions that the library has chosen are not part of it. They may differ on
    one node, which then rounds differently: the test must find that.
    """
    dtype = str(_MATRICES[device.type][1]).removeprefix("torch.")
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), dtype
    names = dict.fromkeys(_MODEL.findall(procfs.read("/proc/cpuinfo") or ""))
    name = " ".join(names) or platform.machine()
    return name, dtype


def multiply(device: torch.device) -> Product:
    """Multiply two matrices, again and again; they are the same on all devices."""
    size, dtype = _MATRICES[device.type]
    # All of this is rounded as IEEE 754 demands.
    numbers = torch.arange(size * size, dtype=torch.float64).reshape(size, size)
    pair = [(numbers * each % 1 - 0.5).to(device, dtype) for each in _FACTORS]
    threads = torch.get_num_threads()
    if device.type == "cpu":  # threads that wait for each other also use time
        torch.set_num_threads(1)
    # What else runs on a shared machine is not the fault of its CPU.
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
    """Wait until a GPU has done all that it was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Figures with their units."""

from __future__ import annotations

_MILLI = 1e-3


def rate(bandwidth: float) -> str:
    """Write bytes per second in bits, the unit of networks."""
    bits = 8 * bandwidth
    return f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"  # noqa: PLR2004


def gigabytes(bandwidth: float) -> str:
    """Write bytes per second as nccl-tests do."""
    return f"{bandwidth / 1e9:.2f} GB/s"


def duration(seconds: float) -> str:
    """Write a short time."""
    is_long = seconds >= _MILLI
    return f"{seconds / _MILLI:.1f} ms" if is_long else f"{seconds * 1e6:.0f} us"


def size(number: float) -> str:
    """Write a number of bytes: ``512 B``, ``16 MiB``, ``1.5 GiB``."""
    power = min(max(int(number).bit_length() - 1, 0) // 10, 3)
    return f"{number / 2 ** (10 * power):.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def speed(flops: float) -> str:
    """Write floating point operations per second."""
    is_tera = flops >= 1e12  # noqa: PLR2004
    return f"{flops / 1e12:.2f} TFLOP/s" if is_tera else f"{flops / 1e9:.2f} GFLOP/s"

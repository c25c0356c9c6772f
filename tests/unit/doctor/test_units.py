"""Figures have units."""

from __future__ import annotations

import pytest

from torchrun_hpc.doctor import units


@pytest.mark.parametrize(
    ("write", "values", "texts"),
    [
        (units.rate, (1.25e8, 6e7, 0.0), ("1.00 Gbit/s", "480 Mbit/s", "0 Mbit/s")),
        (units.gigabytes, (1.5e9, 0.0), ("1.50 GB/s", "0.00 GB/s")),
        (units.duration, (3e-5, 5.3e-3), ("30 us", "5.3 ms")),
        (units.size, (0, 8, 1024, 2**20 - 4), ("0 B", "8 B", "1 KiB", "1024 KiB")),
        (units.size, (2**24, 2**24 - 4, 1.5 * 2**30), ("16 MiB", "16 MiB", "1.5 GiB")),
        (units.size, (2**42,), ("4096 GiB",)),
        (units.speed, (4.2e10, 2.5e14), ("42.00 GFLOP/s", "250.00 TFLOP/s")),
    ],
)
def test_units(write, values, texts):
    assert tuple(map(write, values)) == texts

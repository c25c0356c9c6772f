"""Train for some seconds: some work in different functions, and pauses.

    healthy.py SECONDS [STEADY]

A step is at most 0.2 s of work, and a pause of up to 0.5 s, on each rank another one.
With STEADY it is the same line in which every rank is nearly all of the time.
"""

from __future__ import annotations

import random
import sys
import time

import torch
import torch.distributed as dist

end = time.monotonic() + float(sys.argv[1])
is_steady = len(sys.argv) > 2


def work(seconds: float) -> None:
    """Compute."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.rand(100, 100) @ torch.rand(100, 100)


def forward() -> None:
    """Compute one thing."""
    work(0.1)


def backward() -> None:
    """Compute another one."""
    work(0.1)


def wait() -> None:
    """Wait for data, or for a disk."""
    time.sleep(random.uniform(0, 0.5))  # noqa: S311


dist.init_process_group("gloo")
random.seed(dist.get_rank())
while True:
    done = torch.tensor(float(time.monotonic() > end))
    dist.all_reduce(done)
    if done:
        break
    if is_steady:
        time.sleep(0.4)
        continue
    forward()
    wait()
    backward()
dist.destroy_process_group()

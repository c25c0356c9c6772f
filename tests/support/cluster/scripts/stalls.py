"""The last rank reads, and all others wait for it in an all-reduce.

    stalls.py FOLDER

It reads the named pipe FOLDER/data, until somebody has written into it. Then all of
them end, each with a file FOLDER/ended.RANK.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])


def read() -> None:
    """Wait for data."""
    with open(folder / "data") as data:  # noqa: PTH123 - no frame of pathlib
        data.read()


def step() -> None:
    """Do what a training does in a step."""
    if is_last:
        read()
    else:
        dist.all_reduce(ones)


dist.init_process_group("gloo")
ones = torch.ones(1)  # until the end: gloo's threads hold it a moment longer
is_last = dist.get_rank() == dist.get_world_size() - 1
step()
if is_last:
    dist.all_reduce(ones)
(folder / f"ended.{dist.get_rank()}").touch()
dist.destroy_process_group()

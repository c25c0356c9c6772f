"""Trains a small model with DistributedDataParallel; runs on any number of workers.

    python -m torchrun_hpc --nproc_per_node=2 examples/ddp.py
    srun python -m torchrun_hpc --nproc_per_node=gpu examples/ddp.py

The script is what one would write for torchrun: nothing in it knows of the cluster.
Each step takes one batch of fixed size, of which every worker gets its part, so the
loss does not depend on the number of workers.
"""

from __future__ import annotations

import argparse
import os
import socket
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 96  # rows, split among the workers
FEATURES = 16


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make the same data on every worker: a noisy linear function."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(FEATURES, 1, generator=generator)
    data = []
    for _ in range(steps):
        inputs = torch.randn(BATCH, FEATURES, generator=generator)
        noise = torch.randn(BATCH, 1, generator=generator)
        data.append((inputs, inputs @ weights + 0.1 * noise))
    return data


def train(steps: int, rank: int, world_size: int, device: torch.device) -> float:
    """Train, and return the loss of the last step over the whole batch."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1))
    model = DistributedDataParallel(layers.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = torch.zeros((), device=device)
    for inputs, targets in batches(steps):
        part = slice(rank, None, world_size)
        outputs = model(inputs[part].to(device))
        # Sums divided by the whole batch, times the world size because DDP averages:
        # right also when the workers' parts differ by a row.
        loss = nn.functional.mse_loss(
            outputs, targets[part].to(device), reduction="sum"
        )
        loss = loss * world_size / BATCH
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.all_reduce(loss)
    return loss.item() / world_size


def main() -> None:
    """Join the other workers, train, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")

    rank, world_size = dist.get_rank(), dist.get_world_size()
    # In one piece: the workers share the terminal.
    print(f"rank {rank} of {world_size} on {socket.gethostname()}, {device}\n", end="")
    loss = train(steps, rank, world_size, device)
    if rank == 0:
        print(f"loss after {steps} steps: {loss:.6f}\n", end="")
    # Gloo's threads let go of the last tensor a moment after its result is there. Up to
    # torch 2.4 a worker may hang if the group is gone by then, in 2.13 abort.
    time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

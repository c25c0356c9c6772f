"""Trains a small model with DistributedDataParallel, and resumes from its checkpoint.

    srun python -m torchrun_hpc --nproc_per_node=gpu \
        examples/requeue/checkpoint_ddp.py --checkpoint checkpoint.pt

The script is what one would write for torchrun: nothing in it knows of the cluster, and
it does the same after a restart on the same nodes and in a job that was requeued.
Rank 0 writes the checkpoint, and reads it. It may be on another node each time, so all
nodes have to see the file.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 96  # rows, split among the workers
FEATURES = 16


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    option = parser.add_argument
    option("--checkpoint", type=Path, required=True, metavar="FILE")
    option("--steps", type=int, default=1000)
    option("--save-every", type=int, default=10, metavar="STEPS")
    option("--pause", type=float, default=0.0, metavar="SECONDS", help="per step")
    return parser.parse_args()


def main() -> None:
    """Join the other workers, and train from the checkpoint on, if there is one."""
    args = parse()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1))
    model = DistributedDataParallel(layers.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    done = resume(args.checkpoint, model, optimizer)
    say(f"{dist.get_world_size()} workers, from step {done} on")

    for step in range(done, args.steps):
        train(step, model, optimizer, device)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(args.checkpoint, model, optimizer, step + 1)
        time.sleep(args.pause)
    inputs, targets = batch(args.steps)  # on which it has not trained
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
    say(f"loss after {args.steps} steps: {loss.item():.6f}")
    # Gloo's threads let go of the last tensor a moment after its result is there. Up to
    # torch 2.4 a worker may hang if the group is gone by then, in 2.13 abort.
    time.sleep(0.2)
    dist.destroy_process_group()


def resume(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore what rank 0 reads on all ranks; return how many steps were done."""
    states: list[Any] = [None]
    if dist.get_rank() == 0 and file.exists():
        states = [torch.load(file, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(states)
    if states[0] is None:
        return 0
    model.load_state_dict(states[0]["model"])
    optimizer.load_state_dict(states[0]["optimizer"])
    return int(states[0]["step"])


def save(
    file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Write the checkpoint on rank 0; if that is interrupted, the old one stays."""
    if dist.get_rank() != 0:
        return
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
    }
    new = file.with_name(file.name + ".new")
    torch.save(state, new)
    new.replace(file)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the data of a step, the same on every worker and in every run."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, FEATURES, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True)


def train(
    step: int, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    """Train on this worker's part of the batch of a step."""
    inputs, targets = batch(step)
    world_size = dist.get_world_size()
    part = slice(dist.get_rank(), None, world_size)
    outputs = model(inputs[part].to(device))
    # Sums divided by the whole batch, times the world size because DDP averages: right
    # also when the workers' parts differ by a row.
    loss = nn.functional.mse_loss(outputs, targets[part].to(device), reduction="sum")
    optimizer.zero_grad()
    (loss * world_size / BATCH).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def say(text: str) -> None:
    """Print a line on rank 0, at once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()

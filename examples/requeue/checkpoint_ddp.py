"""Train a small model with DistributedDataParallel, and resume from its checkpoint.

    srun python -m torchrun_hpc --nproc_per_node=gpu \
        examples/requeue/checkpoint_ddp.py --checkpoint checkpoint.pt

You would write the same script for torchrun: it knows nothing about the cluster. A
restart on the same nodes and a requeued job look the same to it. Rank 0 writes and
reads the checkpoint. Rank 0 can be on another node each time, so all nodes must see
the file.
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
    """Join the other workers, and train, from the checkpoint if there is one."""
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
    inputs, targets = batch(args.steps)  # not used for training
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
    say(f"loss after {args.steps} steps: {loss.item():.6f}")
    # Gloo's threads release the last tensor shortly after its result arrives. If the
    # group is gone by then, a worker may hang (up to torch 2.4) or abort (2.13).
    time.sleep(0.2)
    dist.destroy_process_group()


def resume(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore rank 0's checkpoint on all ranks, and return its number of steps."""
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
    """Write the checkpoint on rank 0. An interrupted write leaves the old one."""
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
    """Make a step's data, the same on every worker and in every run."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, FEATURES, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True)


def train(
    step: int, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    """Train on this worker's part of a step's batch."""
    inputs, targets = batch(step)
    world_size = dist.get_world_size()
    part = slice(dist.get_rank(), None, world_size)
    outputs = model(inputs[part].to(device))
    # DDP averages over the workers, so multiply by the world size. Dividing the sum by
    # the whole batch stays correct if the workers' parts differ by a row.
    loss = nn.functional.mse_loss(outputs, targets[part].to(device), reduction="sum")
    optimizer.zero_grad()
    (loss * world_size / BATCH).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def say(text: str) -> None:
    """Print a line on rank 0 immediately."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()

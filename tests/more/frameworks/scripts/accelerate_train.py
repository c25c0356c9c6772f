"""Trains with Hugging Face Accelerate."""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from report import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 4


def main() -> None:
    """Train, and say what came of it."""
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    model: nn.Module = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=2)
    )
    steps = 0
    for inputs, targets in batches:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps == STEPS:
            break
    report(
        "accelerate",
        accelerator.unwrap_model(model),
        rank=accelerator.process_index,
        local_rank=accelerator.local_process_index,
        world_size=accelerator.num_processes,
        steps=steps,
        environment=accelerator.distributed_type.value,
    )
    time.sleep(0.2)  # gloo's threads outlive it: see examples/ddp.py
    accelerator.end_training()


if __name__ == "__main__":
    main()

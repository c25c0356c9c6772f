"""Trains a small model with Hugging Face Accelerate.

    python -m torchrun_hpc --nproc_per_node=2 examples/accelerate_ddp.py
    srun python -m torchrun_hpc --nproc_per_node=gpu examples/accelerate_ddp.py

Accelerate reads all that it needs from torchrun's variables.
"""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 16


def main() -> None:
    """Train, and print the loss of each epoch."""
    # Without a GPU it has to be told so, or each worker would train alone.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    inputs = torch.randn(3200, FEATURES)
    targets = inputs @ torch.randn(FEATURES, 1) + 0.1 * torch.randn(3200, 1)
    data = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    for epoch in range(5):
        losses = []
        for inputs, targets in data:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        # Of all workers.
        mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
        if accelerator.is_main_process:
            print(f"epoch {epoch}: loss {mean:.4f}")
    # Gloo's threads release the last tensor a moment after its result is there, and
    # abort if the group is gone by then.
    time.sleep(0.2)
    accelerator.end_training()


if __name__ == "__main__":
    main()

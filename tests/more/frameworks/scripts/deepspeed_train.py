"""Trains with DeepSpeed, the optimizer's state divided among the workers."""

from __future__ import annotations

import time

import deepspeed
import torch
from deepspeed import comm
from report import report
from torch import nn
from torch.utils.data import TensorDataset

STEPS = 4
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def main() -> None:
    """Train, and say what came of it."""
    deepspeed.init_distributed()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    engine, _, batches, _ = deepspeed.initialize(
        model=nn.Linear(8, 1), config=CONFIG, training_data=data
    )
    for inputs, targets in batches:
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        if engine.global_steps == STEPS:
            break
    report(
        "deepspeed",
        engine.module,
        rank=comm.get_rank(),
        local_rank=comm.get_local_rank(),
        world_size=comm.get_world_size(),
        steps=engine.global_steps,
        environment=torch.distributed.get_backend(),
    )
    time.sleep(0.2)  # gloo's threads outlive it: see examples/ddp.py
    comm.destroy_process_group()


if __name__ == "__main__":
    main()

"""Trains with each framework in one world, and writes losses and weights.

    all_train.py FOLDER

Writes FOLDER/RANK.json: for each framework the losses of its steps, and the sum of the
weights, both with all digits.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import Trainer, TrainingArguments

STEPS = 3
trained: dict[str, list[float]] = {}


class Regression(lightning.LightningModule):
    """A linear model, for Lightning and for the Trainer of Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.losses: list[float] = []

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, object]:
        """Return the loss of a batch, as the Trainer expects it."""
        loss = nn.functional.mse_loss(self.layer(inputs), labels)
        self.losses.append(loss.item())
        return {"loss": loss}

    def training_step(self, batch: list[torch.Tensor], _: int) -> object:
        """Return the loss of a batch, as Lightning expects it."""
        return self(*batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer, for Lightning."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> TensorDataset:
    """Return the same data on each rank."""
    torch.manual_seed(0)
    return TensorDataset(torch.randn(32, 8), torch.randn(32, 1))


def note(name: str, losses: list[float], model: nn.Module) -> None:
    """Note the losses, and what became of the weights."""
    weights = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    total = sum(weight.detach().double().sum().item() for weight in weights)
    trained[name] = [*losses[:STEPS], total]


def with_torch(name: str, model: nn.Module) -> None:
    """Train with torch alone; a process loads the data."""
    rows = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    sampler = DistributedSampler(rows, seed=1)
    for inputs, labels in DataLoader(rows, 4, sampler=sampler, num_workers=1):
        loss = nn.functional.mse_loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    note(name, losses, model)


def model() -> nn.Module:
    """Return a model with the same weights on each rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def with_accelerate() -> None:
    """Train with Hugging Face Accelerate."""
    accelerator = Accelerator(cpu=True)
    start = model()
    optimizer = torch.optim.SGD(start.parameters(), lr=0.1)
    prepared, optimizer, batches = accelerator.prepare(
        start, optimizer, DataLoader(data(), batch_size=4)
    )
    losses = []
    for inputs, labels in batches:
        loss = nn.functional.mse_loss(prepared(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    note("accelerate", losses, prepared)


def with_trainer(folder: str) -> None:
    """Train with the Trainer of Hugging Face Transformers."""
    rows = [{"inputs": inputs, "labels": labels} for inputs, labels in data()]
    torch.manual_seed(1)
    regression = Regression()
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(model=regression, args=arguments, train_dataset=rows).train()
    note("trainer", regression.losses, regression)


def with_lightning(folder: str) -> None:
    """Train with PyTorch Lightning."""
    lightning.seed_everything(2, verbose=False)
    regression = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=STEPS,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(regression, DataLoader(data(), batch_size=4))
    note("lightning", regression.losses, regression)


def main() -> None:
    """Train with all, and write what came of it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with_torch("ddp", nn.parallel.DistributedDataParallel(model()))
    sharded = model()
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    with_torch("fsdp", sharded)
    # Inductor is in tests/support/stock/uses_processes.py; its compiler takes long.
    with_torch("compile", torch.compile(model(), backend="aot_eager"))
    with tempfile.TemporaryDirectory() as folder:
        with_accelerate()
        with_trainer(folder)
        with_lightning(folder)
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(trained))


if __name__ == "__main__":
    main()

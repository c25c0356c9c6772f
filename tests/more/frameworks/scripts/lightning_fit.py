"""Trains with PyTorch Lightning: two nodes, two processes on each."""

from __future__ import annotations

import tempfile

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from report import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 4


class Regression(lightning.LightningModule):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss of one batch."""
        inputs, targets = batch
        return nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Train, and say what came of it."""
    lightning.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    model = Regression()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=2,
            num_nodes=2,
            max_steps=STEPS,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, DataLoader(data, batch_size=2))
        assert isinstance(trainer.strategy, DDPStrategy)
        report(
            "lightning",
            model,
            rank=trainer.global_rank,
            local_rank=trainer.local_rank,
            world_size=trainer.world_size,
            steps=trainer.global_step,
            environment=type(trainer.strategy.cluster_environment).__name__,
        )


if __name__ == "__main__":
    main()

"""Trains a small model with PyTorch Lightning.

    python -m torchrun_hpc --nproc_per_node=2 examples/lightning_ddp.py
    srun python -m torchrun_hpc --nproc_per_node=gpu examples/lightning_ddp.py

Lightning wants to be told the numbers of nodes and of workers on each: torchrun's
variables have them, in any job.
"""

from __future__ import annotations

import os
import time

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 16


class Regression(lightning.LightningModule):
    """A small network for a noisy linear function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1)
        )

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss of one worker's batch."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        # Once in an epoch, averaged over all workers.
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Print the loss of the epoch, on rank 0."""
        loss = self.trainer.callback_metrics["loss"]
        self.print(f"epoch {self.current_epoch}: loss {loss:.4f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main() -> None:
    """Train."""
    lightning.seed_everything(0)
    inputs = torch.randn(3200, FEATURES)
    targets = inputs @ torch.randn(FEATURES, 1) + 0.1 * torch.randn(3200, 1)
    trainer = lightning.Trainer(
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression(), DataLoader(TensorDataset(inputs, targets), batch_size=32))
    # Lightning ends the process group itself on GPUs only.
    time.sleep(0.2)  # gloo's threads let go of the last tensor: see ddp.py
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

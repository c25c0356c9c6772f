"""Trains ResNet-50 with DistributedDataParallel.

    python -m torchrun_hpc --nproc_per_node=2 examples/resnet50_ddp.py --images 640
    srun python -m torchrun_hpc --nproc_per_node=gpu examples/resnet50_ddp.py \
        --data imagenet/train --train-num-workers 8 --checkpoint resnet50.pt

The script is what one would write for torchrun: nothing in it knows of the cluster.
Without a folder it makes synthetic images. Rank 0 writes the checkpoint after each
epoch, and when SIGUSR1 arrives. The same command resumes from it, also with another
number of workers.

Needs torchvision, and torch 2.3 or newer; tested with torch 2.13.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

CLASSES = 1000


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    option = parser.add_argument
    option("--data", metavar="FOLDER", help="images, in a folder for each class")
    option("--images", type=int, default=50_000, help="number of synthetic images")
    option("--image-size", type=int, default=224, help="pixels")
    option("--epochs", type=int, default=90)
    option("--batch-size", type=int, default=64, help="images per worker")
    option("--lr", type=float, default=0.025, help="learning rate per worker")
    option("--fixed-lr", action="store_true", help="use --lr as it is")
    option("--norm", choices=["batch", "group"], default="batch")
    option("--train-num-workers", type=int, default=0, help="DataLoader processes")
    option("--checkpoint", type=Path, metavar="FILE", help="to write and resume")
    option("--log-every", type=int, default=20, metavar="STEPS")
    return parser.parse_args()


def main() -> None:
    """Join the other workers, and train."""
    args = parse()
    signal.signal(signal.SIGUSR1, request_checkpoint)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True  # all batches have the same shape
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")

    training = Training(args, device)
    training.resume()
    data = images(args)
    while training.epoch < args.epochs:
        train_epoch(training, data)
    say(f"finished: {training.epoch} epochs")

    if device.type == "cpu":
        # Gloo's threads release the last tensor a moment after its result is there,
        # and abort if the group is gone by then.
        time.sleep(0.2)
    dist.destroy_process_group()


checkpoint_is_requested = False


def request_checkpoint(*_: object) -> None:
    """Handle SIGUSR1: the next step ends with a checkpoint."""
    global checkpoint_is_requested  # noqa: PLW0603 - a handler has no other way
    checkpoint_is_requested = True


def images(args: argparse.Namespace) -> datasets.VisionDataset:
    """Return the images of the folder, or synthetic ones: noise, with random labels."""
    size = args.image_size
    if args.data is None:
        return datasets.FakeData(
            args.images, (3, size, size), CLASSES, transforms.ToTensor()
        )
    steps = [
        transforms.RandomResizedCrop(size),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
    return datasets.ImageFolder(args.data, transforms.Compose(steps))


def group_norm(channels: int) -> nn.Module:
    """Normalise each image alone; BatchNorm sees the images of one worker."""
    return nn.GroupNorm(32, channels)


class Training:
    """Model and optimizer, and how far they have come.

    Attributes:
        model: The model; ``ddp`` is the same with gradients averaged over the workers.
        epoch: The current epoch, from 0.
        seen: Images of this epoch that all workers together have trained on.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args = args
        self.device = device
        self.epoch = 0
        self.seen = 0
        torch.manual_seed(0)
        norm = nn.BatchNorm2d if args.norm == "batch" else group_norm
        # Residual branches that begin with zero: section 5.1 of Goyal et al.
        self.model = models.resnet50(
            num_classes=CLASSES, norm_layer=norm, zero_init_residual=True
        )
        self.model.to(device, memory_format=torch.channels_last)
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4
        )
        # bfloat16 from NVIDIA's A100 on; before it float16, which needs a scaler.
        self.mixed = device.type == "cuda"
        has_bfloat16 = self.mixed and torch.cuda.get_device_capability() >= (8, 0)
        self.dtype = torch.bfloat16 if has_bfloat16 else torch.float16
        self.scaler = torch.GradScaler(enabled=self.mixed and not has_bfloat16)
        count = sum(parameter.numel() for parameter in self.model.parameters())
        say(f"{count:,} parameters")

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Train on one batch, and return this worker's loss."""
        inputs = inputs.to(
            self.device, non_blocking=True, memory_format=torch.channels_last
        )
        targets = targets.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, self.dtype, enabled=self.mixed):
            loss = nn.functional.cross_entropy(self.ddp(inputs), targets)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def set_learning_rate(self, epoch: float) -> float:
        """Set the learning rate for a moment, in epochs, and return it.

        Proportional to the number of workers, after five epochs of warm-up from the
        rate of one; a tenth from epochs 30, 60 and 80 on: Goyal et al. 2017,
        arXiv:1706.02677.
        """
        rate = float(self.args.lr)
        if not self.args.fixed_lr:
            rate *= 1 + (dist.get_world_size() - 1) * min(1, epoch / 5)
            rate *= 0.1 ** sum(epoch >= drop for drop in (30, 60, 80))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def save(self) -> None:
        """Write the checkpoint on rank 0; if that is interrupted, the old one stays."""
        path: Path | None = self.args.checkpoint
        if path is None or dist.get_rank() != 0:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": self.epoch,
            "seen": self.seen,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        torch.save(state, new)
        new.replace(path)
        say(f"checkpoint: epoch {self.epoch}, {self.seen} images")

    def resume(self) -> None:
        """Restore the checkpoint, which rank 0 reads: other nodes may not have it."""
        path: Path | None = self.args.checkpoint
        states: list[Any] = [None]
        if dist.get_rank() == 0 and path is not None and path.exists():
            states = [torch.load(path, map_location="cpu", weights_only=True)]
        dist.broadcast_object_list(states)
        state = states[0]
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"]:  # empty if it was written without float16
            self.scaler.load_state_dict(state["scaler"])
        # With more workers than before, a few images may come twice.
        self.epoch = state["epoch"]
        self.seen = state["seen"] - state["seen"] % dist.get_world_size()
        say(f"resumed: epoch {self.epoch}, {self.seen} images")


def train_epoch(training: Training, data: datasets.VisionDataset) -> None:
    """Train on the rest of an epoch, and write a checkpoint at its end."""
    global checkpoint_is_requested  # noqa: PLW0603
    args, device, world_size = training.args, training.device, dist.get_world_size()
    # Each worker crops and flips in its own way.
    torch.manual_seed(training.epoch * world_size + dist.get_rank())
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    sampler.set_epoch(training.epoch)
    # The workers take the images in turns, so each of them had an equal share of these.
    remaining = list(sampler)[training.seen // world_size :]
    loader = DataLoader(
        data,
        args.batch_size,
        sampler=remaining,
        num_workers=args.train_num_workers,
        pin_memory=device.type == "cuda",
    )
    loss_sum = torch.zeros((), device=device)
    start, steps, seen = time.perf_counter(), 0, training.seen
    for step, (inputs, targets) in enumerate(loader, 1):
        rate = training.set_learning_rate(training.epoch + training.seen / len(data))
        loss_sum += training.step(inputs, targets)
        training.seen += len(inputs) * world_size
        if step % args.log_every == 0 or step == len(loader):
            dist.all_reduce(loss_sum)
            loss = loss_sum.item() / world_size / (step - steps)
            speed = (training.seen - seen) / (time.perf_counter() - start)
            say(
                f"epoch {training.epoch}, {min(training.seen, len(data))} of "
                f"{len(data)} images: loss {loss:.4f}, learning rate {rate:.4f}, "
                f"{speed:.0f} images/s"
            )
            loss_sum.zero_()
            start, steps, seen = time.perf_counter(), step, training.seen
        if checkpoint_is_requested:
            checkpoint_is_requested = False
            training.save()
    training.epoch += 1
    training.seen = 0
    training.save()


def say(text: str) -> None:
    """Print a line on rank 0, at once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()

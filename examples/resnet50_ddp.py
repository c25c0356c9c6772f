"""Trains ResNet-50 with DistributedDataParallel, on a folder of images or on made ones.

    python -m torchrun_hpc --nproc_per_node=2 examples/resnet50_ddp.py --images 640
    srun python -m torchrun_hpc --nproc_per_node=gpu examples/resnet50_ddp.py \
        --data imagenet/train --train-num-workers 8 --checkpoint resnet50.pt

The script is what one would write for torchrun: nothing in it knows of the cluster.
Rank 0 writes the checkpoint after each epoch, and when SIGUSR1 arrives. The same
command resumes from it, also with another number of workers.

Needs torch 2.3 or newer, and torchvision.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
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
    add = parser.add_argument
    add("--data", metavar="FOLDER", help="images, a folder for each class")
    add("--images", type=int, default=50_000, help="number, where they are made")
    add("--image-size", type=int, default=224, help="pixels")
    add("--epochs", type=int, default=90)
    add("--batch-size", type=int, default=64, help="images, of each worker")
    add("--lr", type=float, default=0.025, help="learning rate, for each worker")
    add("--fixed-lr", action="store_true", help="take --lr as it is")
    add("--norm", choices=["batch", "group"], default="batch")
    add("--train-num-workers", type=int, default=0, help="loaders, of each worker")
    add("--checkpoint", type=Path, metavar="FILE")
    add("--log-every", type=int, default=20, metavar="STEPS")
    return parser.parse_args()


def main() -> None:
    """Join the other workers, and train."""
    args = parse()
    checkpoint_now = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: checkpoint_now.set())

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")

    training = Training(args, device)
    training.resume()
    data = images(args)
    while training.epoch < args.epochs:
        train_epoch(training, data, checkpoint_now)
    # Gloo's threads let go of the last tensor a moment after its result is there, and
    # abort if the group is gone by then.
    time.sleep(0.2)
    dist.destroy_process_group()


def images(args: argparse.Namespace) -> datasets.VisionDataset:
    """Return the images of a folder; without one, noise with labels by chance."""
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
    """Normalise each image alone; BatchNorm would see one worker's part of a batch."""
    return nn.GroupNorm(32, channels)


class Training:
    """Model and optimizer, and how far they have come.

    Attributes:
        model: The model; ``ddp`` is the same, with gradients averaged over the workers.
        epoch: The epoch that is trained, from 0.
        seen: Images of this epoch that are done, on all workers together.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args = args
        self.device = device
        self.epoch = 0
        self.seen = 0
        torch.manual_seed(0)
        norm = nn.BatchNorm2d if args.norm == "batch" else group_norm
        self.model = models.resnet50(
            num_classes=CLASSES, norm_layer=norm, zero_init_residual=True
        )
        self.model.to(device, memory_format=torch.channels_last)
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4
        )
        # bfloat16 since NVIDIA's A100; before it float16, which needs a scaler.
        self.mixed = device.type == "cuda"
        has_bfloat16 = self.mixed and torch.cuda.get_device_capability() >= (8, 0)
        self.dtype = torch.bfloat16 if has_bfloat16 else torch.float16
        self.scaler = torch.GradScaler(enabled=self.mixed and not has_bfloat16)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Train on one batch, and return this worker's loss."""
        last = torch.channels_last
        inputs = inputs.to(self.device, non_blocking=True, memory_format=last)
        targets = targets.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, self.dtype, enabled=self.mixed):
            loss = nn.functional.cross_entropy(self.ddp(inputs), targets)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def set_learning_rate(self, epoch: float) -> None:
        """Set the rate: by world size, warmed up, and a tenth every 30 epochs.

        After Goyal et al. 2017, arXiv:1706.02677.
        """
        rate = self.args.lr
        if not self.args.fixed_lr:
            rate *= dist.get_world_size() * min(1, epoch / 5) * 0.1 ** (epoch // 30)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def save(self) -> None:
        """Let rank 0 write the checkpoint; if it is killed, the old one is whole."""
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
        new = path.with_name(path.name + ".new")
        torch.save(state, new)
        new.replace(path)
        say(f"checkpoint: epoch {self.epoch}, {self.seen} images")

    def resume(self) -> None:
        """Go on from the checkpoint, which rank 0 alone reads: others may lack it."""
        path: Path | None = self.args.checkpoint
        box: list[Any] = [None]
        if dist.get_rank() == 0 and path is not None and path.exists():
            box = [torch.load(path, map_location="cpu", weights_only=True)]
        dist.broadcast_object_list(box)
        state = box[0]
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.epoch, self.seen = state["epoch"], state["seen"]
        say(f"resumed: epoch {self.epoch}, {self.seen} images")


def train_epoch(
    training: Training, data: datasets.VisionDataset, checkpoint_now: threading.Event
) -> None:
    """Train on what is left of an epoch, and write a checkpoint at its end."""
    args, device, world_size = training.args, training.device, dist.get_world_size()
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    sampler.set_epoch(training.epoch)
    left = list(sampler)[training.seen // world_size :]
    loader = DataLoader(
        data,
        args.batch_size,
        sampler=left,
        num_workers=args.train_num_workers,
        pin_memory=device.type == "cuda",
    )
    total = torch.zeros((), device=device)
    start, first, seen = time.perf_counter(), 1, training.seen
    for step, (inputs, targets) in enumerate(loader, 1):
        training.seen += len(inputs) * world_size
        training.set_learning_rate(training.epoch + training.seen / len(data))
        total += training.step(inputs, targets)
        if step % args.log_every == 0 or step == len(loader):
            dist.all_reduce(total)
            loss = total.item() / world_size / (step - first + 1)
            speed = (training.seen - seen) / (time.perf_counter() - start)
            say(
                f"epoch {training.epoch}, {training.seen} of {len(data)} images: "
                f"loss {loss:.4f}, {speed:.0f} images/s"
            )
            total.zero_()
            start, first, seen = time.perf_counter(), step + 1, training.seen
        if checkpoint_now.is_set():
            checkpoint_now.clear()
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

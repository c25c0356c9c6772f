"""Trains a language model with FSDP: its parameters are sharded among the workers.

    python -m torchrun_hpc --nproc_per_node=2 examples/fsdp.py --size tiny
    srun python -m torchrun_hpc --nproc_per_node=gpu examples/fsdp.py \
        --size 1b --steps 1000 --checkpoints $SCRATCH/fsdp

The script is what one would write for torchrun: nothing in it knows of the cluster. The
parameters are sharded within a node and replicated between nodes (HSDP); for models
that need it, ``--shard=all`` shards them among all workers. The workers write a
checkpoint together, into a folder that all nodes see. The same command resumes from the
newest, also with another number of workers, if that divides the batch.

Needs torch 2.6 or newer; tested with torch 2.13.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

if TYPE_CHECKING:
    from collections.abc import Callable

# Width, layers, heads of attention.
SIZES = {
    "tiny": (64, 2, 4),
    "85m": (768, 12, 12),
    "1b": (2048, 20, 16),
    "6b": (4096, 32, 32),
}
CHARACTERS = 128  # ASCII
TEXT = """
the agent of a node starts one worker for each of its devices and waits until all have
joined the others by the numbers of the scheduler before the first step can be made
"""


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    option = parser.add_argument
    option("--size", choices=SIZES, default="85m", help="number of parameters")
    option("--steps", type=int, default=200, help="number of the last step")
    option("--global-batch-size", type=int, default=32, help="sequences of all workers")
    option("--length", type=int, default=1024, help="characters of a sequence")
    option("--lr", type=float, default=3e-4, help="learning rate")
    option("--shard", choices=["node", "all"], default="node", help="among whom")
    option("--precision", choices=["bf16", "fp32"], help="unset: what the GPU has")
    option("--checkpoints", type=Path, metavar="FOLDER", help="to write and resume")
    option("--save-every", type=int, default=500, metavar="STEPS")
    option("--log-every", type=int, default=10, metavar="STEPS")
    args = parser.parse_args()
    workers = int(os.environ["WORLD_SIZE"])
    size = args.global_batch_size
    if size % workers:
        parser.error(f"--global-batch-size={size} is no multiple of {workers} workers")
    return args


def main() -> None:
    """Join the other workers, and train."""
    args = parse()
    gpu = torch.cuda.is_available()
    if gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group()
    mesh = make_mesh(device, args.shard)
    # NVIDIA's GPUs have bfloat16 from the A100 on.
    has_bfloat16 = gpu and torch.cuda.get_device_capability() >= (8, 0)
    precision = args.precision or ("bf16" if has_bfloat16 else "fp32")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)

    torch.manual_seed(0)
    with device:
        model = LanguageModel(*SIZES[args.size], args.length, shard)
    shard(model)
    training = Training(model, torch.optim.AdamW(model.parameters(), args.lr))
    count = sum(parameter.numel() for parameter in model.parameters())
    say(f"{count:,} parameters, {precision}, {mesh}")
    train(training, args, device)
    say(f"finished: step {training.step}")

    if not gpu:
        # Gloo's threads release the last tensor a moment after its result is there,
        # and abort if the group is gone by then.
        time.sleep(0.2)
    dist.destroy_process_group()


def make_mesh(device: torch.device, shard: str) -> DeviceMesh:
    """Say among which workers the parameters are sharded.

    FSDP shards along the last dimension and replicates along the first, so that only
    gradients go from node to node. Nodes have consecutive ranks, equally many.
    """
    within_node = int(os.environ["LOCAL_WORLD_SIZE"])
    world_size = dist.get_world_size()
    if shard == "all":
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("all",))
    return init_device_mesh(
        device.type,
        (world_size // within_node, within_node),
        mesh_dim_names=("between_nodes", "within_node"),
    )


class LanguageModel(nn.Module):
    """A transformer that predicts the next character.

    Each layer is sharded as soon as it is made, so that a worker never has to hold the
    whole model. All workers draw the same random numbers, so that the model does not
    depend on their number.

    Args:
        width: Features of a layer.
        layers: Number of layers.
        heads: Heads of attention; they divide the width.
        length: Characters of the longest sequence.
        shard: What shards a layer.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        length: int,
        shard: Callable[[nn.Module], object],
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.TransformerEncoderLayer(
                width,
                heads,
                4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            shard(layer)
            self.layers.append(layer)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the predictions, shape ().

        Args:
            text: Shape (sequences, length + 1), int64, each below `CHARACTERS`.
        """
        inputs, targets = text[:, :-1], text[:, 1:]
        length = inputs.shape[1]
        positions = torch.arange(length, device=text.device)
        hidden = self.characters(inputs) + self.positions(positions)
        mask = nn.Transformer.generate_square_subsequent_mask(
            length, text.device, hidden.dtype
        )
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        logits = self.head(self.norm(hidden)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Training:
    """What a checkpoint holds: model, optimizer, and the number of steps done."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what `torch.distributed.checkpoint` writes: this worker's part."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `torch.distributed.checkpoint` has read."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]

    def save(self, folder: Path) -> None:
        """Write a checkpoint into a folder, all workers together; keep the last two."""
        dcp.save({"training": self}, checkpoint_id=folder / f"step-{self.step:08}")
        if dist.get_rank() == 0:
            for old in sorted(folder.glob("step-*"))[:-2]:
                shutil.rmtree(old)
        say(f"checkpoint: step {self.step}")

    def resume(self, folder: Path) -> None:
        """Restore the newest complete checkpoint of a folder, if there is one."""
        # .metadata is written last. Rank 0 decides, so that all read the same.
        complete = (path.parent for path in folder.glob("step-*/.metadata"))
        newest = [max(complete, default=None)]
        dist.broadcast_object_list(newest)
        if newest[0] is not None:
            dcp.load({"training": self}, checkpoint_id=newest[0])
            say(f"resumed: step {self.step}")


def train(training: Training, args: argparse.Namespace, device: torch.device) -> None:
    """Train to the last step, from a checkpoint if there is one."""
    if args.checkpoints:
        training.resume(args.checkpoints)
        for group in training.optimizer.param_groups:
            group["lr"] = args.lr  # not that of the checkpoint
    loss_sum = torch.zeros((), device=device)
    start, first = time.perf_counter(), training.step
    while training.step < args.steps:
        text = batch(training.step, args.global_batch_size, args.length).to(device)
        loss = training.model(text)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.step += 1
        loss_sum += loss.detach()
        if training.step % args.log_every == 0 or training.step == args.steps:
            dist.all_reduce(loss_sum)
            steps = training.step - first
            mean = loss_sum.item() / dist.get_world_size() / steps
            tokens = args.global_batch_size * args.length * steps
            speed = tokens / (time.perf_counter() - start)
            say(f"step {training.step}: loss {mean:.4f}, {speed:.0f} tokens/s")
            loss_sum.zero_()
            start, first = time.perf_counter(), training.step
        is_due = training.step % args.save_every == 0 or training.step == args.steps
        if args.checkpoints and is_due:
            begin = time.perf_counter()
            training.save(args.checkpoints)
            start += time.perf_counter() - begin


def batch(step: int, size: int, length: int) -> torch.Tensor:
    """Make this worker's part of the synthetic text for a step.

    All workers' parts together are the same for any number of workers.

    Returns:
        Shape (size / world size, length + 1), int64.
    """
    first, last = step * size, (step + 1) * size
    words = TEXT.split()
    rows = []
    for number in range(first + dist.get_rank(), last, dist.get_world_size()):
        sentence = random.Random(number).choices(words, k=length)  # noqa: S311
        rows.append(list(" ".join(sentence).encode("ascii")[: length + 1]))
    return torch.tensor(rows)


def say(text: str) -> None:
    """Print a line on rank 0, at once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()

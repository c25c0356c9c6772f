"""Trains a language model with FSDP: every GPU holds a part of the parameters.

    python -m torchrun_hpc --nproc_per_node=2 examples/fsdp.py --size tiny
    srun python -m torchrun_hpc --nproc_per_node=gpu examples/fsdp.py \
        --size 1b --steps 1000 --checkpoints $SCRATCH/fsdp

The script is what one would write for torchrun: nothing in it knows of the cluster. The
parameters are divided within a node, and each node has all of them; ``--shard=all``
divides them among all nodes, for models that need it. The checkpoints are divided, too,
into a folder that all nodes see. The same command resumes from the newest, also with
another number of workers.

Needs torch 2.6 or newer.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
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
    add = parser.add_argument
    add("--size", choices=SIZES, default="85m")
    add("--steps", type=int, default=200)
    add("--batch-size", type=int, default=32, help="sequences, of all workers")
    add("--length", type=int, default=1024, help="of a sequence, in characters")
    add("--lr", type=float, default=3e-4, help="learning rate")
    add("--shard", choices=["node", "all"], default="node")
    add("--precision", choices=["bf16", "fp32"], help="bf16 on a GPU, else fp32")
    add("--checkpoints", type=Path, metavar="FOLDER")
    add("--save-every", type=int, default=100, metavar="STEPS")
    add("--log-every", type=int, default=10, metavar="STEPS")
    return parser.parse_args()


def main() -> None:
    """Join the other workers, and train."""
    args = parse()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    mesh = make_mesh(device, args.shard)
    if args.batch_size % dist.get_world_size():
        raise SystemExit(
            f"--batch-size={args.batch_size} cannot be divided among "
            f"{dist.get_world_size()} workers"
        )
    precision = args.precision or ("bf16" if device.type == "cuda" else "fp32")
    half = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)

    torch.manual_seed(0)
    with device:
        model = LanguageModel(*SIZES[args.size], args.length, shard)
    shard(model)
    training = Training(model, torch.optim.AdamW(model.parameters(), args.lr))
    count = sum(parameter.numel() for parameter in model.parameters())
    say(f"{count:,} parameters, {precision}, {mesh}")
    train(training, args, device)

    # Gloo's threads let go of the last tensor a moment after its result is there, and
    # abort if the group is gone by then.
    time.sleep(0.2)
    dist.destroy_process_group()


def make_mesh(device: torch.device, shard: str) -> DeviceMesh:
    """Say between which workers the parameters are divided, and join these workers.

    With two dimensions the second one divides; along the first are copies, so that
    between nodes only gradients are sent.
    """
    within_node = int(os.environ["LOCAL_WORLD_SIZE"])
    world_size = int(os.environ["WORLD_SIZE"])
    if shard == "all":
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("all",))
    return init_device_mesh(
        device.type,
        (world_size // within_node, within_node),
        mesh_dim_names=("between_nodes", "within_node"),
    )


class LanguageModel(nn.Module):
    """A transformer that predicts the next character.

    Each layer is divided as soon as it is made: no worker ever holds more than one
    whole. All draw the same random numbers, so the model does not depend on their
    number.
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
        """Take what it has read."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]

    def save(self, folder: Path) -> None:
        """Write a checkpoint below a folder; all workers write."""
        dcp.save({"training": self}, checkpoint_id=folder / f"step-{self.step:08}")
        say(f"checkpoint: step {self.step}")

    def resume(self, folder: Path) -> None:
        """Read the newest whole checkpoint of a folder, if there is one."""
        # .metadata is written last. Rank 0 decides, so that all read the same.
        whole = (path.parent for path in folder.glob("step-*/.metadata"))
        newest = [max(whole, default=None)]
        dist.broadcast_object_list(newest)
        if newest[0] is not None:
            dcp.load({"training": self}, checkpoint_id=newest[0])
            say(f"resumed: step {self.step}")


def train(training: Training, args: argparse.Namespace, device: torch.device) -> None:
    """Train to the last step, from a checkpoint if there is one."""
    if args.checkpoints:
        training.resume(args.checkpoints)
    total = torch.zeros((), device=device)
    start, first = time.perf_counter(), training.step
    while training.step < args.steps:
        text = batch(training.step, args.batch_size, args.length).to(device)
        loss = training.model(text)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.step += 1
        total += loss.detach()
        if training.step % args.log_every == 0 or training.step == args.steps:
            dist.all_reduce(total)
            steps = training.step - first
            mean = total.item() / dist.get_world_size() / steps
            tokens = args.batch_size * args.length * steps
            speed = tokens / (time.perf_counter() - start)
            say(f"step {training.step}: loss {mean:.4f}, {speed:.0f} tokens/s")
            total.zero_()
            start, first = time.perf_counter(), training.step
        is_due = training.step % args.save_every == 0 or training.step == args.steps
        if args.checkpoints and is_due:
            training.save(args.checkpoints)


def batch(step: int, size: int, length: int) -> torch.Tensor:
    """Make this worker's part of a step's text, the same for any number of workers.

    Returns:
        Shape (size / world size, length + 1), int64.
    """
    first, last = step * size, (step + 1) * size
    rows = []
    for number in range(first + dist.get_rank(), last, dist.get_world_size()):
        words = random.Random(number).choices(TEXT.split(), k=length)  # noqa: S311
        rows.append(list(" ".join(words).encode("ascii")[: length + 1]))
    return torch.tensor(rows)


def say(text: str) -> None:
    """Print a line on rank 0, at once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()

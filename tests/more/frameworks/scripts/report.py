"""The last line of each script: JSON of each rank."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")


def report(  # noqa: PLR0913
    framework: str,
    model: nn.Module,
    *,
    rank: int,
    local_rank: int,
    world_size: int,
    steps: int,
    environment: str,
) -> None:
    """Print what the framework made of its environment, and of the model.

    Args:
        framework: Its name.
        model: After the training; of its parameters a checksum is written.
        rank: As the framework counts.
        local_rank: As the framework counts.
        world_size: As the framework counts.
        steps: Optimizer steps that were done.
        environment: What the framework calls what it runs in.
    """
    checksum = hashlib.sha256()
    for parameter in model.parameters():
        checksum.update(parameter.detach().numpy().tobytes())
    line = {
        "framework": framework,
        "rank": rank,
        "local_rank": local_rank,
        "world_size": world_size,
        "steps": steps,
        "environment": environment,
        "host": socket.gethostname(),
        "checksum": checksum.hexdigest(),
        **{name: os.environ.get(name, "") for name in _VARIABLES},
    }
    # In one piece: the workers of a node share a pipe.
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()

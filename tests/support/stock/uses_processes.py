"""Use what starts processes and draws random numbers; print what came out.

Processes that need no torch do not import it.
"""

import json
import multiprocessing
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METHODS = ("fork", "spawn", "forkserver")


class Squares:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> "Sample":
        return Sample(index)


class Sample:
    def __init__(self, index: int) -> None:
        self.square = index**2


@dataclass
class Batch:
    """A class of the script, which processes send back."""

    squares: list[int]


def collate(samples: list[Sample]) -> Batch:
    return Batch([sample.square for sample in samples])


def load(method: str) -> list[list[int]]:
    from torch.utils.data import DataLoader

    squares: Any = Squares()
    loader: Any = DataLoader(
        squares, 4, num_workers=1, multiprocessing_context=method, collate_fn=collate
    )
    return [batch.squares for batch in loader]


def double(sample: Sample) -> Batch:
    return Batch([Sample(2 * sample.square).square])


def map_in_a_pool(method: str) -> list[list[int]]:
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(1, context) as pool:
        return [batch.squares for batch in pool.map(double, [Sample(3)])]


def compiled() -> bool:
    import torch

    function = torch.compile(lambda values: torch.sin(values) + 1)
    values = torch.arange(8.0)
    return torch.allclose(function(values), torch.sin(values) + 1)


def started() -> dict[str, Any]:
    """Start processes in each way."""
    return {
        "loaders": [load(method) for method in METHODS],
        "pools": [map_in_a_pool(method) for method in METHODS],
        "compiled": compiled() if sys.argv[2:] == ["compiled"] else None,
    }


def main() -> None:
    import numpy as np
    import torch

    seen = {
        "started": started() if os.environ["RANK"] == "0" else None,
        "threads": torch.get_num_threads(),
        "rank": os.environ["RANK"],
        "random": [random.random(), np.random.random(), torch.rand(1).item()],
        "key": multiprocessing.current_process().authkey.hex(),
    }
    Path(sys.argv[1], f"{seen['rank']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

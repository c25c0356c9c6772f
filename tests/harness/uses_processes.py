"""Use what starts processes and draws random numbers; print what came out."""

import json
import multiprocessing
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return Sample(index)


class Sample:
    def __init__(self, index):
        self.square = index**2


def squares(samples):
    return [sample.square for sample in samples]


def load(method):
    loader = DataLoader(
        Squares(), 4, num_workers=1, multiprocessing_context=method, collate_fn=squares
    )
    return list(loader)


def double(sample):
    return Sample(2 * sample.square).square


def map_in_a_pool(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(double, [Sample(3)])


def compiled():
    function = torch.compile(lambda values: torch.sin(values) + 1)
    values = torch.arange(8.0)
    return torch.allclose(function(values), torch.sin(values) + 1)


def started():
    """Start processes in each way; those that are spawned import torch anew."""
    return {
        "loaders": [load(method) for method in ("fork", "spawn")],
        "pools": [map_in_a_pool(m) for m in ("fork", "spawn", "forkserver")],
        "compiled": compiled() if sys.argv[2:] == ["compiled"] else None,
    }


def main():
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

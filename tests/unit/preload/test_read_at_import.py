"""The names of variables that ``import torch`` reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrun_hpc.preload import plan

DATA = Path(plan.__file__).with_name("read_at_import.txt")


@pytest.mark.parametrize(
    "name", ["TORCH_LOGS", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "KMP_AFFINITY"]
)
def test_names_and_families(name):
    assert plan.is_read(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "OMP",
        "TORCH_LOGS_",
        "TORCH_HOME",
        "HOME",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_DEBUG",
    ],
)
def test_others(name):
    assert not plan.is_read(name)


def test_no_line_is_twice_or_in_a_family():
    """Each section is sorted."""
    sections = DATA.read_text(encoding="ascii").split("\n\n")
    for section in sections:
        comment, *names = section.splitlines()
        assert comment.startswith("# ")
        assert names == sorted(names)
    lines = [line for section in sections for line in section.splitlines()[1:]]
    families = [line[:-1] for line in lines if line.endswith("*")]
    for line in lines:
        matching = sum(line.startswith(family) for family in families)
        assert (lines.count(line), matching) == (1, line.endswith("*")), line

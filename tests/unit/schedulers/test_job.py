"""Names of hosts, and what a person types."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.juelich import step, tasks_at
from torchrun_hpc.schedulers.job import Launcher, as_identifier, node_index, same_host

MPIRUN = Launcher(
    name="mpirun",
    template="mpirun -np {nodes} {command}",
    cpu_option="--bind-to none",
    block_option="--map-by ppr:{tasks}:node",
    host_file_option="--hostfile",
)
SRUN = Launcher(
    name="srun",
    template="srun {command}",
    cpu_option="--cpus-per-task={cpus}",
    block_option="",
    fills_all_nodes=True,
)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("n1", "n1", True),
        ("n1", "n1.site", True),
        ("n1.site", "n1.site", True),
        ("n1.site", "n1.other", False),
        ("n1", "n2", False),
        ("n1", "n10", False),
        ("", "n1", False),
    ],
)
def test_same_host(one, other, is_same):
    assert same_host(one, other) is same_host(other, one) is is_same


def test_node_index():
    nodes = ("n1.site", "n2", "n3.site")
    assert [node_index(host, nodes) for host in ("n1", "n2.site", "n4")] == [0, 1, None]


@pytest.mark.parametrize(
    ("launcher", "host_file", "options", "line"),
    [
        (MPIRUN, "", "", "mpirun -np 2 --bind-to none x"),
        (MPIRUN, "$F", "-v", "mpirun -np 2 --hostfile $F --bind-to none -v x"),
        (MPIRUN, "", "--bind-to none", "mpirun -np 2 --bind-to none x"),
        (SRUN, "$F", "", "srun x"),
        (SRUN, "", "--cpus-per-task=4", "srun --cpus-per-task=4 x"),
    ],
)
def test_once_per_node(launcher, host_file, options, line):
    assert launcher.once_per_node(2, "x", host_file, options) == line


def test_launchers_that_do_not_fill_all_nodes_have_put_the_tasks_on_the_first_ones():
    alone = step(launcher=MPIRUN, allocated_nodes=4)
    assert alone.once_per_node("x").startswith("mpirun -np 3 ")
    several = replace(alone, task=tasks_at([0, 0, 1, 1, 2, 2])[0])
    assert several.once_per_node("x").startswith("mpirun -np 4 ")
    assert several.once_per_node("x", nodes=2).startswith("mpirun -np 2 ")


def test_as_identifier():
    assert as_identifier("17[3].a_b-\u0661") == "17-3-.a_b--"

"""Ways in which Slurm starts a step: an array, a heterogeneous job, a host file."""

from __future__ import annotations

from tests.support.cluster.commands import (
    ENVIRON,
    HPC,
    LINE,
    ONE_TASK,
    WORLD,
    column,
    own_lines,
)
from tests.support.cluster.real_job import launch


def test_an_array(unpadded):
    """The tasks of each element are a world of their own."""
    done = unpadded.sbatch(
        f"#!/bin/sh\nsrun {LINE}\n",
        "-N2", "--ntasks-per-node=2", "--array=0-1", env=ENVIRON,
    )  # fmt: skip
    assert done.returncode == 0, done.outputs
    assert len(done.outputs) == 2
    for element, output in enumerate(done.outputs):
        assert column(output, "RANK", "TORCHELASTIC_RUN_ID") == [
            (str(rank), f"{done.job_id}_{element}.0") for rank in range(4)
        ], output


def test_a_heterogeneous_step(unpadded):
    done = unpadded.run(
        ["salloc", "-N1", ":", "-N2", "srun", "--het-group=0,1", ONE_TASK, *HPC, WORLD],
        env=ENVIRON,
    )
    seen = column(done, "RANK", "GROUP_WORLD_SIZE", "host")
    assert [worker[:2] for worker in seen] == [("0", "3"), ("1", "3"), ("2", "3")], done
    assert len({host for _, _, host in seen}) == 3, done


def test_a_host_file_in_another_order(unpadded, tmp_path):
    """srun numbers the tasks as in the file, but the nodes as in its own list.

    The agents meet on the first node of the file, and are ranked as their tasks.
    """
    tmp_path.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("n10\nn9\n")
    environ = {"SLURM_HOSTFILE": str(hosts)}
    done = launch(unpadded, srun=["--distribution=arbitrary"], environ=environ)
    assert column(done, "RANK", "GROUP_RANK", "host", "MASTER_ADDR") == [
        ("0", "0", "n10", "10.10.0.2"),
        ("1", "1", "n9", "10.10.0.2"),
    ], done.stdout
    assert len(own_lines(done.stderr)) == 1, done.stderr

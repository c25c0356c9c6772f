"""Each way in which Slurm starts a launcher, and what becomes of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from commands import (
    ENVIRON,
    HPC,
    NODES,
    ONE_TASK,
    WORLD,
    column,
    own_lines,
    read_workers,
)

if TYPE_CHECKING:
    from testbed import Cluster

COMMAND = " ".join([*HPC, WORLD])


def test_a_host_file_in_another_order(unpadded: Cluster, tmp_path) -> None:
    """srun numbers the tasks as in the file, but the nodes as in its own list.

    The agents meet on the first node of that, and are ranked as their tasks.
    """
    tmp_path.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("n11\nn9\nn10\n")
    done = unpadded.srun("-N3", "-n3", "--distribution=arbitrary", *HPC, WORLD,
                         env=ENVIRON | {"SLURM_HOSTFILE": str(hosts)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = read_workers(done)
    assert column(seen, "RANK", "GROUP_RANK", "host") == [
        (str(rank), str(rank), host) for rank, host in enumerate(("n11", "n9", "n10"))
    ]
    assert {worker["MASTER_ADDR"] for worker in seen} == {"10.10.0.3"}
    assert len(own_lines(done.stderr)) == 1, done.stderr


def test_what_other_jobs_have_left(unpadded: Cluster) -> None:
    """srun in a job that was submitted in a task of mpirun, in a job of PBS."""
    left = {"PBS_JOBID": "7.server", "PBS_NODEFILE": "/etc/hostname"}
    left |= {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    left |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    done = unpadded.srun("-N3", "-n3", *HPC, WORLD, env=ENVIRON | left)
    assert done.returncode == 0, done.stderr
    assert column(read_workers(done), "RANK", "host", "MASTER_ADDR") == [
        (str(rank), name, "10.10.0.1") for rank, name in enumerate(NODES)
    ]
    (line,) = own_lines(done.stderr)
    assert "HPC001 3 nodes, 1 worker on this one" in line


def test_a_step_on_some_of_the_nodes(unpadded: Cluster) -> None:
    done = unpadded.sbatch(
        f"#!/bin/sh\nsrun -N2 -w n10,n11 {ONE_TASK} {COMMAND}\n", "-N3", env=ENVIRON
    )
    assert done.returncode == 0, done.output
    assert column(read_workers(done.output), "RANK", "host", "MASTER_ADDR") == [
        ("0", "n10", "10.10.0.2"),
        ("1", "n11", "10.10.0.2"),
    ]
    assert "2 nodes, 1 worker on this one" in done.output
    assert "(2 of 3 nodes)" in done.output


def test_two_steps_at_once_on_the_same_nodes(unpadded: Cluster) -> None:
    step = f"srun -N3 -n3 --overlap {COMMAND} --sleep 3 &"
    done = unpadded.sbatch(f"#!/bin/sh\n{step}\n{step}\nwait\n", "-N3", "-n6",
                           env=ENVIRON)  # fmt: skip
    assert done.returncode == 0, done.output
    seen = read_workers(done.output)
    steps = {worker["TORCHELASTIC_RUN_ID"] for worker in seen}
    assert steps == {f"{done.job_id}.0", f"{done.job_id}.1"}
    for step in steps:
        mine = [worker for worker in seen if worker["TORCHELASTIC_RUN_ID"] == step]
        assert column(mine, "RANK", "host") == [
            (str(rank), name) for rank, name in enumerate(NODES)
        ]
        assert {worker["WORLD_SIZE"] for worker in mine} == {"3"}


def test_an_array(unpadded: Cluster) -> None:
    done = unpadded.sbatch(
        f"#!/bin/sh\nsrun {ONE_TASK} {COMMAND} --sleep 2\n", "-N2", "--array=0-1",
        env=ENVIRON,
    )  # fmt: skip
    assert done.returncode == 0, done.outputs
    for element, output in enumerate(done.outputs):
        seen = read_workers(output)
        assert len(seen) == 2
        assert {worker["TORCHELASTIC_RUN_ID"] for worker in seen} == {
            f"{done.job_id}_{element}.0"
        }


def test_five_steps_of_one_node_at_once(unpadded: Cluster) -> None:
    steps = "\n".join([f"srun -N1 -n1 --exact {COMMAND} --sleep 3 &"] * 5)
    done = unpadded.sbatch(f"#!/bin/sh\n{steps}\nwait\n", "-N1", "-n5", env=ENVIRON)
    assert done.returncode == 0, done.output
    seen = read_workers(done.output)
    assert len(seen) == 5
    assert set(column(seen, "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")) == {
        ("1", "127.0.0.1", "")
    }
    assert len({worker["MASTER_PORT"] for worker in seen}) == 5
    assert len({worker["TORCHELASTIC_RUN_ID"] for worker in seen}) == 5


def test_a_requeued_job_has_another_launch_id(unpadded: Cluster) -> None:
    script = f"""#!/bin/sh
    if [ -z "$SLURM_RESTART_COUNT" ]; then
        scontrol requeue $SLURM_JOB_ID; sleep 60
    fi
    srun {ONE_TASK} {COMMAND}
    """
    done = unpadded.sbatch(script, "-N2", "--requeue", env=ENVIRON)
    assert done.returncode == 0, done.output
    assert {worker["TORCHELASTIC_RUN_ID"] for worker in read_workers(done.output)} == {
        f"{done.job_id}.0-r1"
    }


def test_a_heterogeneous_step(unpadded: Cluster) -> None:
    done = unpadded.run(
        ["salloc", "-N1", ":", "-N2", "srun", "--het-group=0,1", ONE_TASK, *HPC, WORLD],
        env=ENVIRON,
    )
    assert done.returncode == 0, done.stderr
    seen = read_workers(done)
    assert column(seen, "RANK", "GROUP_WORLD_SIZE") == [
        ("0", "3"),
        ("1", "3"),
        ("2", "3"),
    ]
    assert len({worker["host"] for worker in seen}) == 3


def test_standalone_makes_a_world_of_every_task(unpadded: Cluster) -> None:
    done = unpadded.srun("-N2", "-n3", *HPC, "--standalone", WORLD, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    seen = read_workers(done)
    assert column(seen, "WORLD_SIZE") == [("1",)] * 3


def test_an_interactive_step_is_one_node(unpadded: Cluster) -> None:
    """salloc's shell is on the first node; `script` gives it the terminal it wants."""
    done = unpadded.run(
        ["script", "--quiet", "--return", "--command", "salloc -N3", "/dev/null"],
        input=f"{COMMAND}; exit $?\n",
        env=ENVIRON | {"SHELL": "/bin/sh"},
    )
    assert done.returncode == 0, done.stdout
    output = done.stdout.replace("\r\n", "\n")
    assert column(read_workers(output), "host", "WORLD_SIZE") == [("n9", "1")]
    (line,) = own_lines(output)
    assert "this is 1 of 3 nodes of the job" in line
    assert f"srun --overlap --nodes=3 --ntasks=3 --ntasks-per-node=1 {COMMAND}" in line


def test_a_shell_of_srun_pty_is_one_node(unpadded: Cluster) -> None:
    """Also when the step has three: the others' shells have ended at once."""
    srun = "srun -N3 --pty sh"
    nested = f"srun --overlap -N2 -n2 -w n10,n11 {COMMAND} </dev/null"
    done = unpadded.run(
        ["script", "--quiet", "--return", "--command", srun, "/dev/null"],
        input=f"{COMMAND}\n{nested}; exit $?\n",
        env=ENVIRON,
    )
    assert done.returncode == 0, done.stdout
    sizes = column(
        read_workers(done.stdout.replace("\r\n", "\n")), "host", "WORLD_SIZE"
    )
    assert sorted(sizes) == [("n10", "2"), ("n11", "2"), ("n9", "1")]


def test_a_login_into_a_node_is_one_node(unpadded: Cluster) -> None:
    """pam_slurm_adopt and editors bring the job's id along, and little more."""
    done = unpadded.run([*HPC, WORLD], host="n10", env=ENVIRON | {"SLURM_JOB_ID": "7"})
    assert done.returncode == 0, done.stderr
    assert column(read_workers(done), "host", "WORLD_SIZE") == [("n10", "1")]


# --- refused; that what the messages tell to type works: test_suggested_lines.py -----


@pytest.mark.parametrize(
    ("srun", "message"),
    [
        (["-N1", "-n2"], "srun started 2 tasks on 1 node (SLURM_STEP_TASKS_PER_N"),
    ],
)
def test_workers_of_several_tasks_on_a_node_are_refused(
    unpadded: Cluster, srun: list[str], message: str
) -> None:
    done = unpadded.srun(*srun, *HPC, "--nproc_per_node=4", WORLD, env=ENVIRON)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = own_lines(done.stderr)
    assert message in line
    assert re.search(
        r"srun --nodes=\d --ntasks=\d --ntasks-per-node=1 python -m torchrun_hpc", line
    )
    assert "Traceback" not in done.stderr


def test_a_batch_script_of_one_node_needs_no_srun(unpadded: Cluster) -> None:
    done = unpadded.sbatch(f"#!/bin/sh\n{COMMAND}\n", "-N1", env=ENVIRON)
    assert done.returncode == 0, done.output
    assert column(read_workers(done.output), "WORLD_SIZE") == [("1",)]

"""More ways in which Slurm starts a launcher; see core/test_steps.py, too."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from commands import (
    ENVIRON,
    HPC,
    NODES,
    ONE_TASK,
    WORLD,
    column,
    own_lines,
    read_workers,
    together,
)
from waiting import NEVER_S

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster

COMMAND = " ".join([*HPC, WORLD])


def test_what_other_jobs_have_left(unpadded: Cluster) -> None:
    """srun in a job that was submitted in a task of mpirun, in a job of PBS."""
    left = {"PBS_JOBID": "7.server", "PBS_NODEFILE": "/etc/hostname"}
    left |= {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    left |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    done = unpadded.srun("-N3", "--ntasks-per-node=2", *HPC, WORLD,
                         env=ENVIRON | left)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert column(read_workers(done), "RANK", "host", "MASTER_ADDR") == [
        (str(rank), NODES[rank // 2], "10.10.0.1") for rank in range(6)
    ]
    (line,) = own_lines(done.stderr)
    assert "HPC001 3 nodes x 2 tasks" in line


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


def test_two_steps_at_once_on_the_same_nodes(unpadded: Cluster, tmp_path: Path) -> None:
    step = f"srun -N2 -n2 --overlap {' '.join([*HPC, *together(tmp_path, 4)])} &"
    done = unpadded.sbatch(f"#!/bin/sh\n{step}\n{step}\nwait\n", "-N2", "-n4",
                           "--nodelist=n9,n10", env=ENVIRON)  # fmt: skip
    assert done.returncode == 0, done.output
    seen = read_workers(done.output)
    steps = {worker["TORCHELASTIC_RUN_ID"] for worker in seen}
    assert steps == {f"{done.job_id}.0", f"{done.job_id}.1"}, done.output
    for step in steps:
        mine = [worker for worker in seen if worker["TORCHELASTIC_RUN_ID"] == step]
        assert column(mine, "RANK", "host") == [("0", "n9"), ("1", "n10")], done.output
        assert {worker["WORLD_SIZE"] for worker in mine} == {"2"}


def test_two_steps_of_one_node_at_once(unpadded: Cluster, tmp_path: Path) -> None:
    steps = f"srun -N1 -n1 --exact {' '.join([*HPC, *together(tmp_path, 2)])} &\n" * 2
    done = unpadded.sbatch(f"#!/bin/sh\n{steps}wait\n", "-N1", "-n2", env=ENVIRON)
    assert done.returncode == 0, done.output
    seen = read_workers(done.output)
    names = ("WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    assert column(seen, *names) == [("1", "127.0.0.1", "")] * 2, done.output
    assert len({worker["MASTER_PORT"] for worker in seen}) == 2
    assert len({worker["TORCHELASTIC_RUN_ID"] for worker in seen}) == 2


def test_a_requeued_job_has_another_launch_id(unpadded: Cluster) -> None:
    script = f"""#!/bin/sh
    if [ -z "$SLURM_RESTART_COUNT" ]; then
        scontrol requeue $SLURM_JOB_ID; sleep {NEVER_S}
    fi
    srun {COMMAND}
    """
    job = ("-N2", "--ntasks-per-node=2", "--requeue")
    done = unpadded.sbatch(script, *job, env=ENVIRON)
    assert done.returncode == 0, done.output
    assert {worker["TORCHELASTIC_RUN_ID"] for worker in read_workers(done.output)} == {
        f"{done.job_id}.0-r1"
    }


def test_standalone_makes_a_world_of_every_task(unpadded: Cluster) -> None:
    done = unpadded.srun("-N1", "-n2", *HPC, "--standalone", WORLD, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    seen = read_workers(done)
    assert column(seen, "WORLD_SIZE") == [("1",)] * 2, done.stderr


def test_an_interactive_step_is_one_node(unpadded: Cluster) -> None:
    """salloc's shell is on the first node; `script` gives it the terminal it wants."""
    done = unpadded.run(
        ["script", "--quiet", "--return", "--command", "salloc -N3", "/dev/null"],
        input=f"{COMMAND}; exit $?\n",
        env=ENVIRON | {"SHELL": "/bin/sh"},
    )
    assert done.returncode == 0, done.stdout
    output = done.stdout.replace("\r\n", "\n")
    assert column(read_workers(output), "host", "WORLD_SIZE") == [("n9", "1")], output
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
    assert column(read_workers(done), "host", "WORLD_SIZE") == [("n10", "1")], (
        done.stderr
    )


# --- refused; that what the messages tell to type works: test_suggested_lines.py -----


def test_workers_of_several_tasks_on_a_node_are_refused(unpadded: Cluster) -> None:
    command = (*HPC, "--nproc_per_node=4", WORLD)
    done = unpadded.srun("-N1", "-n2", *command, env=ENVIRON)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = own_lines(done.stderr)
    assert "srun started 2 tasks on 1 node (SLURM_STEP_TASKS_PER_N" in line
    assert re.search(
        r"srun --nodes=\d --ntasks=\d --ntasks-per-node=1 python -m torchrun_hpc", line
    )
    assert "Traceback" not in done.stderr

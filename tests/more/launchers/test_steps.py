"""More ways in which Slurm starts a launcher; see also core/test_steps.py."""

from __future__ import annotations

import json

import pytest

from tests.support.cluster.commands import (
    ENVIRON,
    HPC,
    LINE,
    NODES,
    ONE_TASK,
    WORLD,
    column,
    in_terminal,
    own_lines,
    read_workers,
    together,
)
from tests.support.cluster.real_job import RealJob, launch
from tests.support.pages.blocks import block, replaced
from tests.support.patience import NEVER_S, PATIENCE


def test_what_other_jobs_have_left(unpadded):
    """srun in a job that was submitted in a task of mpirun, in a job of PBS."""
    left = {"PBS_JOBID": "7.server", "PBS_NODEFILE": "/etc/hostname"}
    left |= {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    left |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    done = launch(unpadded, nodes=3, tasks=2, environ=left)
    assert column(done, "RANK", "host", "MASTER_ADDR") == [
        (str(rank), NODES[rank // 2], "10.10.0.1") for rank in range(6)
    ]
    (line,) = own_lines(done.stderr)
    assert "3 nodes x 2 tasks" in line


def test_a_step_on_some_of_the_nodes(unpadded):
    script = f"#!/bin/sh\nsrun -N2 -w n10,n11 {ONE_TASK} {LINE}\n"
    done = unpadded.sbatch(script, "-N3", env=ENVIRON)
    assert column(done, "RANK", "host", "MASTER_ADDR") == [
        ("0", "n10", "10.10.0.2"),
        ("1", "n11", "10.10.0.2"),
    ], done.output
    assert "2 nodes, 1 worker here" in done.output
    assert "(2 of 3 nodes)" in done.output


def test_two_steps_at_once_on_the_same_nodes(unpadded, tmp_path):
    step = f"srun -N2 -n2 --overlap {' '.join([*HPC, *together(tmp_path, 4)])} &"
    done = unpadded.sbatch(f"#!/bin/sh\n{step}\n{step}\nwait\n", "-N2", "-n4",
                           env=ENVIRON)  # fmt: skip
    seen = column(done, "TORCHELASTIC_RUN_ID", "RANK", "host", "WORLD_SIZE")
    assert sorted(seen) == [
        (f"{done.job_id}.{step}", rank, host, "2")
        for step in range(2)
        for rank, host in (("0", "n9"), ("1", "n10"))
    ], done.output


def test_two_steps_of_one_node_at_once(unpadded, tmp_path):
    steps = f"srun -N1 -n1 --exact {' '.join([*HPC, *together(tmp_path, 2)])} &\n" * 2
    done = unpadded.sbatch(f"#!/bin/sh\n{steps}wait\n", "-N1", "-n2", env=ENVIRON)
    seen = read_workers(done)
    names = ("WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    assert column(seen, *names) == [("1", "127.0.0.1", "")] * 2, done.output
    assert len({worker["MASTER_PORT"] for worker in seen}) == 2
    assert len({worker["TORCHELASTIC_RUN_ID"] for worker in seen}) == 2


def test_a_requeued_job_has_another_launch_id(unpadded):
    script = f"""#!/bin/sh
    if [ -z "$SLURM_RESTART_COUNT" ]; then
        scontrol requeue $SLURM_JOB_ID; sleep {NEVER_S}
    fi
    srun {LINE}
    """
    job = ("-N2", "--ntasks-per-node=2", "--requeue")
    done = unpadded.sbatch(script, *job, env=ENVIRON)
    assert {*column(done, "TORCHELASTIC_RUN_ID")} == {(f"{done.job_id}.0-r1",)}, done


def test_standalone_makes_a_world_of_every_task(unpadded):
    done = launch(unpadded, "--standalone", nodes=1, tasks=2)
    assert column(done, "WORLD_SIZE") == [("1",)] * 2


def test_an_interactive_step_is_one_node(unpadded):
    """salloc's shell is on the first node, and wants a terminal."""
    output = in_terminal(unpadded, "salloc -N3", f"{LINE}; exit $?\n")
    assert column(output, "host", "WORLD_SIZE") == [("n9", "1")], output
    (line,) = own_lines(output)
    assert "this is 1 of 3 nodes of the job" in line
    assert f"srun --overlap --nodes=3 --ntasks=3 --ntasks-per-node=1 {LINE}" in line


def test_a_shell_of_srun_pty_is_one_node(unpadded):
    """Also when the step has three: the others' shells have ended at once."""
    srun = "srun -N3 --pty sh"
    nested = f"srun --overlap -N2 -n2 -w n10,n11 {LINE} </dev/null"
    output = in_terminal(unpadded, srun, f"{LINE}\n{nested}; exit $?\n")
    sizes = column(output, "host", "WORLD_SIZE")
    assert sorted(sizes) == [("n10", "2"), ("n11", "2"), ("n9", "1")], output


def test_a_login_into_a_node_is_one_node(unpadded):
    """pam_slurm_adopt and editors bring the job's id along, and little more."""
    done = unpadded.run([*HPC, WORLD], host="n10", env=ENVIRON | {"SLURM_JOB_ID": "7"})
    assert column(done, "host", "WORLD_SIZE") == [("n10", "1")], done.stderr


@pytest.mark.parametrize("host", ["n9", pytest.param("n10", marks=pytest.mark.release)])
def test_a_second_agent_joins_by_hand(unpadded, host):
    """It has no scheduler. The first one is a step of one node, with a range."""
    environ = {"PET_HPC_SITE": "jsc"}  # n9 is n9i: 10.20.0.1 on ib0
    options = ("--nnodes=1:2", f"--rdzv_conf=last_call_timeout={PATIENCE}")
    with RealJob(unpadded, *options, hosts=["n9"], environ=environ) as first:
        mine = {
            "jwb0001i:26058": f"n9i:{first.port()}",
            "123456.0": first.launch_id(),
            "main.py": f"{options[1]} {WORLD}",
        }
        line = replaced(block("docs/internals.md", "--nnodes=1:2").text, mine)
        second = unpadded.run(["bash", "-c", line], host=host, env=ENVIRON)
        first.ends(0)
    assert "c10d rendezvous at n9i:" in first.stderr
    assert second.returncode == 0, second.stderr
    assert column(first.stdout + second.stdout, "RANK", "host", "MASTER_ADDR") == [
        ("0", "n9", "10.20.0.1"),
        ("1", host, "10.20.0.1"),
    ]
    # On the same node the port is taken, and by whom.
    joined = [line for line in own_lines(second.stderr) if "HPC156" in line]
    assert len(joined) == (host == "n9"), second.stderr


# Slurm 26.05 numbers tasks by topology; SLURM_NODEID stays the place in the list.
BY_TOPOLOGY = (
    "case $SLURM_NODEID in {}) SLURM_PROCID={};; {}) SLURM_PROCID={};; "
    "{}) SLURM_PROCID={};; esac; export SLURM_PROCID"
)


@pytest.mark.parametrize("ranks", [(0, 2, 1), (1, 2, 0)])
def test_ranks_that_follow_the_topology(unpadded, ranks, tmp_path):
    """Names are right, also on a node that sees no difference: in the last line."""
    first = BY_TOPOLOGY.format(*(n for pair in enumerate(ranks) for n in pair))
    hosts = [NODES[ranks.index(rank)] for rank in range(3)]
    script = ("--no-python", "sh", "-c", "sleep 1; test $RANK != 1")
    file = tmp_path / "outcome.json"
    tmp_path.chmod(0o777)
    done = launch(
        unpadded, f"--hpc-outcome={file}", nodes=3, first=first, script=script
    )
    assert (
        f"HPC125]: the job has failed: worker 1 on {hosts[1]} (node 1)" in done.stderr
    )
    assert json.loads(file.read_text("utf-8"))["nodes"] == [hosts[1]]
    done = launch(unpadded, nodes=3, first=first)
    assert column(done, "RANK", "host") == [(str(r), hosts[r]) for r in range(3)]
    done = launch(unpadded, "--hpc-dry-run", nodes=3, first=first)
    assert done.returncode == 0
    assert "did not answer" not in done.stdout + done.stderr
    for host in hosts:
        assert host in done.stdout

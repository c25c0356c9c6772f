"""The nodes meet by the scheduler's numbers, and end together, whatever happens."""

from __future__ import annotations

import re
import time

import pytest

from tests.support.cluster.attack import attacked
from tests.support.cluster.commands import (
    WORLD,
    column,
    late,
    on_node,
    own_lines,
    until_there,
)
from tests.support.cluster.real_job import RealJob, launch
from tests.support.cluster.steady_job import STEADY, SteadyJob
from tests.support.patience import START

# --- signals ----------------------------------------------------------------------


def test_a_signal_in_the_search_for_the_coordinator(unpadded):
    with RealJob(unpadded, nodes=3, first=late(0)) as job:
        job.says("HPC113")
        job.signal(1, "SIGINT")
        job.agent_ends(1)
    assert "Traceback" not in job.output


@pytest.mark.release
def test_a_signal_while_nodes_are_missing(unpadded):
    """The others hear of it, and the first one says so."""
    with RealJob(unpadded, nodes=3, first=late(2)) as job:
        job.wait(lambda: job.is_accepted(1))
        job.signal(1, "SIGTERM")
        job.agent_ends(0, 1)
        job.says(r"HPC125\]: .*the agent on n10 \(node 1\) received SIGTERM")
    assert "Traceback" not in job.output


def test_a_signal_in_the_restart_wait(unpadded, tmp_path):
    with SteadyJob(unpadded, tmp_path, "--max-restarts=1", nodes=3) as job:
        job.works()
        job.signal(2, "SIGKILL")
        job.says("HPC123]: the agent on n11 .node 2. is gone. Waiting until")
        time.sleep(0.1)
        assert job.agents(0), job.output
        job.signal(1, "SIGINT")  # SIGTERM may be the launcher's, after the loss
        job.agent_ends(0, 1)
        job.says("HPC125]: the job has failed: the agent on n10")


def test_a_signal_in_the_exit_barrier(unpadded, tmp_path):
    with SteadyJob(unpadded, tmp_path) as job:
        job.stop(0)
        job.says("HPC120]: 1 of 2 nodes have finished, .* Still running: n10 .node 1.")
        job.signal(0, "SIGINT")
        job.agent_ends(0, 1)
        job.says(
            r"HPC125]: the job has failed: the agent on n9 \(node 0\) received SIGINT"
        )


# --- restarts ---------------------------------------------------------------------


def test_one_budget_of_restarts(unpadded, tmp_path):
    """Every restart counts for all, whichever worker failed."""
    with SteadyJob(unpadded, tmp_path, "--max-restarts=1") as job:
        for attempt in range(2):
            job.works(attempt)
            job.fail(attempt, attempt)
        job.ends(1)
    assert not [*tmp_path.glob("up*.2")], job.output
    assert job.errors()[-1].endswith(
        "HPC125]: the job has failed: worker 1 on n10 (node 1) ended with exit code 3"
    ), job.output


def test_agents_that_are_started_again(unpadded, tmp_path):
    """A second agent on a node is refused; one that replaces another is not."""
    second = f'({until_there(tmp_path / "second")}; "$@"; echo second $?) &'
    # A node's own watchdog: what is killed is started once more.
    first = f'{on_node(1, second)}; "$@"; code=$?; test $code = 137 || exit $code'
    with SteadyJob(unpadded, tmp_path, "--max-restarts=1", nodes=3, first=first) as job:
        job.works()
        (tmp_path / "second").touch()
        job.says("second 2")
        job.says(
            r"HPC115]: on n10: the head node at 10\.10\.0\.1:\d+ already has an agent "
            r"of node 1\."
        )
        job.says(
            r"warning\[HPC229\]: refused an agent that claims to be n10 \(node 1\): "
            r"process \d+ on n10 instead of process \d+ on n10\. This job continues"
        )
        job.signal(2, "SIGKILL")
        job.works(1)
        job.stop()
        job.ends(0)
    assert sorted(re.findall("steady: .*", job.output)) == [
        f"steady: rank {rank}, attempt 1" for rank in range(3)
    ], job.output


def test_no_restart_when_others_have_finished(unpadded, tmp_path):
    """Foreign clients do what they can meanwhile, and change nothing."""
    with SteadyJob(unpadded, tmp_path, "--max-restarts=3") as job:
        job.stop(0)
        job.says("HPC120]: 1 of 2 nodes have finished")
        with attacked(job, tmp_path):
            job.fail(1, 0)
            job.ends(1)
    assert job.errors()[-1].endswith(
        "worker 1 on n10 (node 1) ended with exit code 3; no restart, because 1 node "
        "had already finished"
    ), job.output


# --- who comes --------------------------------------------------------------------


def test_different_numbers_of_workers_and_sites(unpadded):
    first = (
        "test $SLURM_NODEID = 1 && export NCAR_HOST=derecho; "
        "export PET_NPROC_PER_NODE=$((SLURM_NODEID + 1))"
    )
    done = launch(unpadded, first=first)
    assert column(done, "RANK", "GROUP_RANK", "WORLD_SIZE") == [
        (str(rank), group, "3") for rank, group in enumerate("011")
    ]
    said = own_lines(done.stderr)
    (start,) = [line for line in said if START in line]
    (warning,) = [line for line in said if "HPC163" in line]
    assert "2 nodes, 1 worker here; " in start
    assert (
        "warning[HPC163]: the nodes have different values: none on n9 (node 0); "
        "derecho on n10 (node 1). Pass --hpc-site=NAME"
    ) in warning


def test_another_id_on_one_node(unpadded):
    first = f'set -- "$@" --rdzv_id=id$SLURM_NODEID {WORLD}'
    done = launch(unpadded, first=first, script=())
    assert done.returncode == 2, done
    there = "HPC117]: on n10: this node has --rdzv_id=id1, but the head node at"
    assert there in done.stderr, done
    assert (
        "the agent on n10 (node 1) does not belong to this job "
        "(--rdzv_id=id1 instead of id0)"
    ) in done.stderr


# --- hostile clients --------------------------------------------------------------


def test_hostile_clients_at_the_end(unpadded, tmp_path):
    """One node waits for the other one, and the workers' store is there.

    The job continues, or ends with a message; nothing of theirs is run.
    """
    script = tmp_path / "script.py"
    script.write_text(
        "import runpy; import torch.distributed as dist;"
        f"dist.init_process_group('gloo'); runpy.run_path({STEADY!r})"
    )
    with SteadyJob(unpadded, tmp_path, "--hpc-preload=torch", script=[script]) as job:
        job.works()
        job.stop(0)
        job.says("HPC120]: 1 of 2 nodes have finished")
        with attacked(job, tmp_path, (tmp_path / "store0").read_text()) as did:
            job.stop()
            job.end()
    assert did["spoiled"] > 10
    # The store is torch's own affair.
    assert job.codes() == [0] or "HPC125]: the job has failed: " in job.output

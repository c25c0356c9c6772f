"""The nodes meet by the scheduler's numbers, and end together, whatever happens."""

from __future__ import annotations

import re

import pytest

from tests.support.cluster.commands import (
    ENVIRON,
    HPC,
    LINE,
    SCRIPTS,
    WORLD,
    column,
    launch,
    own_lines,
)
from tests.support.cluster.steps import LATE, Step
from tests.support.patience import START

STEADY = str(SCRIPTS / "steady.py")


def wait_for(job, folder, *names):
    """Wait until files are there; see scripts/steady.py."""
    job.wait(lambda: all((folder / name).exists() for name in names))


def wait_for_all(job, folder, attempt, workers=3):
    """Wait until all workers are there."""
    wait_for(job, folder, *(f"up{rank}.{attempt}" for rank in range(workers)))


# --- signals ----------------------------------------------------------------------


def test_a_signal_in_the_search_for_the_coordinator(unpadded):
    command = LATE.format(node=0) + LINE
    with Step(unpadded, "sh", "-c", command) as job:
        job.says("HPC113")
        job.send("n10", "SIGINT")
    assert "Traceback" not in job.output


@pytest.mark.release
def test_a_signal_while_nodes_are_missing(unpadded):
    """The others hear of it, and the first one says so."""
    command = LATE.format(node=2) + LINE
    with Step(unpadded, "sh", "-c", command) as job:
        job.joins("n10")
        job.send("n10", "SIGTERM")
        job.see_end("n9")
        assert "the agent on n10 (node" in job.says("HPC125")
        assert "received SIGTERM" in job.output
    assert "Traceback" not in job.output


def test_a_signal_in_the_restart_wait(unpadded, tmp_path):
    argv = [*HPC, "--max-restarts=1", STEADY, str(tmp_path)]
    with Step(unpadded, *argv) as job:
        wait_for_all(job, tmp_path, 0)
        job.send("n11", "SIGKILL")
        job.says("HPC123]: the agent on n11 .node 2. is gone. Waiting until")
        assert job.agent("n9", "wait", "0.1") == "alive", job.output
        job.send("n10", "SIGINT")  # SIGTERM may be the launcher's, after the loss
        job.see_end("n9")
        job.says("HPC125]: the job has failed: the agent on n10")


def test_a_signal_in_the_exit_barrier(unpadded, tmp_path):
    with Step(unpadded, *HPC, STEADY, str(tmp_path), nodes=2) as job:
        (tmp_path / "stop0").touch()
        job.says("HPC120]: 1 of 2 nodes have finished, .* Still running: n10 .node 1.")
        job.send("n9", "SIGINT")
        job.see_end("n10")
        job.says(
            r"HPC125]: the job has failed: the agent on n9 \(node 0\) received SIGINT"
        )


# --- restarts ---------------------------------------------------------------------


def test_one_budget_of_restarts(unpadded, tmp_path):
    """Every restart counts for all, whoever's worker it was that failed."""
    argv = [*HPC, "--max-restarts=1", STEADY, str(tmp_path)]
    with Step(unpadded, *argv, nodes=2) as job:
        for attempt in range(2):
            wait_for_all(job, tmp_path, attempt, workers=2)
            (tmp_path / f"fail{attempt}.{attempt}").touch()
        assert job.end() != 0, job.output
    assert not [*tmp_path.glob("up*.2")], job.output
    assert own_lines(job.output)[-1].endswith(
        "HPC125]: the job has failed: worker 1 on n10 (node 1) ended with exit code 3"
    ), job.output


def test_agents_that_are_started_again(unpadded, tmp_path):
    """A second one on a node is refused; one that takes the place of another is not."""
    argv = " ".join([*HPC, "--max-restarts=1", STEADY, str(tmp_path)])
    second = (
        f"(until test -e {tmp_path}/second; do sleep 0.1; done; {argv}; echo second $?)"
    )
    # A node's own watchdog: what is killed is started once more.
    command = (
        f"if test $SLURM_NODEID = 1; then {second} & fi; {argv}; code=$?; "
        f"test $code = 137 && exec {argv}; exit $code"
    )
    with Step(unpadded, "sh", "-c", command) as job:
        wait_for_all(job, tmp_path, 0)
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
        job.send("n11", "SIGKILL")
        wait_for_all(job, tmp_path, 1)
        (tmp_path / "stop").touch()
        assert job.end() == 0, job.output
    assert sorted(re.findall("steady: .*", job.output)) == [
        f"steady: rank {rank}, attempt 1" for rank in range(3)
    ], job.output


def test_no_restart_when_others_have_finished(unpadded, tmp_path):
    """Foreign clients do what they can meanwhile, and change nothing."""
    argv = [*HPC, "--max-restarts=3", STEADY, str(tmp_path)]
    with Step(unpadded, *argv, nodes=2) as job:
        (tmp_path / "stop0").touch()
        job.says("HPC120]: 1 of 2 nodes have finished")
        _, port = job.launch_id_and_port()
        with job.hostile(tmp_path, f"10.10.0.1:{port}"):
            (tmp_path / "fail1.0").touch()
            assert job.end() != 0, job.output
    assert own_lines(job.output)[-1].endswith(
        "worker 1 on n10 (node 1) ended with exit code 3; no restart, because 1 node "
        "had already finished"
    ), job.output
    assert "Traceback" not in job.output


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
    line = LINE.replace(WORLD, f"--rdzv_id=id$SLURM_NODEID {WORLD}")
    done = unpadded.srun("-N2", "sh", "-c", line, env=ENVIRON)
    assert done.returncode == 2, done
    there = "HPC117]: on n10: this node has --rdzv_id=id1, but the head node at"
    assert there in done.stderr, done
    assert (
        "the agent on n10 (node 1) does not belong to this job "
        "(--rdzv_id=id1 instead of id0)"
    ) in done.stderr


# --- hostile clients --------------------------------------------------------------


def test_hostile_clients_at_the_end(unpadded, tmp_path):
    """One node waits for the other one; the store is there, too.

    The job continues, or ends with a message; nothing of theirs is run.
    """
    script = tmp_path / "script.py"
    script.write_text(
        "import runpy; import torch.distributed as dist;"
        f"dist.init_process_group('gloo'); runpy.run_path({STEADY!r})"
    )
    argv = [*HPC, "--hpc-preload=torch", str(script), str(tmp_path)]
    with Step(unpadded, *argv, nodes=2) as job:
        _, port = job.launch_id_and_port()
        wait_for_all(job, tmp_path, 0, workers=2)
        (tmp_path / "stop0").touch()
        job.says("HPC120]: 1 of 2 nodes have finished")
        store = (tmp_path / "store0").read_text()
        with job.hostile(tmp_path, f"10.10.0.1:{port}", store) as did:
            (tmp_path / "stop").touch()
            code = job.end()
    assert did["spoiled"] > 10
    # What they do to the store is between them and torch.
    assert code == 0 or "HPC125]: the job has failed: " in job.output, job.output

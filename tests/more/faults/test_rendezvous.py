"""The nodes meet by the scheduler's numbers, and end together, whatever happens."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from commands import (
    ENVIRON,
    FIRST_TWO,
    HPC,
    ONE_TASK,
    SCRIPTS,
    WORLD,
    column,
    lines,
    own_lines,
    read_workers,
)
from steps import LATE, Step, step
from waiting import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster

STEADY = str(SCRIPTS / "steady.py")
HOSTILE = [sys.executable, str(SCRIPTS / "hostile.py")]
NAMESERVER = SCRIPTS / "nameserver.py"


def wait_for(job: Step, folder: Path, *names: str) -> None:
    """Wait until files are there; see scripts/steady.py."""
    job.wait(lambda: all((folder / name).exists() for name in names))


def wait_for_all(job: Step, folder: Path, attempt: int) -> None:
    """Wait until all workers are there."""
    wait_for(job, folder, *(f"up{rank}.{attempt}" for rank in range(3)))


# --- signals ----------------------------------------------------------------------


def test_a_signal_in_the_search_for_the_coordinator(unpadded: Cluster) -> None:
    command = LATE.format(node=0) + " ".join([*HPC, WORLD])
    with step(unpadded, "sh", "-c", command) as job:
        job.says("HPC113")
        job.send("n10", "SIGINT")
    assert "Traceback" not in job.output


@pytest.mark.release
def test_a_signal_while_nodes_are_missing(unpadded: Cluster) -> None:
    """The others hear of it, and the first one says so."""
    command = LATE.format(node=2) + " ".join([*HPC, WORLD])
    with step(unpadded, "sh", "-c", command) as job:
        job.joins("n10")
        job.send("n10", "SIGTERM")
        job.see_end("n9")
        assert "the agent on n10 (node" in job.says("HPC125")
        assert "received SIGTERM" in job.output
    assert "Traceback" not in job.output


def test_a_signal_in_the_restart_wait(unpadded: Cluster, tmp_path: Path) -> None:
    argv = [*HPC, "--max-restarts=1", STEADY, str(tmp_path)]
    with step(unpadded, *argv) as job:
        wait_for_all(job, tmp_path, 0)
        job.send("n11", "SIGKILL")
        job.says("HPC123 the agent on n11 .node 2. is gone; waiting for it")
        assert job.agent("n9", "wait", "0.1") == "alive", job.output
        job.send("n10", "SIGTERM")
        job.see_end("n9")
        job.says("HPC125 the job has failed: the agent on n10")


def test_a_signal_in_the_exit_barrier(unpadded: Cluster, tmp_path: Path) -> None:
    with step(unpadded, *HPC, STEADY, str(tmp_path)) as job:
        for rank in 0, 2:
            (tmp_path / f"stop{rank}").touch()
        job.says("HPC120 2 of 3 nodes have finished, .* still at work: n10 .node 1.")
        job.send("n9", "SIGINT")
        job.see_end("n11", "n10")
        job.says(
            r"HPC125 the job has failed: the agent on n9 \(node 0\) received SIGINT"
        )


# --- restarts ---------------------------------------------------------------------


def test_one_budget_of_restarts(unpadded: Cluster, tmp_path: Path) -> None:
    """Every restart counts for all, whoever's worker it was that failed."""
    argv = [*HPC, "--max-restarts=2", STEADY, str(tmp_path)]
    with step(unpadded, *argv) as job:
        for attempt in range(3):
            wait_for_all(job, tmp_path, attempt)
            (tmp_path / f"fail{attempt}.{attempt}").touch()
        assert job.end() != 0, job.output
    assert not [*tmp_path.glob("up*.3")], job.output
    assert own_lines(job.output)[-1].endswith(
        "HPC125 the job has failed: worker 2 on n11 (node 2) ended with exit code 3"
    ), job.output


def test_agents_that_are_started_again(unpadded: Cluster, tmp_path: Path) -> None:
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
    with step(unpadded, "sh", "-c", command) as job:
        wait_for_all(job, tmp_path, 0)
        (tmp_path / "second").touch()
        job.says("second 2")
        job.says(
            r"HPC115 on n10: the head node at 10\.10\.0\.1:\d+ has another agent of "
            r"node 1 already: process \d+ on n10\. Start torchrun_hpc once on each node"
        )
        job.send("n11", "SIGKILL")
        wait_for_all(job, tmp_path, 1)
        (tmp_path / "stop").touch()
        assert job.end() == 0, job.output
    assert sorted(re.findall("steady: .*", job.output)) == [
        f"steady: rank {rank}, attempt 1" for rank in range(3)
    ], job.output


def test_no_restart_when_others_have_finished(
    unpadded: Cluster, tmp_path: Path
) -> None:
    argv = [*HPC, "--max-restarts=3", STEADY, str(tmp_path)]
    with step(unpadded, *argv) as job:
        for rank in 0, 2:
            (tmp_path / f"stop{rank}").touch()
        job.says("HPC120 2 of 3 nodes have finished")
        (tmp_path / "fail1.0").touch()
        assert job.end() != 0, job.output
    assert own_lines(job.output)[-1].endswith(
        "worker 1 on n10 (node 1) ended with exit code 3; no restart, because 2 nodes "
        "had finished already"
    ), job.output
    assert "Traceback" not in job.output


# --- who comes --------------------------------------------------------------------


def test_different_numbers_of_workers_and_sites(unpadded: Cluster) -> None:
    command = (
        "test $SLURM_NODEID = 2 && export NCAR_HOST=derecho;"
        f"exec {' '.join(HPC)} --nproc_per_node=$((SLURM_NODEID + 1)) {WORLD}"
    )
    done = unpadded.srun("-N3", ONE_TASK, "sh", "-c", command, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    said = own_lines(done.stderr)
    (start,) = [line for line in said if "HPC001" in line]
    (warning,) = [line for line in said if "HPC163" in line]
    assert "HPC001 3 nodes, 1 worker on this one, " in start
    assert (
        "warning: HPC163 the nodes use different sites, and so other variables: none "
        "on n9 (node 0), n10 (node 1); derecho on n11 (node 2). Type "
        "--hpc-site=derecho, or "
    ) in warning
    assert column(read_workers(done), "RANK", "GROUP_RANK", "WORLD_SIZE") == [
        (str(rank), group, "6") for rank, group in enumerate("011222")
    ], done.stdout


def test_missing_nodes_are_named_in_the_end(unpadded: Cluster) -> None:
    """The others do not have to wait for what else the machine has to do."""
    command = LATE.format(node=2) + " ".join(
        ["nice -n-40", *HPC, "--rdzv_conf=join_timeout=20", WORLD]
    )
    with step(unpadded, "sh", "-c", command) as job:
        job.says("HPC125 the job has failed: 1 node did not come within 20 s")
        job.says(r"\(join_timeout\): n11 \(node 2\)\n")
        job.see_end("n10")


def test_another_id_on_one_node(unpadded: Cluster) -> None:
    command = f"exec {' '.join(HPC)} --rdzv_id=id$SLURM_NODEID {WORLD}"
    done = unpadded.srun(*FIRST_TWO, ONE_TASK, "sh", "-c", command, env=ENVIRON)
    assert done.returncode == 2, done.stderr
    assert (
        "HPC117 on n10: --rdzv_id=id1 here, but id0 on the head node at" in done.stderr
    ), done.stderr
    assert (
        "the agent on n10 (node 1) does not belong here (it has --rdzv_id=id1 and 2 "
        "nodes); see there"
    ) in done.stderr, done.stderr


def test_two_jobs_on_the_same_nodes(unpadded: Cluster) -> None:
    argv = ["srun", "-N2", "-n2", "--overlap", "--mem=0", *HPC, WORLD]
    jobs = [
        unpadded.popen(argv, env=ENVIRON, stderr=subprocess.STDOUT) for _ in range(2)
    ]
    try:
        for job in jobs:
            output, _ = job.communicate(timeout=PATIENCE)
            assert job.returncode == 0, output
            assert len(read_workers(output)) == 2, output
    finally:
        for job in jobs:
            unpadded.end(job)


def test_the_kind_that_was_asked_for(unpadded: Cluster) -> None:
    done = unpadded.srun(*FIRST_TWO, ONE_TASK, *HPC, "--hpc-rendezvous=c10d",
                         "--rdzv_backend=c10d", WORLD, env=ENVIRON)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = lines(done.stderr)
    assert "c10d rendezvous at n9:" in line


# --- hostile clients --------------------------------------------------------------


def test_hostile_clients_at_the_end(unpadded: Cluster, tmp_path: Path) -> None:
    """Two nodes wait for the third one; the store is there, too.

    The job goes on, or ends with a message; nothing of theirs is run.
    """
    marker, script = tmp_path / "marker", tmp_path / "script.py"
    script.write_text(
        "import runpy; import torch.distributed as dist;"
        f"dist.init_process_group('gloo'); runpy.run_path({STEADY!r})"
    )
    argv = [*HPC, "--hpc-preload=torch", str(script), str(tmp_path)]
    with step(unpadded, *argv) as job:
        said = job.says(r"rendezvous at n9:\d+")
        ((launch_id, port),) = re.findall(r"Slurm (\S+), .* at n9:(\d+)", said)
        wait_for_all(job, tmp_path, 0)
        for rank in 0, 2:
            (tmp_path / f"stop{rank}").touch()
        job.says("HPC120 2 of 3 nodes have finished")
        store = (tmp_path / "store0").read_text()
        places = [f"10.10.0.1:{port}", store]
        hostile = unpadded.popen(
            [*HOSTILE, str(marker), launch_id, *places], env=ENVIRON, stderr=None
        )
        try:
            assert hostile.stdout is not None
            did = json.loads(hostile.stdout.readline())
            (tmp_path / "stop").touch()
            code = job.end()
        finally:
            unpadded.end(hostile)
    assert did["garbage"] >= 11
    assert did["held"] == 300
    assert did["pretended"] == 3
    assert did["disclosed"] == 0  # what it must know to pretend
    assert did["spoiled"] > 10
    assert not marker.exists()
    # What they do to the store is between them and torch.
    assert code == 0 or "HPC125 the job has failed: " in job.output, job.output
    assert "Traceback" not in job.output


# --- names ------------------------------------------------------------------------


def test_the_name_server_is_not_asked_for_peers(
    unpadded: Cluster, tmp_path: Path
) -> None:
    """Torch's store asks for the name of every peer; where DNS is slow, all wait.

    One question is left: of the client that a server is to itself. And each node asks
    once more, to find out whether there is an answer.
    """
    (tmp_path / "nsswitch.conf").write_text("hosts: files dns\n")
    (tmp_path / "resolv.conf").write_text(
        "nameserver 10.10.0.254\noptions timeout:1 attempts:1\n"
    )
    binds = "; ".join(
        f"mount --bind {tmp_path / name} /etc/{name}"
        for name in ("nsswitch.conf", "resolv.conf")
    )
    notes = tmp_path / "questions"
    server = unpadded.popen([sys.executable, NAMESERVER, notes])
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        done = unpadded.srun("-N3", ONE_TASK, "unshare", "--mount", "sh", "-c",
                             f"{binds}; exec {' '.join([*HPC, WORLD])}",
                             env=ENVIRON)  # fmt: skip
    finally:
        unpadded.end(server)
    assert done.returncode == 0, done.stderr
    assert len(read_workers(done)) == 3, done.stdout
    asked = [name for name in notes.read_text().splitlines() if name.endswith(".arpa")]
    assert 0 < len(asked) <= 1 + 3, asked

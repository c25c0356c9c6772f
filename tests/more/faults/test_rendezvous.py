"""The nodes meet by the scheduler's numbers, and end together, whatever happens."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from commands import (
    ENVIRON,
    FIRST_TWO,
    HPC,
    ONE_TASK,
    SCRIPTS,
    STOCK,
    WORLD,
    column,
    lines,
    own_lines,
    read_workers,
)
from steps import LATE, SOON, step
from waiting import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster

STEADY = str(SCRIPTS / "steady.py")
RESTARTS = str(SCRIPTS / "restarts.py")
HOSTILE = [sys.executable, str(SCRIPTS / "hostile.py")]
NAMESERVER = SCRIPTS / "nameserver.py"


def wait_for(path: Path, timeout: float = PATIENCE) -> None:
    """Wait until a file is there."""
    end = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.05)


# --- signals ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("late", "host", "name"),
    [
        (0, "n10", "SIGTERM"),
        (0, "n10", "SIGINT"),
        pytest.param(2, "n10", "SIGTERM", marks=pytest.mark.release("signals")),
        (2, "n9", "SIGINT"),
    ],
)
def test_a_signal_while_nodes_are_missing(
    unpadded: Cluster, late: int, host: str, name: str
) -> None:
    """In the search for the coordinator (late 0), in a wait for nodes (late 2)."""
    command = LATE.format(node=late) + " ".join([*HPC, WORLD])
    with step(unpadded, "sh", "-c", command) as job:
        job.says("HPC001" if late else "HPC113")
        time.sleep(3 if late else 0)  # until the other node is there, too
        assert float(job.agent(host, name)) < SOON
        if late:  # the others hear of it, and the first says so
            other = "n10" if host == "n9" else "n9"
            assert job.agent(other, "wait", "3") != "alive"
            assert f"the agent on {host} (node" in job.says("HPC125")
            assert f"received {name}" in job.output
    assert "Traceback" not in job.output


def test_a_signal_in_the_restart_wait(unpadded: Cluster, tmp_path: Path) -> None:
    argv = [*HPC, "--max-restarts=1", STEADY, str(tmp_path)]
    with step(unpadded, *argv) as job:
        wait_for(tmp_path / "up2.0")
        job.agent("n11", "SIGKILL")
        job.says("HPC123 the agent on n11 .node 2. is gone; waiting for it")
        time.sleep(2)
        assert job.agent("n9", "wait", "0.1") == "alive"
        assert float(job.agent("n10", "SIGTERM")) < SOON
        assert job.agent("n9", "wait", "3") != "alive"
        assert "HPC125 the job has failed: the agent on n10" in job.output


def test_a_signal_in_the_exit_barrier(unpadded: Cluster) -> None:
    script = "import os, time; time.sleep(60 * (os.environ['RANK'] == '1'))"
    with step(unpadded, *HPC, "--no-python", "python", "-c", script) as job:
        job.says("HPC120 2 of 3 nodes have finished, .* still at work: n10 .node 1.")
        assert float(job.agent("n9", "SIGINT")) < SOON
        assert job.agent("n11", "wait", "3") != "alive"
        assert job.agent("n10", "wait", "3") != "alive"
        assert (
            "HPC125 the job has failed: the agent on n9 (node 0) received SIGINT"
            in (job.output)
        )


# --- restarts ---------------------------------------------------------------------


def test_one_budget_of_restarts(unpadded: Cluster) -> None:
    """Every restart counts for all, whoever's worker it was that failed."""
    script = (
        "import os, sys, time; a = int(os.environ['TORCHELASTIC_RESTART_COUNT']);"
        "print('attempt', a, os.environ['RANK'], flush=True);"
        "sys.exit(3) if a == int(os.environ['RANK']) else time.sleep(60)"
    )
    argv = ["-N3", ONE_TASK, *HPC, "--max-restarts=2", "--no-python", "python", "-c"]
    done = unpadded.srun(*argv, script, env=ENVIRON)
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == sorted(
        f"attempt {attempt} {rank}" for attempt in range(3) for rank in range(3)
    )
    assert own_lines(done.stderr)[-1].endswith(
        "HPC125 the job has failed: worker 2 on n11 (node 2) ended with exit code 3"
    )


def test_an_agent_that_is_started_again(unpadded: Cluster, tmp_path: Path) -> None:
    again = f"{' '.join([*HPC, '--max-restarts=1', STEADY, str(tmp_path)])}"
    # A node's own watchdog: what is killed is started once more.
    command = f"{again}; code=$?; test $code = 137 && exec {again}; exit $code"
    with step(unpadded, "sh", "-c", command) as job:
        wait_for(tmp_path / "up2.0")
        job.agent("n11", "SIGKILL")
        for rank in range(3):
            wait_for(tmp_path / f"up{rank}.1")
        (tmp_path / "stop").touch()
        assert job.end() == 0, job.output
    assert sorted(re.findall("steady: .*", job.output)) == [
        f"steady: rank {rank}, attempt 1" for rank in range(3)
    ]


def test_no_restart_when_others_have_finished(unpadded: Cluster) -> None:
    script = (
        "import os, sys, time; late = os.environ['RANK'] == '1';"
        "time.sleep(3 * late); print(time.time()); sys.exit(5 * late)"
    )
    argv = ["-N3", ONE_TASK, *HPC, "--max-restarts=3", "--no-python", "python", "-c"]
    done = unpadded.srun(*argv, script, env=ENVIRON)
    failed = max(float(line) for line in done.stdout.splitlines())
    assert time.time() - failed < 30
    assert done.returncode == 1
    assert own_lines(done.stderr)[-1].endswith(
        "worker 1 on n10 (node 1) ended with exit code 5; no restart, because 2 nodes "
        "had finished already"
    )
    assert "Traceback" not in done.stderr


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
    ]


def test_missing_nodes_are_named_in_the_end(unpadded: Cluster) -> None:
    command = LATE.format(node=2) + " ".join(
        [*HPC, "--rdzv_conf=join_timeout=4", WORLD]
    )
    with step(unpadded, "sh", "-c", command) as job:
        job.says("HPC125 the job has failed: 1 node did not come within 4 s")
        assert "(join_timeout): n11 (node 2)\n" in job.output
        assert job.agent("n10", "wait", "2") != "alive"


def test_two_agents_of_one_node(unpadded: Cluster, tmp_path: Path) -> None:
    argv = " ".join([*HPC, STEADY, str(tmp_path), "8"])
    second = f"(sleep 3; {argv}; echo second: $?)"
    command = f"if [ $SLURM_NODEID = 1 ]; then {second} & fi; {argv}; wait"
    done = unpadded.srun("-N3", ONE_TASK, "sh", "-c", command, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    assert "second: 2" in done.stdout
    assert done.stdout.count("steady: ") == 3
    error = own_lines(done.stderr)[-1]
    assert re.search(
        r"HPC115 on n10: the head node at 10\.10\.0\.1:\d+ has another agent of node 1 "
        r"already: process \d+ on n10\. Start torchrun_hpc once on each node",
        error,
    )


def test_another_id_on_one_node(unpadded: Cluster) -> None:
    command = f"exec {' '.join(HPC)} --rdzv_id=id$((SLURM_NODEID / 2)) {WORLD}"
    done = unpadded.srun("-N3", ONE_TASK, "sh", "-c", command, env=ENVIRON)
    assert done.returncode == 2
    assert (
        "HPC117 on n11: --rdzv_id=id1 here, but id0 on the head node at" in done.stderr
    )
    assert (
        "the agent on n11 (node 2) does not belong here (it has --rdzv_id=id1 and 3 "
        "nodes); see there"
    ) in done.stderr


def test_five_jobs_on_the_same_nodes(unpadded: Cluster) -> None:
    argv = ["srun", "-N2", "-n2", "--overlap", "--mem=0", *HPC, WORLD]
    jobs = [
        unpadded.popen(argv, env=ENVIRON, stderr=subprocess.STDOUT) for _ in range(5)
    ]
    try:
        for job in jobs:
            output, _ = job.communicate(timeout=PATIENCE)
            assert job.returncode == 0, output
            assert len(read_workers(output)) == 2
    finally:
        for job in jobs:
            unpadded.end(job)


@pytest.mark.parametrize("kind", ["auto", "scheduler", "c10d"])
def test_the_kind_that_was_asked_for(unpadded: Cluster, kind: str) -> None:
    done = unpadded.srun(*FIRST_TWO, ONE_TASK, *HPC, f"--hpc-rendezvous={kind}",
                         "--rdzv_backend=c10d", WORLD, env=ENVIRON)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = lines(done.stderr)
    expected = "c10d" if kind == "c10d" else "scheduler"
    assert f"{expected} rendezvous at n9:" in line


# --- hostile clients --------------------------------------------------------------


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("waiting", marks=pytest.mark.release("hostile")),
        "training",
        "ending",
    ],
)
def test_hostile_clients(unpadded: Cluster, tmp_path: Path, phase: str) -> None:
    """The job goes on, or ends with a message; nothing of theirs is run."""
    marker = tmp_path / "marker"
    late = f"test $SLURM_NODEID = 2 && sleep {6 if phase == 'waiting' else 0}; "
    script = [STEADY, str(tmp_path), "10"]
    if phase == "ending":
        text = 'import os, time; time.sleep(15 * (os.environ["RANK"] == "1"))'
        script = ["--no-python", "python", "-c", f"'{text}'"]
    command = f"{late} exec {' '.join([*HPC, *script])}"
    with step(unpadded, "sh", "-c", command) as job:
        said = job.says(r"rendezvous at n9:\d+")
        ((launch_id, port),) = re.findall(r"Slurm (\S+), .* at n9:(\d+)", said)
        places = [f"10.10.0.1:{port}"]
        if phase == "training":
            wait_for(tmp_path / "store0")
            places.append((tmp_path / "store0").read_text())
        hostile = unpadded.run(
            [*HOSTILE, "6", str(marker), launch_id, *places], env=ENVIRON, check=True
        )
        code = job.end(60)
    did = json.loads(hostile.stdout)
    assert did["garbage"] >= 11
    assert did["held"] == 300
    assert did["pretended"] == 3
    assert did["disclosed"] == 0  # what it must know to pretend
    assert phase != "training" or did["spoiled"] > 10
    assert not marker.exists()
    # What they do to the workers' store is between them and torch.
    assert code == 0 or phase == "training", job.output
    if code:
        assert "HPC125 the job has failed: " in job.output


# --- names ------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ["ours", "stock"])
def test_the_name_server_is_not_asked_for_peers(
    unpadded: Cluster, tmp_path: Path, launcher: str
) -> None:
    """Torch's store asks for the name of every peer; where DNS is slow, all wait.

    One question is left: of the client that a server is to itself.
    """
    (tmp_path / "nsswitch.conf").write_text("hosts: files dns\n")
    (tmp_path / "resolv.conf").write_text(
        "nameserver 10.10.0.254\noptions timeout:1 attempts:1\n"
    )
    stock = (*STOCK, "--nnodes=3", "--rdzv_backend=c10d", "--rdzv_endpoint=n9:24680")
    binds = "; ".join(
        f"mount --bind {tmp_path / name} /etc/{name}"
        for name in ("nsswitch.conf", "resolv.conf")
    )
    argv = " ".join([*(HPC if launcher == "ours" else stock), WORLD])
    notes = tmp_path / "questions"
    server = unpadded.popen([sys.executable, NAMESERVER, notes])
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        done = unpadded.srun("-N3", ONE_TASK, "unshare", "--mount", "sh", "-c",
                             f"{binds}; exec {argv}", env=ENVIRON)  # fmt: skip
    finally:
        unpadded.end(server)
    assert done.returncode == 0, done.stderr
    assert len(read_workers(done)) == 3
    asked = [name for name in notes.read_text().splitlines() if name.endswith(".arpa")]
    # Each node of ours asks once more, to find out whether there is an answer.
    assert len(asked) <= 1 + 3 if launcher == "ours" else len(asked) >= 3, asked

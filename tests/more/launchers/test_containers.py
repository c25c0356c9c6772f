"""In containers: other networks, stale variables; see core/test_containers.py, too.

The container is a stand-in, scripts/container.sh: namespaces that have just these
properties. Neither Apptainer nor pyxis is started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from commands import (
    ALL_REDUCE,
    ENVIRON,
    FIRST_TWO,
    FORMS,
    HPC,
    JUELICH,
    ONE_TASK,
    SCRIPTS,
    WORLD,
    column,
    lines,
    own_lines,
    read_workers,
)

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster

CONTAINER = ("sh", str(SCRIPTS / "container.sh"))
TWO_NODES = ("-N2", "-w", "jwb0001,jwb0002")
TWO_TASKS = "--ntasks-per-node=2"

RANKS = [(str(rank), str(rank % 2), "4") for rank in range(4)]
STALE = {"MASTER_PORT": "61234", "RANK": "7", "LOCAL_RANK": "3", "WORLD_SIZE": "16"}
OF_ANOTHER_JOB = ("jwb0003", "gpu17.example.org")  # known here, and unknown


def hosts_file(folder: Path, first: int) -> str:
    """Write a container's own /etc/hosts: the names of the nodes, and no fast ones."""
    folder.chmod(0o755)
    names = [f"10.10.0.{first + k} {name}\n" for k, name in enumerate(("n9", "n10"))]
    (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
    return f"--hosts={folder}/hosts"


# --- in the host's network, as with Apptainer and pyxis -----------------------------


def test_each_task_a_worker(juelich: Cluster) -> None:
    """The hook's MASTER_ADDR names rank 0's node, and its port is that of all steps.

    Each task is in a container of its own, as where srun starts Apptainer.
    """
    done = juelich.srun(
        *TWO_NODES, TWO_TASKS, *CONTAINER, "--hook", *HPC, WORLD, env=JUELICH
    )
    assert done.returncode == 0, done.stderr
    seen = read_workers(done)
    assert column(seen, "RANK", "LOCAL_RANK", "WORLD_SIZE") == RANKS, done.stderr
    for worker in seen:
        assert worker["host"] == "container"
        assert worker["MASTER_ADDR"] == "10.20.0.1"
        assert int(worker["MASTER_PORT"]) < 61000
        assert worker["OMP_NUM_THREADS"] == "1"
    (line,) = lines(done.stderr)
    assert "HPC078" not in line


def test_agents_leave_stale_variables(juelich: Cluster) -> None:
    """Variables of another job; and to c10d, nodes are host name and process number.

    Both are the same in all containers.
    """
    stale = STALE | {"MASTER_ADDR": OF_ANOTHER_JOB[0]}
    done = juelich.srun(
        *TWO_NODES, ONE_TASK, *CONTAINER, *HPC, "--nproc_per_node=2",
        "--hpc-rendezvous=c10d", WORLD, env=JUELICH | stale,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = read_workers(done)
    assert column(seen, "RANK", "LOCAL_RANK", "WORLD_SIZE") == RANKS, done.stderr
    assert {worker["MASTER_ADDR"] for worker in seen} == {"10.20.0.1"}
    assert STALE["MASTER_PORT"] not in {worker["MASTER_PORT"] for worker in seen}
    assert len(lines(done.stderr)) == 1, done.stderr


@pytest.mark.parametrize("address", OF_ANOTHER_JOB)
def test_tasks_replace_stale_variables(juelich: Cluster, address: str) -> None:
    done = juelich.srun(*TWO_NODES, TWO_TASKS, *CONTAINER, *HPC, WORLD,
                        env=JUELICH | STALE | {"MASTER_ADDR": address})  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = read_workers(done)
    assert column(seen, "RANK", "LOCAL_RANK", "WORLD_SIZE") == RANKS, done.stderr
    assert {worker["MASTER_ADDR"] for worker in seen} == {"10.20.0.1"}
    assert STALE["MASTER_PORT"] not in {worker["MASTER_PORT"] for worker in seen}
    (line,) = lines(done.stderr)
    assert f"HPC078 MASTER_ADDR={address} is not node 0 of this step, jwb0001" in line


def test_slurms_variables_are_enough(juelich: Cluster) -> None:
    """--cleanenv, and SLURM_* let through; what shows the site has to be typed."""
    done = juelich.srun(
        *TWO_NODES, TWO_TASKS, *CONTAINER, "--cleanenv=SLURM*", *HPC, "--hpc-site=jsc",
        WORLD, env=JUELICH,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert column(read_workers(done), "RANK", "WORLD_SIZE", "MASTER_ADDR") == [
        (rank, "4", "10.20.0.1") for rank in "0123"
    ]


def test_without_slurms_variables(juelich: Cluster) -> None:
    """--cleanenv alone: each node is alone, unless the command tells of others."""
    done = juelich.srun(*TWO_NODES, ONE_TASK, *CONTAINER, "--cleanenv=none", *HPC,
                        "--nnodes=2", WORLD, env=JUELICH)  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert {line.split()[2] for line in own_lines(done.stderr)} == {"HPC066"}


# --- names and networks that are not the host's -------------------------------------


def test_a_network_without_the_fast_interface(
    unpadded: Cluster, tmp_path: Path
) -> None:
    """Addresses of their own in the one network that is there; names mean these."""
    done = unpadded.srun(
        *FIRST_TWO, ONE_TASK, *CONTAINER, "--network=macvlan",
        hosts_file(tmp_path, 101), *HPC, "--nproc_per_node=2", ALL_REDUCE,
        env=ENVIRON | FORMS["fork"],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = read_workers(done)
    assert column(seen, "RANK", "LOCAL_RANK", "WORLD_SIZE") == RANKS, done.stderr
    for worker in seen:
        assert worker["MASTER_ADDR"] == "10.10.0.101"
        assert worker["GLOO_SOCKET_IFNAME"] == "eth0"
        assert worker["total"] == 6
    assert len(lines(done.stderr)) == 1, done.stderr


def test_names_without_those_of_the_fast_network(
    unpadded: Cluster, tmp_path: Path
) -> None:
    """The container's own /etc/hosts: the plain names have to do."""
    done = unpadded.srun(
        *FIRST_TWO, TWO_TASKS, *CONTAINER, hosts_file(tmp_path, 1), *HPC,
        "--hpc-site=jsc", WORLD, env=ENVIRON,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert column(read_workers(done), "RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME") == [
        (rank, "10.10.0.1", "eth0") for rank in "0123"
    ]
    assert "HPC056 n9i does not resolve here" in done.stderr


@pytest.mark.parametrize("tasks", [ONE_TASK, TWO_TASKS])
def test_names_of_no_node(juelich: Cluster, tmp_path: Path, tasks: str) -> None:
    done = juelich.srun(*TWO_NODES, tasks, *CONTAINER, hosts_file(tmp_path, 1), *HPC,
                        WORLD, env=JUELICH)  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    seen = own_lines(done.stderr)
    assert seen, done.stderr
    for line in seen:
        assert "HPC059 on jwb000" in line
        assert ": the head node's name jwb0001 (SLURM_STEP_NODELIST)" in line
        assert "does not resolve here" in line


@pytest.mark.parametrize(
    ("network", "reason"),
    [("none", "Network is unreachable"), ("bridge", "nobody listens")],
)
def test_networks_that_lead_to_no_node(
    juelich: Cluster, network: str, reason: str
) -> None:
    """Nothing but loopback, as of pyxis' --container-unshare=net; Docker's bridge.

    From behind NAT one reaches other hosts, but none of the containers there.
    """
    done = juelich.srun(
        *TWO_NODES, ONE_TASK, *CONTAINER, f"--network={network}", *HPC,
        "--rdzv_conf=join_timeout=3", WORLD, env=JUELICH,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    errors = [line for line in own_lines(done.stderr) if "HPC112" in line]
    assert errors, done.stderr
    for line in errors:
        assert "no head node at jwb0001i:" in line
        assert "(10.20.0.1)" in line
        assert reason in line
    for name in ("jwb0001", "jwb0002"):
        # Behind NAT, jwb0001i is 10.20.0.1, and inside nobody has that.
        of_none = f"HPC057 no address of {name} is known"
        of_bridge = f"warning: HPC136 {name}"
        assert (of_none in done.stderr) == (network == "none"), done.stderr
        assert (of_bridge in done.stderr) == (network == "bridge"), done.stderr
    assert "Traceback" not in done.stderr


def test_two_steps_at_once_have_a_port_each(unpadded: Cluster) -> None:
    """The hook exports the same for all steps of a job."""
    step = " ".join(["srun -N1 -n2 --exact", *CONTAINER, "--hook", *HPC, WORLD])
    script = f"#!/bin/sh\n{step} --sleep 1 &\n{step} --sleep 1 &\nwait\n"
    done = unpadded.sbatch(script, "-N1", "-n4", env=ENVIRON)
    assert done.returncode == 0, done.output
    seen = column(read_workers(done.output), "TORCHELASTIC_RUN_ID", "MASTER_PORT")
    assert len(seen) == 4
    assert len({port for _, port in seen}) == 2, seen


def test_a_terminal_alone_is_no_shell(unpadded: Cluster) -> None:
    """srun --pty: in a container the process has another number than Slurm's."""
    srun = " ".join(["srun -N2 --pty", *CONTAINER, *HPC, WORLD])
    done = unpadded.run(
        ["script", "--quiet", "--return", "--command", srun, "/dev/null"],
        env=ENVIRON | {"SHELL": "/bin/sh"},
    )
    assert done.returncode == 0, done.stdout
    assert "2 nodes, 1 worker on this one" in done.stdout


def test_rank_0_without_its_address(juelich: Cluster) -> None:
    done = juelich.srun(*TWO_NODES, TWO_TASKS, *CONTAINER, "--network=none", *HPC,
                        WORLD, env=JUELICH)  # fmt: skip
    assert done.returncode == 2, done.stderr
    (error,) = [line for line in own_lines(done.stderr) if "error:" in line]
    assert "HPC135 on jwb0001: rank 0 is to be reached at 10.20.0.1 (jwb0001i:" in error
    assert "which no interface of this node has: there are 127.0.0.1" in error


@pytest.mark.parametrize("address", ["n9i", "10.20.0.1"])
def test_master_addr_in_another_network_of_node_0(
    unpadded: Cluster, address: str
) -> None:
    """Where no site is known, so does a user choose the network in direct mode."""
    environ = ENVIRON | {"MASTER_ADDR": address, "MASTER_PORT": "29511"}
    done = unpadded.srun(*FIRST_TWO, TWO_TASKS, *HPC, WORLD, env=environ)
    assert done.returncode == 0, done.stderr
    seen = column(read_workers(done), "MASTER_ADDR", "MASTER_PORT")
    assert seen == [("10.20.0.1", "29511")] * 4

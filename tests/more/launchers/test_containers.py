"""In containers: other networks, stale variables; see also core/test_containers.py.

The container is a stand-in: neither Apptainer nor pyxis is started.
"""

from __future__ import annotations

import pytest

from tests.support.cluster.commands import (
    ALL_REDUCE,
    CONTAINER,
    ENVIRON,
    FORMS,
    JUELICH,
    LINE,
    column,
    errors,
    in_terminal,
    lines,
    read_workers,
    refused,
)
from tests.support.cluster.real_job import launch

RANKS = [(str(rank), str(rank % 2), "4") for rank in range(4)]
STALE = {"MASTER_PORT": "61234", "RANK": "7", "LOCAL_RANK": "3", "WORLD_SIZE": "16"}
OF_ANOTHER_JOB = ("jwb0003", "gpu17.example.org")  # known here, and unknown


def hosts_file(folder, first):
    """Write a container's own /etc/hosts: the names of the nodes, and no fast ones."""
    folder.chmod(0o755)
    names = [f"10.10.0.{first + k} {name}\n" for k, name in enumerate(("n9", "n10"))]
    (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
    return f"--hosts={folder}/hosts"


def in_containers(cluster, *options, inside=(), **how):
    """Start the launcher in a container for each task, as where srun starts it."""
    return launch(cluster, *options, srun=[*CONTAINER, *inside], **how)


# --- in the host's network, as with Apptainer and pyxis -----------------------------


def test_each_task_a_worker(juelich):
    """The hook's MASTER_ADDR names rank 0's node, and its port is that of all steps."""
    done = in_containers(juelich, inside=["--hook"], tasks=2, environ=JUELICH)
    seen = read_workers(done)
    assert column(seen, "RANK", "LOCAL_RANK", "WORLD_SIZE") == RANKS
    for worker in seen:
        assert worker["host"] == "container"
        assert worker["MASTER_ADDR"] == "10.20.0.1"
        assert int(worker["MASTER_PORT"]) < 61000
        assert worker["OMP_NUM_THREADS"] == "1"
    (line,) = lines(done.stderr)
    assert "HPC078" not in line


def check_stale(done):
    """See that nothing of another job's variables is left; return the lines."""
    seen = read_workers(done)
    assert column(seen, "RANK", "LOCAL_RANK", "WORLD_SIZE") == RANKS
    assert {worker["MASTER_ADDR"] for worker in seen} == {"10.20.0.1"}
    assert STALE["MASTER_PORT"] not in {worker["MASTER_PORT"] for worker in seen}
    return lines(done.stderr)


def test_agents_leave_stale_variables(juelich):
    """Variables of another job; and to c10d, nodes are host name and process number.

    Both are the same in all containers.
    """
    stale = STALE | {"MASTER_ADDR": OF_ANOTHER_JOB[0]}
    options = ("--nproc_per_node=2", "--hpc-rendezvous=c10d")
    done = in_containers(juelich, *options, environ=JUELICH | stale)
    assert len(check_stale(done)) == 1


@pytest.mark.parametrize("address", OF_ANOTHER_JOB)
def test_tasks_replace_stale_variables(juelich, address):
    stale = STALE | {"MASTER_ADDR": address}
    (line,) = check_stale(in_containers(juelich, tasks=2, environ=JUELICH | stale))
    assert f"HPC078]: MASTER_ADDR={address} is not node 0 of this step, jwb0001" in line


def test_slurms_variables_are_enough(juelich):
    """--cleanenv, and SLURM_* let through; the site must be explicit."""
    inside = ["--cleanenv=SLURM*"]
    done = in_containers(
        juelich, "--hpc-site=jsc", inside=inside, tasks=2, environ=JUELICH
    )
    assert column(done, "RANK", "WORLD_SIZE", "MASTER_ADDR") == [
        (rank, "4", "10.20.0.1") for rank in "0123"
    ]


def test_without_slurms_variables(juelich):
    """--cleanenv alone: each node is alone, unless the command tells of others."""
    done = in_containers(
        juelich, "--nnodes=2", inside=["--cleanenv=none"], environ=JUELICH
    )
    assert {line.split()[1] for line in refused(done)} == {"error[HPC066]:"}


# --- names and networks that are not the host's -------------------------------------


def test_a_network_without_the_fast_interface(unpadded, tmp_path):
    """Addresses of their own in the one network that is there; names mean these."""
    done = in_containers(
        unpadded,
        "--nproc_per_node=2",
        inside=["--network=macvlan", hosts_file(tmp_path, 101)],
        script=[ALL_REDUCE],
        environ=FORMS["fork"],
    )
    seen = read_workers(done)
    assert column(seen, "RANK", "LOCAL_RANK", "WORLD_SIZE") == RANKS
    for worker in seen:
        assert worker["MASTER_ADDR"] == "10.10.0.101"
        assert worker["GLOO_SOCKET_IFNAME"] == "eth0"
        assert worker["total"] == 6
    assert len(lines(done.stderr)) == 1


def test_names_without_those_of_the_fast_network(unpadded, tmp_path):
    """The container's own /etc/hosts: the plain names have to do."""
    inside = [hosts_file(tmp_path, 1)]
    done = in_containers(unpadded, "--hpc-site=jsc", inside=inside, tasks=2)
    assert column(done, "RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME") == [
        (rank, "10.10.0.1", "eth0") for rank in "0123"
    ]
    assert "HPC056]: n9i does not resolve here" in done.stderr


@pytest.mark.parametrize("tasks", [1, 2])
def test_names_of_no_node(juelich, tmp_path, tasks):
    inside = [hosts_file(tmp_path, 1)]
    done = in_containers(juelich, inside=inside, tasks=tasks, environ=JUELICH)
    seen = refused(done)
    assert seen
    for line in seen:
        assert "HPC059]: on jwb000" in line
        assert ": the head node's name jwb0001 (SLURM_STEP_NODELIST)" in line
        assert "does not resolve here" in line


@pytest.mark.parametrize(
    ("network", "reason"),
    [("none", "Network is unreachable"), ("bridge", "nobody listens")],
)
def test_networks_that_lead_to_no_node(juelich, network, reason):
    """Nothing but loopback, as of pyxis' --container-unshare=net; Docker's bridge.

    From behind NAT one reaches other hosts, but none of the containers there.
    """
    option, inside = "--rdzv_conf=join_timeout=3", [f"--network={network}"]
    done = in_containers(juelich, option, inside=inside, environ=JUELICH)
    said = [line for line in refused(done, code=1) if "HPC112" in line]
    assert said
    for line in said:
        assert "no head node at jwb0001i:" in line
        assert "(10.20.0.1)" in line
        assert reason in line
    for name in ("jwb0001", "jwb0002"):
        # Behind NAT, jwb0001i is 10.20.0.1, and inside nobody has that.
        of_none = f"HPC057]: {name} has no known address"
        of_bridge = f"warning[HPC136]: {name}"
        assert (of_none in done.stderr) == (network == "none")
        assert (of_bridge in done.stderr) == (network == "bridge")


def test_two_steps_at_once_have_a_port_each(unpadded):
    """The hook exports the same for all steps of a job."""
    step = " ".join(["srun -N1 -n2 --exact", *CONTAINER, "--hook", LINE])
    script = f"#!/bin/sh\n{step} --sleep 1 &\n{step} --sleep 1 &\nwait\n"
    done = unpadded.sbatch(script, "-N1", "-n4", env=ENVIRON)
    seen = column(done, "TORCHELASTIC_RUN_ID", "MASTER_PORT")
    assert len(seen) == 4, done.output
    assert len({port for _, port in seen}) == 2, seen


def test_a_terminal_alone_is_no_shell(unpadded):
    """srun --pty: in a container the process has another number than Slurm's."""
    srun = " ".join(["srun -N2 --pty", *CONTAINER, LINE])
    assert "2 nodes, 1 worker here" in in_terminal(unpadded, srun)


def test_rank_0_without_its_address(juelich):
    done = in_containers(juelich, inside=["--network=none"], tasks=2, environ=JUELICH)
    assert done.returncode == 2
    (error,) = errors(done.stderr)
    assert "HPC136]: on jwb0001: " in error
    assert "10.20.0.1" in error


@pytest.mark.parametrize("address", ["n9i", "10.20.0.1"])
def test_master_addr_in_another_network_of_node_0(unpadded, address):
    """If no site is known, a user chooses the network of direct mode in this way."""
    environ = {"MASTER_ADDR": address, "MASTER_PORT": "29511"}
    done = launch(unpadded, tasks=2, environ=environ)
    assert column(done, "MASTER_ADDR", "MASTER_PORT") == [("10.20.0.1", "29511")] * 4

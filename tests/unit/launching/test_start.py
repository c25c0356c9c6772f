"""What starting has in common in all modes, and the environment that it writes."""

from __future__ import annotations

import socket

import pytest
from nodes import COMMAND
from plans import BLOCK, job_at, planned_at, worker_environment

from torchrun_hpc import main
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.launching import environment, start
from torchrun_hpc.planning.preflight import Preflight


def test_the_environment_is_written(monkeypatch):
    environ = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "99", "HOME": "/root"}
    monkeypatch.setattr("os.environ", environ)
    environment.write(planned_at(BLOCK, 5))
    assert environ == worker_environment(5, BLOCK) | {"HOME": "/root"}


def test_only_the_first_task_prints_a_line(capsys):
    for rank in range(8):
        start._announce(planned_at(BLOCK, rank), [], [])
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "Slurm 19.0" in said.err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_that_is_taken(rank):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        plan = planned_at([0, 0], rank, environ={"MASTER_PORT": port})
        if rank:
            start.check_port(plan)
            return
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1") as caught:
            start.check_port(plan)
    assert caught.value.code == "HPC132"
    assert "MASTER_PORT=PORT" in str(caught.value)


def test_nothing_is_written_where_the_port_is_taken(monkeypatch):
    """A second call of setup_environment() would take it for an agent's."""
    environ = {"HOME": "/root"}
    monkeypatch.setattr("os.environ", environ)
    job = job_at([0, 0], 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = {"MASTER_PORT": str(server.getsockname()[1])}
        seen = Preflight(job, None, given, "jwb0001", COMMAND)
        with pytest.raises(LaunchError, match="cannot be used") as caught:
            main.set_up_worker(seen)
    assert caught.value.code == "HPC132"
    assert environ == {"HOME": "/root"}


def test_a_variable_that_cannot_be_read_leaves_those_of_a_script(monkeypatch):
    monkeypatch.setattr("os.environ", {})
    given = {"PET_MAX_RESTARTS": "x", "PET_HPC_OMP_THREADS": "3"}
    seen = Preflight(job_at([0, 0], 0), None, given, "jwb0001", COMMAND)
    assert main.set_up_worker(seen)["OMP_NUM_THREADS"] == "3"

"""The start in all modes, and the environment that it writes."""

from __future__ import annotations

import socket

import pytest

from tests.support.juelich import COMMAND, job_at
from tests.support.plans import BLOCK, planned_at, worker_environment
from torchrun_hpc import main
from torchrun_hpc.agent import start
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.preflight import Preflight


def test_the_environment_is_written(monkeypatch):
    environ = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "99", "HOME": "/root"}
    monkeypatch.setattr("os.environ", environ)
    start.write_environment(planned_at(BLOCK, 5))
    assert environ == worker_environment(5, BLOCK) | {"HOME": "/root"}


def test_nothing_is_written_where_the_port_is_taken(monkeypatch):
    """A second call of setup_environment() would take it for an agent's."""
    environ = {"HOME": "/root"}
    monkeypatch.setattr("os.environ", environ)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        given = {"MASTER_PORT": port}
        facts = Preflight(job_at([0, 0], 0), None, given, "jwb0001", COMMAND)
        monkeypatch.setattr(main, "preflight", lambda *_: facts)
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1") as caught:
            main.setup_environment()
        other = planned_at([0, 0], 1, environ=given).meeting
        start.check_port(other, is_direct=True)
    assert caught.value.code == "HPC132"
    assert "MASTER_PORT=PORT" in str(caught.value)
    assert environ == {"HOME": "/root"}


def test_a_variable_that_cannot_be_read_leaves_those_of_a_script(monkeypatch):
    monkeypatch.setattr("os.environ", {})
    given = {"PET_MAX_RESTARTS": "x", "PET_HPC_OMP_THREADS": "3"}
    facts = Preflight(job_at([0, 0], 0), None, given, "jwb0001", COMMAND)
    monkeypatch.setattr(main, "preflight", lambda *_: facts)
    assert main.setup_environment()["OMP_NUM_THREADS"] == "3"

"""What starting has in common in all modes, and the environment that it writes."""

from __future__ import annotations

import pytest
from plans import BLOCK, planned_at, worker_environment

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.launching import environment, start


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
    import socket  # noqa: PLC0415 - here only

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        plan = planned_at([0, 0], rank, environ={"MASTER_PORT": port})
        if rank:
            start._check_port(plan)
            return
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1") as caught:
            start._check_port(plan)
    assert caught.value.code == "HPC132"
    assert "MASTER_PORT=PORT" in str(caught.value)

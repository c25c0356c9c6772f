"""What a node does before it connects to anybody, and before it answers."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import pytest

from tests.support.loopback import HERE, JOB, key_of, listening, started
from tests.support.patience import NEVER_S, until
from tests.support.simulated_job import SETTINGS
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.limits import KEY_FILE_TIMEOUT
from torchrun_hpc.planning.meeting import KeyFile, Meeting, Spares
from torchrun_hpc.rendezvous.client import Listener
from torchrun_hpc.rendezvous.connection import Connection, inform
from torchrun_hpc.rendezvous.protocol import Ended

WHY = Failure(Kind.AGENT, (1,), text="why")


@pytest.fixture
def stranger():
    """Listen where the head node is expected, as somebody who knows the launch id."""
    with listening() as server:
        server.settimeout(0)
        yield server


@pytest.fixture(params=["", "--hpc_key_file=FILE"], ids=["default", "explicit"])
def key(request, tmp_path):
    """A key that cannot be used: somebody has put a folder in its place."""
    (tmp_path / "key").mkdir()
    return KeyFile(str(tmp_path / "key"), source=request.param)


def meeting(rank, key, port, spares):
    return Meeting(
        "scheduler", nodes=3, node_rank=rank, launch_id=JOB, hosts=("n0", "n1", "n2"),
        fast_hosts=(HERE,) * 3, connect_host=HERE, local_address=HERE, ports=(port,),
        listen=(HERE, port) if rank == 0 else None, coordinator=0,
        is_coordinator=rank == 0, spares=Spares(spares), key=key,
    )  # fmt: skip


def gives_up(this_meeting):
    """See that a node gives up, and does not tell others why: that would be as bad."""
    connection = Connection(this_meeting, SETTINGS, {}, Listener(print))
    with pytest.raises(LaunchError, match="needs a usable key") as caught:
        connection.open(NEVER_S)
    connection.close()
    assert caught.value.code == "HPC238"
    assert inform(this_meeting, WHY, NEVER_S, print) is None


@pytest.mark.parametrize("spares", [0, 1])
def test_a_node_whose_key_cannot_be_used_calls_nobody(stranger, key, spares):
    gives_up(meeting(1, key, stranger.getsockname()[1], spares))
    with pytest.raises(BlockingIOError):
        stranger.accept()


@pytest.mark.parametrize("spares", [0, 1])
def test_a_head_node_whose_key_cannot_be_used_answers_nobody(key, spares, monkeypatch):
    ports = []
    monkeypatch.setattr(socket.socket, "listen", lambda *_: ports.append(1))
    gives_up(meeting(0, key, 1, spares))
    assert ports == []


def test_who_gives_up_without_a_key_does_not_warn(stranger, tmp_path, capfd):
    """Its own failure ends the launch, whoever joins."""
    port = stranger.getsockname()[1]
    stranger.close()
    this_meeting = meeting(1, KeyFile(str(tmp_path / "key")), port, 0)
    assert inform(this_meeting, WHY, 0, lambda _: None) is None
    assert capfd.readouterr().err == ""


@pytest.fixture
def opened(job, tmp_path, monkeypatch):
    """Let node 1 look for the head node, with spares; their keys differ."""
    connections, new_loop = [], asyncio.new_event_loop

    def by_clock():
        loop = new_loop()
        monkeypatch.setattr(loop, "time", job.clock)
        return loop

    def opened(spare_after):
        job.start_server(key=key_of(b"theirs"))
        this_meeting = meeting(1, KeyFile(str(tmp_path / "key"), "FILE"), job.port, 1)
        settings = replace(SETTINGS, coordinator=1, spares=1, spare_after=spare_after)
        connection = Connection(this_meeting, settings, {}, Listener())
        connections.append(connection)
        monkeypatch.setattr(asyncio, "new_event_loop", by_clock)
        connected = started(lambda: connection.open(NEVER_S))
        until(lambda: connection.client.state.is_running)
        job.clock.drive(connection.client)
        return connected

    yield opened
    (connection,) = connections
    # So that it waits for no other node.
    connection.client._change(lambda state: replace(state, ending=Ended()))
    closed = started(connection.close)
    job.clock.passes_until(closed.done)


@pytest.mark.parametrize("after", [1, KEY_FILE_TIMEOUT - 1, KEY_FILE_TIMEOUT, 60])
def test_two_keys_in_a_job_with_spares(job, opened, after):
    """However soon it would ask the other members."""
    connected = opened(int(after))
    job.clock.passes_until(connected.done)
    with pytest.raises(LaunchError, match="another key") as caught:
        connected.result()
    assert caught.value.code == "HPC119"


def test_a_stranger_who_leaves_the_port(job, opened):
    """Then the other members are asked, as if nobody had listened there."""
    connected = opened(1)
    job.clock.go_on(KEY_FILE_TIMEOUT - 1)
    assert not connected.done()
    job.end_server()
    job.clock.passes_until(connected.done)
    connected.result()

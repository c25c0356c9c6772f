"""How many open files a launch needs, and what it does with too few."""

from __future__ import annotations

import resource
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest
from loopback import LIMIT, Raw
from plans import make_launch_plan

from torchrun_hpc.rendezvous import open_files, protocol

HERE = "127.0.0.1"


def plan(**changes):
    values = {
        "title": "Slurm 19.0",
        "nodes": 3,
        "node_rank": 0,
        "workers": 4,
        "endpoint": "jwb0001i:25592",
        "coordinator": 0,
        "is_coordinator": True,
    }
    return make_launch_plan(**values | changes)


# What is otherwise, whether node 0 has the store, and what is needed beside 10.
NEEDS = {
    "all on node 0": ({}, True, (8 + 8 + 4 + 3 + 12 + 4, 8 + 8 + 4 + 3 + 12 + 12)),
    "the store is worker 0's": ({}, False, (8 + 8 + 4 + 3,) * 2),
    "the coordinator is node 1": (
        {"is_coordinator": False},
        True,
        (8 + 8 + 16, 8 + 8 + 12 + 12),
    ),
    "node 1, the coordinator": ({"node_rank": 1}, True, (8 + 8 + 4 + 3,) * 2),
    "any other node": ({"node_rank": 1, "is_coordinator": False}, True, (8 + 8,) * 2),
    # Any node may become the coordinator, and have the store.
    "with a spare, node 0": (
        {"spares": 1},
        True,
        (8 + 8 + 4 + 3 + 12 + 4, 8 + 8 + 4 + 3 + 12 + 8),
    ),
    "with a spare, any other node": (
        {"spares": 1, "node_rank": 2, "is_coordinator": False},
        True,
        (8 + 8 + 4 + 3 + 12 + 4, 8 + 8 + 4 + 3 + 12 + 8),
    ),
    "with a spare, and the store is worker 0's": (
        {"spares": 1, "node_rank": 2, "is_coordinator": False},
        False,
        (8 + 8 + 4 + 3,) * 2,
    ),
    "many nodes": ({"nodes": 400}, True, (436, 436 - 4 + 1600)),
    "many nodes, and many spares": (
        {"nodes": 400, "spares": 100, "node_rank": 9, "is_coordinator": False},
        True,
        (436, 436 - 4 + 1200),
    ),
}


@pytest.mark.parametrize("case", NEEDS)
def test_what_a_node_needs(case, monkeypatch):
    monkeypatch.setattr(psutil.Process, "num_fds", lambda _: 10)
    changes, has_store, expected = NEEDS[case]
    found = open_files.need(plan(**changes), has_store=has_store)
    assert found == tuple(10 + number for number in expected)


@pytest.mark.parametrize(
    ("limits", "raised", "allowed"),
    [
        ((1024, 4096), 3256, 3256),
        ((4096, 4096), None, 4096),
        ((1024, resource.RLIM_INFINITY), 3256, 3256),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, 3256),
        ((1024, 2000), 2000, 2000),
        ((2000, 2000), 2000, 2000),
    ],
)
def test_the_limit_is_raised_as_far_as_needed(limits, raised, allowed, monkeypatch):
    made = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: made.append(new))
    assert open_files.raise_limit(3256) == allowed
    assert made == ([] if raised is None else [(raised, limits[1])])


# --- real sockets -------------------------------------------------------------------

SERVER = """
import resource, socket, sys, time
from torchrun_hpc.rendezvous.server import CoordinatorServer
from torchrun_hpc.rendezvous.coordinator import Coordinator, Settings

listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
settings = Settings("19.0", "mine", 3, 0, 0, 60, 120)
unknown_peers, limit = map(int, sys.argv[1:])
server = CoordinatorServer(
    listening,
    Coordinator(settings),
    unknown_peers,
    lambda reason: print("problem:", reason)
)
server.start()
time.sleep(0.2)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
print(listening.getsockname()[1], flush=True)
sys.stdin.read()
server.close(0, 0)
print(time.process_time())
"""


@contextmanager
def server(unknown_peers, limit):
    """Start a coordinator of three nodes in a process of its own.

    Yields:
        Its port, and a function that ends it and returns its output by line, the CPU
        time at the end, and its standard error.
    """
    program = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(unknown_peers), str(limit)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def end():
        output, errors = program.communicate("", timeout=10)
        *printed, seconds = output.splitlines()
        return printed, float(seconds), errors

    try:
        yield int(program.stdout.readline()), end
    finally:
        program.kill()
        program.communicate()


def join(peer, rank):
    """Send the join request of a node's agent, and return the answer."""
    peer.request(rank)
    return peer.receive()


@pytest.fixture
def client():
    made = []

    def connect(port, timeout=LIMIT):
        made.append(Raw(port, timeout))
        return made[-1]

    yield connect
    for each in made:
        each.close()


# Idle connections, how many the server holds, and the limit of open files.
FLOODS = {
    "fewer than it holds": (100, 1024, 256),
    "more than it holds": (1500, 100, 256),
    "it holds none": (100, 0, 32),
    "no spare files": (100, 1024, 24),
}


@pytest.mark.parametrize("case", FLOODS)
def test_agents_are_accepted_whoever_else_is_connected(case, client):
    number, unknown_peers, limit = FLOODS[case]
    with server(unknown_peers, limit) as (port, end):
        idle = [client(port) for _ in range(number)]
        agents = [client(port) for _ in range(3)]
        for rank, agent in enumerate(agents):
            assert "welcome" in join(agent, rank)
        idle += [client(port) for _ in range(number)]
        for agent in agents:
            agent.send_message(join=0)
        assert ["go" in agent.receive() for agent in agents] == [True] * 3
        again = client(port)
        again.send_message(protocol=protocol.VERSION, job="20.0")
        assert "refused" in again.receive()
        printed, seconds, errors = end()
    assert (printed, errors) == ([], "")
    assert seconds < 3


def test_a_connection_that_has_to_wait_is_reported_once_and_costs_nothing(client):
    with server(1024, 9) as (port, end):  # two connections, beside what a process has
        first, second = client(port), client(port)
        for rank, agent in enumerate((first, second)):
            assert "welcome" in join(agent, rank)
        third = client(port, 2.5)
        with pytest.raises(TimeoutError):
            join(third, 2)
        third.close()
        first.close()
        assert "welcome" in join(client(port), 2)
        printed, seconds, errors = end()
    assert (printed, errors) == (["problem: Too many open files"], "")
    assert seconds < 2


AGENT = """
import os, resource, sys, time
from torchrun_hpc.rendezvous.client import Client
from torchrun_hpc.rendezvous.search import CoordinatorAddress
from torchrun_hpc.rendezvous.protocol import JoinRequest

client = Client(
    JoinRequest("19.0", "mine", 3, 1, "n1", 100, "0.1.0"),
    CoordinatorAddress("127.0.0.1", (1, 2), 30, 120),
    print,
)
before = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
start = time.monotonic()
try:
    client.connect()
except OSError as error:
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    print(error.strerror, time.monotonic() - start < 5)
"""


def test_an_agent_without_an_open_file_does_not_look_for_long():
    argv = [sys.executable, "-c", AGENT]
    done = subprocess.run(argv, capture_output=True, check=True, text=True, timeout=20)
    assert (done.stdout, done.stderr) == ("Too many open files True\n", "")

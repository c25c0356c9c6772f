"""The coordinator with few open files, in a process of its own: real sockets."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.support.loopback import Raw
from tests.support.patience import NEVER_S, PATIENCE
from tests.support.simulated_job import STORE
from torchrun_hpc.rendezvous.errors import Refused
from torchrun_hpc.rendezvous.protocol import (
    Confirm,
    Go,
    Join,
    Prepare,
    Welcome,
)

SERVER = """
import resource, socket, sys, threading, time
from torchrun_hpc.rendezvous.loop import Loop
from torchrun_hpc.rendezvous.server import CoordinatorServer
from torchrun_hpc.rendezvous.coordinator import Coordinator
from torchrun_hpc.planning.meeting import KeyFile
from torchrun_hpc.rendezvous.key import Key
from torchrun_hpc.rendezvous.member import Member
from torchrun_hpc.rendezvous.protocol import Settings
from torchrun_hpc.rendezvous.record import first_record

listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
settings = Settings("mine", 3, 0, 120, 0, 60)
member = Member(0, first_record(3, 0, 0))
coordinator = Coordinator(settings, member)
coordinator.coordinate(member.record)
unknown_peers, limit = map(int, sys.argv[1:])
loop, ready = Loop(), threading.Event()
loop.start()
server = CoordinatorServer(
    loop,
    listening,
    coordinator,
    Key(KeyFile(), "19.0"),
    unknown_peers,
    lambda reason: print("problem:", reason)
)
server.start()
loop.call(ready.set)
ready.wait()  # it has opened what it needs
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
print(listening.getsockname()[1], flush=True)
sys.stdin.read()
server.close(0, 0)
loop.close()
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
        output, errors = program.communicate("", timeout=PATIENCE)
        *printed, seconds = output.splitlines()
        return printed, float(seconds), errors

    try:
        assert program.stdout
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

    def connect(port, timeout=PATIENCE):
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
            assert isinstance(join(agent, rank), Welcome)
        idle += [client(port) for _ in range(number)]
        for agent in agents:
            agent.send_message(Join())
        assert isinstance(agents[0].receive(), Prepare)
        agents[0].send_message(Confirm((0, 0), 0, STORE))
        assert [agent.receive() for agent in agents] == [Go(0, STORE)] * 3
        again = client(port)
        again.request(0, nodes=4)
        assert again.receive() is Refused.NODES
        printed, seconds, errors = end()
    assert (printed, errors) == ([], "")
    assert seconds < 3


def test_a_connection_that_has_to_wait_is_reported_once_and_costs_nothing(client):
    with server(1024, 9) as (port, end):  # two connections, beside what a process has
        first, second = client(port), client(port)
        for rank, agent in enumerate((first, second)):
            assert isinstance(join(agent, rank), Welcome)
        third = client(port, 2.5)
        with pytest.raises(TimeoutError):
            join(third, 2)
        third.close()
        first.close()
        assert isinstance(join(client(port), 2), Welcome)
        printed, seconds, errors = end()
    assert (printed, errors) == (["problem: Too many open files"], "")
    assert seconds < 2


AGENT = """
import resource, sys
from torchrun_hpc.planning.meeting import KeyFile
from torchrun_hpc.rendezvous.client import Client, Listener
from torchrun_hpc.rendezvous.key import Key
from torchrun_hpc.rendezvous.loop import Loop
from torchrun_hpc.rendezvous.member import Member
from torchrun_hpc.rendezvous.protocol import JoinRequest
from torchrun_hpc.rendezvous.record import first_record
from torchrun_hpc.rendezvous.search import CoordinatorAddress, Search

request = JoinRequest("mine", 3, 1, "n1", 100, "0.1.0", "agent 1")
loop = Loop()
loop.start()
client = Client(loop, request, Member(1, first_record(3, 0, 0)), 120, Listener(print))
address = CoordinatorAddress("127.0.0.1", (1, 2), float(sys.argv[1]))
before = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
try:
    search = Search(request, address, Key(KeyFile(), "19.0"), client.tell)
    client.connect(search.find)
except OSError as error:
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    print(error.strerror)
"""


def test_an_agent_without_an_open_file_does_not_look_for_long():
    argv = [sys.executable, "-c", AGENT, str(NEVER_S)]
    done = subprocess.run(
        argv, capture_output=True, check=True, text=True, timeout=PATIENCE
    )
    assert (done.stdout, done.stderr) == ("Too many open files\n", "")

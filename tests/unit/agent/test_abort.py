"""The meeting place of a launch that fails early."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.support.patience import NEVER_S, PATIENCE
from torchrun_hpc import schedulers
from torchrun_hpc.agent import abort
from torchrun_hpc.agent.abort import LaunchState
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.host import network
from torchrun_hpc.host.network import Interface
from torchrun_hpc.planning.meeting import Meeting
from torchrun_hpc.preflight import Preflight
from torchrun_hpc.rendezvous import connection
from torchrun_hpc.rendezvous.server import CoordinatorServer


def state(facts):
    """Return the state of a launch after the first stage."""
    launch = LaunchState()
    launch.facts = facts
    return launch


def test_without_a_job_a_fault_is_said_and_nothing_told(capfd, monkeypatch):
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    abort.give_up(LaunchError("HPC018", "no torch"), LaunchState())
    assert capfd.readouterr().err == "torchrun_hpc: error[HPC018]: no torch\n"


def test_a_node_that_cannot_find_its_job_names_itself(capfd):
    """Under pbsdsh, only the message shows which node has no node file."""
    fault = LaunchError("HPC035", "cannot be read here")
    seen = Preflight(None, fault, {}, "dec0002", "", task_rank=1)
    abort.give_up(fault, state(seen))
    expected = "torchrun_hpc: error[HPC035]: on dec0002: cannot be read here\n"
    assert capfd.readouterr().err == expected


def test_tasks_that_pbs_numbers_alike_say_the_same_once(capfd):
    """Each of the first node has the number 0, with several lines in the node file."""
    fault = LaunchError("HPC036", f"by process {os.getpid()}", everywhere=True)
    seen = Preflight(None, fault, {}, "dec0001", "", task_rank=0)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: abort.give_up(fault, state(seen)), range(3)))
    expected = f"torchrun_hpc: error[HPC036]: by process {os.getpid()}\n"
    assert capfd.readouterr().err == expected


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_another_user_cannot_hide_a_message(capfd, beside_nobody, kind):
    """The name with which tasks of a node agree can be computed by everybody."""
    said = f"by process {os.getpid()} beside a {kind.name}"
    fault = LaunchError("HPC036", said, everywhere=True)
    seen = Preflight(None, fault, {"PBS_JOBID": "77"}, "dec0001", "", task_rank=0)
    text = f"{os.getuid()} {schedulers.job_number(seen.environ)} {fault}"

    def squat(ready, wait):
        with socket.socket(socket.AF_UNIX, kind) as taken:
            taken.bind(f"\0torchrun_hpc.{hashlib.sha256(text.encode()).hexdigest()}")
            if kind is socket.SOCK_STREAM:
                taken.listen()
            ready()
            wait()

    with beside_nobody(squat):
        abort.give_up(fault, state(seen))
    assert capfd.readouterr().err == f"torchrun_hpc: error[HPC036]: {said}\n"


def place(rank, port):
    """Return where the nodes of a job of two meet, all of them here."""
    port = port.getsockname()[1]
    return Meeting(
        "scheduler", nodes=2, node_rank=rank, report_rank=rank, hosts=("n9", "n10"),
        endpoint="n9", launch_id="19.0", connect_host="127.0.0.1", ports=(port,),
        coordinator=0, is_coordinator=rank == 0,
        listen=("127.0.0.1", port) if rank == 0 else None,
    )  # fmt: skip


@pytest.fixture
def port():
    """Listen, as the coordinator will."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        found.settimeout(PATIENCE)  # nobody may come, if a test fails
        yield found


@pytest.mark.parametrize(("texts", "says"), [(("x", "x"), 1), (("x", "y"), 2)])
def test_what_two_nodes_find_is_said_once(port, texts, says, monkeypatch):
    monkeypatch.setattr(connection, "listen", lambda *_: port)

    def tell(rank):
        return abort.tell(place(rank, port), texts[rank], NEVER_S)

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(tell, (0, 1)))
    assert (told[0], sum(told)) == (True, says)


def test_ctrl_c_while_telling(port):
    """Somebody accepts at the place where the others would meet, and says nothing."""

    def interrupt():
        with port.accept()[0]:
            os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(interrupt)
        assert abort.tell(place(1, port), "x", NEVER_S)
        done.result()


def test_ctrl_c_while_others_are_awaited(port, monkeypatch):
    """On the head node: nothing waits for them once more."""
    monkeypatch.setattr(connection, "listen", lambda *_: port)
    monkeypatch.setattr(CoordinatorServer.close, "__defaults__", (NEVER_S, NEVER_S))

    def interrupt():
        with socket.create_connection(port.getsockname(), PATIENCE) as opened:
            opened.sendall(b"no message\n")
            with suppress(ConnectionResetError):
                opened.recv(1)  # until it serves
            os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(interrupt)
        assert abort.tell(place(0, port), "x", NEVER_S)
        done.result()


def test_nobody_is_there_and_a_long_wait_is_said(monkeypatch, capfd):
    waits = []

    class PassedTimer:
        def __init__(self, seconds, function, args):
            waits.append(seconds)
            self.start = lambda: function(*args)
            self.cancel = waits.clear

    monkeypatch.setattr(threading, "Timer", PassedTimer)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert abort.tell(place(1, bound), "x", 0)
    said = capfd.readouterr().err
    assert "HPC167]: telling the other nodes" in said
    assert "for up to 0 s" in said
    assert waits == []  # cancelled


def addresses(text):
    return tuple(network._with_prefix(a, "255.255.255.0") for a in text.split())


PATHS = {
    "unknown": ("10.20.0.9", ""),
    "none": (None, ""),
    "down": ("10.20.0.1", "interface ib0, which has 10.20.0.1, is down"),
    "another one is up": (
        "10.10.0.1",
        "tried from eth0 (10.10.0.1); also up here: hsn0, hsn1",
    ),
    "the route takes another one": (
        "10.30.0.1",
        "tried from eth0 (10.10.0.1); also up here: hsn0, hsn1",
    ),
}


@pytest.mark.parametrize(("address", "problem"), PATHS.values(), ids=PATHS)
def test_what_keeps_others_away(monkeypatch, address, problem):
    here = (
        Interface("lo", addresses("127.0.0.1")),
        Interface("eth0", addresses("10.10.0.1")),
        Interface("ib0", addresses("10.20.0.1"), up=False),
        Interface("hsn0", addresses("10.30.0.1")),
        Interface("hsn1", addresses("10.31.0.1")),
        Interface("docker0", ()),
    )
    monkeypatch.setattr(network, "_interfaces", lambda: here)
    # To one node by eth0, and to another one from an address that is not its own.
    sources = {"10.10.0.9": "10.10.0.1", "10.40.0.9": "192.0.2.9"}
    monkeypatch.setattr(
        network, "source_toward", lambda far: ipaddress.ip_address(sources[str(far)])
    )
    is_down = address == "10.20.0.1"
    hosts = ["10.10.0.9"] if address == "10.30.0.1" else ["10.40.0.9", "jwb0001i"]
    for host in hosts:
        assert network.path_problem(address, host) == (problem, is_down)

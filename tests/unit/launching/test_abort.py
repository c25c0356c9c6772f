"""What is known of the meeting place when a launch fails early."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from plans import make_launch_plan

from torchrun_hpc import network
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.launching import abort
from torchrun_hpc.launching.abort import Known
from torchrun_hpc.network import Interface


def test_without_a_job_a_fault_is_said_and_nothing_told(capfd, monkeypatch):
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    abort.give_up(LaunchError("HPC018", "no torch"), Known())
    assert capfd.readouterr().err == "torchrun_hpc: error: HPC018 no torch\n"


def place(rank, port):
    """Return where the nodes of a job of two meet, all of them here."""
    return make_launch_plan(
        nodes=2, node_rank=rank, workers=1, report_rank=rank,
        endpoint="n9", launch_id="19.0", backend="scheduler", connect_host="127.0.0.1",
        ports=(port,), coordinator=0, is_coordinator=rank == 0, hosts=("n9", "n10"),
        listen=("127.0.0.1", port) if rank == 0 else None,
    )  # fmt: skip


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@pytest.mark.parametrize(("texts", "says"), [(("x", "x"), 1), (("x", "y"), 2)])
def test_what_two_nodes_find_is_said_once(port, texts, says):
    with ThreadPoolExecutor(2) as pool:
        told = list(
            pool.map(
                lambda rank: abort.tell(place(rank, port), texts[rank], 10), (0, 1)
            )
        )
    assert (told[0], sum(told)) == (True, says)


def test_nobody_is_there(port):
    events = []
    start = time.monotonic()
    assert abort.tell(place(1, port), "x", 1.5, events.append)
    assert time.monotonic() - start < 4
    assert [event["looking"] for event in events] == [1]


# A thread that ends loads libgcc_s, which takes a file, unless it is there.
WITHOUT_FILES = """
import contextlib, ctypes, resource
with contextlib.suppress(OSError):
    ctypes.CDLL("libgcc_s.so.1")
from torchrun_hpc.launching import abort
from torchrun_hpc.planning.launch_plan import LaunchPlan, Rendezvous, World
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.rendezvous import server, client, protocol

resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))
for is_coordinator in (True, False):
    plan = LaunchPlan(
        mode=Mode.SEVERAL_NODES,
        world=World(nodes=2, node_rank=0, workers=1, hosts=("n9", "n10")),
        rendezvous=Rendezvous("scheduler", ports=(1,), is_coordinator=is_coordinator),
        launch_id="19.0",
    )
    assert abort.tell(plan, "x", 1)
"""


def test_no_file_is_left_to_tell_by():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FILES], stderr=subprocess.PIPE, check=False
    )
    assert done.returncode == 0, done.stderr


def test_ctrl_c_while_telling(port):
    timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    start = time.monotonic()
    assert abort.tell(place(1, port), "x", 20)
    assert time.monotonic() - start < 5
    timer.join()


def test_a_long_wait_is_said(port, monkeypatch, capfd):
    monkeypatch.setattr(abort, "_SOON", -0.5)
    abort.tell(place(1, port), "x", 1.5)
    said = capfd.readouterr().err
    assert "HPC167 telling the other nodes that this one cannot start, for 2 s" in said


def addresses(text):
    return tuple(network._with_prefix(a, "255.255.255.0") for a in text.split())


PATHS = {
    "unknown": ("10.20.0.9", ""),
    "none": (None, ""),
    "down": ("10.20.0.1", "interface ib0, which has 10.20.0.1, is down"),
    "another one is up": (
        "10.10.0.1",
        "tried from eth0 (10.10.0.1); up here, too: hsn0, hsn1",
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
    is_down = address == "10.20.0.1"
    assert network.path_problem(address) == (problem, is_down)

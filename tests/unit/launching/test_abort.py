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
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc import network
from torchrun_hpc.commandline import options as hpc_options
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.launching import abort
from torchrun_hpc.launching.abort import Known
from torchrun_hpc.network import Interface
from torchrun_hpc.planning.plan import LaunchPlan

EXPLICIT = {
    "nothing": (["main.py"], {}, {}),
    "both spellings": (
        ["--rdzv-endpoint=n9:1", "--rdzv_id", "x", "main.py"],
        {},
        {"rdzv_endpoint": "n9:1", "rdzv_id": "x"},
    ),
    "behind options that are not known": (
        ["--log-dir", "logs", "--nproc-per-node=gpu", "--nnodes", "2:3", "main.py"],
        {},
        {"nnodes": "2:3"},
    ),
    "variables": (
        ["--master-port=1"],
        {"PET_NNODES": "3", "PET_RDZV_ID": "", "PET_STANDALONE": "1"},
        {"nnodes": "3", "master_port": 1, "standalone": True},
    ),
    "the script's own": (
        ["--rdzv-id=x", "main.py", "--standalone", "--nnodes", "x"],
        {},
        {"rdzv_id": "x"},
    ),
    "the script's own, behind a value": (
        ["--nproc-per-node", "4", "main.py", "--master_port=29500"],
        {},
        {},
    ),
    "the script's own, behind a flag": (
        ["--rdzv-id=x", "--no-python", "main.sh", "--nnodes", "x"],
        {},
        {"rdzv_id": "x"},
    ),
    "node rank 0": (["--node-rank=0", "main.py"], {}, {"node_rank": 0}),
    "a wrong value": (["--master-port=x", "--rdzv-id=y"], {}, {}),
    "a wrong variable": (["--rdzv-id=y"], {"PET_STANDALONE": "yes"}, {}),
    "no value": (["--rdzv-id"], {}, {}),
}


@pytest.mark.parametrize(
    ("argv", "environ", "expected"), EXPLICIT.values(), ids=EXPLICIT
)
def test_endpoint_options(monkeypatch, argv, environ, expected):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = hpc_options.endpoint_options(argv)
    assert {name: option.value for name, option in found.items()} == expected


@given(st.lists(st.text()))
def test_no_command_line_is_too_wrong(argv):
    assert set(hpc_options.endpoint_options(argv)) <= set(hpc_options.ENDPOINT)


def test_without_a_job_a_fault_is_said_and_nothing_told(capfd, monkeypatch):
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    abort.give_up(LaunchError("HPC018", "no torch"), Known(["main.py"]))
    assert capfd.readouterr().err == "torchrun_hpc: error: HPC018 no torch\n"


def place(rank, port):
    """Return where the nodes of a job of two meet, all of them here."""
    return LaunchPlan(
        title="", nodes=2, node_rank=rank, workers=1, is_reporter=rank == 0,
        endpoint="n9", launch_id="19.0", backend="scheduler", connect_host="127.0.0.1",
        ports=(port,), head=0, is_coordinator=rank == 0, hosts=("n9", "n10"),
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
from torchrun_hpc.planning.plan import LaunchPlan
from torchrun_hpc.rendezvous import server, client, protocol

resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))
for is_head in (True, False):
    plan = LaunchPlan(
        title="", nodes=2, node_rank=0, workers=1, is_reporter=True, endpoint="",
        launch_id="19.0", ports=(1,), hosts=("n9", "n10"), is_coordinator=is_head,
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

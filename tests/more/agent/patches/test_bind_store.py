"""The stores listen on one address, and are waited for."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    static_tcp_rendezvous,
)

from tests.support.patience import NEVER_S, PATIENCE, until
from tests.support.ports import own_port
from tests.support.stock.inside_torch import (
    Handler,
    listening_at,
    make_plan,
    needs_listening,
    parameters_at,
    patch_all,
)
from tests.support.stock.side_by_side import clean_environ, end_group
from torchrun_hpc.agent.patches import registry
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.host import capabilities


def _open(endpoint: str, **conf: Any) -> Any:
    """Open a store as torch's rendezvous does."""
    return c10d_rendezvous_backend._create_tcp_store(parameters_at(endpoint, **conf))


@pytest.mark.usefixtures("torch_again")
@pytest.mark.parametrize("may_join", [True, False])
@pytest.mark.parametrize("takes_socket", [True, False])
def test_who_finds_the_port_taken(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    may_join: bool,
    takes_socket: bool,
) -> None:
    """By another agent of this world, if the plan says that this may be."""
    if not takes_socket:  # as up to torch 2.0
        without = replace(capabilities.LISTENING_SOCKET, present=False)
        monkeypatch.setattr(capabilities, "LISTENING_SOCKET", without)
    first = dist.TCPStore("127.0.0.2", 0, is_master=True, wait_for_workers=False)
    first.set("key", "value")
    listen = ("127.0.0.2", first.port)
    registry.apply_patches(make_plan(listen=listen, may_join=may_join))
    place = f"127.0.0.2:{first.port}"
    holder = f"{psutil.Process().name()} (pid {os.getpid()}"
    problem = f"cannot listen on 127.0.0.2 port {first.port}: it is taken by {holder}"
    if not may_join:
        with pytest.raises(LaunchError, match=re.escape(problem)) as caught:
            _open(place, is_host=1)
        assert caught.value.code == "HPC055"
        return
    assert _open(place, is_host=1, read_timeout=PATIENCE).get("key") == b"value"
    output = capsys.readouterr().err
    assert output.startswith(f"torchrun_hpc: note[HPC156]: {problem}")
    assert output.endswith(". Joining the program there as an agent of this job\n")


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=PATIENCE).close()
    except OSError:
        return False
    return True


def _usable(address: str) -> bool:
    try:
        own_port(address)
    except OSError:
        return False
    return True


def test_stock_listens_on_all_interfaces() -> None:
    port = own_port()
    store = _open(f"127.0.0.2:{port}", is_host=1)
    assert _answers("127.0.0.3", port)
    assert listening_at(port).isdisjoint({"127.0.0.2"})
    del store


@pytest.mark.usefixtures("torch_again")
def test_a_torch_of_which_nobody_expects_that_its_stores_take_a_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its stores open their ports themselves."""
    none = capabilities.Capability("<2.0", present=False)
    monkeypatch.setattr(capabilities, "LISTENING_SOCKET", none)
    modules = (c10d_rendezvous_backend, static_tcp_rendezvous)
    for module in modules:
        monkeypatch.setattr(module, "TCPStore", dist.HashStore)
    server = vars(Handler).get("_create_tcp_store_server")
    patch_all()
    assert dist.HashStore not in {vars(module)["TCPStore"] for module in modules}
    assert vars(Handler).get("_create_tcp_store_server") is server


@needs_listening
@pytest.mark.usefixtures("torch_again", "quick")
@pytest.mark.parametrize(
    ("address", "other"), [("127.0.0.2", "127.0.0.3"), ("::1", "127.0.0.1")]
)
def test_all_stores_listen_on_one_address(address: str, other: str) -> None:
    if not _usable(address):
        pytest.skip(f"this machine has no {address}")
    port = own_port()
    patch_all(local_address=address, listen=(address, port))
    host = f"[{address}]" if ":" in address else address
    parameters = parameters_at(f"{host}:{port}", is_host=1)
    parameters.local_addr = address
    backend, store = c10d_rendezvous_backend.create_backend(parameters)
    handler = dynamic_rendezvous.create_handler(store, backend, parameters)
    try:
        answer = handler.next_rendezvous()
        assert store.port == port
        ports = [store.port]
        if capabilities.SHARED_STORE.present:
            info = answer.bootstrap_store_info
            assert info.master_addr == address
            ports.append(info.master_port)
        for found in ports:
            assert listening_at(found) == {address}
            assert _answers(address, found)
            assert not _answers(other, found)
        workers = dist.TCPStore(address, ports[-1], is_master=False)
        workers.set("key", "value")
        assert workers.get("key") == b"value"
    finally:
        handler.shutdown()


@pytest.mark.usefixtures("torch_again")
def test_a_client_that_comes_first_waits_quietly(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_all(node_rank=1)
    tried: list[Any] = []
    original = socket.create_connection

    def create_connection(*at: Any, **options: Any) -> socket.socket:
        tried.append(at)
        return original(*at, **options)

    monkeypatch.setattr(socket, "create_connection", create_connection)
    port = own_port()
    stores: list[Any] = []

    def connect() -> None:
        stores.append(_open(f"127.0.0.2:{port}", is_host=0, read_timeout=NEVER_S))
        stores[0].set("key", "value")

    client = threading.Thread(target=connect, daemon=True)
    client.start()
    until(lambda: len(tried) > 2)
    assert client.is_alive()
    assert stores == []
    server = _open(f"127.0.0.2:{port}", is_host=1)
    client.join(PATIENCE)
    assert not client.is_alive()
    assert server.get("key") == b"value"
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("torch_again", "soon")
@pytest.mark.parametrize(
    ("head", "node_rank", "reports"),
    [(0, 1, 1), (0, 2, 0), (1, 0, 1), (1, 2, 0), (None, 1, 1)],
)
def test_a_client_says_for_what_it_waits(
    head: int | None, node_rank: int, reports: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """One node reports for all: they wait for the same."""
    patch_all(node_rank=node_rank, coordinator=head, endpoint="jwb0001i:1")
    place = "the head node {}at jwb0001i:1 (127.0.0.2) {} "
    gives_up = re.escape(place.format("did not answer ", "within 1 s (read_timeout):"))
    with pytest.raises(RendezvousConnectionError, match=f"{gives_up}.*refused"):
        _open(f"127.0.0.2:{own_port()}", is_host=0, read_timeout=1)
    out, err = capfd.readouterr()
    waits = place.format("", "after 0 s:")
    start = f"torchrun_hpc: note[HPC113]: still waiting for {waits}"
    assert (out, err.count("\n"), err.count(start)) == ("", reports, reports)


WAITING = """
import sys
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters, c10d_rendezvous_backend,
)

from torchrun_hpc.agent.patches import registry
from torchrun_hpc.options.options import Options
from torchrun_hpc.planning.meeting import Meeting
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.planning.plan import LaunchPlan
from torchrun_hpc.planning.workers import Workers

meeting = Meeting(
    "c10d", 2, 1, report_rank=1, endpoint="head:1", local_address="127.0.0.2"
)
plan = LaunchPlan(Mode.SEVERAL_NODES, Options(), meeting, Workers())
assert registry.left_out(registry.apply_patches(plan)) == []
print("waiting", flush=True)
c10d_rendezvous_backend.create_backend(
    RendezvousParameters(
        "c10d", sys.argv[1], "test", 2, 2, is_host=0, read_timeout=int(sys.argv[2])
    )
)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_waiting(number: int) -> None:
    endpoint = f"127.0.0.2:{own_port()}"
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, endpoint, str(NEVER_S)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environ(),
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout.readline() == "waiting\n"
            time.sleep(0.3)
            assert process.poll() is None
            process.send_signal(number)
            process.wait(PATIENCE)
            assert process.returncode == -number
        finally:
            end_group(process.pid)

"""The stores listen on one address, and are waited for."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    static_tcp_rendezvous,
)

from tests.support.patience import NEVER_S, PATIENCE, until
from tests.support.ports import own_port
from tests.support.processes import RunningProgram
from tests.support.stock.inside_torch import (
    Handler,
    c10d,
    dist,
    listening_at,
    make_plan,
    needs_listening,
    open_store,
    parameters_at,
    patch_all,
)
from torchrun_hpc.agent.patches import registry
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.host import capabilities

pytestmark = pytest.mark.usefixtures("torch_again")


@pytest.mark.parametrize("may_join", [True, False])
@pytest.mark.parametrize("takes_socket", [True, False])
def test_who_finds_the_port_taken(capsys, monkeypatch, may_join, takes_socket):
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
            open_store(place, is_host=1)
        assert caught.value.code == "HPC055"
        return
    assert open_store(place, is_host=1, read_timeout=PATIENCE).get("key") == b"value"
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


def test_stock_listens_on_all_interfaces():
    port = own_port()
    store = open_store(f"127.0.0.2:{port}", is_host=1)
    assert _answers("127.0.0.3", port)
    assert listening_at(port).isdisjoint({"127.0.0.2"})
    del store


def test_a_torch_of_which_nobody_expects_that_its_stores_take_a_socket(monkeypatch):
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
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("address", "other"), [("127.0.0.2", "127.0.0.3"), ("::1", "127.0.0.1")]
)
def test_all_stores_listen_on_one_address(address, other):
    if not _usable(address):
        pytest.skip(f"this machine has no {address}")
    port = own_port()
    patch_all(local_address=address, listen=(address, port))
    host = f"[{address}]" if ":" in address else address
    parameters = parameters_at(f"{host}:{port}", is_host=1)
    parameters.local_addr = address
    backend, store = c10d.create_backend(parameters)
    handler = dynamic_rendezvous.create_handler(store, backend, parameters)
    try:
        answer: Any = handler.next_rendezvous()
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


def test_a_client_that_comes_first_waits_quietly(capfd, monkeypatch):
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
        stores.append(open_store(f"127.0.0.2:{port}", is_host=0, read_timeout=NEVER_S))
        stores[0].set("key", "value")

    client = threading.Thread(target=connect, daemon=True)
    client.start()
    until(lambda: len(tried) > 2)
    assert client.is_alive()
    assert stores == []
    server = open_store(f"127.0.0.2:{port}", is_host=1)
    client.join(PATIENCE)
    assert not client.is_alive()
    assert server.get("key") == b"value"
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("head", "node_rank", "reports"),
    [(0, 1, 1), (0, 2, 0), (1, 0, 1), (1, 2, 0), (None, 1, 1)],
)
def test_a_client_says_for_what_it_waits(head, node_rank, reports, capfd):
    """One node reports for all: they wait for the same."""
    patch_all(node_rank=node_rank, coordinator=head, endpoint="jwb0001i:1")
    place = "the head node {}at jwb0001i:1 (127.0.0.2) {} "
    gives_up = re.escape(place.format("did not answer ", "within 1 s (read_timeout):"))
    with pytest.raises(RendezvousConnectionError, match=f"{gives_up}.*refused"):
        open_store(f"127.0.0.2:{own_port()}", is_host=0, read_timeout=1)
    out, err = capfd.readouterr()
    waits = place.format("", "after 0 s:")
    start = f"torchrun_hpc: note[HPC113]: still waiting for {waits}"
    assert (out, err.count("\n"), err.count(start)) == ("", reports, reports)


WAITING = """
import sys
from tests.support.stock.inside_torch import open_store, patch_all

patch_all(node_rank=1, report_rank=1)
print("waiting", flush=True)
open_store(sys.argv[1], is_host=0, read_timeout=int(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_waiting(number):
    endpoint = f"127.0.0.2:{own_port()}"
    command = [sys.executable, "-c", WAITING, endpoint, str(NEVER_S)]
    with RunningProgram(command) as program:
        assert program.line() == "waiting"
        time.sleep(0.3)
        assert program.is_running
        program.send(number)
        assert program.wait() == -number

"""The check of the resolver: what is known of it, and when."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from tests.support.networks import make_network
from tests.support.patience import NEVER_S, until
from torchrun_hpc import programs
from torchrun_hpc.host import resolver
from torchrun_hpc.host.resolver import Resolver, ResolverCheck

LOOPBACK = ("lo", "127.0.0.1/8")


def network_of(*interfaces, **changes):
    return make_network(dict([LOOPBACK, *interfaces]), **changes)


ETHERNET = ("eth0", "10.20.0.1/24")


def asked(monkeypatch, folder, program):
    """Return what asks by a program."""
    monkeypatch.setattr(programs, "FOLDER", folder)
    (folder / "ask_resolver.py").write_text(program)
    return ResolverCheck(network_of(ETHERNET))


def result_of(monkeypatch, folder, program):
    check = asked(monkeypatch, folder, program)
    until(lambda: check._process.poll() is not None)
    return check.result()


@pytest.mark.parametrize(
    ("program", "result"),
    [
        ("", Resolver.ANSWERS),
        ("raise SystemExit(0)", Resolver.ANSWERS),
        ("raise SystemExit(1)", Resolver.UNKNOWN),  # Python itself
        ("import os; os._exit(5)", Resolver.UNKNOWN),
    ],
)
def test_an_answer(monkeypatch, tmp_path, program, result):
    assert result_of(monkeypatch, tmp_path, program) is result


def test_it_asks_for_the_address_that_torch_asks_for(monkeypatch, tmp_path):
    program = "import sys; sys.exit(sys.argv[1] != '::ffff:10.20.0.1')"
    assert result_of(monkeypatch, tmp_path, program) is Resolver.ANSWERS


@pytest.mark.parametrize(
    ("seconds", "result"), [(0, Resolver.UNKNOWN), (1, Resolver.SILENT)]
)
def test_nobody_waits_for_an_answer(monkeypatch, tmp_path, seconds, result):
    times = iter([0, seconds])
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr(resolver, "time", clock)
    check = asked(monkeypatch, tmp_path, f"import time; time.sleep({NEVER_S})")
    process = check._process
    assert check.result() is result
    assert process.returncode == -9  # nor does it ask on
    assert check.result() is Resolver.UNKNOWN


@pytest.mark.parametrize(
    ("server", "result"),
    [
        ("127.0.0.1", Resolver.DOWN),  # nobody listens
        ("::1", Resolver.DOWN),
        ("127.0.0.2", Resolver.SILENT),
        (None, Resolver.DOWN),
    ],
)
def test_a_name_server_that_does_not_answer(monkeypatch, tmp_path, server, result):
    """Direct mode knows at once: it imports nothing meanwhile."""
    file = tmp_path / "resolv.conf"
    if server:
        file.write_text(f"# x\nnameserver {server}\n")
    monkeypatch.setattr(resolver, "FILE", str(file))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.2", 0))
        monkeypatch.setattr(resolver, "PORT", silent.getsockname()[1])
        assert resolver.ask_name_servers() is result
        assert result_of(monkeypatch, tmp_path, "raise SystemExit(4)") is result


def test_without_an_address_nothing_is_asked():
    for network in (
        network_of(),
        network_of(("eth0", "fd00::1/64")),
        network_of(ETHERNET, down=("eth0",)),
    ):
        check = ResolverCheck(network)
        assert check._process is None, network
        assert check.result() is Resolver.UNKNOWN, network


def test_what_this_machine_says():
    """The question itself is one that Python can ask."""
    check = ResolverCheck(network_of(ETHERNET))
    assert isinstance(check.result(), Resolver)

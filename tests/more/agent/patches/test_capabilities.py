"""The table of torch's releases, and the one that is installed."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import socket
import types
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.distributed import run as torch_run
from torch.distributed.elastic.agent.server import api

import torchrun_hpc
from tests.support.patience import PATIENCE
from tests.support.processes import run_python
from tests.support.stock.inside_torch import (
    Node,
    State,
    dist,
    make_executor,
    needs_listening,
)
from torchrun_hpc import main
from torchrun_hpc.agent import start
from torchrun_hpc.agent.patches import registry
from torchrun_hpc.host import capabilities
from torchrun_hpc.host.capabilities import Capability

ALL = {
    name: value
    for name, value in vars(capabilities).items()
    if isinstance(value, Capability)
}


@pytest.mark.parametrize("name", ALL)
def test_this_torch_has_what_it_is_known_to_have(name):
    assert ALL[name].present is ALL[name].is_expected, torch.__version__


def test_every_patch_is_for_one_of_them():
    known = {id(capability) for capability in ALL.values()}
    assert {id(patch.IS_FOR) for patch in registry.PATCHES} <= known


def _looked_again() -> Any:
    """Return what another import of the module finds; the first one stays."""
    spec: Any = importlib.util.find_spec(capabilities.__name__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.1.2", "2.1.2"),
        ("2.4.1+cu121", "2.4.1"),
        ("2.1.2-site.1x", "2.1.2"),
        ("2.16.0a0+git1", "2.16.0"),
        ("2.9", "2.9"),
    ],
)
def test_the_release_of_a_version(version, release, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    found = _looked_again().RELEASE
    assert found == Version(release)


@pytest.mark.parametrize("version", ["unknown", "", "git-1a2b3c"])
def test_a_build_without_a_release_is_newer_than_all(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    found = _looked_again()
    assert Version("99") < found.RELEASE
    found.check_release()
    assert found.LISTENING_SOCKET.is_expected
    assert not found.WARNS_OF_DEFAULT.is_expected


def test_a_look_that_fails_has_found_nothing():
    def look() -> bool:
        raise error

    for error in (AttributeError, TypeError, KeyError, RuntimeError, ImportError):
        assert capabilities._has(look) is False, error


def test_what_was_looked_at_is_what_torch_says():
    """By other ways than the looks."""
    agent: Any = inspect.unwrap(api.SimpleElasticAgent._rendezvous)
    reads_info = "bootstrap_store_info" in agent.__code__.co_names
    assert capabilities.RENDEZVOUS_INFO.present is reads_info
    assert capabilities.LISTENING_SOCKET.present is _takes_a_socket(use_libuv=False)
    assert capabilities.AWARE_TIMES.present is (_heartbeat().tzinfo is not None)


def _heartbeat() -> Any:
    """Return a time that torch itself has put into a state."""
    node = Node("n9", 1, 0)
    executor = make_executor(node, State())
    executor._keep_alive()
    return executor._state.last_heartbeats[node]


def _warns(args: Any) -> Any:
    return getattr(args, "master_addr", None)


def _warns_if_explicit(args: Any) -> Any:
    return args.rdzv_endpoint or getattr(args, "master_addr", None)


@functools.wraps(_warns)
def _decorated(*args: Any) -> Any:
    return _warns(*args)


@pytest.mark.parametrize(
    ("function", "warns"),
    [
        (_warns, True),
        (_warns_if_explicit, False),
        (_decorated, False),
        (functools.partial(_warns), False),  # it has no code
    ],
)
def test_whether_torch_warns_is_seen_in_its_code(function, monkeypatch, warns):
    monkeypatch.setattr(torch_run, "config_from_args", function)
    assert _looked_again().WARNS_OF_DEFAULT.present is warns


def _store_at(address: str, port: int, **options: Any) -> Any:
    options |= {"is_master": True, "wait_for_workers": False}
    return dist.TCPStore(address, port, **options)


def _takes_a_socket(**options: Any) -> bool:
    opened = socket.create_server(("127.0.0.3", 0))
    place = opened.getsockname()
    try:
        _store_at(*place, master_listen_fd=opened.detach(), **options)
    except (TypeError, RuntimeError):
        return False
    return True


@needs_listening
def test_a_store_takes_a_socket_as_it_is_told():
    opened = socket.create_server(("127.0.0.3", 0))
    _, port = place = opened.getsockname()
    store = _store_at(*place, **capabilities.listening_on(opened))
    store.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=PATIENCE)


@pytest.mark.skipif(
    "use_libuv: bool = True" not in str(dist.TCPStore.__init__.__doc__),
    reason="this torch does not take libuv's by itself",
)
def test_libuvs_store_takes_a_socket_where_that_is_known():
    """Others refuse it, with a line of C++."""
    takes = _takes_a_socket(use_libuv=True)
    assert takes is capabilities.LIBUV_TAKES_SOCKET.present


def test_torch_says_itself_what_it_raises_without_an_answer():
    store = _store_at("127.0.0.1", 0)
    store.set_timeout(timedelta(seconds=0.3))  # a shorter one is none to connect in
    with pytest.raises(RuntimeError) as caught:
        store.get("key")
    assert type(caught.value) is capabilities.STORE_ERROR


# --- options ------------------------------------------------------------------------


@pytest.mark.parametrize("name", capabilities._OPTIONS)
def test_an_option_is_that_of_torch_or_what_it_would_be(name):
    args = torch_run.parse_args(["train.py"])
    default = capabilities._OPTIONS[name]
    assert capabilities.option(args, name) == default
    setattr(args, name, "explicit")
    assert capabilities.option(args, name) == "explicit"
    delattr(args, name)  # as in a program that makes the arguments itself
    assert capabilities.option(args, name) == default


def test_gpus_of_a_torch_that_knows_none(monkeypatch):
    monkeypatch.delattr(torch, "xpu", raising=False)
    assert capabilities.number_of_xpus() == 0
    two: Any = types.SimpleNamespace(device_count=lambda: 2)
    monkeypatch.setattr(torch, "xpu", two, raising=False)
    assert capabilities.number_of_xpus() == 2


# --- the answer of a rendezvous -----------------------------------------------------


def test_an_answer_is_of_the_kind_that_torch_expects():
    store = dist.HashStore()
    found = capabilities.rendezvous_info(store, 1, 3, "127.0.0.2", 1234)
    if not capabilities.RENDEZVOUS_INFO.present:
        assert found == (store, 1, 3)
        return
    assert (found.store, found.rank, found.world_size) == (store, 1, 3)
    where = found.bootstrap_store_info
    assert (where.master_addr, where.master_port) == ("127.0.0.2", 1234)


def test_an_answer_without_a_place_to_meet(monkeypatch):
    older = Capability("<2.0", present=False)
    monkeypatch.setattr(capabilities, "RENDEZVOUS_INFO", older)
    store = dist.HashStore()
    assert capabilities.rendezvous_info(store, 1, 3, "127.0.0.2", 1234) == (store, 1, 3)


# --- a torch that is too old --------------------------------------------------------

OLD = Version("1.13.1")
TOO_OLD = "is too old: torchrun_hpc needs 2.0 or newer. Load a newer torch"


@pytest.fixture
def old(outside_of_jobs, monkeypatch):  # noqa: ARG001
    monkeypatch.setattr(capabilities, "RELEASE", OLD)
    monkeypatch.setattr(torch, "__version__", str(OLD))


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(
    "ask", [capabilities.check_release, lambda: torchrun_hpc.describe([])]
)
def test_an_old_torch_is_refused_and_not_described(ask):
    with pytest.raises(torchrun_hpc.LaunchError) as caught:
        ask()
    assert (caught.value.code, caught.value.everywhere) == ("HPC086", False)
    assert f"torch 1.13.1 {TOO_OLD}" in str(caught.value)


@pytest.mark.parametrize("release", ["2.0.0", "2.15.1", "3.7.0"])
def test_others_are_not(release, monkeypatch):
    monkeypatch.setattr(capabilities, "RELEASE", Version(release))
    capabilities.check_release()


# Torch's version is all that a look at the release sees.
PRETENDING = """
import runpy, sys, torch
torch.__version__ = torch.version.__version__ = "1.13.1"
sys.argv[0] = "x"
runpy.run_module("torchrun_hpc", run_name="__main__")
"""


def test_starting_with_an_old_torch(tmp_path):
    """A program that imports torchrun_hpc.auto: more/dropin/test_auto.py."""
    done = run_python("-c", PRETENDING, "train.py", cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    start = "torchrun_hpc: error[HPC086]: torch 1.13.1"
    assert re.fullmatch(re.escape(f"{start} {TOO_OLD}") + ".*\n", done.err), done.err


# --- a torch that cannot listen on one address ----------------------------------------


def _warned(
    monkeypatch: pytest.MonkeyPatch, *options: str, present: bool, nodes: int = 2
) -> list[str]:
    """Let a launch be announced, and return the codes of its warnings."""
    some = Capability(">=2.1", present)
    monkeypatch.setattr(capabilities, "LISTENING_SOCKET", some)
    messages: list[Any] = []
    monkeypatch.setattr(
        "torchrun_hpc.agent.start.console.write",
        lambda message, *_: messages.append(message),
    )
    argv = [*options, "train.py"]
    launch = main.CommandLaunch(argv, is_launch=False)
    launch.run(upto=main.Stage.PLAN)
    plan = replace(launch.plan, meeting=replace(launch.plan.meeting, nodes=nodes))
    start._announce(plan, *launch.starter.findings(plan))
    return [message.code for message in messages]


AT_1 = "--rdzv-endpoint=localhost:1"


@pytest.mark.usefixtures("outside_of_jobs")
@pytest.mark.parametrize("present", [True, False])
def test_who_listens_on_all_interfaces_says_so(monkeypatch, present):
    for options, opens in {
        "": False,  # within the agent
        "--rdzv-backend=c10d --rdzv-endpoint=localhost:0": True,
        "--master-port=29501": True,
        f"--rdzv-backend=etcd {AT_1}": False,
        f"--rdzv-backend=c10d {AT_1} --rdzv-conf=is_host=0": False,
    }.items():
        codes = _warned(monkeypatch, *options.split(), present=present)
        assert ("HPC087" in codes) is (opens and not present), options
    assert _warned(monkeypatch, present=present, nodes=1) == []


# --- a store in which workers do not meet again ---------------------------------------


@pytest.mark.parametrize("present", [True, False])
def test_what_torchs_rendezvous_is_told(monkeypatch, present):
    some = Capability("==2.5.*", present, is_fault=True)
    monkeypatch.setattr(capabilities, "SHARED_RENDEZVOUS_STORE", some)
    wanted = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    found = capabilities.variables()
    assert {k: v.value for k, v in found.items()} == (wanted if present else {})
    assert {v.source for v in found.values()} <= {f"torch {torch.__version__}"}

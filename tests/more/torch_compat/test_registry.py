"""All differences together: needed, applied, and left out where torch has changed."""

from __future__ import annotations

import inspect
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from inside_torch import (
    EXPECTED,
    PLACES,
    POPEN,
    Executor,
    Handler,
    Starting,
    expected_state,
    make_plan,
    patch_all,
    targets,
)
from side_by_side import run
from torch.distributed import run as torch_run
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.rendezvous import (
    c10d_rendezvous_backend,
    dynamic_rendezvous,
)
from torch.distributed.launcher import api as launcher_api

from torchrun_hpc.errors import Message
from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches import (
    agent,
    bind_store,
    bind_workers,
    defer_signals_on_close,
    fork_workers,
    forward_signals,
    fresh_store,
    host_exits_last,
    host_name,
    keep_open_on_restart,
    local_addr,
    master_addr,
    node_order,
    parent_death_signal,
    registry,
    replacing,
    report_missing_nodes,
    state_as_json,
    watch_workers,
)
from torchrun_hpc.torch_compat.patches.hooks import Hooks
from torchrun_hpc.torch_compat.patches.state_as_json import StateAsJson

Multiprocessing: Any = multiprocessing_api
SubprocessHandler = Multiprocessing.SubprocessHandler

NEEDED = [patch for patch in registry.PATCHES if patch.IS_FOR.is_expected]


@pytest.mark.parametrize("patch", NEEDED, ids=lambda patch: patch.__name__)
def test_fits_this_torch(patch: registry.Patch) -> None:
    assert patch.fits() is True


@pytest.mark.usefixtures("torch_again")
def test_every_target_is_replaced_and_put_back() -> None:
    before = targets()
    patch_all()
    for old, new, place in zip(before, targets(), PLACES, strict=True):
        assert (old is not new) is EXPECTED[place].present, place
    replacing.restore()
    assert targets() == before


@pytest.mark.usefixtures("torch_again")
def test_the_agent_has_all_extensions_and_torchs_name() -> None:
    """Each is a class of its own; torch's own stays as it is."""
    own = dict(vars(LocalElasticAgent))
    patch_all()
    extended = launcher_api.LocalElasticAgent
    assert extended.__name__ == "LocalElasticAgent"
    assert issubclass(extended, agent.JobAgent)
    names = {kind.__name__ for kind in extended.__mro__}
    assert {"ForwardingAgent", "WatchingAgent"} <= names
    assert ("OpenAgent" in names) is keep_open_on_restart.IS_FOR.present
    changed = {k for k, v in vars(LocalElasticAgent).items() if v is not own.get(k)}
    assert changed <= {"_get_fq_hostname"}
    assert agent.fits()  # a second launch in this process


@pytest.mark.usefixtures("torch_again")
def test_a_second_launch_in_one_process() -> None:
    """Programs that use torchrun_hpc.auto may launch twice; nothing has changed."""
    patch_all(node_rank=0)
    patch_all(node_rank=2)
    assert Handler._node_desc_generator.generate("n").node_rank == 2


@pytest.mark.usefixtures("torch_again")
def test_what_became_of_each() -> None:
    outcomes = registry.apply_patches(make_plan())
    names = sorted(outcome.name for outcome in outcomes)
    page = (Path(__file__).parents[3] / "docs" / "patches.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| .* \| .* \|$", page, re.MULTILINE)
    paragraphs = re.findall(r"^- `(\w+)`: ", page, re.MULTILINE)
    assert names == sorted(rows) == sorted(paragraphs)
    assert registry.left_out(outcomes) == []
    for outcome in outcomes:
        assert registry.described(outcome) == {
            "name": outcome.name,
            "target": outcome.patch.TARGET,
            "reason": outcome.patch.REASON,
            "releases": outcome.patch.IS_FOR.releases,
            "state": expected_state(outcome.patch).value,
        }


@pytest.mark.usefixtures("torch_again")
def test_looking_at_patches_applies_none() -> None:
    before = targets()
    outcomes = registry.examine(registry.PATCHES)
    assert targets() == before
    assert outcomes == registry.apply_patches(make_plan())


@pytest.mark.usefixtures("torch_again")
def test_a_release_without_the_fault_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = capabilities.Capability("<2.0", present=False)
    monkeypatch.setattr(state_as_json, "IS_FOR", older)
    before = dynamic_rendezvous.pickle
    first, *others = registry.apply_patches(make_plan())
    assert (first.name, first.state) == ("state_as_json", registry.State.NOT_NEEDED)
    for outcome in others:
        assert outcome.state is expected_state(outcome.patch), outcome.name
    assert registry.left_out([first]) == []
    assert dynamic_rendezvous.pickle is before


@pytest.mark.usefixtures("torch_again")
def test_a_release_that_has_lost_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fault may be there all the same, at another place."""
    lost = capabilities.Capability(f"=={capabilities.RELEASE}", present=False)
    monkeypatch.setattr(state_as_json, "IS_FOR", lost)
    before = dynamic_rendezvous.pickle
    outcome = registry.apply_patches(make_plan())[0]
    assert outcome.state is registry.State.DOES_NOT_FIT
    (message,) = registry.left_out([outcome])
    assert (message.code, state_as_json.TARGET in message.text) == ("HPC080", True)
    assert dynamic_rendezvous.pickle is before


@pytest.mark.parametrize("patch", registry.PATCHES, ids=lambda patch: patch.__name__)
def test_a_release_that_should_have_it_and_has_not(
    patch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = replace(patch.IS_FOR, releases=">=2.0", present=False)
    monkeypatch.setattr(patch, "IS_FOR", lost)
    (outcome,) = outcomes = registry.examine([patch])
    messages = [message.code for message in registry.left_out(outcomes)]
    if patch.IS_FOR.is_fault:  # somebody has mended it
        assert (outcome.state, messages) == (registry.State.NOT_NEEDED, [])
    else:
        assert (outcome.state, messages) == (registry.State.DOES_NOT_FIT, ["HPC080"])


@pytest.mark.usefixtures("torch_again")
def test_a_release_that_nobody_knows_and_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newer = capabilities.Capability("<2.0", present=True)
    monkeypatch.setattr(state_as_json, "IS_FOR", newer)
    assert registry.apply_patches(make_plan())[0].state is registry.State.APPLIED


def _by_address(self: Any) -> None:
    """Rank as pytorch#191285 proposes: with a key, which asks no participant."""
    ranked = sorted(self._state.participants, key=lambda node: node.addr)
    for rank, node in enumerate(ranked):
        self._state.participants[node] = rank


def _no_order(self: Any) -> None:
    self._state.complete = True


def _other_server(_self: Any, _addr: str, _port: int, _timeout: int) -> None: ...


def _other_store(_params: Any, _timeout: int) -> None: ...


def _other_init(self: Any, node: Any, *_more: Any) -> None:
    self._this_node = node


def _answer(self: Any) -> Any:
    return self._answer


CHANGES = [
    (node_order, Executor, "_mark_rendezvous_complete", _by_address),
    (node_order, Executor, "_mark_rendezvous_complete", _no_order),
    (node_order, Executor, "_mark_rendezvous_complete", None),
    (node_order, Handler, "_node_desc_generator", None),
    (bind_store, c10d_rendezvous_backend, "TCPStore", None),
    (state_as_json, dynamic_rendezvous, "pickle", None),
]
if capabilities.LISTENING_SOCKET.present:
    CHANGES += [(bind_store, c10d_rendezvous_backend, "TCPStore", dist.HashStore)]
if capabilities.SHARED_STORE.present:
    CHANGES += [
        (bind_store, Handler, "_create_tcp_store_server", _other_server),
        (bind_store, Handler, "_create_tcp_store_server", None),
        (fresh_store, Handler, "__init__", _other_init),
        (fresh_store, Handler, "next_rendezvous", None),
    ]
if capabilities.ADDRESS_IS_LOST.present:
    CHANGES += [
        (local_addr, Handler, "__init__", _other_init),
        (local_addr, Handler, "next_rendezvous", _answer),
        (local_addr, Handler, "next_rendezvous", None),
    ]


def _monitor_more(_agent: Any, worker_group: Any, more: Any) -> None: ...


def _close_otherwise(_context: Any, timeout: int) -> None: ...


def _start_otherwise(_self: Any) -> None: ...


def _popen_with_preexec(_self: Any, args: Any, env: Any) -> Any:
    return subprocess.Popen(args, env=env, preexec_fn=None)


def _popen_elsewhere(_self: Any, args: Any, env: Any) -> Any:
    return args, env


def _name_of(_host: str) -> str: ...


CHANGES += [
    (forward_signals, LocalElasticAgent, "_monitor_workers", None),
    (forward_signals, LocalElasticAgent, "_monitor_workers", _monitor_more),
    (forward_signals, LocalElasticAgent, "__init__", _start_otherwise),
    (forward_signals, multiprocessing_api.MultiprocessContext, "pids", None),
    (forward_signals, multiprocessing_api.SubprocessContext, "pids", None),
    (defer_signals_on_close, multiprocessing_api.PContext, "close", None),
    (defer_signals_on_close, multiprocessing_api.PContext, "close", _close_otherwise),
    (defer_signals_on_close, multiprocessing_api.PContext, "start", _start_otherwise),
    (defer_signals_on_close, multiprocessing_api, "_terminate_process_handler", None),
    (parent_death_signal, Starting, POPEN, None),
    (parent_death_signal, multiprocessing_api, "SubprocessHandler", None),
    (parent_death_signal, SubprocessHandler, "_popen", _start_otherwise),
    (parent_death_signal, SubprocessHandler, "_popen", _popen_with_preexec),
    (parent_death_signal, SubprocessHandler, "_popen", _popen_elsewhere),
]
if POPEN == "subprocess":
    CHANGES += [(parent_death_signal, Starting, "subprocess", object())]
if host_name.IS_FOR.present:
    CHANGES += [
        (host_name, agent_api, "_get_fq_hostname", None),
        (host_name, agent_api, "_get_fq_hostname", _name_of),
        (host_name, LocalElasticAgent, "_get_fq_hostname", None),
        (host_name, agent_api.SimpleElasticAgent, "_construct_event", _start_otherwise),
    ]


def _other(self: Any, worker_group: Any, more: Any) -> None: ...


def _no_arguments(self: Any) -> None: ...


Simple: Any = agent_api.SimpleElasticAgent
CHANGES += [
    (agent, Simple, "_rendezvous", _other),
    (agent, Simple, "_rendezvous", None),
    (agent, Simple, "_exit_barrier", _other),
    (agent, Simple, "_exit_barrier", None),
    (agent, Simple, "__init__", _no_arguments),  # it counts the restarts otherwise
    (agent, LocalElasticAgent, "_shutdown", None),
    (watch_workers, LocalElasticAgent, "_start_workers", _no_arguments),
    (watch_workers, LocalElasticAgent, "_start_workers", None),
    (watch_workers, LocalElasticAgent, "_shutdown", None),
    (watch_workers, LocalElasticAgent, "__init__", _no_arguments),
    (watch_workers, SubprocessHandler, "_popen", None),
    (watch_workers, SubprocessHandler, "_popen", _no_arguments),
    (watch_workers, SubprocessHandler, "_popen", _popen_elsewhere),
    (watch_workers, multiprocessing_api.PContext, "__init__", _start_otherwise),
]
# The base has a method of this name, which nobody calls.
for _handler in report_missing_nodes.HANDLERS:
    CHANGES += [
        (report_missing_nodes, _handler, "next_rendezvous", None),
        (host_exits_last, _handler, "shutdown", None),
    ]
if master_addr.IS_FOR.present:
    CHANGES += [(master_addr, torch_run, "config_from_args", None)]
CHANGES += [
    (patch, multiprocessing_api.SubprocessHandler, "_popen", changed)
    for patch in (fork_workers, bind_workers)
    for changed in (None, _no_arguments)
]
# Agents are created elsewhere, or by another name.
for _patch in (agent, forward_signals, watch_workers):
    CHANGES += [
        (_patch, launcher_api, "LocalElasticAgent", None),
        (_patch, launcher_api, "launch_agent", _no_arguments),
    ]
if keep_open_on_restart.IS_FOR.present:
    CHANGES += [
        (keep_open_on_restart, LocalElasticAgent, "_stop_workers", None),
        (keep_open_on_restart, LocalElasticAgent, "__init__", _no_arguments),
    ]


@pytest.mark.parametrize("patch", registry.PATCHES, ids=lambda patch: patch.__name__)
def test_a_change_of_torch_is_tried_for_each(patch: registry.Patch) -> None:
    assert patch.IS_FOR.present is any(patch is tried for tried, *_ in CHANGES)


@pytest.mark.usefixtures("torch_again")
@pytest.mark.parametrize(
    ("patch", "owner", "name", "changed"),
    CHANGES,
    ids=[
        f"{p.__name__.split('.')[-1]}-{n}-{getattr(c, '__name__', c and type(c))}"
        for p, _, n, c in CHANGES
    ],
)
def test_a_torch_that_has_changed(
    patch: Any, owner: Any, name: str, changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if changed is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, changed)
    before = {
        (place, place_name): inspect.getattr_static(place, place_name, None)
        for place, place_name in PLACES
    }
    monkeypatch.setattr(registry, "PATCHES", (patch,))

    (outcome,) = registry.apply_patches(make_plan())
    assert outcome.state is registry.State.DOES_NOT_FIT
    assert registry.left_out([outcome]) == [
        Message(
            "HPC080",
            f"torch {torch.__version__} has changed {patch.TARGET}; it is left as it "
            f"is, and {patch.REASON}",
        )
    ]
    assert "#" in patch.REASON  # an issue to read
    for (place, place_name), old in before.items():
        assert inspect.getattr_static(place, place_name, None) is old


@pytest.mark.usefixtures("torch_again")
def test_one_that_does_not_fit_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Executor, "_mark_rendezvous_complete", _by_address)
    outcomes = registry.apply_patches(make_plan())
    (message,) = registry.left_out(outcomes)
    assert node_order.TARGET in message.text
    assert len(outcomes) == len(registry.PATCHES)
    assert dynamic_rendezvous.pickle is StateAsJson
    assert c10d_rendezvous_backend.TCPStore is not dist.TCPStore


WITHOUT = """
import signal
import sys
from types import SimpleNamespace
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

delattr(dynamic_rendezvous, sys.argv[1])

from torchrun_hpc.launching import agent  # it imports all that torch is asked for
from torchrun_hpc.torch_compat.patches import registry
from torchrun_hpc.planning.launch_plan import LaunchPlan, Rendezvous, World
from torchrun_hpc.planning.mode import Mode

plan = LaunchPlan(
    mode=Mode.SEVERAL_NODES,
    world=World(2, 0, 1, report_rank=0, hosts=("n9", "n10")),
    rendezvous=Rendezvous("c10d", "head:1", local_address="127.0.0.2"),
)
for outcome in registry.apply_patches(plan):
    print(outcome.name, outcome.state.name)
"""


@pytest.mark.parametrize("name", ["_NodeDesc", "_RendezvousState"])
def test_a_torch_without_a_class_that_two_patches_need(
    name: str, tmp_path: Path
) -> None:
    done = run([sys.executable, "-c", WITHOUT, name], cwd=tmp_path)
    assert (done.code, done.own_lines) == (0, []), done.err
    found = dict(line.split() for line in done.out.splitlines())
    outcomes = registry.examine(
        registry.patches_for(make_plan(preload=None, binding=None))
    )
    expected = {o.name: expected_state(o.patch).name for o in outcomes}
    left_out = dict.fromkeys(("state_as_json", "node_order"), "DOES_NOT_FIT")
    assert found == {**expected, **left_out}


NEW: tuple[Any, ...] = (
    forward_signals,
    defer_signals_on_close,
    parent_death_signal,
    host_name,
)


@pytest.mark.usefixtures("torch_again")
def test_the_originals_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the one whose call is what must not happen."""
    monkeypatch.setattr(registry, "PATCHES", NEW)
    called: list[Any] = []

    def monitor(self: Any, worker_group: Any) -> Any:
        called.append((self, worker_group))
        return "state"

    def close(self: Any, death_sig: Any = None, timeout: int = 30) -> Any:
        called.append((self, death_sig, timeout))

    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", monitor)
    monkeypatch.setattr(multiprocessing_api.PContext, "close", close)
    forwarded: list[Any] = []
    nothing: Any = None
    hooks = Hooks(forwarded.append, relay=nothing, watch=nothing)
    for outcome in registry.apply_patches(make_plan(), hooks):
        applied = outcome.state is registry.State.APPLIED
        assert applied is outcome.patch.IS_FOR.is_expected, outcome

    one = object.__new__(launcher_api.LocalElasticAgent)
    one._pcontext = None
    assert one._monitor_workers("group") == "state"
    assert forwarded == []
    one._pcontext = SimpleNamespace(pids=lambda: {0: 4711})
    assert one._monitor_workers("group") == "state"
    assert forwarded == [{0: 4711}]
    context: Any = multiprocessing_api.PContext
    context.close(one, signal.SIGTERM, timeout=3)
    assert called == [(one, "group"), (one, "group"), (one, signal.SIGTERM, 3)]
    if capabilities.RENDEZVOUS_INFO.present:
        assert agent_api._get_fq_hostname() == socket.gethostname()
        assert one._get_fq_hostname() == socket.gethostname()

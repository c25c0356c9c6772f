"""All differences together: needed, applied, and left out where torch has changed."""

from __future__ import annotations

import inspect
import re
import signal
import socket
import subprocess
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import run as torch_run
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import registry as torch_registry
from torch.distributed.elastic.rendezvous import (
    static_tcp_rendezvous,
)

from tests.support import ROOT
from tests.support.processes import run_python
from tests.support.stock.inside_torch import (
    EXPECTED,
    NOTHING,
    PLACES,
    POPEN,
    Executor,
    Handler,
    Multiprocessing,
    Starting,
    SubprocessHandler,
    c10d,
    dist,
    dynamic,
    expected_state,
    launcher_api,
    make_plan,
    patch_all,
    targets,
)
from torchrun_hpc.agent.patches import Hooks, _originals, registry, restore
from torchrun_hpc.agent.patches.agent import (
    ActTogether,
    BindWorkers,
    DeferSignals,
    ForkWorkers,
    ForwardSignals,
    KeepOpenOnRestart,
    ParentDeathSignal,
    WatchWorkers,
    extend,
)
from torchrun_hpc.agent.patches.bind_store import BindStore
from torchrun_hpc.agent.patches.c10d import (
    FreshStore,
    HostExitsLast,
    LocalAddr,
    NodeOrder,
    ReportMissingNodes,
)
from torchrun_hpc.agent.patches.state_as_json import JsonPickle, StateAsJson
from torchrun_hpc.agent.patches.torchrun import HostName, MasterAddr
from torchrun_hpc.agent.signals import DeathSignals
from torchrun_hpc.errors import Message
from torchrun_hpc.host import capabilities
from torchrun_hpc.planning.workers import Workers

pytestmark = pytest.mark.usefixtures("torch_again")


def test_every_target_is_replaced_and_put_back():
    before = targets()
    patch_all()
    replaced = [(owner, name) for owner, name, _ in _originals]
    assert [place for place in replaced if place not in PLACES] == []
    for old, new, place in zip(before, targets(), PLACES, strict=True):
        assert (old is not new) is EXPECTED[place].present, place
    restore()
    assert targets() == before


def test_the_agent_has_all_extensions_and_torchs_name():
    """Each is a part of one class; torch's own stays as it is."""
    own = dict(vars(LocalElasticAgent))
    patch_all()
    extended = launcher_api.LocalElasticAgent
    assert extended.__name__ == "LocalElasticAgent"
    for part in (ActTogether, ForwardSignals, WatchWorkers, DeferSignals):
        assert issubclass(extended, part.Extension)
    is_open = issubclass(extended, KeepOpenOnRestart.Extension)
    assert is_open is KeepOpenOnRestart.IS_FOR.present
    changed = {k for k, v in vars(LocalElasticAgent).items() if v is not own.get(k)}
    assert changed <= {"_get_fq_hostname"}
    assert ActTogether.fits()  # a second launch in this process


def test_a_programs_agent_keeps_its_names(monkeypatch):
    """It may have an attribute ``hooks``, or a method ``start_worker``."""

    class ProgramsAgent(LocalElasticAgent):
        pass

    monkeypatch.setattr(launcher_api, "LocalElasticAgent", ProgramsAgent)
    patch_all()
    kinds = launcher_api.LocalElasticAgent.__mro__
    for kind in kinds[: kinds.index(ProgramsAgent)]:
        new = {*vars(kind)} - {*dir(LocalElasticAgent)}
        assert all(name.startswith(("_hpc", "__", "_abc")) for name in new), kind


def test_a_dry_run_leaves_the_agent_as_it_is():
    """The program may use torch's own afterwards."""
    registry.apply_patches(make_plan())
    assert launcher_api.LocalElasticAgent is LocalElasticAgent


def test_a_second_launch_in_one_process():
    """Programs that use torchrun_hpc.auto may launch twice; nothing has changed."""
    patch_all(node_rank=0)
    patch_all(node_rank=2)
    assert Handler._node_desc_generator.generate("n").node_rank == 2


def test_what_became_of_each():
    before = targets()
    outcomes = registry.examine(registry.PATCHES)
    assert targets() == before  # none is applied by looking
    assert outcomes == registry.apply_patches(make_plan())
    names = sorted(outcome.patch.NAME for outcome in outcomes)
    page = (ROOT / "docs" / "internals.md").read_text()
    rows = re.findall(r"^\| `([a-z_]+)` \| .* \| .* \| .* \|$", page, re.MULTILINE)
    assert names == sorted(rows)
    assert registry.left_out(outcomes) == []
    for outcome in outcomes:
        assert asdict(registry.described(outcome)) == {
            "name": outcome.patch.NAME,
            "target": outcome.patch.TARGET,
            "reason": outcome.patch.REASON,
            "releases": outcome.patch.IS_FOR.releases,
            "state": expected_state(outcome.patch).value,
        }


def test_what_a_torch_without_its_target_makes_of_each(monkeypatch):
    """A fault that is not there has been fixed; anything else may be elsewhere."""
    for patch in registry.PATCHES:
        absent = replace(patch.IS_FOR, releases=">=2.0", present=False)
        monkeypatch.setattr(patch, "IS_FOR", absent)
    faults = {
        outcome.patch.NAME
        for outcome in registry.apply_patches(make_plan())
        if outcome.state is registry.PatchState.NOT_NEEDED
    }
    assert faults == {"local_addr", "keep_open_on_restart", "master_addr"}


@pytest.mark.parametrize(
    ("releases", "present", "is_fault", "state"),
    [
        ("<2.0", False, False, registry.PatchState.NOT_NEEDED),
        (">=2.0", False, False, registry.PatchState.DOES_NOT_FIT),
        (">=2.0", False, True, registry.PatchState.NOT_NEEDED),
        ("<2.0", True, False, registry.PatchState.APPLIED),  # nobody knows this release
    ],
)
def test_what_a_release_has_and_should_have(
    releases, state, monkeypatch, present, is_fault
):
    is_for = capabilities.Capability(releases, present, is_fault)
    monkeypatch.setattr(StateAsJson, "IS_FOR", is_for)
    before = dynamic.pickle
    first, *others = registry.apply_patches(make_plan())
    assert (first.patch.NAME, first.state) == ("state_as_json", state)
    assert (dynamic.pickle is before) is (not present)
    codes = [message.code for message in registry.left_out([first])]
    assert codes == ["HPC080"] * (state is registry.PatchState.DOES_NOT_FIT)
    for outcome in others:
        assert outcome.state is expected_state(outcome.patch), outcome.patch.NAME


# --- a torch that has changed ---------------------------------------------------------


def _by_address(self: Any) -> None:
    """Rank as pytorch#191285 proposes: with a key, which asks no participant."""
    ranked = sorted(self._state.participants, key=lambda node: node.addr)
    for rank, node in enumerate(ranked):
        self._state.participants[node] = rank


def _no_order(self: Any) -> None:
    self._state.complete = True


def _other(_self: Any, _more: Any) -> None:
    """Take other arguments, and use nothing of what a patch looks for."""


def _answer(self: Any) -> Any:
    return self._answer


def _popen_with_preexec(self: Any, args: Any, env: Any) -> Any:
    self._stdout, self._stderr = None, None
    return subprocess.Popen(args, env=env, preexec_fn=None)


def _popen_elsewhere(self: Any, args: Any, env: Any) -> Any:
    return self, args, env


def _without_option(args: Any) -> Any:
    return args


# It starts workers in a method that it inherits.
HeirOfHandler = type("HeirOfHandler", (SubprocessHandler,), {})


Local, Simple = LocalElasticAgent, agent_api.SimpleElasticAgent
Static = static_tcp_rendezvous.StaticTCPRendezvous
AGENT = [ActTogether, KeepOpenOnRestart, ForwardSignals, WatchWorkers]
START_WORKERS = [ParentDeathSignal, ForkWorkers, BindWorkers, WatchWorkers]

# A name, its changes (None: it is missing), and who must notice each of them.
TABLE: list[tuple[Any, str, list[Any], list[Any]]] = [
    (dynamic, "pickle", [None], [StateAsJson]),
    (
        *(Executor, "_mark_rendezvous_complete"),
        [_by_address, _no_order, None],
        [NodeOrder],
    ),
    (Handler, "_node_desc_generator", [None], [NodeOrder]),
    (Handler, "__init__", [_other], [FreshStore, LocalAddr, HostExitsLast]),
    (Handler, "next_rendezvous", [_answer], [LocalAddr]),
    (Handler, "next_rendezvous", [None], [FreshStore, LocalAddr, ReportMissingNodes]),
    (Static, "next_rendezvous", [None], [ReportMissingNodes]),
    (Handler, "shutdown", [None], [HostExitsLast]),
    (Static, "shutdown", [None], [HostExitsLast]),
    (Static, "__init__", [_other], [HostExitsLast]),
    (c10d, "TCPStore", [None], [BindStore]),
    (launcher_api, "LocalElasticAgent", [None], AGENT),
    (launcher_api, "launch_agent", [_other], AGENT),
    (torch_registry, "get_rendezvous_handler", [_other, None], [ActTogether]),
    (Simple, "_rendezvous", [_other, None], [ActTogether]),
    (Simple, "_exit_barrier", [_other, None], [ActTogether]),
    (Simple, "_invoke_run", [None], [ActTogether]),
    (Simple, "__init__", [_other], [ActTogether, WatchWorkers]),  # counts the restarts
    (Local, "__init__", [_other], [KeepOpenOnRestart, ForwardSignals, WatchWorkers]),
    (
        *(Local, "_monitor_workers", [_other, None]),
        [ActTogether, ForwardSignals, WatchWorkers],
    ),
    (Local, "_shutdown", [None], [ActTogether, DeferSignals, WatchWorkers]),
    (Local, "_start_workers", [_other, None], [DeferSignals, WatchWorkers]),
    (Local, "_stop_workers", [None], [KeepOpenOnRestart]),
    (Multiprocessing.MultiprocessContext, "pids", [None], [ForwardSignals]),
    (Multiprocessing.SubprocessContext, "pids", [None], [ForwardSignals]),
    (Multiprocessing.PContext, "__init__", [_other], [WatchWorkers]),
    (Multiprocessing.PContext, "close", [_other, None], [DeferSignals]),
    (Multiprocessing.PContext, "start", [_other], [DeferSignals]),
    (Multiprocessing, "_terminate_process_handler", [None], [DeferSignals]),
    (Multiprocessing, "SubprocessHandler", [None, HeirOfHandler], START_WORKERS),
    (SubprocessHandler, "_popen", [_other, None], START_WORKERS),
    (SubprocessHandler, "_popen", [_popen_with_preexec], [ParentDeathSignal]),
    (
        *(SubprocessHandler, "_popen", [_popen_elsewhere]),
        [ParentDeathSignal, ForkWorkers, WatchWorkers],
    ),
    (Starting, POPEN, [None], [ParentDeathSignal]),
    (agent_api, "_get_fq_hostname", [_other, None], [HostName]),
    (Local, "_get_fq_hostname", [None], [HostName]),
    (Simple, "_construct_event", [_other], [HostName]),
    (torch_run, "config_from_args", [_other, _without_option, None], [MasterAddr]),
]
CHANGES = [(o, n, change, p) for o, n, changes, p in TABLE for change in changes]
if POPEN == "subprocess":
    CHANGES += [(Starting, "subprocess", object(), [ParentDeathSignal])]
if capabilities.LISTENING_SOCKET.present:
    CHANGES += [(c10d, "TCPStore", dist.HashStore, [BindStore])]
if capabilities.SHARED_STORE.present:
    CHANGES += [
        (Handler, "_create_tcp_store_server", changed, [BindStore])
        for changed in (None, _other)
    ]


def test_a_change_of_torch_is_tried_for_each():
    tried = {patch.NAME for *_, patches in CHANGES for patch in patches}
    assert tried == {patch.NAME for patch in registry.PATCHES}


@pytest.mark.parametrize(
    ("owner", "name", "changed", "patches"),
    CHANGES,
    ids=[f"{n}-{getattr(c, '__name__', c and type(c))}" for _, n, c, _ in CHANGES],
)
def test_a_torch_that_has_changed(owner, name, changed, patches, monkeypatch):
    # Also one that this torch does not need, if it would fit.
    patches = [patch for patch in patches if patch.fits()]
    if not patches:
        pytest.skip("none of them fits this torch")
    if changed is None:
        monkeypatch.delattr(owner, name, raising=False)
    else:
        monkeypatch.setattr(owner, name, changed, raising=False)
    for patch in patches:
        monkeypatch.setattr(patch, "IS_FOR", replace(patch.IS_FOR, present=True))
    monkeypatch.setattr(registry, "PATCHES", patches)
    before = [inspect.getattr_static(*place, None) for place in PLACES]

    outcomes = registry.apply_patches(make_plan())
    assert [outcome.patch for outcome in outcomes] == patches
    for outcome in outcomes:
        assert outcome.state is registry.PatchState.DOES_NOT_FIT, outcome.patch.NAME
        assert "#" in outcome.patch.REASON  # an issue to read
    assert registry.left_out(outcomes) == [
        Message(
            "HPC080",
            f"torch {torch.__version__} has changed {patch.TARGET}, which is left as "
            f"it is: {patch.REASON}",
        )
        for patch in patches
    ]
    assert [inspect.getattr_static(*place, None) for place in PLACES] == before


def test_one_that_does_not_fit_keeps_no_other_from_it(monkeypatch):
    monkeypatch.setattr(Executor, "_mark_rendezvous_complete", _by_address)
    outcomes = registry.apply_patches(make_plan())
    (message,) = registry.left_out(outcomes)
    assert NodeOrder.TARGET in message.text
    assert len(outcomes) == len(registry.PATCHES)
    assert dynamic.pickle is JsonPickle
    assert c10d.TCPStore is not dist.TCPStore


WITHOUT = """
import sys
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

delattr(dynamic_rendezvous, sys.argv[1])

from torchrun_hpc.agent import elastic  # it imports all that torch is asked for
from torchrun_hpc.agent.patches import registry
from torchrun_hpc.options.options import Options
from torchrun_hpc.planning.meeting import Meeting
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.planning.plan import LaunchPlan
from torchrun_hpc.planning.workers import Workers

meeting = Meeting(
    "c10d", 2, hosts=("n9", "n10"), endpoint="head:1", local_address="127.0.0.2"
)
plan = LaunchPlan(Mode.SEVERAL_NODES, Options(), meeting, Workers())
for outcome in registry.apply_patches(plan):
    print(outcome.patch.NAME, outcome.state.name)
"""


@pytest.mark.parametrize("name", ["_NodeDesc", "_RendezvousState"])
def test_a_torch_without_a_class_that_two_patches_need(name):
    done = run_python("-c", WITHOUT, name)
    assert (done.code, done.own_lines) == (0, []), done.err
    found = dict(line.split() for line in done.out.splitlines())
    outcomes = registry.planned(make_plan(workers=Workers()))
    expected = {o.patch.NAME: expected_state(o.patch).name for o in outcomes}
    left_out = dict.fromkeys(("state_as_json", "node_order"), "DOES_NOT_FIT")
    assert found == {**expected, **left_out}


def test_the_originals_are_called(monkeypatch):
    """But of the name of the host: that call is what must not happen."""
    called: list[Any] = []

    def monitor(self: Any, worker_group: Any) -> Any:
        called.append((self, worker_group))
        return "state"

    def close(self: Any, death_sig: Any = None, timeout: int = 30) -> Any:
        called.append((self, death_sig, timeout))

    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", monitor)
    monkeypatch.setattr(Multiprocessing.PContext, "close", close)
    forwarded: list[Any] = []
    hooks = Hooks(forwarded.append, NOTHING, NOTHING, DeathSignals())
    extend([ForwardSignals, DeferSignals], NOTHING, hooks)

    one = object.__new__(launcher_api.LocalElasticAgent)
    one._pcontext = None
    assert one._monitor_workers("group") == "state"
    assert forwarded == []
    one._pcontext = SimpleNamespace(pids=lambda: {0: 4711})
    assert one._monitor_workers("group") == "state"
    assert forwarded == [{0: 4711}]
    Multiprocessing.PContext.close(one, signal.SIGTERM, timeout=3)
    assert called == [(one, "group"), (one, "group"), (one, signal.SIGTERM, 3)]
    if HostName.IS_FOR.present:
        HostName.apply(None, None)
        assert agent_api._get_fq_hostname() == socket.gethostname()
        assert one._get_fq_hostname() == socket.gethostname()

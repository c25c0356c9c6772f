"""What tests of changes inside torch need: its places, a plan, two agents."""

from __future__ import annotations

import inspect
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch.distributed import run as torch_run
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    static_tcp_rendezvous,
)
from torch.distributed.elastic.rendezvous import registry as torch_registry
from torch.distributed.launcher import api as torch_launcher_api

from tests.support.patience import PATIENCE
from tests.support.ports import own_port
from torchrun_hpc.agent.patches import Hooks, registry
from torchrun_hpc.errors import Setting
from torchrun_hpc.host import capabilities
from torchrun_hpc.options.options import Options
from torchrun_hpc.planning.meeting import Meeting
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.planning.plan import LaunchPlan
from torchrun_hpc.planning.workers import Binding, Preload, Share, Workers

if TYPE_CHECKING:
    from unittest.mock import Mock

    from torchrun_hpc.agent.patches import Patch

# Torch exports not all names of these modules to type checkers.
c10d: Any = c10d_rendezvous_backend
dist: Any = torch.distributed
dynamic: Any = dynamic_rendezvous
launcher_api: Any = torch_launcher_api

Handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
Executor: Any = dynamic_rendezvous._DistributedRendezvousOpExecutor
State: Any = dynamic_rendezvous._RendezvousState
Node: Any = dynamic_rendezvous._NodeDesc

# The module that starts workers, and its name for `Popen`.
Multiprocessing: Any = multiprocessing_api
SubprocessHandler = Multiprocessing.SubprocessHandler
Starting: Any = sys.modules[SubprocessHandler.__module__]
POPEN = "Popen" if hasattr(Starting, "Popen") else "subprocess"

# Each place that a patch can replace, and the capability of a torch that has it.
_EVERY, _SHARED = capabilities.EVERY, capabilities.SHARED_STORE
_INFO = capabilities.RENDEZVOUS_INFO
EXPECTED = {
    (Handler, "next_rendezvous"): _EVERY,
    (Handler, "shutdown"): _EVERY,
    (Handler, "_create_tcp_store_server"): _SHARED,
    (Handler, "_node_desc_generator"): _EVERY,
    (static_tcp_rendezvous.StaticTCPRendezvous, "next_rendezvous"): _EVERY,
    (static_tcp_rendezvous.StaticTCPRendezvous, "shutdown"): _EVERY,
    (c10d_rendezvous_backend, "TCPStore"): _EVERY,
    (static_tcp_rendezvous, "TCPStore"): _EVERY,
    (dynamic_rendezvous, "pickle"): _EVERY,
    (launcher_api, "LocalElasticAgent"): _EVERY,
    (torch_registry, "get_rendezvous_handler"): _EVERY,
    (LocalElasticAgent, "_get_fq_hostname"): _INFO,
    (agent_api, "_get_fq_hostname"): _INFO,
    (multiprocessing_api.PContext, "close"): _EVERY,
    (multiprocessing_api, "_terminate_process_handler"): _EVERY,
    (Starting, POPEN): _EVERY,
    (SubprocessHandler, "_popen"): _EVERY,
    (torch_run, "config_from_args"): capabilities.WARNS_OF_DEFAULT,
}
PLACES = [place for place, has in EXPECTED.items() if has.present or hasattr(*place)]


def needs(capability: capabilities.Capability, what: str) -> pytest.MarkDecorator:
    """Skip with a torch that does not have a capability."""
    reason = f"torch {torch.__version__} has no {what}"
    return pytest.mark.skipif(not capability.present, reason=reason)


needs_shared_store = needs(_SHARED, "store that agents keep for workers")
needs_listening = needs(
    capabilities.LISTENING_SOCKET, "store that listens on a given socket"
)


def targets() -> list[Any]:
    return [getattr(owner, name) for owner, name in PLACES]


MEETING = Meeting(
    "c10d",
    nodes=3,
    endpoint="head:1",
    hosts=("n9", "n10", "n11"),
    local_address="127.0.0.2",
)
WORKERS = Workers(
    preload=Preload(("torch",), Setting("torch", "--hpc-preload")),
    binding=Binding(Setting("even", "--hpc-bind"), (Share((0,), "", ""),)),
)


def make_plan(
    mode: Mode = Mode.SEVERAL_NODES,
    *,
    workers: Workers = WORKERS,
    without_patches: tuple[str, ...] = (),
    **meeting: Any,
) -> LaunchPlan:
    """Return a plan of three nodes with these fields of their meeting."""
    return LaunchPlan(
        mode,
        Options(hpc_without_patches=without_patches),
        replace(MEETING, **meeting),
        workers,
    )


def expected_state(patch: type[Patch]) -> registry.PatchState:
    """Return the state that a patch must reach: none is left out."""
    needed = patch.IS_FOR.is_expected
    return registry.PatchState.APPLIED if needed else registry.PatchState.NOT_NEEDED


NOTHING: Any = None
NO_HOOKS = Hooks(NOTHING, NOTHING, NOTHING, NOTHING)


def patch_all(**values: Any) -> None:
    """Apply all patches that this torch needs, and see that none is left out."""
    outcomes = registry.apply_patches(make_plan(**values), NO_HOOKS)
    for outcome in outcomes:
        assert outcome.state is expected_state(outcome.patch), outcome.patch.NAME


def make_executor(node: Any, state: Any) -> Any:
    """Return what changes a state for a node."""
    conditions = dynamic_rendezvous.RendezvousSettings(
        run_id="test",
        min_nodes=1,
        max_nodes=len(state.participants),
        timeout=dynamic_rendezvous.RendezvousTimeout(),
        keep_alive_interval=timedelta(seconds=5),
        keep_alive_max_attempt=3,
    )
    executor = Executor(node, None, conditions)
    executor._state = state
    return executor


def parameters_at(endpoint: str, **conf: Any) -> RendezvousParameters:
    nodes = conf.pop("nodes", 1)
    return RendezvousParameters(
        backend="c10d",
        endpoint=endpoint,
        run_id="test",
        min_nodes=nodes,
        max_nodes=nodes,
        **conf,
    )


class RecordedAgent(LocalElasticAgent):
    """Stands in for torch's agent: it does nothing, and lets a mock record that."""

    def __init__(self, torch: Mock, **attributes: Any) -> None:
        self._torch = torch
        vars(self).update(attributes)

    def _rendezvous(self, *args: Any) -> None:
        self._torch.rendezvous(*args)

    def _start_workers(self, *args: Any) -> Any:
        return self._torch.start_workers(*args)

    def _monitor_workers(self, *args: Any) -> Any:
        return self._torch.monitor_workers(*args)

    def _shutdown(self, *args: Any, **options: Any) -> None:
        self._torch.shutdown(*args, **options)

    def _exit_barrier(self) -> None:
        self._torch.exit_barrier()


HANDLER_TAKES = tuple(inspect.signature(SubprocessHandler).parameters)


def start_worker(entrypoint: str, *args: str, **more: Any) -> Any:
    """Start a worker as torch does; older releases take other arguments."""
    given = {"entrypoint": entrypoint, "args": args, "env": {}, "local_rank_id": 0}
    given |= {"stdout": "", "stderr": "", **more}
    return SubprocessHandler(**{name: given.get(name) for name in HANDLER_TAKES})


def open_store(endpoint: str, **conf: Any) -> Any:
    """Open a store as torch's rendezvous does."""
    return c10d_rendezvous_backend._create_tcp_store(parameters_at(endpoint, **conf))


def two_agents(*addresses: str) -> tuple[list[Any], int]:
    """Return the handlers of two agents, and the port of their rendezvous."""
    port = own_port()
    handlers = []
    for number, address in enumerate(addresses):
        parameters = parameters_at(
            f"127.0.0.1:{port}",
            is_host=int(number == 0),
            nodes=2,
            join_timeout=PATIENCE,
            read_timeout=PATIENCE,
        )
        parameters.local_addr = address
        backend, store = c10d_rendezvous_backend.create_backend(parameters)
        handlers.append(dynamic_rendezvous.create_handler(store, backend, parameters))
    return handlers, port


def meet(handlers: list[Any]) -> list[Any]:
    """Return what the handlers answer when all of them are asked."""
    pool = ThreadPoolExecutor(len(handlers))
    answers = [pool.submit(handler.next_rendezvous) for handler in handlers]
    pool.shutdown(wait=False)
    return [answer.result(PATIENCE) for answer in answers]


def listening_at(port: int) -> set[str]:
    """Return the addresses on which this process listens at a port."""
    return {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }

"""The capabilities of the installed torch: everything that depends on its release.

The releases come from reading torch 2.0 to 2.15, and from running the tests on each. A
newer torch is expected to match 2.15.
"""

from __future__ import annotations

import copy
import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import distributed
from torch.distributed import run as torch_run
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from torchrun_hpc.errors import LaunchError, Message, Setting
from torchrun_hpc.variables import UNSHARED

if TYPE_CHECKING:
    import argparse
    import socket
    from collections.abc import Callable

OLDEST = "2.0"

_numbers = re.match(r"\d+(\.\d+)*", torch.__version__)
# A build without a release number counts as the newest.
RELEASE = Version(_numbers[0] if _numbers else "9999")

_torch: Any = distributed
_Handler: Any = dynamic_rendezvous.DynamicRendezvousHandler


@dataclass(frozen=True)
class Capability:
    """Something that not every release of torch has.

    If one of ``releases`` lacks a capability, torch has changed (HPC080). If a fault is
    missing, torch was fixed, and needs no patch.
    """

    releases: str
    present: bool
    is_fault: bool = False

    @property
    def is_expected(self) -> bool:
        """Whether the installed release should have it."""
        return RELEASE in SpecifierSet(self.releases)


def _has(look: Callable[[], bool]) -> bool:
    """Return what a look at torch shows; false if torch is too new for this look."""
    try:
        return look()
    except Exception:  # noqa: BLE001 - whatever a future torch does
        return False


def _builds_without_address() -> bool:
    build = rendezvous.RendezvousStoreInfo.build
    return "local_addr" not in inspect.signature(build).parameters


def _warns_of_default() -> bool:
    code = torch_run.config_from_args.__code__
    return "master_addr" in code.co_consts and "rdzv_endpoint" not in code.co_names


def _has_naive_times() -> bool:
    executor: Any = dynamic_rendezvous._DistributedRendezvousOpExecutor
    return uses(executor._keep_alive, "utcnow")


def _stop_closes_rendezvous() -> bool:
    agent: Any = local_elastic_agent.LocalElasticAgent
    return (
        uses(agent._shutdown, "_rdzv_handler")
        and "is_restart" not in inspect.signature(agent._shutdown).parameters
    )


def uses(function: Any, *names: str) -> bool:
    """Return whether a function of torch uses these attributes and globals."""
    return {*names} <= {*inspect.unwrap(function).__code__.co_names}


EVERY = Capability(f">={OLDEST}", present=True)
# ``next_rendezvous`` returns the place where the workers meet, and a handler knows
# whether an agent keeps their store. In older releases, the agent of rank 0 put its
# address into the store.
RENDEZVOUS_INFO = Capability(">=2.4", hasattr(rendezvous, "RendezvousInfo"))
# Torch uses the host's full name instead of ``--local-addr`` (pytorch#125743).
ADDRESS_IS_LOST = Capability(
    "==2.4.*",
    RENDEZVOUS_INFO.present and _has(_builds_without_address),
    is_fault=True,
)
# The agent of rank 0 keeps a store for the workers.
SHARED_STORE = Capability(
    ">=2.5", _has(lambda: uses(_Handler.__init__, "_shared_tcp_store_server"))
)
# The shared store is the rendezvous store, with the number of restarts as a prefix.
# Each agent counts its own restarts, so after a restart the workers do not meet.
SHARED_RENDEZVOUS_STORE = Capability(
    "==2.5.*",
    SHARED_STORE.present and _has(lambda: uses(_Handler.next_rendezvous, "host")),
    is_fault=True,
)
# A store can listen on a socket that the caller has bound.
LISTENING_SOCKET = Capability(
    ">=2.1", _has(lambda: "master_listen_fd" in _torch.TCPStore.__init__.__doc__)
)
# libuv's store, the default since 2.4, can also do that. Nothing in Python shows this.
LIBUV_TAKES_SOCKET = Capability(">=2.8", Version("2.8") <= RELEASE)
# Times in the rendezvous state have a time zone.
AWARE_TIMES = Capability(">=2.6", not _has(_has_naive_times))
# An agent that stops its workers for a restart closes the rendezvous (pytorch#123678).
STOP_CLOSES_RENDEZVOUS = Capability(
    "==2.3.*", _has(_stop_closes_rendezvous), is_fault=True
)
# Torch warns of the default of ``--master-addr`` (pytorch#111085).
WARNS_OF_DEFAULT = Capability("<2.2", _has(_warns_of_default), is_fault=True)

# A store raises this after a timeout.
STORE_ERROR: type[Exception] = getattr(_torch, "DistStoreError", RuntimeError)  # 2.2

# Options that some releases lack, with the value that matches their behaviour.
_OPTIONS = {
    "event_log_handler": "null",  # since 2.8
    "numa_binding": None,  # since 2.9
    "shutdown_timeout": None,  # since 2.12
}


def check_release() -> None:
    """Refuse a torch that is too old."""
    if not EVERY.is_expected:
        raise LaunchError(
            "HPC086",
            f"torch {torch.__version__} is too old: torchrun_hpc needs {OLDEST} or "
            "newer. Load a newer torch, or start the script with torchrun",
        )


def number_of_xpus() -> int:
    """Return how many Intel GPUs this torch sees."""
    xpu = getattr(torch, "xpu", None)  # since 2.3
    return int(xpu.device_count()) if xpu else 0


def option(args: argparse.Namespace, name: str) -> Any:
    """Return the value of torchrun's option; a default if this release lacks it."""
    return getattr(args, name, _OPTIONS[name])


def shutdown_timeout(args: argparse.Namespace) -> int:
    """Return how many seconds to wait for the end of workers that are stopped."""
    explicit = option(args, "shutdown_timeout")
    return 30 if explicit is None else int(explicit)


def variables() -> dict[str, Setting]:
    """Return the variables without which torch's own rendezvous would be wrong."""
    needs = SHARED_RENDEZVOUS_STORE.present
    return {UNSHARED: Setting("1", f"torch {torch.__version__}")} if needs else {}


def without_default(args: argparse.Namespace) -> argparse.Namespace:
    """Return torchrun's arguments without ``master_addr``; see `WARNS_OF_DEFAULT`.

    Only the static rendezvous reads it.
    """
    if not WARNS_OF_DEFAULT.present or args.rdzv_backend == "static":
        return args
    others = copy.copy(args)
    vars(others).pop("master_addr", None)
    return others


def rendezvous_info(store: Any, rank: int, nodes: int, address: str, port: int) -> Any:
    """Return where the workers meet, as torch expects it from ``next_rendezvous``.

    Torch may ask the agents' `store` for ``MASTER_ADDR`` and ``MASTER_PORT``.
    """
    if not RENDEZVOUS_INFO.present:
        return store, rank, nodes
    place = rendezvous.RendezvousStoreInfo(address, port)
    return rendezvous.RendezvousInfo(store, rank, nodes, place)


def listening_on(opened: socket.socket) -> dict[str, Any]:
    """Return the options with which a TCPStore takes over a listening socket."""
    options = {"master_listen_fd": opened.detach()}
    return options if LIBUV_TAKES_SOCKET.present else {**options, "use_libuv": False}


def warning_of_all_interfaces() -> Message:
    """Return the warning for a torch without `LISTENING_SOCKET`."""
    text = (
        f"torch {torch.__version__} cannot listen on a single address: the rendezvous "
        "store listens on all interfaces. Use torch 2.1 or newer"
    )
    return Message("HPC087", text)

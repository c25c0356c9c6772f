"""What the installed torch has: all that depends on its release.

A capability is found by looking at torch. The releases are those that have it, from
reading each from 2.0 to 2.15 and running the checks of docs/compatibility.md on it; a
newer one is expected to have what 2.15 has. A torch that is expected to have something,
and seems not to, has changed.
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

from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    import argparse
    import socket
    from collections.abc import Callable

OLDEST = "2.0"

_numbers = re.match(r"\d+(\.\d+)*", torch.__version__)
# A build that does not say its release counts as the newest.
RELEASE = Version(_numbers[0] if _numbers else "9999")

_torch: Any = distributed
_Handler: Any = dynamic_rendezvous.DynamicRendezvousHandler


@dataclass(frozen=True)
class Capability:
    """Something that not every release of torch has.

    Attributes:
        releases: Those that have it, as a version specifier.
        present: Whether the installed torch has it.
        is_fault: Whether it is a fault of torch. A torch of these releases that lacks
            it has been mended, and needs no patch; one that lacks anything else is
            taken for one that has changed (HPC080).
    """

    releases: str
    present: bool
    is_fault: bool = False

    @property
    def is_expected(self) -> bool:
        """Whether the installed release should have it."""
        return RELEASE in SpecifierSet(self.releases)


def _found(look: Callable[[], bool]) -> bool:
    """Look at torch, which may be newer than all that is known here."""
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
    """Say whether these attributes and globals are used in a function of torch."""
    return {*names} <= {*inspect.unwrap(function).__code__.co_names}


EVERY = Capability(f">={OLDEST}", present=True)
# ``next_rendezvous`` says where the workers meet, and a handler whether an agent keeps
# their store. Before, the agent of rank 0 puts its address into the agents' store.
RENDEZVOUS_INFO = Capability(">=2.4", hasattr(rendezvous, "RendezvousInfo"))
# It asks for the host's full name, not for ``--local-addr`` (pytorch#125743).
ADDRESS_IS_LOST = Capability(
    "==2.4.*",
    RENDEZVOUS_INFO.present and _found(_builds_without_address),
    is_fault=True,
)
# The agent of rank 0 keeps a store for the workers.
SHARED_STORE = Capability(
    ">=2.5", _found(lambda: uses(_Handler.__init__, "_shared_tcp_store_server"))
)
# It is the store of the rendezvous itself, with a prefix from the number of restarts,
# of which each agent counts its own: after a restart the workers do not meet.
SHARED_RENDEZVOUS_STORE = Capability(
    "==2.5.*",
    SHARED_STORE.present and _found(lambda: uses(_Handler.next_rendezvous, "host")),
    is_fault=True,
)
# A store can listen on a socket that somebody else has bound.
LISTENING_SOCKET = Capability(
    ">=2.1", _found(lambda: "master_listen_fd" in _torch.TCPStore.__init__.__doc__)
)
# So can libuv's, which is the default since 2.4. Nothing in Python shows it.
LIBUV_TAKES_SOCKET = Capability(">=2.8", Version("2.8") <= RELEASE)
# Times in the state of the rendezvous have a time zone.
AWARE_TIMES = Capability(">=2.6", not _found(_has_naive_times))
# An agent that stops its workers for a restart closes the rendezvous (pytorch#123678).
STOP_CLOSES_RENDEZVOUS = Capability(
    "==2.3.*", _found(_stop_closes_rendezvous), is_fault=True
)
# It warns of the default of ``--master-addr`` (pytorch#111085).
WARNS_OF_DEFAULT = Capability("<2.2", _found(_warns_of_default), is_fault=True)

# What a store raises that has no answer in time.
STORE_ERROR: type[Exception] = getattr(_torch, "DistStoreError", RuntimeError)  # 2.2

# With "1", worker 0 keeps the store of the workers.
UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

# Options that not every release has: one without it behaves as with this value.
_OPTIONS = {
    "event_log_handler": "null",  # since 2.8
    "numa_binding": None,  # since 2.9
    "shutdown_timeout": None,  # since 2.12
}


def check_release() -> None:
    """Check that torch is not too old.

    Raises:
        LaunchError: It is.
    """
    if not EVERY.is_expected:
        raise LaunchError(
            "HPC086",
            f"torch {torch.__version__} is too old: torchrun_hpc needs {OLDEST} or "
            "newer. Load a newer torch, or start the script with torchrun",
        )


def number_of_xpus() -> int:
    """Return how many GPUs of Intel's this torch sees."""
    xpu = getattr(torch, "xpu", None)  # since 2.3
    return int(xpu.device_count()) if xpu else 0


def option(args: argparse.Namespace, name: str) -> Any:
    """Return an option of torchrun, also if this one does not have it."""
    return getattr(args, name, _OPTIONS[name])


def shutdown_timeout(args: argparse.Namespace) -> int:
    """Return for how many seconds workers that are stopped are waited for."""
    typed = option(args, "shutdown_timeout")
    return 30 if typed is None else int(typed)


def variables() -> dict[str, Setting]:
    """Return the variables that torch's own rendezvous needs to be right."""
    needs = SHARED_RENDEZVOUS_STORE.present
    return {UNSHARED: Setting("1", f"torch {torch.__version__}")} if needs else {}


def without_default(args: argparse.Namespace) -> argparse.Namespace:
    """Return arguments of torchrun of which it does not warn, see `WARNS_OF_DEFAULT`.

    Only the static rendezvous reads the option.
    """
    if not WARNS_OF_DEFAULT.present or args.rdzv_backend == "static":
        return args
    others = copy.copy(args)
    vars(others).pop("master_addr", None)
    return others


def rendezvous_info(store: Any, rank: int, nodes: int, address: str, port: int) -> Any:
    """Return what torch expects of ``next_rendezvous``.

    Args:
        store: For the agents. Where it is asked for ``MASTER_ADDR`` and
            ``MASTER_PORT``, it has to know them.
        rank: Group rank of this node.
        nodes: How many there are.
        address: Where the workers meet: host.
        port: And port.
    """
    if not RENDEZVOUS_INFO.present:
        return store, rank, nodes
    where = rendezvous.RendezvousStoreInfo(address, port)
    return rendezvous.RendezvousInfo(store, rank, nodes, where)


def listening_on(opened: socket.socket) -> dict[str, Any]:
    """Return options with which a TCPStore takes over a listening socket."""
    options = {"master_listen_fd": opened.detach()}
    return options if LIBUV_TAKES_SOCKET.present else {**options, "use_libuv": False}


def warning_of_all_interfaces() -> Message:
    """Return the warning for a torch where `LISTENING_SOCKET` is missing."""
    text = (
        f"torch {torch.__version__} cannot listen on a single address: the rendezvous "
        "store listens on all interfaces. Use torch 2.1 or newer"
    )
    return Message("HPC087", text)

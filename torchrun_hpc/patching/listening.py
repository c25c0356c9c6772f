"""The stores listen on the one address that the job uses, and are waited for quietly.

Torch's TCPStore listens on all interfaces, warns where there is no IPv6, and asks the
name server for every peer because it sees IPv4 peers as IPv6 ones. A client that comes
before its server prints a C++ trace at each attempt, and lets no signal through.
"""

from __future__ import annotations

import functools
import inspect
import random
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
)

from torchrun_hpc import report
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.network import listener, port_holder

if TYPE_CHECKING:
    from torchrun_hpc.plan import LaunchPlan

TARGET = "c10d_rendezvous_backend.TCPStore"
REASON = "stores listen on all interfaces (pytorch#155741, #173909)"
RELEASES = ">=2.6"

_Handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
_backend: Any = c10d_rendezvous_backend
_dist: Any = dist
_TCPStore = _dist.TCPStore

# Seconds.
_PROBE_TIMEOUT = 5.0
_PAUSE = (0.05, 0.3)
_FIRST_REPORT = 10.0
_NEXT_REPORT = 60.0


def fits() -> bool:
    """Check the names that are replaced, and what they are called with."""
    server = inspect.signature(_Handler._create_tcp_store_server)
    creator = inspect.signature(_backend._create_tcp_store)
    return (
        _backend.TCPStore is _TCPStore
        and list(server.parameters) == ["self", "master_addr", "master_port"]
        and list(creator.parameters) == ["params"]
        and "master_listen_fd" in (_TCPStore.__init__.__doc__ or "")
    )


def apply(plan: LaunchPlan) -> None:
    """Open the stores of this process on the plan's address."""
    if plan.address is None:
        return

    def make(host: str, port: int, *, is_master: bool, **options: Any) -> Any:
        if not is_master:
            _wait_for(host, port, options["timeout"].total_seconds(), plan)
            return _TCPStore(host, port, is_master=False, **options)
        address = plan.address if plan.listen is None else plan.listen[0]
        return _serve(str(address), port, **options)

    original = _Handler._create_tcp_store_server

    @functools.wraps(original)
    def create_server(self: Any, master_addr: str, master_port: int) -> Any:
        if master_addr != plan.address:
            return original(self, master_addr, master_port)
        return _serve(master_addr, master_port, multi_tenant=True)

    _backend.TCPStore = make
    _Handler._create_tcp_store_server = create_server


def _serve(address: str, port: int, **options: Any) -> Any:
    try:
        opened = listener(address, port)
    except OSError as error:
        raise LaunchError(
            f"cannot listen on {address} port {port}: {error.strerror}; the port is "
            f"held by {port_holder(port)}"
        ) from None
    return _TCPStore(
        address,
        opened.getsockname()[1],
        is_master=True,
        master_listen_fd=opened.detach(),
        **options,
    )


def _wait_for(host: str, port: int, limit: float, plan: LaunchPlan) -> None:
    """Wait until the head node listens, with plain sockets.

    Raises:
        RendezvousConnectionError: It does not, within ``limit`` seconds.
    """
    start = time.monotonic()
    report_at = _FIRST_REPORT
    while True:
        waited = time.monotonic() - start
        try:
            socket.create_connection((host, port), timeout=_PROBE_TIMEOUT).close()
        except OSError as error:
            if waited > limit:
                raise RendezvousConnectionError(
                    f"the head node did not answer at {plan.endpoint} ({host}) within "
                    f"{limit:.0f} s (read_timeout): {error}"
                ) from None
            if waited > report_at and plan.node_rank == 1:
                report_at = waited + _NEXT_REPORT
                report.line(
                    f"waiting for the head node at {plan.endpoint} ({host}) for "
                    f"{waited:.0f} s: {error}",
                    sys.stderr,
                )
            time.sleep(random.uniform(*_PAUSE))  # noqa: S311 - spreads the nodes
        else:
            return

"""The stores listen on the one address that the job uses, and are waited for.

Torch's TCPStore listens on all interfaces, warns where there is no IPv6, and asks the
name server for every peer because it sees IPv4 peers as IPv6 ones. A client that comes
before its server lets no signal through until it is connected, and prints C++ traces
where the server's network cannot be reached yet.
"""

from __future__ import annotations

import functools
import inspect
import random
import socket
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    static_tcp_rendezvous,
)

from torchrun_hpc import report
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.network import bound_socket, port_problem
from torchrun_hpc.patching import leaving
from torchrun_hpc.patching.replacing import has, replace

if TYPE_CHECKING:
    from torchrun_hpc.plan import LaunchPlan

TARGET = "TCPStore of torch.distributed.elastic.rendezvous"
REASON = "stores listen on all interfaces (pytorch#155741, #173909)"
RELEASES = ">=2.6"

_torch: Any = dynamic_rendezvous
_Handler = _torch.DynamicRendezvousHandler
_MODULES: tuple[Any, ...] = (c10d_rendezvous_backend, static_tcp_rendezvous)
_STORE = "TCPStore"
_SERVER = "_create_tcp_store_server"

# Seconds.
_PROBE_TIMEOUT = 5.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


def fits() -> bool:
    """Check the names that are replaced, and what they are called with."""
    if not has(_Handler, _SERVER) or not all(has(m, _STORE) for m in _MODULES):
        return False
    server = inspect.signature(vars(_Handler)[_SERVER])
    store = getattr(_MODULES[0], _STORE)
    return (
        list(server.parameters) == ["self", "master_addr", "master_port"]
        and "master_listen_fd" in store.__init__.__doc__
    )


def apply(plan: LaunchPlan) -> None:
    """Open the stores of this process on the plan's addresses."""
    for module in _MODULES:
        replace(module, _STORE, _maker(getattr(module, _STORE), plan))
    if plan.address is not None:
        replace(_Handler, _SERVER, _server(vars(_Handler)[_SERVER], plan))


def _maker(original: Any, plan: LaunchPlan) -> Any:
    """Wrap TCPStore where the nodes' rendezvous makes it."""

    @functools.wraps(original)
    def make(
        host: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,  # noqa: FBT001, FBT002
        timeout: timedelta = timedelta(seconds=300),
        **options: Any,
    ) -> Any:
        options.update(world_size=world_size, timeout=timeout)
        if not is_master:
            _wait_for(host, port, timeout.total_seconds(), plan)
            return original(host, port, is_master=False, **options)
        if plan.listen is not None:
            store = _serve(original, plan.listen[0], port, options)
        else:
            store = original(host, port, is_master=True, **options)
        leaving.hosts(store)
        return store

    return make


def _server(original: Any, plan: LaunchPlan) -> Any:
    """Wrap the method that opens the store of the workers."""

    @functools.wraps(original)
    def create_server(_self: Any, _master_addr: str, master_port: int) -> Any:
        store = getattr(_torch.dist, _STORE)
        return _serve(store, str(plan.address), master_port, {"multi_tenant": True})

    return create_server


def _serve(store: Any, address: str, port: int, options: dict[str, Any]) -> Any:
    try:
        opened = bound_socket(address, port)
        opened.listen(socket.SOMAXCONN)
    except OSError as error:
        problem = port_problem(address, port) or error.strerror
        raise LaunchError(
            "HPC081", f"cannot listen on {address} port {port}: {problem}"
        ) from None
    port = opened.getsockname()[1]
    return store(
        address, port, is_master=True, master_listen_fd=opened.detach(), **options
    )


def _wait_for(host: str, port: int, limit: float, plan: LaunchPlan) -> None:
    """Wait until the head node listens, with plain sockets.

    Raises:
        RendezvousConnectionError: It does not, within ``limit`` seconds.
    """
    start = time.monotonic()
    # Node 1 speaks for all first; who waits longer than that may be alone.
    report_at = report.FIRST_REPORT if plan.node_rank == 1 else report.ALONE
    while True:
        waited = time.monotonic() - start
        try:
            socket.create_connection((host, port), timeout=_PROBE_TIMEOUT).close()
        except OSError as error:
            if waited > limit:
                raise RendezvousConnectionError(
                    "HPC082 the head node did not answer at "
                    f"{plan.endpoint} ({host}) within {limit:.0f} s "
                    f"(read_timeout): {error}"
                ) from None
            if waited > report_at:
                report_at = waited + report.NEXT_REPORT
                text = (
                    f"waiting for the head node at {plan.endpoint} ({host}) for "
                    f"{waited:.0f} s: {error}"
                )
                report.line(Message("HPC083", text), sys.stderr)
            # Short at first, when all start together; spread among the nodes.
            pause = min(max(waited / 10, _SHORTEST_PAUSE), _LONGEST_PAUSE)
            time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311
        else:
            return

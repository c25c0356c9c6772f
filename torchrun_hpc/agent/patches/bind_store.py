"""The stores of torch's rendezvous: where they listen, and how clients find them."""

from __future__ import annotations

import functools
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    static_tcp_rendezvous,
)

from torchrun_hpc import limits, waiting
from torchrun_hpc.agent.patches import Patch, c10d, has, takes, wrap
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.host import capabilities
from torchrun_hpc.host.network import (
    bound_socket,
    join_endpoint,
    port_is_taken,
    port_problem,
)
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.console import reports_wait_for

if TYPE_CHECKING:
    from torchrun_hpc.planning.plan import LaunchPlan

_torch: Any = dynamic_rendezvous
_Handler = _torch.DynamicRendezvousHandler
_MODULES: tuple[Any, ...] = (c10d_rendezvous_backend, static_tcp_rendezvous)
_STORE = "TCPStore"
_SOCKET = "master_listen_fd"
_SERVER = "_create_tcp_store_server"


class BindStore(Patch):
    """Stores listen on the job's address only, and clients wait for them.

    Torch's TCPStore listens on all interfaces. It warns if there is no IPv6, and asks
    the name server for every peer: it sees IPv4 peers as IPv6 ones. A client that
    starts before its server blocks signals, and prints C++ traces.
    """

    NAME = "bind_store"
    TARGET = "TCPStore of torch.distributed.elastic.rendezvous"
    REASON = "stores listen on all interfaces (pytorch#155741, #173909)"

    @classmethod
    def fits(cls) -> bool:
        """Check the replaced names, and their parameters."""
        if not all(has(module, _STORE) for module in _MODULES):
            return False
        if capabilities.LISTENING_SOCKET.is_expected and not all(
            _SOCKET in getattr(module, _STORE).__init__.__doc__ for module in _MODULES
        ):
            return False
        return (
            not capabilities.SHARED_STORE.present
            or takes(_Handler, _SERVER, "self", "bootstrap_store_info")
            or takes(_Handler, _SERVER, "self", "master_addr", "master_port")
        )

    @classmethod
    def apply(cls, plan: LaunchPlan, _hooks: object) -> None:
        """Open the stores of this process on the plan's addresses."""
        for module in _MODULES:
            wrap(module, _STORE, functools.partial(_open_or_connect, plan))
        address = plan.meeting.local_address
        takes_socket = capabilities.LISTENING_SOCKET.present
        if address is not None and takes_socket and has(_Handler, _SERVER):
            wrap(_Handler, _SERVER, functools.partial(_open_for_workers, address))


def _open_or_connect(  # noqa: PLR0913, PLR0917 - as TCPStore
    plan: LaunchPlan,
    original: Any,
    host: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,  # noqa: FBT001, FBT002
    timeout: timedelta = timedelta(seconds=300),
    **options: Any,
) -> Any:
    options.update(world_size=world_size, timeout=timeout)
    if is_master:
        try:
            store = _open(original, host, port, plan, options)
        except LaunchError as error:
            listen = plan.meeting.listen
            is_taken = listen is not None and port_is_taken(listen[0], port)
            if not (plan.meeting.may_join and is_taken):
                other = join_endpoint(host, "PORT")
                text = f"{error}. Pass another port: --rdzv_endpoint={other}"
                raise LaunchError("HPC055", text) from None
            text = f"{error}. Joining the program there as an agent of this job"
            console.write(Message("HPC156", text))
        else:
            c10d.record_hosted(store)
            return store
    _wait_for(host, port, timeout.total_seconds(), plan)
    return original(host, port, is_master=False, **options)


def _open(
    original: Any, host: str, port: int, plan: LaunchPlan, options: dict[str, Any]
) -> Any:
    listen = plan.meeting.listen
    if listen is not None and listen[1] == 0:
        port = 0  # torch may pass a fixed one, as with --standalone in 2.0
    if listen is not None and capabilities.LISTENING_SOCKET.present:
        return _serve(original, listen[0], port, options)
    try:
        return original(host, port, is_master=True, **options)
    except RuntimeError:
        if listen is not None:
            _check_free(listen[0], port)
        raise


def _open_for_workers(address: str, _original: Any, _handler: Any, *at: Any) -> Any:
    port = at[1] if len(at) > 1 else at[0].master_port
    store = getattr(_torch.dist, _STORE)
    return _serve(store, address, port, {"multi_tenant": True})


def _serve(store: Any, address: str, port: int, options: dict[str, Any]) -> Any:
    try:
        opened = bound_socket(address, port, socket.SOMAXCONN)
    except OSError as error:
        _check_free(address, port, str(error.strerror))
        raise
    port = opened.getsockname()[1]
    options = {**options, **capabilities.listening_on(opened)}
    return store(address, port, is_master=True, **options)


def _check_free(address: str, port: int, reason: str = "") -> None:
    """Refuse a port on which we could not listen, if the reason is known."""
    problem = port_problem(address, port) or reason
    if problem:
        text = f"cannot listen on {address} port {port}: {problem}"
        raise LaunchError("HPC055", text) from None


def _wait_for(host: str, port: int, limit: float, plan: LaunchPlan) -> None:
    place = f"{plan.meeting.endpoint} ({host})"
    problem: OSError | None = None

    def is_reached() -> bool:
        nonlocal problem
        try:
            socket.create_connection((host, port), limits.STORE_PROBE_TIMEOUT).close()
        except OSError as error:
            problem = error
            return False
        return True

    def report(waited: float) -> None:
        since = f"after {waited:.0f} s: {problem}"
        text = f"still waiting for the head node at {place} {since}"
        console.write(Message("HPC113", text))

    # At first one node reports for all. A node that waits longer may be the only one.
    is_first = reports_wait_for(plan.meeting.node_rank, plan.meeting.coordinator)
    if not waiting.until(is_reached, limit, report, is_reporter=is_first, pause=None):
        raise RendezvousConnectionError(
            f"the head node did not answer at {place} within "
            f"{limit:.0f} s (read_timeout): {problem}"
        )

"""The environment variables that gloo, NCCL and OpenMP read.

Gloo takes exact names of interfaces; NCCL takes prefixes, exact names behind ``=``,
exclusions behind ``^``. What the user has set is never changed; an empty variable is
unset. Sources: torch's ProcessGroupGloo and gloo's ``transport/tcp/device.cc``;
NVIDIA's NCCL documentation, "Environment Variables".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.inputs import Value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.inputs import Inputs
    from torchrun_hpc.network import Address, Network

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
OMP = "OMP_NUM_THREADS"


def worker_threads(q: Inputs) -> dict[str, Value]:
    """Set what torchrun sets, without its banner: one thread a worker."""
    if q.workers > 1 and not q.environ.get(OMP):
        return {OMP: Value("1", "torchrun's default")}
    return {}


def interfaces(q: Inputs, address: Address | None) -> dict[str, Value]:
    """Name the interface that has this node's address, to gloo and to NCCL."""
    interface = q.network.owner(address)
    if address is None or interface is None:
        return {}
    found = {}
    owner = f"{interface.name} has {address}"
    if not q.environ.get(GLOO):
        found[GLOO] = Value(interface.name, owner)
    # NCCL takes ib* first, all of them, without being told.
    infiniband = any(i.up and i.name.startswith("ib") for i in q.network.interfaces)
    if not q.environ.get(NCCL) and not infiniband:
        rails = q.network.siblings(interface, address)
        names = ",".join(rail.name for rail in rails)
        found[NCCL] = Value(f"={names}", owner)
    return found


def check_gloo(environ: Mapping[str, str], network: Network) -> None:
    """Refuse what gloo would crash on.

    Raises:
        LaunchError: ``GLOO_SOCKET_IFNAME`` names what is not an interface here.
    """
    value = environ.get(GLOO, "")
    if len(value) <= 1:  # gloo ignores it
        return
    names = [interface.name for interface in network.interfaces]
    # Not lo: other nodes are not there.
    useful = [
        interface.name
        for interface in network.interfaces
        if not all(own.ip.is_loopback for own in interface.addresses)
    ]
    for part in value.removesuffix(",").split(","):
        if part not in names:
            wanted = part.strip().lstrip("^=")
            alike = [n for n in useful if wanted and n.startswith(wanted)]
            hint = " or ".join(alike) or "one of " + ", ".join(useful)
            raise LaunchError(
                f"{GLOO}={value}: this node has no interface {part!r}. Gloo takes "
                "exact names only: no prefix, no ^, no =, no blanks (those are for "
                f"NCCL). Unset it, or set it to {hint}",
                everywhere=part.startswith(("^", "=")),
            )


def nccl_warning(environ: Mapping[str, str], network: Network) -> str:
    """Say that NCCL would find no interface; whether it is used, the script knows."""
    value = environ.get(NCCL, "")
    if len(value) <= 1 or value.startswith("^"):
        return ""
    exact = value.startswith("=")
    wanted = tuple(part for part in value.lstrip("=").split(",") if part)
    names = [interface.name for interface in network.interfaces if interface.up]
    if any(name in wanted if exact else name.startswith(wanted) for name in names):
        return ""
    return (
        f"{NCCL}={value} matches no interface that is up here, and NCCL will not "
        f"start. There are {', '.join(names)}. Names are prefixes; = in front of all "
        "means exact ones, ^ all but these"
    )

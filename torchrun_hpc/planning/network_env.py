"""The environment variables of the network: those of gloo, of NCCL, of the site.

Gloo takes exact names of interfaces; NCCL takes prefixes, exact names behind ``=``,
exclusions behind ``^``. What the user has set is never changed; an empty variable is
unset. Sources: torch's ProcessGroupGloo and gloo's ``transport/tcp/device.cc``;
NVIDIA's NCCL documentation, "Environment Variables".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message, choices
from torchrun_hpc.host.resolver import Resolver
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.host.network import Address, Network
    from torchrun_hpc.planning.inputs import Inputs

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"

CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
RESOLVER_OPTIONS = "RES_OPTIONS"

# Each of these sets a level of its own, so that their common parent has no say.
_LOGGED_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "torch.distributed.distributed_c10d",
    "torchrun_hpc.rendezvous.client",
)

DEBUG_VARIABLES = {
    "TORCH_LOGS": ",".join(f"+{module}" for module in _LOGGED_MODULES),
    # Not DETAIL: that is no logging, it checks each collective in a process group of
    # its own, and jobs hang (pytorch#129672) or, DDP on gloo in torch 2.13, crash.
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
    CPP_LOG_LEVEL: "INFO",
    # For --tee, which is set where neither it nor --redirects is typed.
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "rank ${rank}: ",
}


def network(inputs: Inputs, address: Address | None) -> dict[str, Setting]:
    """Return the variables for several nodes that are not set.

    What the site documents, and where that says nothing, the interface that has this
    node's address.
    """
    found = _site_variables(inputs)
    return _unset(inputs, {**found, **_interfaces(inputs, address), **found})


def debugging(environ: Mapping[str, str]) -> dict[str, Setting]:
    """Return the variables of ``--hpc-debug`` that the user has not set otherwise."""
    return {
        name: Setting(value, "--hpc-debug")
        for name, value in DEBUG_VARIABLES.items()
        if environ.get(name) in {None, "", value}
    }


def of_resolver(inputs: Inputs) -> dict[str, Setting]:
    """Return what spares workers a resolver that does not answer.

    Torch asks for the name of each address, and warns where it gets no answer. Where no
    name server can be reached, nobody has to wait for one (resolv.conf(5)).
    """
    source = {
        Resolver.DOWN: "no name server can be reached",
        Resolver.SILENT: "no answer of the resolver",
    }.get(inputs.node.resolver)
    if source is None:
        return {}
    found = {CPP_LOG_LEVEL: Setting("ERROR", source)}
    if inputs.node.resolver is Resolver.DOWN:
        found[RESOLVER_OPTIONS] = Setting("timeout:1 attempts:1", source)
    return _unset(inputs, found)


def of_release(inputs: Inputs) -> dict[str, Setting]:
    """Return the variables of torch's release that are not set."""
    return _unset(inputs, inputs.node.of_release)


def _unset(inputs: Inputs, found: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return those of some variables that the user has not set."""
    return {name: found[name] for name in found if not inputs.environ.get(name)}


def interface_name(
    environ: Mapping[str, str], environment: Mapping[str, Setting]
) -> str:
    """Return the interfaces of gloo, and of NCCL where they are others."""
    gloo, nccl = (
        str(environment[name].value if name in environment else environ.get(name, ""))
        for name in (GLOO, NCCL)
    )
    if not nccl or nccl.lstrip("=") == gloo:
        return gloo
    return f"{gloo} (NCCL: {nccl.lstrip('=')})" if gloo else ""


def _site_variables(inputs: Inputs) -> dict[str, Setting]:
    """Return what the site documents, without interfaces that are not here."""
    if inputs.site is None:
        return {}
    return {
        name: Setting(value, f"site {inputs.site.name}")
        for name, value in inputs.site.variables.items()
        if name not in _MATCHES or _MATCHES[name](value, inputs.network)
    }


def _interfaces(inputs: Inputs, address: Address | None) -> dict[str, Setting]:
    """Name the interface that has this node's address, to gloo and to NCCL."""
    interface = inputs.network.owner(address)
    if address is None or interface is None:
        return {}
    owner = f"{interface.name} has {address}"
    found = {GLOO: Setting(interface.name, owner)}
    # NCCL takes ib* first, all of them, without being told.
    infiniband = any(
        i.up and i.name.startswith("ib") for i in inputs.network.interfaces
    )
    if not infiniband:
        rails = inputs.network.siblings(interface, address)
        names = ",".join(rail.name for rail in rails)
        found[NCCL] = Setting(f"={names}", owner)
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
            hint = choices(part.strip().lstrip("^="), useful or names)
            raise LaunchError(
                "HPC054",
                f"{GLOO}={value}: this node has no interface {part!r}. Gloo takes "
                "exact names only: no prefix, no ^, no =, no blanks (those are for "
                f"NCCL). Unset it, or set it to what is here. {hint}",
                everywhere=part.startswith(("^", "=")),
            )


def notes(inputs: Inputs, address: Address | None) -> list[Message]:
    """Return a note if gloo is told another interface than the job's."""
    interface = inputs.network.owner(address)
    value = inputs.environ.get(GLOO, "")
    if len(value) <= 1 or interface is None or interface.name in value.split(","):
        return []
    text = f"{GLOO}={value} is set, and the job's address {address} is on "
    return [Message("HPC224", text + interface.name)]


def warnings(inputs: Inputs) -> list[Message]:
    """Return which interfaces of the user or the site are not here."""
    found = []
    names = [interface.name for interface in inputs.network.interfaces if interface.up]
    value = inputs.environ.get(NCCL, "")
    # Whether NCCL is used at all, the script knows: no error.
    if not _nccl_matches(value, inputs.network):
        wanted = value.lstrip("=").partition(",")[0]
        text = (
            f"{NCCL}={value} matches no interface that is up here, and NCCL will not "
            f"start. {choices(wanted, names)}. Names are prefixes; = in front of all "
            "means exact ones, ^ all but these"
        )
        found.append(Message("HPC058", text))
    for name, matches in _MATCHES.items():
        value = inputs.site.variables.get(name, "") if inputs.site else ""
        if (
            inputs.site
            and not inputs.environ.get(name)
            and not matches(value, inputs.network)
        ):
            text = (
                f"site {inputs.site.name} sets {name}={value}, which is not up here. "
                f"There are: {', '.join(names)}. It is left out ({inputs.site.file})"
            )
            found.append(Message("HPC076", text))
    return found


def _gloo_matches(value: str, here: Network) -> bool:
    return {i.name for i in here.interfaces if i.up}.issuperset(value.split(","))


def _nccl_matches(value: str, here: Network) -> bool:
    if len(value) <= 1 or value.startswith("^"):
        return True
    wanted = tuple(part for part in value.lstrip("=").split(",") if part)
    return any(
        i.name in wanted if value.startswith("=") else i.name.startswith(wanted)
        for i in here.interfaces
        if i.up
    )


_MATCHES = {
    GLOO: lambda value, here: not value or _gloo_matches(value, here),
    NCCL: _nccl_matches,
}

"""The environment variables of gloo, of NCCL, and of the site.

gloo takes exact names of interfaces. NCCL takes prefixes, exact names after ``=``, and
exclusions after ``^``. Variables of the user never change. An empty variable counts as
unset. Sources: torch's ProcessGroupGloo and gloo's ``transport/tcp/device.cc``;
NVIDIA's NCCL documentation, "Environment Variables".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message, Setting, choices
from torchrun_hpc.host.resolver import Resolver
from torchrun_hpc.variables import (
    CPP_LOG_LEVEL,
    DISTRIBUTED_DEBUG,
    GLOO,
    LOG_LINE_PREFIX,
    NCCL,
    RESOLVER_OPTIONS,
    TORCH_LOGS,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchrun_hpc.host.network import Address, Network
    from torchrun_hpc.planning.inputs import Inputs


# Each of these sets its own level, so the level of their parent has no effect.
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
    TORCH_LOGS: ",".join(f"+{module}" for module in _LOGGED_MODULES),
    # DETAIL would check each collective in a process group of its own: jobs hang
    # (pytorch#129672), or crash (DDP on gloo in torch 2.13).
    DISTRIBUTED_DEBUG: "INFO",
    CPP_LOG_LEVEL: "INFO",
    # For --tee, which is set if the user has set neither it nor --redirects.
    LOG_LINE_PREFIX: "rank ${rank}: ",
}


def network(inputs: Inputs, address: Address | None) -> dict[str, Setting]:
    """Return the variables for several nodes that are not set, first the site's.

    ``address`` is this node's address for the job.
    """
    variables = of_site(inputs)
    for name, setting in _interfaces(inputs, address).items():
        variables.setdefault(name, setting)
    return _unset(inputs, variables)


def debugging(environ: Mapping[str, str]) -> dict[str, Setting]:
    """Return the variables of ``--hpc-debug``, unless the user has set other values."""
    return {
        name: Setting(value, "--hpc-debug")
        for name, value in DEBUG_VARIABLES.items()
        if environ.get(name) in {None, "", value}
    }


def of_resolver(inputs: Inputs) -> dict[str, Setting]:
    """Return the variables that matter if no name server answers.

    Torch asks for the name of each address, and warns if it gets no answer. Without a
    reachable name server, a short timeout is set (resolv.conf(5)).
    """
    variables = {}
    if inputs.node.resolver is Resolver.DOWN:
        source = "no name server can be reached"
        variables[CPP_LOG_LEVEL] = Setting("ERROR", source)
        variables[RESOLVER_OPTIONS] = Setting("timeout:1 attempts:1", source)
    elif inputs.node.resolver is Resolver.SILENT:
        variables[CPP_LOG_LEVEL] = Setting("ERROR", "no answer of the resolver")
    return _unset(inputs, variables)


def of_release(inputs: Inputs) -> dict[str, Setting]:
    """Return the variables for torch's release that are not set."""
    return _unset(inputs, inputs.node.of_release)


def _unset(inputs: Inputs, variables: Mapping[str, Setting]) -> dict[str, Setting]:
    return {n: value for n, value in variables.items() if not inputs.environ.get(n)}


def interface_name(
    environ: Mapping[str, str], environment: Mapping[str, Setting]
) -> str:
    """Return the interfaces of gloo, and those of NCCL if they differ."""
    gloo, nccl = (
        str(environment[name].value if name in environment else environ.get(name, ""))
        for name in (GLOO, NCCL)
    )
    if not nccl or nccl.lstrip("=") == gloo:
        return gloo
    return f"{gloo} (NCCL: {nccl.lstrip('=')})" if gloo else ""


def of_site(inputs: Inputs) -> dict[str, Setting]:
    """Return the site's and its profile's variables, except for absent interfaces."""
    return {
        name: setting
        for name, setting in _all_of_site(inputs)
        if _is_present(name, setting, inputs.network)
    }


def _all_of_site(inputs: Inputs) -> Iterator[tuple[str, Setting]]:
    """Yield the site's variables, and then the profile's, which replace them."""
    if inputs.site is not None:
        for name, value in inputs.site.variables.items():
            yield name, Setting(value, f"site {inputs.site.name}")
        yield from inputs.profile.variables.items()


def _is_present(name: str, setting: Setting, network: Network) -> bool:
    return name not in _MATCHES or _MATCHES[name](setting.value, network)


def _interfaces(inputs: Inputs, address: Address | None) -> dict[str, Setting]:
    interface = inputs.network.owner(address)
    if address is None or interface is None:
        return {}
    source = f"{interface.name} has {address}"
    variables = {GLOO: Setting(interface.name, source)}
    # By itself, NCCL prefers all ib* interfaces.
    if not any(name.startswith("ib") for name in _up(inputs.network)):
        rails = inputs.network.siblings(interface, address)
        names = ",".join(rail.name for rail in rails)
        variables[NCCL] = Setting(f"={names}", source)
    return variables


def check_gloo(environ: Mapping[str, str], network: Network) -> None:
    """Check that ``GLOO_SOCKET_IFNAME`` names known interfaces: gloo would crash."""
    value = environ.get(GLOO, "")
    if len(value) <= 1:  # gloo ignores it
        return
    names = [interface.name for interface in network.interfaces]
    # lo reaches no other node.
    useful = [
        interface.name
        for interface in network.interfaces
        if not all(address.ip.is_loopback for address in interface.addresses)
    ]
    for part in value.removesuffix(",").split(","):
        if part not in names:
            hint = choices(part.strip().lstrip("^="), useful or names)
            text = (
                f"{GLOO}={value}: this node has no interface {part!r}. gloo takes "
                "exact names. Prefixes, ^, = and blanks are for NCCL. Unset the "
                f"variable, or name an interface of this node. {hint}"
            )
            is_wrong = part.startswith(("^", "="))  # on any node
            raise LaunchError("HPC054", text, everywhere=is_wrong)


def notes(inputs: Inputs, address: Address | None) -> list[Message]:
    """Return a note if gloo's variable names another interface than the job's."""
    interface = inputs.network.owner(address)
    value = inputs.environ.get(GLOO, "")
    if len(value) <= 1 or interface is None or interface.name in value.split(","):
        return []
    text = f"{GLOO}={value} is set, but the job's address {address} is on "
    return [Message("HPC224", f"{text}{interface.name}. Unset it unless you need it")]


def warnings(inputs: Inputs) -> list[Message]:
    """Return warnings if the user or the site names interfaces that are not here."""
    problems = []
    names, site = _up(inputs.network), inputs.site
    value = inputs.environ.get(NCCL, "")
    # Only the script knows whether it uses NCCL, so this is no error.
    if not _nccl_matches(value, inputs.network):
        wanted = value.lstrip("=").partition(",")[0]
        text = (
            f"{NCCL}={value} matches no interface that is up here, and NCCL will not "
            f"start. {choices(wanted, names)}. Names are prefixes. A leading = means "
            "exact names, a leading ^ all other names"
        )
        problems.append(Message("HPC058", text))
    if site is None:
        return problems
    for name, setting in _all_of_site(inputs):
        is_present = _is_present(name, setting, inputs.network)
        if not (inputs.environ.get(name) or is_present):
            text = (
                f"{setting.source} sets {name}={setting.value}, which is not up here. "
                f"It is left out ({site.file}). There are: {', '.join(names)}"
            )
            problems.append(Message("HPC076", text))
    return [*problems, *unread(inputs)]


def unread(inputs: Inputs) -> tuple[Message, ...]:
    """Return that the profile cannot be read here, if anything needs it."""
    site, missing = inputs.site, _missing(inputs)
    if site is None or not (missing and inputs.profile.problem):
        return ()
    text = (
        f"{site.profile} cannot be read: {inputs.profile.problem}. Site {site.name} "
        "takes variables of NCCL from it. Mount it on this node, or export them: "
        f"{', '.join(sorted(missing))}"
    )
    return (Message("HPC247", text),)


def advice(inputs: Inputs) -> tuple[Message, ...]:
    """Return what the profile lacks; a dry run also names what the site does not allow.

    Images are mostly the same on all nodes, so one node reports it.
    """
    missing = _missing(inputs)
    skipped = [
        f"{name} ({why})"
        for name, why in inputs.profile.skipped.items()
        if name in missing or inputs.options.hpc_dry_run
    ]
    if inputs.site is None or not skipped:
        return ()
    text = (
        f"{inputs.site.profile}: not taken: {', '.join(skipped)}. Export what you "
        "need, or remove the names from the site file"
    )
    return (Message("HPC248", text),)


def _missing(inputs: Inputs) -> set[str]:
    """Return the names that the profile should set, and nothing else sets."""
    wanted = inputs.site.profile_names if inputs.site else ()
    return {n for n in wanted if not inputs.environ.get(n)} - of_site(inputs).keys()


def _up(network: Network) -> list[str]:
    return [interface.name for interface in network.interfaces if interface.up]


def _gloo_matches(value: str, network: Network) -> bool:
    return not value or {*_up(network)}.issuperset(value.split(","))


def _nccl_matches(value: str, network: Network) -> bool:
    if len(value) <= 1 or value.startswith("^"):
        return True
    parts = tuple(part for part in value.lstrip("=").split(",") if part)
    if value.startswith("="):
        return any(name in parts for name in _up(network))
    return any(name.startswith(parts) for name in _up(network))


_MATCHES = {GLOO: _gloo_matches, NCCL: _nccl_matches}

"""The plan of a world of one node: torchrun --standalone, whatever the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.commandline import rdzv_conf
from torchrun_hpc.commandline.options import names_folder
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.planning import endpoints, local_endpoint, messages, resources
from torchrun_hpc.planning.endpoints import C10D_PORT, LOOPBACK, STATIC_PORT
from torchrun_hpc.planning.inputs import C10D, STATIC
from torchrun_hpc.planning.launch_plan import LaunchPlan, Messages, Rendezvous, World
from torchrun_hpc.planning.mode import node_range
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from torchrun_hpc.planning.inputs import Inputs

_RULE = "one node"


def plan(inputs: Inputs) -> LaunchPlan:
    """Plan a world of one node.

    Raises:
        LaunchError: Something that the user typed cannot work.
    """
    standalone = inputs.explicit("standalone")
    is_typed = standalone or "nnodes" in inputs.options
    options: dict[str, Setting] = {}
    ignored = _ignored_node_rank(inputs)
    if ignored:
        options["node_rank"] = Setting(0, _RULE)
    if standalone and node_range(inputs.options)[0] > 1:
        raise LaunchError(
            "HPC065",
            f"{inputs.options['nnodes']} and --standalone, which is one node: leave "
            "one of them out",
            everywhere=True,
        )
    where = {"rdzv_endpoint", "master_addr", "master_port"}.intersection(inputs.options)
    listen = _listens(inputs) if where and not standalone else (LOOPBACK, 0)
    if standalone and "rdzv_backend" in inputs.options:  # whatever it is
        options["rdzv_backend"] = Setting(C10D, "--standalone")
        options["rdzv_endpoint"] = Setting("localhost:0", "--standalone")
    if not standalone and not inputs.is_static:
        options |= _c10d_options(inputs, is_host=bool(where and listen))
    # torch would publish getfqdn(), which need not resolve: pytorch#174513.
    address = LOOPBACK
    if "local_addr" in inputs.options:
        address = str(local_endpoint.explicit_local_address(inputs))
    else:
        options["local_addr"] = Setting(LOOPBACK, _RULE)
    if inputs.explicit("nnodes") is None or node_range(inputs.options)[1] > 1:
        options["nnodes"] = Setting("1", _RULE)  # nobody can join what is standalone
    job = inputs.job
    hosts = () if job is None or job.node_rank is None else (job.own_name,)
    return LaunchPlan(
        mode=inputs.mode,
        world=World(
            nodes=1,
            node_rank=0,
            workers=inputs.workers,
            report_rank=0 if job is None else job.task.rank,
            hosts=hosts,
            fast_hosts=hosts,
        ),
        rendezvous=Rendezvous(
            backend=C10D if standalone else inputs.backend,
            endpoint=inputs.explicit("rdzv_endpoint") or "localhost",
            local_address=address,
            listen=listen,
        ),
        options=options,
        environment=resources.worker_threads(inputs),
        messages=Messages(
            title=messages.title(inputs, 1),
            notes=(
                *_range_note(inputs),
                *(() if is_typed else messages.interactive_note(inputs)),
                *messages.unused_on_one_node(inputs, "a world of one node"),
            ),
            advice=(*ignored, *resources.advice(inputs, 1)),
        ),
    )


def _ignored_node_rank(inputs: Inputs) -> tuple[Message, ...]:
    """Say that a node rank has no effect.

    Raises:
        LaunchError: It has one, and nobody would meet.
    """
    if not inputs.explicit("node_rank"):
        return ()
    has_static_store = inputs.explicit("rdzv_backend") == STATIC or (
        inputs.is_static and "master_port" in inputs.options
    )
    if has_static_store and not inputs.explicit("standalone"):
        raise LaunchError(
            "HPC064",
            f"{inputs.options['node_rank']}, but a world of one node has only node 0. "
            "Leave the option out",
        )
    text = (
        f"{inputs.options['node_rank']} is ignored, a world of one node has only node "
        "0. For several nodes type --nnodes"
    )
    return (Message("HPC151", text),)


def _range_note(inputs: Inputs) -> tuple[Message, ...]:
    if node_range(inputs.options)[1] == 1:
        return ()
    text = f"{inputs.options['nnodes']} is 1: nobody can join with --standalone"
    return (Message("HPC155", text),)


def _c10d_options(inputs: Inputs, *, is_host: bool) -> dict[str, Setting]:
    """Return the options of c10d on one node that were not typed."""
    job = inputs.job
    where = {"rdzv_backend", "rdzv_endpoint", "rdzv_id"}
    if job is None and not where.intersection(inputs.options):
        return {"standalone": Setting(value=True, source=_RULE)}
    options = {"rdzv_backend": Setting(C10D, _RULE)}
    if inputs.is_c10d:
        options["rdzv_endpoint"] = Setting("localhost:0", _RULE)
    if job is not None:
        options["rdzv_id"] = Setting(job.launch_id, job.provenance["launch_id"])
    options = {k: v for k, v in options.items() if k not in inputs.options}
    if not names_folder(str(inputs.explicit("rdzv_id") or "")):
        options["rdzv_id"] = Setting("none", _RULE)  # torchrun takes one of its own
    if inputs.is_c10d and is_host:
        # torch does not know the node by the name of a second interface.
        conf = rdzv_conf.filled(inputs.options.get("rdzv_conf"), is_host=1)
        options["rdzv_conf"] = Setting(rdzv_conf.join(conf), _RULE)
    return options


def _listens(inputs: Inputs) -> tuple[str, int] | None:
    """Return where a node listens that was told an endpoint, if it is its own."""
    port = STATIC_PORT if inputs.is_static else C10D_PORT
    host, port, setting = endpoints.explicit_endpoint(inputs, LOOPBACK, port)
    if not inputs.is_static and not inputs.is_c10d:
        return None
    endpoints.check_resolves(inputs, host, setting)
    conf = rdzv_conf.parse(inputs.options.get("rdzv_conf"))
    if inputs.is_c10d and conf.get("is_host", "1").lower() in rdzv_conf.FALSE:
        return None
    own = inputs.network.local_address(host)
    return None if own is None else (str(own), port)

"""What the user has set, as typed values: each option is a field of `Options`.

Of torchrun's options there are those that matter to a decision of ours. Ours begin with
``hpc_``: their fields also have what ``--help`` says of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.options import rdzv_conf, values
from torchrun_hpc.options.rdzv_conf import RdzvConf
from torchrun_hpc.options.values import C10D, NONE, STATIC, HostPort, NodeRange
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.options.values import Reader

# torchrun's options of the static rendezvous.
_OF_STATIC = ("node_rank", "master_addr", "master_port")


def _torchruns(default: Any, read: Reader | None = None) -> Any:
    """Declare an option of torchrun; without a reader, argparse returns its type."""
    return field(default=default, metadata={"read": read})


def _ours(default: Any, metavar: str, text: str, read: Reader | None = None) -> Any:
    """Declare an option of ours."""
    about = {"metavar": metavar, "help": text}
    return field(default=default, metadata={"read": read, "about": about})


def _our_flag(text: str) -> Any:
    """Declare a flag of ours."""
    return field(default=False, metadata={"about": {"help": text}})


@dataclass(frozen=True)
class Options:
    """What the user has set, and what the site and torchrun set otherwise.

    ``"nnodes" in options`` tells whether the user has set an option, and
    ``options["nnodes"]`` how it was written, for a message: ``--nnodes=4``.

    Attributes:
        given: What the user has set, also options that have no field, by their names
            in torchrun's parsed arguments.
        of_site: What the site has set, by the same names.
        wrong: Why some of them cannot be used; these have their defaults here.
        backend: The kind of the rendezvous that torchrun itself would take.
        endpoint: Where c10d or the static rendezvous is; ``None`` if it is not typed.
        rdzv_conf: ``--rdzv-conf``.
    """

    given: Mapping[str, Setting] = field(default_factory=dict)
    of_site: Mapping[str, Setting] = field(default_factory=dict)
    wrong: Mapping[str, LaunchError] = field(default_factory=dict)
    backend: str = C10D
    endpoint: HostPort | None = None
    rdzv_conf: RdzvConf = field(default_factory=RdzvConf)

    nnodes: NodeRange = field(
        default=NodeRange(1, 1), metadata={"read": values.node_range}
    )
    nproc_per_node: int | str = _torchruns(1, values.workers)
    rdzv_backend: str = _torchruns("", values.backend)
    rdzv_endpoint: str = _torchruns("")
    rdzv_id: str = _torchruns("")
    standalone: bool = _torchruns(default=False)
    module: bool = _torchruns(default=False)
    no_python: bool = _torchruns(default=False)
    run_path: bool = _torchruns(default=False)
    max_restarts: int = _torchruns(0, values.max_restarts)
    monitor_interval: float = _torchruns(0.1, values.monitor_interval)
    node_rank: int = _torchruns(0)
    master_port: int | None = _torchruns(None, values.master_port)
    local_addr: str = _torchruns("")
    numa_binding: str = _torchruns("")
    virtual_local_rank: bool = _torchruns(default=False)
    signals_to_handle: tuple[str, ...] = _torchruns(
        ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"), values.signals
    )

    hpc_site: str = _ours(
        "",
        "NAME|FILE|none",
        "Computing centre whose rules for host names and variables to use, or a file "
        "with them, or 'none'. By default it is recognised by the environment. python "
        "-m torchrun_hpc.sites lists them.",
    )
    hpc_omp_threads: int | str | None = _ours(
        None,
        "auto|NUMBER",
        "OMP_NUM_THREADS of each worker where it is not set; 'auto' divides the CPUs "
        "of this process by the workers, or follows --hpc-bind. By default 1, as "
        "torchrun does.",
        values.threads,
    )
    hpc_bind: str = _ours(
        NONE,
        "gpu|even|none",
        "Divide the CPUs that this node has for the job among its workers: 'gpu' gives "
        "each those near its GPU, 'even' as many as the others. By default the site's, "
        "or none.",
        values.binding,
    )
    hpc_rendezvous: str = _ours(
        "auto",
        "auto|scheduler|c10d",
        "How the nodes of a job meet where torchrun would use c10d: 'scheduler' by the "
        "ranks that the scheduler gave them, 'c10d' as torch does. By default 'auto': "
        "the first if the number of nodes is fixed.",
        values.rendezvous,
    )
    hpc_auth: str = _ours(
        "auto",
        "auto|require|none",
        "Whether nodes prove by a key that they are of this job: 'auto' if there is "
        "one, 'require' always. By default the site's, or auto.",
        values.auth,
    )
    hpc_key_file: str = _ours(
        "",
        "FILE",
        "The key, which is made if it is not there; by default key in "
        "~/.config/torchrun_hpc/, if nodes share that file system.",
        lambda setting: str(setting.value),
    )
    hpc_preload: tuple[str, ...] = _ours(
        (),
        "MODULE[,MODULE]|none",
        "Modules that each node imports once, for all of its workers: 'torch'. A "
        "worker is a fork then, and starts much faster. By default the site's, or "
        "none.",
        values.modules,
    )
    hpc_stall_report: int = _ours(
        0,
        "SECONDS",
        "When all workers of the job have shown the same stacks for so long, print "
        "what they are doing, once; nothing is ended. Off by default; needs py-spy: "
        "pip install 'torchrun_hpc[stacks]'.",
        values.stall,
    )
    hpc_spares: int = _ours(
        0,
        "NUMBER",
        "How many of the nodes wait, to take the place of one that is lost; the world "
        "has as many fewer. Needs --no-kill of sbatch and srun, --kill-on-bad-exit=0 "
        "and --wait=0 of srun, and --max-restarts. By default 0.",
        values.whole("a number of nodes: --hpc-spares=2"),
    )
    hpc_spare_after: int = _ours(
        60,
        "SECONDS",
        "When a spare takes the place of a node that has not come. By default 60.",
        values.whole("whole seconds: --hpc-spare-after=60"),
    )
    hpc_health_check: str = _ours(
        "",
        "COMMAND",
        "A shell command that each node runs before its workers start, also after a "
        "restart; where it fails, a spare takes the node's place.",
    )
    hpc_health_check_timeout: int = _ours(
        60,
        "SECONDS",
        "How long it may take; longer is a failure. By default 60.",
        values.whole("whole seconds: --hpc-health-check-timeout=60"),
    )
    hpc_outcome: str = _ours(
        "",
        "FILE",
        "Write how the job ended into a file, as JSON: done, the script failed, or "
        "nodes failed, and which ones.",
    )
    hpc_without_patches: tuple[str, ...] = _ours(
        (),
        "NAME[,NAME]",
        "Changes inside torch to leave out, by their names in docs/patches.md; the "
        "same on all nodes. By default none.",
        values.names,
    )
    hpc_debug: bool = _our_flag(
        "Log what torch and the launcher do, on every node, with host name and "
        "rank before each line."
    )
    # Two flags, not one with a value: that would take the script for it.
    hpc_dry_run: str = _torchruns("", values.dry_run)

    def __contains__(self, name: str) -> bool:
        """Return whether the user has set an option."""
        return name in self.given

    def __getitem__(self, name: str) -> Setting:
        """Return how the user, or the site, has set an option."""
        return self.given[name] if name in self.given else self.of_site[name]

    @property
    def problem(self) -> LaunchError | None:
        """The first of what is wrong; ``None`` if nothing is."""
        return next(iter(self.wrong.values()), None)

    @property
    def is_static(self) -> bool:
        """Whether torchrun would take its static rendezvous."""
        return self.backend == STATIC

    @property
    def is_c10d(self) -> bool:
        """Whether torchrun would take its c10d rendezvous, over TCP."""
        return self.backend == C10D and not self.rdzv_conf.uses_file

    @property
    def endpoint_setting(self) -> Setting | None:
        """How ``endpoint`` was written; ``None`` without one."""
        if self.endpoint is None:
            return None
        return self.given.get("rdzv_endpoint") or self.given["master_addr"]

    @property
    def asks_for_one_node(self) -> bool:
        """Whether the user asks for a world of one node, whatever the scheduler."""
        is_typed = "nnodes" in self and "nnodes" not in self.wrong
        return self.standalone or (is_typed and self.nnodes == (1, 1))

    def without(self, *names: str) -> Options:
        """Return what would be read in a job if the user had not set some of them."""
        return read({k: v for k, v in self.given.items() if k not in names})

    def with_site(self, site: str, defaults: Mapping[str, str]) -> Options:
        """Return the options with a site's defaults for what the user has not set.

        Args:
            site: Name of the site.
            defaults: Values as text, by the names of the options.
        """
        of_site = {
            name: Setting(value, f"site {site}: {name.removeprefix('hpc_')}")
            for name, value in defaults.items()
            # Torch binds the workers, if the user says so.
            if name not in self and not (name == "hpc_bind" and self.numa_binding)
        }
        found = {name: READERS[name](value) for name, value in of_site.items()}
        return replace(self, of_site=of_site, **found)


READERS: dict[str, Reader] = {
    each.name: each.metadata["read"]
    for each in fields(Options)
    if each.metadata.get("read")
}
_FIELDS = frozenset(each.name for each in fields(Options) if each.metadata)


def read(given: Mapping[str, Setting], *, has_job: bool = True) -> Options:
    """Read what the user has set.

    Args:
        given: Options by their names in torchrun's parsed arguments. A value is what
            torchrun's parser returns, or text.
        has_job: Whether a scheduler says how many nodes there are. Without, torchrun's
            default for several nodes is the static rendezvous.
    """
    found = {name: each.value for name, each in given.items() if name in _FIELDS}
    problems: dict[str, LaunchError] = {}

    def add(name: str, option: str, reader: Reader) -> None:
        try:
            found[name] = reader(given[option])
        except LaunchError as problem:
            problems[option] = problem
            found.pop(option, None)

    for name in filter(READERS.__contains__, given):
        add(name, name, READERS[name])
    backend = _backend(given, found, has_job=has_job)
    if "rdzv_conf" in given:
        add("rdzv_conf", "rdzv_conf", partial(rdzv_conf.read, backend=backend))
    is_tcp = backend == C10D and not found.get("rdzv_conf", RdzvConf()).uses_file
    where = next(filter(given.__contains__, ("rdzv_endpoint", "master_addr")), None)
    if where and (is_tcp or backend == STATIC) and not found.get("standalone"):
        add("endpoint", where, values.endpoint)
    if "numa_binding" in given and found.get("hpc_bind", NONE) != NONE:
        problems["hpc_bind"] = _bound_twice(given)
    return Options(given, wrong=problems, backend=backend, **found)


def _backend(
    given: Mapping[str, Setting], found: Mapping[str, Any], *, has_job: bool
) -> str:
    if found.get("standalone"):
        return C10D  # torchrun ignores what is typed
    is_typed = not has_job and found.get("nnodes", (1, 1))[1] > 1
    is_static = is_typed or any(name in given for name in _OF_STATIC)
    return str(found.get("rdzv_backend") or (STATIC if is_static else C10D))


def _bound_twice(given: Mapping[str, Setting]) -> LaunchError:
    return LaunchError(
        "HPC220",
        f"{given['hpc_bind']} and {given['numa_binding']}: both bind the workers to "
        "CPUs. Leave one of them out",
        everywhere=True,
    )

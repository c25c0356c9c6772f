"""The options that the user has set: each one is a field of `Options`.

Of torchrun's options, only those that a decision of ours needs have a field. The fields
of our options, ``hpc_*``, also have the text of ``--help``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrun_hpc.errors import LaunchError, Setting
from torchrun_hpc.options import rdzv_conf, values
from torchrun_hpc.options.rdzv_conf import RdzvConf
from torchrun_hpc.options.values import C10D, NONE, STATIC, HostPort, NodeRange
from torchrun_hpc.variables import OMP

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.options.values import Reader

# torchrun's options of the static rendezvous.
OF_STATIC = ("node_rank", "master_addr", "master_port")


def _torchruns(default: Any, read: Reader | None = None, **more: Any) -> Any:
    """Declare an option of torchrun; without a reader, argparse's value is its value.

    With ``equal=True``, all nodes of a launch must have the same value.
    """
    return field(default=default, metadata={"read": read, **more})


def _ours(
    default: Any, metavar: str, text: str, read: Reader | None = None, **more: bool
) -> Any:
    """Declare an option of ours with its help; see `_torchruns`."""
    about = {"metavar": metavar, "help": text}
    return _torchruns(default, read, about=about, **more)


@dataclass(frozen=True)
class Options:
    """The user's values, otherwise the site's, otherwise torchrun's.

    ``"nnodes" in options`` is true if the user has set an option. ``options["nnodes"]``
    is written as the user did: ``--nnodes=4``.

    The keys of ``given``, ``of_site`` and ``wrong`` are torchrun's names. ``given`` can
    have options without a field. The field of a ``wrong`` option has its default. A
    wrong ``rdzv_endpoint`` keeps its text, but ``endpoint`` is ``None``. ``endpoint``
    and ``backend`` are read from several options. ``words`` are the script and its
    arguments; empty if they are unknown.
    """

    given: Mapping[str, Setting] = field(default_factory=dict)
    of_site: Mapping[str, Setting] = field(default_factory=dict)
    wrong: Mapping[str, LaunchError] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    backend: str = C10D
    endpoint: HostPort | None = None
    rdzv_conf: RdzvConf = field(default_factory=RdzvConf)

    nnodes: NodeRange = _torchruns(NodeRange(1, 1), values.node_range, equal=True)  # noqa: RUF009
    nproc_per_node: int | str = _torchruns(1, values.workers, equal=True)
    rdzv_backend: str = _torchruns("", values.backend, equal=True)
    rdzv_endpoint: str = _torchruns("")
    rdzv_id: str = _torchruns("")
    standalone: bool = _torchruns(default=False)
    module: bool = _torchruns(default=False, equal=True)
    no_python: bool = _torchruns(default=False, equal=True)
    run_path: bool = _torchruns(default=False, equal=True)
    max_restarts: int = _torchruns(0, values.max_restarts, equal=True)
    monitor_interval: float = _torchruns(0.1, values.monitor_interval)
    node_rank: int = _torchruns(0, values.number)
    master_port: int | None = _torchruns(None, values.master_port)
    shutdown_timeout: int = _torchruns(30, values.number)
    local_addr: str = _torchruns("")
    numa_binding: str = _torchruns("")
    virtual_local_rank: bool = _torchruns(default=False)
    signals_to_handle: tuple[str, ...] = _torchruns(
        ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"), values.signals
    )

    hpc_site: str = _ours(
        "",
        "NAME|FILE|none",
        "Use the host name rule and the variables of this computing centre, or of this "
        "site file; 'none' uses no site. Default: the site that is recognised from the "
        "environment. python -m torchrun_hpc.sites lists the sites.",
    )
    hpc_omp_threads: int | str | None = _ours(
        None,
        "auto|NUMBER",
        f"Set {OMP} in each worker, unless the variable is already set. "
        "'auto' divides the launcher's CPUs by the number of its workers. Default, "
        "like torchrun: 1 for several workers, unset for one.",
        values.threads,
    )
    hpc_bind: str = _ours(
        NONE,
        "gpu|even|none",
        "Divide the launcher's CPUs among its workers. 'gpu' gives each worker CPUs "
        "near its GPU. 'even' gives each worker the same number of CPUs. Default: the "
        "site's value, or none.",
        values.binding,
    )
    hpc_rendezvous: str = _ours(
        "auto",
        "auto|scheduler|c10d",
        "Choose how the nodes meet: with the scheduler's ranks ('scheduler'), or "
        "through PyTorch's rendezvous ('c10d'). Default: auto, which means 'scheduler' "
        "if the number of nodes is fixed.",
        values.rendezvous,
        equal=True,
    )
    hpc_auth: str = _ours(
        "auto",
        "auto|require|none",
        "Make the nodes prove with a key that they belong to this job. 'auto' does so "
        "if there is a key. 'require' starts several nodes only with a key. Default: "
        "the site's value, or auto.",
        values.auth,
    )
    hpc_key_file: str = _ours(
        "",
        "FILE",
        "Read the key from this file, or create the file if it does not exist. "
        "Default: the site's value, or ~/.config/torchrun_hpc/key if the nodes share "
        "the home folder.",
        lambda setting: str(setting.value),
    )
    hpc_preload: tuple[str, ...] = _ours(
        ("auto",),
        "auto|MODULE[,MODULE]|none",
        "Import these modules once per node, and fork the workers from the process "
        "that has imported them. 'auto' imports torch, unless the script, PyTorch or "
        "the system speaks against forks. Default: the site's value, or auto.",
        values.modules,
    )
    hpc_read_ahead: str = _ours(
        "auto",
        "auto|none",
        "'auto' reads the files of PyTorch and of preloaded modules before an import "
        "needs them, if the file system is slow. Default: auto.",
        values.read_ahead,
    )
    hpc_stall_report: int | None = _ours(
        None,
        "SECONDS|none",
        "If no worker's stack has changed for this many seconds, print all stacks "
        "once. The job continues. Without preloading, this needs py-spy. Default: 1800 "
        "with preloading, otherwise none.",
        values.stall,
    )
    hpc_spares: int = _ours(
        0,
        "NUMBER",
        "Keep this many nodes idle, to replace lost nodes. The other nodes train. "
        "Spares need --max-restarts, sbatch --no-kill, and srun --no-kill "
        "--kill-on-bad-exit=0 --wait=0. Default: 0.",
        values.whole("a number of nodes, such as --hpc-spares=2"),
    )
    hpc_spare_after: int = _ours(
        60,
        "SECONDS",
        "Let a spare replace a node that has not joined after this many seconds. "
        "Default: 60.",
        values.whole("whole seconds, such as --hpc-spare-after=60"),
    )
    hpc_health_check: str = _ours(
        "",
        "COMMAND",
        "Run this shell command on each node before its workers start, including after "
        "a restart. If the command fails, a spare replaces the node. Default: none.",
    )
    hpc_health_check_timeout: int = _ours(
        60,
        "SECONDS",
        "Limit the health check to this many seconds. If the command takes longer, the "
        "check has failed. Default: 60.",
        values.whole("whole seconds, such as --hpc-health-check-timeout=60"),
    )
    hpc_outcome: str = _ours(
        "",
        "FILE",
        "Write to this file, as JSON, how the job ended, for example done, script "
        "failed, or nodes failed. The file also names the failed nodes. Default: none.",
    )
    hpc_without_patches: tuple[str, ...] = _ours(
        (),
        "NAME[,NAME]",
        "Leave out these changes inside PyTorch. docs/internals.md lists their names. "
        "Pass the same names on all nodes. Default: none.",
        values.names,
        equal=True,
    )
    hpc_debug: bool = _torchruns(
        default=False,
        about={
            "help": "Log what PyTorch and the launcher do, on every node. Each line "
            "begins with the host name and the rank. Default: off."
        },
    )
    # A flag for each value. An option with a value could take the script as its value.
    hpc_dry_run: str = _torchruns("", values.dry_run, equal=True)

    def __contains__(self, name: str) -> bool:
        """Return whether the user has set an option."""
        return name in self.given

    def __getitem__(self, name: str) -> Setting:
        """Return the user's setting of an option, or the site's."""
        return self.given[name] if name in self.given else self.of_site[name]

    @property
    def problem(self) -> LaunchError | None:
        """The first problem in ``wrong``; ``None`` if there is none."""
        return next(iter(self.wrong.values()), None)

    @property
    def script(self) -> str:
        """The script, the module or the program; empty if there is none."""
        return self.words[0] if self.words else ""

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
        """The user's setting of ``endpoint``; ``None`` if torchrun would use none."""
        if self.standalone or not (self.is_static or self.is_c10d):
            return None
        return self.given.get("rdzv_endpoint") or self.given.get("master_addr")

    @property
    def asks_for_one_node(self) -> bool:
        """Whether the user asks for a world of one node, whatever the job has."""
        is_explicit = "nnodes" in self and "nnodes" not in self.wrong
        return self.standalone or (is_explicit and self.nnodes == (1, 1))

    def without(self, *names: str) -> Options:
        """Return the options as read in a job, without some of the user's values.

        If one of these is wrong, the command line is unclear, so the script is unknown.
        """
        words = self.words if self.wrong.keys().isdisjoint(names) else ()
        return read({k: v for k, v in self.given.items() if k not in names}, words)

    def with_site(self, site: str, defaults: Mapping[str, str]) -> Options:
        """Return the options with a site's defaults, which are text by option name."""
        of_site = {
            name: Setting(value, f"site {site}: {name.removeprefix('hpc_')}")
            for name, value in defaults.items()
            # With --numa-binding, torch binds the workers.
            if name not in self and not (name == "hpc_bind" and self.numa_binding)
        }
        fields_of_site = {name: READERS[name](of_site[name]) for name in of_site}
        return replace(self, of_site=of_site, **fields_of_site)


_FIELDS = {each.name: each.metadata for each in fields(Options) if each.metadata}
READERS: dict[str, Reader] = {
    name: about["read"] for name, about in _FIELDS.items() if about.get("read")
}
EQUAL = tuple(name for name, about in _FIELDS.items() if about.get("equal"))


def read(
    given: Mapping[str, Setting], words: tuple[str, ...] = (), *, has_job: bool = True
) -> Options:
    """Read what the user has set, as text or with the type of torchrun's parser.

    Without a job, torchrun's default for several nodes is the static rendezvous.
    """
    options = Options(given, words=words)
    for name in filter(_FIELDS.__contains__, given):
        options = _with(options, name, name, READERS.get(name, _value))
    options = replace(options, backend=_backend(options, has_job=has_job))
    if "rdzv_conf" in given:
        reader = partial(rdzv_conf.read, backend=options.backend)
        options = _with(options, "rdzv_conf", "rdzv_conf", reader)
    if options.endpoint_setting is not None:
        option = "rdzv_endpoint" if "rdzv_endpoint" in given else "master_addr"
        options = _with(options, "endpoint", option, values.endpoint)
    if "numa_binding" in given and options.hpc_bind != NONE:
        problem = LaunchError(
            "HPC220",
            f"{given['hpc_bind']} and {given['numa_binding']} both bind the workers to "
            "CPUs. Remove one of them",
            everywhere=True,
        )
        options = replace(options, wrong={**options.wrong, "hpc_bind": problem})
    return options


def _with(options: Options, name: str, option: str, reader: Reader) -> Options:
    """Return the options with the field ``name``, read from the user's ``option``."""
    try:
        return replace(options, **{name: reader(options.given[option])})
    except LaunchError as problem:
        return replace(options, wrong={**options.wrong, option: problem})


def _value(setting: Setting) -> Any:
    return setting.value


def _backend(options: Options, *, has_job: bool) -> str:
    """Return the rendezvous that torchrun would take."""
    if options.standalone:
        return C10D  # torchrun ignores an explicit backend
    is_by_hand = not has_job and options.nnodes.high > 1
    is_static = is_by_hand or any(name in options for name in OF_STATIC)
    return options.rdzv_backend or (STATIC if is_static else C10D)

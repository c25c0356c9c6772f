"""Whether a node imports modules once for all its workers, and which ones."""

from __future__ import annotations

import functools
import re
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from torchrun_hpc import files
from torchrun_hpc.errors import Setting
from torchrun_hpc.planning import network_env
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.planning.plan import workers_of
from torchrun_hpc.planning.workers import Preload
from torchrun_hpc.preload import worker
from torchrun_hpc.variables import INTEL_FORKS, LD_PRELOAD, PYTHON_EXEC, TOOLS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.inputs import Inputs


DEFAULT = ("auto",)  # torch, if nothing speaks against it
TORCH = "torch"

# Python and the system's loader of libraries read these when a program starts.
READ_AT_START = ("PYTHON", "LD_")


def preload_of(inputs: Inputs, against_default: str = "") -> Preload | None:
    """Plan the import, before torch is imported; ``None`` without one.

    Without torch, the number of workers in ``inputs`` can be a guess. For
    ``against_default``, see `obstacle`.
    """
    modules = modules_of(inputs.options)
    if not modules or inputs.mode.is_direct or not inputs.options.script:
        return None
    is_used = inputs.mode is Mode.SEVERAL_NODES  # other modes set no site variables
    site = network_env.of_site(inputs) if is_used else {}
    variables = {
        name: str(setting.value)
        for name, setting in site.items()
        if not (inputs.environ.get(name) or name.startswith(READ_AT_START))
    }
    workers = workers_of(inputs)
    variables |= {name: str(s.value) for name, s in workers.environment.items()}
    is_named = inputs.options.hpc_preload != DEFAULT
    setting = inputs.options["hpc_preload"] if is_named else Setting(TORCH, "default")
    is_bound = workers.binding is not None and workers.binding.fewest > 0
    problem = _problem(inputs) or against_default
    return Preload(modules, setting, variables, problem, is_bound)


def modules_of(options: Options) -> tuple[str, ...]:
    """Return the modules to import once, if nothing speaks against it."""
    return (TORCH,) if options.hpc_preload == DEFAULT else options.hpc_preload


def _problem(inputs: Inputs) -> str:
    options, interpreter = inputs.options, inputs.environ.get(PYTHON_EXEC)
    if interpreter:
        return f"{PYTHON_EXEC}={interpreter} is another interpreter"
    for name in ("no_python", "numa_binding", "run_path"):
        if getattr(options, name):
            return f"{options[name].source} needs an exec"
    if "fork_workers" in options.hpc_without_patches:
        return str(options["hpc_without_patches"])
    if options.script.startswith("-"):
        return f"{options.script} is an option of Python, or standard input"
    return ""


# --- obstacles to the default ---------------------------------------------------------

# Profilers in LD_PRELOAD: of NVIDIA, AMD, HPCToolkit, TAU, Score-P, Extrae, gperftools.
# Darshan works in forks, and XALT does not have to, so they are not listed.
_PROFILERS = re.compile(
    r"(?<![^/: ])lib(ToolsInjection|InterceptorInjection|TreeLauncher|rocprof|omnitrace"
    r"|hpcrun|TAU|scorep|(seq|mpi|omp|pt|cuda)trace|profiler\b)[^/: ]*"
)

_MOST_BYTES, _MOST_PATHS = 2**18, 500  # of all searched files

# An import of torch that always runs; names in strings or of arguments; other imports.
_IMPORT_OF_TORCH = re.compile(r"^(?:from|import) +torch\b", re.MULTILINE)
_NAME = re.compile(r"""(?<=['"])[A-Z]\w+(?=['"])|\b[A-Z]\w+(?= *=)""", re.ASCII)
_IMPORT = re.compile(r"^[ \t]*(?:from +([\w.]+) +)?import +(\([^)]*|.+)", re.MULTILINE)


def obstacle(options: Options, environ: Mapping[str, str]) -> str:
    """Return what speaks against the default on this node; empty if nothing does."""
    if options.hpc_preload != DEFAULT:
        return ""
    # Forks were compared with programs on Python 3.10 to 3.13.
    if sys.platform != "linux" or sys.version_info[:2] > (3, 13):
        return f"forks were not tried with this Python on {sys.platform}"
    if tools := [name for name in TOOLS if environ.get(name)]:
        return f"{tools[0]} is set"
    if profiler := _PROFILERS.search(environ.get(LD_PRELOAD, "")):
        return f"{LD_PRELOAD} has {profiler[0]}"
    option = ["-m"] if options.module else []
    return early_variable([*option, *options.words]) if options.script else ""


def early_variable(words: Sequence[str]) -> str:
    """Return why a script may set a variable before it imports torch; or nothing.

    ``words`` are the script, or ``-m`` and a module. Search the script and its own
    modules, each up to its first import of torch.
    """
    folder = Path(worker.script_folder(words))
    module = words[1] if words[0] == "-m" else ""
    main = folder.joinpath(*module.split(".")) if module else Path(words[0])
    paths = [*_paths(main, folder, module, ""), main, main / "__main__.py"]
    left = _MOST_BYTES
    for path in paths:  # more are appended
        try:
            is_file = path.is_file()  # a FIFO can be read only once
            text = files.read(path, left).decode(errors="replace") if is_file else ""
        except OSError:
            continue
        left -= len(text)
        text = _IMPORT_OF_TORCH.split(text, maxsplit=1)[0]
        if variables := [*filter(is_read, _NAME.findall(text))]:
            return f"{path.name} names {variables[0]}"
        for package, names in _IMPORT.findall(text):
            if "dotenv" in (package or names):
                return f"{path.name} reads variables with dotenv"
            more = _paths(path, folder, package, names)
            more = islice(more, _MOST_PATHS - len(paths))
            paths += [each for each in more if each not in paths]
    return ""


def _paths(path: Path, folder: Path, package: str, names: str) -> Iterator[Path]:
    """Yield the possible files of an import statement's modules, in ``folder``."""
    start = folder
    while package.startswith("."):
        package = package[1:]
        start = path = path.parent
    for name in names.strip("( ").split(","):
        module = start
        for part in re.findall(r"\w+", f"{package}.{name.partition(' as ')[0]}"):
            module /= part
            yield module / "__init__.py"
            yield Path(f"{module}.py")


# --- variables that the import reads --------------------------------------------------

_NAMES_READ = Path(__file__).with_name("read_at_import.txt")


@functools.cache
def _listed() -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names, and the beginnings of names."""
    lines = _NAMES_READ.read_text(encoding="ascii").splitlines()
    names = frozenset(line for line in lines if line and line[0] != "#")
    return names, tuple(name[:-1] for name in names if name.endswith("*"))


def is_read(name: str) -> bool:
    """Return whether ``import torch`` reads a variable in some release of PyTorch."""
    names, beginnings = _listed()
    return name in names or (name.startswith(beginnings) and name not in INTEL_FORKS)

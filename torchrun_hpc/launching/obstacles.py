"""Obstacles to preloading by default: cases in which forks could differ from programs.

A false alarm costs only speed.
"""

from __future__ import annotations

import re
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from torchrun_hpc import files
from torchrun_hpc.planning.preload import DEFAULT
from torchrun_hpc.worker import script
from torchrun_hpc.worker.read_at_import import is_read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrun_hpc.options.options import Options

# Tools of NVIDIA, AMD and others get into a process by these variables. Sources: CUPTI,
# NVTX, kineto's init.cpp, rocprofv3, rocr's flag.h, TAU's tau_exec, ld.so(8).
_TOOLS = (
    *("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"),
    *("NV_NSIGHT_INJECTION_TRANSPORT_TYPE", "NV_SANITIZER_INJECTION_TRANSPORT_TYPE"),
    *("ROCP_TOOL_LIBRARIES", "ROCP_TOOL_ATTACH", "HSA_TOOLS_LIB", "OMP_TOOL_LIBRARIES"),
    *("INTEL_LIBITTNOTIFY64", "KINETO_USE_DAEMON", "LD_AUDIT"),
)

# Profilers in LD_PRELOAD: of NVIDIA, AMD, HPCToolkit, TAU, Score-P, Extrae, gperftools.
# Darshan follows forks, and XALT needs none, so they are not here.
_PROFILERS = re.compile(
    r"(?<![^/: ])lib(ToolsInjection|InterceptorInjection|TreeLauncher|rocprof|omnitrace"
    r"|hpcrun|TAU|scorep|(seq|mpi|omp|pt|cuda)trace|profiler\b)[^/: ]*"
)

_MOST_BYTES, _MOST_PATHS = 2**18, 500  # in all

# The import of torch that runs first, a string or an argument's name, other imports.
_TORCH = re.compile(r"^(?:from|import) +torch\b", re.MULTILINE)
_NAME = re.compile(r"""(?<=['"])[A-Z]\w+(?=['"])|\b[A-Z]\w+(?= *=)""", re.ASCII)
_IMPORT = re.compile(r"^[ \t]*(?:from +([\w.]+) +)?import +(\([^)]*|.+)", re.MULTILINE)


def of_default(options: Options, environ: Mapping[str, str]) -> str:
    """Return what speaks against the default on this node; empty if nothing does."""
    if options.hpc_preload != DEFAULT:
        return ""
    # Forks were compared with programs on Python 3.10 to 3.13.
    if sys.platform != "linux" or sys.version_info[:2] > (3, 13):
        return f"forks were not tried with this Python on {sys.platform}"
    if tools := [name for name in _TOOLS if environ.get(name)]:
        return f"{tools[0]} is set"
    if profiler := _PROFILERS.search(environ.get("LD_PRELOAD", "")):
        return f"LD_PRELOAD has {profiler[0]}"
    option = ["-m"] if options.module else []
    return early_variable([*option, *options.words]) if options.script else ""


def early_variable(words: Sequence[str]) -> str:
    """Return why a script may set a variable before it imports torch; or nothing.

    ``words`` are the script, or ``-m`` and a module. The script and its own modules are
    searched up to their first import of torch.
    """
    folder = Path(script.folder(words))
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
        text = _TORCH.split(text, maxsplit=1)[0]
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
    """Yield where the modules of an import statement can be, in ``folder``."""
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

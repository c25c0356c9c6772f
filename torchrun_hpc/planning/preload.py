"""The modules that a node imports once, for all of its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.planning import binding, network_env, resources
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.planning.workers import Preload
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.inputs import Inputs

DEFAULT = ("auto",)  # torch, if nothing speaks against it
TORCH = "torch"

PYTHON_EXEC = "PYTHON_EXEC"  # torchrun's: another interpreter for the workers

# Python and the system's loader of libraries read these when a program starts.
READ_AT_START = ("PYTHON", "LD_")


def plan(inputs: Inputs, obstacle: str = "") -> Preload | None:
    """Plan the import, before torch is imported; ``None`` without one.

    Without torch, the number of workers in ``inputs`` can be a guess. An ``obstacle``
    speaks against the default.
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
    bound = binding.plan(inputs)
    threads = resources.worker_threads(inputs, bound)
    variables |= {name: str(value.value) for name, value in threads.items()}
    is_named = inputs.options.hpc_preload != DEFAULT
    setting = inputs.options["hpc_preload"] if is_named else Setting(TORCH, "default")
    is_bound = bound is not None and bound.fewest > 0
    return Preload(modules, setting, variables, _problem(inputs) or obstacle, is_bound)


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

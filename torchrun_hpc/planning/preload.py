"""Which modules a node imports once, for all of its workers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.commandline.options import WITHOUT_PATCHES
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.planning import binding, messages, resources
from torchrun_hpc.planning.inputs import Preload
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.setting import Setting
from torchrun_hpc.sites import NONE, is_module

if TYPE_CHECKING:
    from torchrun_hpc.planning.inputs import Inputs

OPTION = "hpc_preload"
PYTHON_EXEC = "PYTHON_EXEC"  # torchrun's: another interpreter for the workers

# Lets Python write the frames of a process that crashes; forks do it by themselves.
FAULT_HANDLER = "PYTHONFAULTHANDLER"

# Python, and the system's loader of libraries, read these when a program starts.
READ_AT_START = ("PYTHON", "LD_")


def plan(inputs: Inputs, script: str) -> Preload | None:
    """Plan it, before torch is imported; ``None`` if nothing is to be preloaded.

    Args:
        inputs: What is known without torch; the number of workers may be a guess.
        script: What the workers run.

    Raises:
        LaunchError: What was typed, or set, is no list of modules.
    """
    setting = inputs.options.get(OPTION)
    if setting is None and inputs.site is not None and inputs.site.preload:
        modules = ",".join(inputs.site.preload)
        setting = Setting(modules, f"preload of site {inputs.site.name}")
    if setting is None or setting.value == NONE or inputs.mode.is_direct:
        return None
    names = [name.strip() for name in setting.value.split(",")]
    for name in names:
        if not is_module(name):
            raise LaunchError(
                "HPC168",
                f"{setting}: {name!r} is no name of a module. Type names with commas "
                f"between them, --hpc-preload=torch,numpy, or {NONE}",
                everywhere=True,
            )
    has_say = inputs.mode is Mode.SEVERAL_NODES  # else a launch sets none
    site = inputs.site.variables if inputs.site and has_say else {}
    variables = {
        name: value
        for name, value in site.items()
        if not (inputs.environ.get(name) or name.startswith(READ_AT_START))
    }
    bound = replace(inputs, binding=binding.plan(inputs))
    for name, threads in resources.worker_threads(bound).items():
        variables[name] = str(threads.value)
    return Preload(tuple(names), setting, variables, _problem(inputs, script))


def _problem(inputs: Inputs, script: str) -> str:
    """Say why no worker can be a fork."""
    interpreter = inputs.environ.get(PYTHON_EXEC)
    if interpreter:
        return f"{PYTHON_EXEC}={interpreter} is another interpreter"
    for name in ("no_python", "numa_binding", "run_path"):
        if inputs.explicit(name):
            return f"{inputs.options[name].source} needs an exec"
    if "fork_workers" in inputs.without_patches:
        return str(inputs.options[WITHOUT_PATCHES])
    if script.startswith("-"):
        return f"{script} is an option of Python, or standard input"
    return ""


def notes(inputs: Inputs) -> tuple[Message, ...]:
    """Say that the option has no effect, where no agent of ours starts the workers."""
    if inputs.preload is not None or inputs.explicit(OPTION) == NONE:
        return ()
    where = "an agent that a program has started"
    if inputs.mode.is_direct:
        where = messages.DIRECT_MODE
    return messages.unused(inputs, where, (OPTION,))


def advice(inputs: Inputs) -> tuple[Message, ...]:
    """Say why the workers are not forked, if it is the user who has asked for it."""
    preload = inputs.preload
    if preload is None or not preload.problem or OPTION not in inputs.options:
        return ()
    return (not_used(preload, preload.problem),)


def not_used(preload: Preload, reason: str) -> Message:
    """Say why the workers are started by exec."""
    text = f"{preload.setting} is not used, each worker imports by itself: {reason}"
    return Message("HPC169", text)

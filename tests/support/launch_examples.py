"""Launches as each launcher's variables describe them, and what is refused there.

Of Flux, PALS and jsrun nothing was recorded. Their variables are those of
flux-environment(7); of ALCF's and NCAR's documentation of mpiexec, and Slurm's plugin
cray_shasta, which sets the same; and of users' scripts for systems with jsrun.
"""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.support import ROOT
from tests.support.juelich import changed, detected, tasks_at
from tests.support.python_programs import load
from torchrun_hpc import schedulers
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.schedulers.pmi import Exchanged
from torchrun_hpc.schedulers.process import Process

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrun_hpc.schedulers.job import Task

HOSTS = ("jwb0001", "jwb0002", "jwb0003", "jwb0004")


@dataclass(frozen=True)
class Batch:
    """A job of a scheduler, as the tasks that it started see it, or the script.

    Attributes:
        tasks: For each its variables and its host.
        ancestors: Names of the processes above a task, the nearest first.
        files: What can be read there.
        is_left: Whether a job that is submitted in it finds its variables.
        on_dec0001: Variables by which dec0001 is one of its nodes; files do it, too.
    """

    tasks: list[tuple[dict[str, str], str]]
    ancestors: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    is_left: bool = False
    on_dec0001: dict[str, str] = field(default_factory=dict)


class Tasks(NamedTuple):
    """Tasks of a launcher.

    Attributes:
        variables: Returns those of a `Task` from it, its node, and the places of all.
        launch_ids: What names a launch by itself, and in job 17_3 of PBS.
        answers: Whether the process manager answers.
        ancestors: Names of the processes above a task, if they show that it is one.
        recording: Of three tasks, if there is one.
    """

    variables: Callable[[Task, int, list[int]], dict[str, object]]
    launch_ids: tuple[str, str]
    answers: bool = False
    ancestors: tuple[str, ...] = ()
    recording: str = ""


@functools.cache
def examples():
    """Return by name each example of a test of a detector, and that detector.

    Each ``test_NAME.py`` has ``EXAMPLES``, by their names: the first is the usual one.
    """
    found = {}
    for detector in schedulers.DETECTORS:
        name = module_of(detector).__name__.rpartition(".")[2]
        test = load(ROOT / "tests" / "unit" / "schedulers" / f"test_{name}.py")
        found |= {name: (detector, one) for name, one in test.EXAMPLES.items()}
    return found


def module_of(detector):
    """Return the module of a launcher or scheduler."""
    return sys.modules[(detector.task_layout or detector.detect).__module__]


def batches():
    """Return the examples of schedulers, with their detectors, by their names."""
    return {k: (d, one) for k, (d, one) in examples().items() if d.detect}


def kinds():
    """Return the examples of launchers by their names."""
    return {k: one for k, (d, one) in examples().items() if d.task_layout}


FILE = "/var/spool/pbs/aux/17[3].server"
PBS = {"PBS_JOBID": "17[3].server", "PBS_NODEFILE": FILE}


def launch(kind, places, job=None, files=None):
    """Return the processes of a launch.

    Args:
        kind: One of `kinds`.
        places: For each rank its node.
        job: Variables of the job around it.
        files: What can be read.
    """
    variables, _, answers, *_ = kinds()[kind]
    exchanged = Exchanged(HOSTS[0], "0badcafe", tuple(places)) if answers else None
    around = job or {}
    return [
        Process(
            around | {k: f"{v}" for k, v in variables(task, node, places).items()},
            HOSTS[node],
            read=(files or {}).get,
            exchange=lambda _: exchanged,
        )
        for node, task in zip(places, tasks_at(places), strict=True)
    ]


def with_changes(process, changes):
    """Return a process with changed variables; a value of None removes one."""
    return replace(process, environ=changed(process.environ, changes))


# Codes of faults that all nodes share.
# The contradictions of HPC025 that all nodes find, because the lists are equal there.
SHARED = re.compile("names [0-9]+ nodes, but|counts the tasks of|names nodes that are")
EVERYWHERE = {f"HPC{code:03}" for code in (*range(20, 27), 30, 36, 140)}


def assert_refused(process, wrong):
    """Check how a process is refused if one of its variables has another value.

    Args:
        process: A process that is understood unchanged.
        wrong: By the beginning of a message, with its code, variables and the values
            that lead to it; of None, it is not set. In the message ``{name}`` stands
            for the variable, ``{value}`` for its value, and ``{shown}`` for both.
    """
    assert detected(process)
    for message, faults in wrong.items():
        for name, values in faults.items():
            for value in values:
                shown = f"{name}={value!r}"
                start = message.format(name=name, value=value, shown=shown)
                assert_refusal(with_changes(process, {name: value}), start)


def assert_refusal(process, start):
    """Check the beginning of a message, with its code, and who reports it."""
    with pytest.raises(LaunchError) as caught:
        pytest.fail(f"{start}: not {detected(process)}")
    code = caught.value.code
    text = str(Message(code, str(caught.value)))
    assert text.startswith(start)
    assert text.isprintable()
    is_shared = bool(SHARED.search(text)) if code == "HPC025" else code in EVERYWHERE
    assert caught.value.everywhere is is_shared, f"EVERYWHERE: {code}"

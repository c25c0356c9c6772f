"""Launches as each launcher's variables describe them, and what is refused there.

Nothing was recorded of Flux, PALS and jsrun. Their variables come from
flux-environment(7), from ALCF's and NCAR's documentation of mpiexec, and from users'
scripts for systems with jsrun. Slurm's plugin cray_shasta sets the same as PALS.
"""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import pytest

from tests.support import ROOT
from tests.support.detection import detected, with_changes
from tests.support.juelich import tasks_at
from tests.support.python_programs import load
from torchrun_hpc import schedulers
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.schedulers.pmi import Exchanged
from torchrun_hpc.schedulers.process import Process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    from torchrun_hpc.schedulers.detector import Detector
    from torchrun_hpc.schedulers.job import Task

HOSTS = ("jwb0001", "jwb0002", "jwb0003", "jwb0004")


@dataclass(frozen=True)
class Batch:
    """A job of a scheduler, as the tasks that it started see it, or the script.

    Attributes:
        tasks: The variables and the host of each task.
        ancestors: Names of the processes above a task, the nearest first.
        files: The text of each file that a task can read.
        is_left: Whether a job that is submitted in it finds its variables.
        on_dec0001: Variables that make dec0001 one of its nodes; files also do so.
    """

    tasks: list[tuple[dict[str, str], str]]
    ancestors: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    is_left: bool = False
    on_dec0001: dict[str, str] = field(default_factory=dict)


class Tasks(NamedTuple):
    """Tasks of a launcher.

    Attributes:
        variables: Returns the variables of a task from it, its node, and the places of
            all tasks.
        launch_ids: The launch id without a job, and in job 17_3 of PBS.
        answers: Whether the process manager answers.
        ancestors: Names of the processes above a task, if they show that it is one.
        recording: A recorded launch of three tasks, if there is one.
    """

    variables: Callable[[Task, int, Sequence[int]], dict[str, object]]
    launch_ids: tuple[str, str]
    answers: bool = False
    ancestors: tuple[str, ...] = ()
    recording: str = ""


@functools.cache
def examples() -> dict[str, tuple[Detector, Batch | Tasks]]:
    """Return by name each example of a test of a detector, and that detector.

    Each ``test_NAME.py`` has ``EXAMPLES``, by their names: the first is the usual one.
    """
    by_name: dict[str, tuple[Detector, Batch | Tasks]] = {}
    for detector in schedulers.DETECTORS:
        name = module_of(detector).__name__.rpartition(".")[2]
        test = load(ROOT / "tests" / "unit" / "schedulers" / f"test_{name}.py")
        by_name |= {name: (detector, one) for name, one in test.EXAMPLES.items()}
    return by_name


def module_of(detector: Detector) -> ModuleType:
    """Return the module of a launcher or scheduler."""
    function = detector.task_layout or detector.detect
    assert function is not None
    return sys.modules[function.__module__]


def batches() -> dict[str, tuple[Detector, Batch]]:
    """Return the examples of schedulers, with their detectors, by their names."""
    return {k: (d, one) for k, (d, one) in examples().items() if isinstance(one, Batch)}


def kinds() -> dict[str, Tasks]:
    """Return the examples of launchers by their names."""
    return {k: one for k, (_, one) in examples().items() if isinstance(one, Tasks)}


# By the beginning of a message, with its code: for each variable the values that lead
# to it; None unsets the variable.
Wrong: TypeAlias = "Mapping[str, Mapping[str, Sequence[str | None]]]"

FILE = "/var/spool/pbs/aux/17[3].server"
PBS = {"PBS_JOBID": "17[3].server", "PBS_NODEFILE": FILE}


def launch(
    kind: str,
    places: Sequence[int],
    job: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
) -> list[Process]:
    """Return the processes of a launch.

    Args:
        kind: The name of a launcher's example.
        places: For each rank its node.
        job: Variables of the job around it.
        files: The text of each file that a process can read.
    """
    variables, _, answers, *_ = kinds()[kind]
    exchanged = Exchanged(HOSTS[0], "0badcafe", tuple(places)) if answers else None
    around = {**(job or {})}
    return [
        Process(
            around | {k: f"{v}" for k, v in variables(task, node, places).items()},
            HOSTS[node],
            read=(files or {}).get,
            exchange=lambda _: exchanged,
        )
        for node, task in zip(places, tasks_at(places), strict=True)
    ]


# Codes of faults that all nodes share.
EVERYWHERE = {f"HPC{code:03}" for code in (*range(20, 27), 30, 36, 140)}
# The contradictions of HPC025 that all nodes find, because the lists are equal there.
SHARED = re.compile("names [0-9]+ nodes, but|counts the tasks of|names nodes that are")


def assert_refused(process: Process, wrong: Wrong) -> None:
    """Check how a process is refused if one of its variables has another value.

    Args:
        process: A process that is understood unchanged.
        wrong: The messages and the values. In a message ``{name}`` stands for the
            variable, ``{value}`` for its value, and ``{shown}`` for both.
    """
    assert detected(process)
    for message, faults in wrong.items():
        for name, values in faults.items():
            for value in values:
                shown = f"{name}={value!r}"
                start = message.format(name=name, value=value, shown=shown)
                assert_refusal(with_changes(process, {name: value}), start)


def assert_refusal(process: Process, start: str) -> None:
    """Check the beginning of a message, with its code, and who reports it."""
    with pytest.raises(LaunchError) as caught:
        pytest.fail(f"{start}: not {detected(process)}")
    code = caught.value.code
    text = str(Message(code, str(caught.value)))
    assert text.startswith(start)
    assert text.isprintable()
    is_shared = bool(SHARED.search(text)) if code == "HPC025" else code in EVERYWHERE
    assert caught.value.everywhere is is_shared, f"EVERYWHERE: {code}"

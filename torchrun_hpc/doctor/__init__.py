"""A doctor for the allocation, which finds bad nodes, links and settings.

``python -m torchrun_hpc.doctor`` is the command. Programs call `examine`. Each task
finds its `place`, and meets the others as the job would (`examination`). Task 0
(`conductor`) asks all tasks. Each node examines itself (`node`). Pairs of nodes measure
their `link`. A `launch` runs PyTorch's `collectives` (`operations`). `judgement` finds
bad links, and `checks` finds bad nodes and workers. `summary` makes the report
(`results`), and `output` writes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.doctor.results import (
    SCHEMA,
    Collective,
    DoctorReport,
    Finding,
    Folder,
    GpuReport,
    InterfaceReport,
    Link,
    NodeReport,
    NotMetError,
    Torch,
    WorkerReport,
    exclude,
    exit_code,
    suspects,
)
from torchrun_hpc.errors import EmbeddedLaunchError, LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchrun_hpc.errors import Message

__all__ = ["SCHEMA", "NotMetError", "examine", "exclude", "exit_code", "suspects"]
__all__ += ["Collective", "DoctorReport", "Finding", "Folder", "GpuReport"]
__all__ += ["InterfaceReport", "Link", "NodeReport", "Torch", "WorkerReport"]


def examine(
    argv: Sequence[str] = (),
    *,
    max_bytes: int = 16 * 2**20,
    timeout: float = 60.0,
    tell: Callable[[Message], None] = lambda _: None,
) -> DoctorReport | None:
    """Examine the nodes of this step. Each task of the step must call this function.

    ``examine(["--standalone"])`` examines this node alone, for example in a prolog.

    Args:
        argv: The options of the job's launch command: ``["--nproc_per_node=gpu"]``. A
            script and its arguments can follow.
        max_bytes: The largest size of the collectives, in bytes.
        timeout: Seconds to wait for the other nodes, at least 10.
        tell: A function that receives messages about the progress.

    Returns:
        The report on task 0; ``None`` on the other tasks.

    Raises:
        LaunchError: An argument is wrong, or the nodes cannot meet because a launch
            would be refused. messages.md explains the exception's ``code``.
        NotMetError: This node did not meet the other nodes. The exception's ``report``
            is about this node only.
    """
    from torchrun_hpc.doctor import examination  # noqa: PLC0415
    from torchrun_hpc.doctor.place import ExaminedLaunch, Wishes, find_place  # noqa: PLC0415
    from torchrun_hpc.options.command_line import wrong_line  # noqa: PLC0415

    try:
        if isinstance(argv, str):
            raise wrong_line(f"argv={argv!r}: pass a list of words")
        place = find_place(ExaminedLaunch(argv), Wishes(max_bytes, timeout))
        return examination.examine(place, tell)
    except LaunchError as fault:
        raise EmbeddedLaunchError(fault.code, str(fault)) from None

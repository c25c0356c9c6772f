"""A doctor for the allocation, which finds bad nodes, links and settings.

``python -m torchrun_hpc.doctor`` is the command. Programs call `examine`.
Each node examines itself (`node`). The nodes meet as the job would (`place`,
`examination`). Task 0 (`conductor`) asks all tasks (`member`). They measure their links
(`pairs`, `link`) and run PyTorch's collectives (`launch`, `collectives`). The findings
come from `checks`, `differences`, `judgement` and `compute`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.doctor.results import (
    SCHEMA,
    Collective,
    Finding,
    Folder,
    Interface,
    Link,
    Node,
    NotMetError,
    Report,
    Torch,
    Worker,
    exclude,
    exit_code,
    suspects,
)
from torchrun_hpc.errors import EmbeddedLaunchError, LaunchError
from torchrun_hpc.host.nvml import Gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchrun_hpc.errors import Message

__all__ = ["SCHEMA", "NotMetError", "examine", "exclude", "exit_code", "suspects"]
__all__ += ["Collective", "Finding", "Folder", "Gpu", "Interface", "Link", "Node"]
__all__ += ["Report", "Torch", "Worker"]


def examine(
    argv: Sequence[str] = (),
    *,
    max_bytes: int = 16 * 2**20,
    timeout: float = 60.0,
    tell: Callable[[Message], None] = lambda _: None,
) -> Report | None:
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
    from torchrun_hpc.agent.abort import LaunchState  # noqa: PLC0415
    from torchrun_hpc.doctor import examination, place  # noqa: PLC0415
    from torchrun_hpc.options.command_line import wrong_line  # noqa: PLC0415

    try:
        if isinstance(argv, str):
            raise wrong_line(f"argv={argv!r}: pass a list of words")
        wishes = place.Wishes(max_bytes, timeout)
        return examination.examine(argv, wishes, tell, LaunchState())
    except LaunchError as fault:
        raise EmbeddedLaunchError(fault.code, str(fault)) from None

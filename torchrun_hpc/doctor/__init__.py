"""A doctor for the allocation: which node, which link, which setting.

``python -m torchrun_hpc.doctor`` is the command, instead of the job's own line;
`examine` is the same for a program, such as a prolog. Each node looks at itself, the
nodes meet as the job would, measure what is between them, and run torch's collectives.

=============  =======================================================================
`results`      what is found, as dataclasses
`place`        where this task is: the plan of the job, and where all meet
`examination`  all tasks meet, and task 0 gets the report
`member`       what each task does: it replies to the questions of task 0
`conductor`    what task 0 does besides: it asks all, and collects
`node`         what a node shows of itself
`checks`       what is wrong with that
`differences`  what is not the same on all nodes
`pairs`        which nodes measure what is between them, and when
`link`         how they do that
`judgement`    which links, and which nodes, are suspect
`compute`      which workers compute wrongly or slowly, or arrive late
`summary`      the report, made of all that
`comparison`   what became slower since an earlier one
`launch`       the job's own launch, of torch's collectives
`causes`       why it has ended too early
`collectives`  its script, with `session`, `operations` and `product`; it imports torch
`units`        figures with their units
`text`         the report for a person
`page`         the same as a page of HTML
`output`       where the report goes
=============  =======================================================================
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
    """Examine the nodes of this step; each of its tasks calls this.

    In a prolog, which no launcher starts on all nodes: ``examine(["--standalone"])``
    looks at this node alone.

    Args:
        argv: Options as the job's own line has them: ``["--nproc_per_node=gpu"]``. A
            script and its arguments may follow.
        max_bytes: The largest size of torch's collectives, in bytes.
        timeout: Seconds for the nodes to come.
        tell: Shows a person how far it is.

    Returns:
        The report on task 0; ``None`` on the others.

    Raises:
        LaunchError: An argument is wrong, or a launch would be refused and the nodes
            cannot meet; its ``code`` is in the documentation.
        NotMetError: This node has not met the others; it has a report of its own node.
    """
    # The pipeline, which no import of this package needs.
    from torchrun_hpc.doctor import examination, place  # noqa: PLC0415
    from torchrun_hpc.launching.abort import LaunchState  # noqa: PLC0415
    from torchrun_hpc.options.arguments import wrong_line  # noqa: PLC0415

    try:
        if isinstance(argv, str):
            raise wrong_line(f"argv={argv!r}: pass a list of words")
        wishes = place.Wishes(max_bytes, timeout)
        return examination.examine(argv, wishes, tell, LaunchState())
    except LaunchError as fault:
        raise EmbeddedLaunchError(fault.code, str(fault)) from None

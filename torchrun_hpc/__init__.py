"""torchrun for clusters: one command per job, everything else from the scheduler.

``import torchrun_hpc`` imports no torch and changes nothing. The command is
``python -m torchrun_hpc``; ``import torchrun_hpc.auto`` is for programs that call
``torch.distributed.run`` themselves; `setup_environment` is for scripts that srun or
mpirun started without it; `describe` is for programs that want to know.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from torchrun_hpc.errors import EmbeddedLaunchError, LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__version__ = "0.2.0"
__all__ = ["LaunchError", "__version__", "describe", "setup_environment"]


def describe(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Describe what a launch from here would be: job and plan, as plain data.

    Nothing is started and nothing changed; no other node is asked. It imports torch.

    Args:
        argv: Options, without the script: ``["--nnodes=2"]``.

    Returns:
        Dictionaries, lists, texts, numbers; the same as one of the nodes in
        ``--hpc-dry-run=json``. A value that was decided comes with its source.

    Raises:
        TypeError: ``argv`` is a text.
        LaunchError: A launch would be refused; ``messages.toml`` explains its ``code``
            is in the documentation. Ports are not tried, nor is torch asked.
    """
    if isinstance(argv, str):
        raise TypeError(f"a list of options is needed: describe([{argv!r}])")
    with _faults_with_code() as main:
        described: dict[str, Any] = main.describe(argv)
    return described


def setup_environment() -> Mapping[str, str]:
    """Set what ``torch.distributed.init_process_group`` reads, in this process.

    For a script that srun, mpirun or the like have started once for each worker, where
    the command cannot be changed; see direct mode. Without a launcher it is the only
    worker. Under torchrun, or torchrun_hpc, nothing is changed. It prints the start
    line and warnings to stderr, and imports no torch.

    Returns:
        The variables that were set; empty if an agent had set them.

    Raises:
        LaunchError: The world cannot be found out; its ``code`` is in the
            documentation.
    """
    with _faults_with_code() as main:
        variables: Mapping[str, str] = main.setup_environment()
    return variables


@contextlib.contextmanager
def _faults_with_code() -> Iterator[Any]:
    """Import the pipeline, which most programs do not need; show the code of a fault.

    A traceback shows the text of an exception only.
    """
    main = importlib.import_module("torchrun_hpc.main")
    try:
        yield main
    except LaunchError as fault:
        raise EmbeddedLaunchError(fault.code, str(fault)) from None

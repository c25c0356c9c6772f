"""torchrun for clusters: one command per job, everything else from the scheduler.

``import torchrun_hpc`` imports no torch and changes nothing. There are four ways to use
the package:

- the command ``python -m torchrun_hpc``
- ``import torchrun_hpc.auto``, for programs that call ``torch.distributed.run``
- `setup_environment`, for scripts that srun or mpirun started without the command
- `describe`, for programs that need the plan as data
"""

from __future__ import annotations

import contextlib
import importlib

# The command can handle Ctrl-C only after this module, so it imports little.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from torchrun_hpc.errors import LaunchError

__version__ = "0.3.0.dev0"
__all__ = ["LaunchError", "__version__", "describe", "setup_environment"]


def __getattr__(name: str) -> type:
    """Import `LaunchError` at its first use."""
    if name != "LaunchError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchrun_hpc.errors import LaunchError  # noqa: PLC0415 - slow to import

    return LaunchError


def describe(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Return the job and the plan of a launch from here, as plain data.

    This function imports torch. It starts and changes nothing, and asks no other node.

    Args:
        argv: Options, without the script: ``["--nnodes=2"]``.

    Returns:
        One node's description, as in ``--hpc-dry-run=json``: values with their sources.

    Raises:
        TypeError: ``argv`` is a string instead of a list.
        LaunchError: A launch would be refused; the documentation explains the ``code``.
            A real launch can find more faults, because it also tries ports and asks
            torch.
    """
    if isinstance(argv, str):
        raise TypeError(f"a list of options is needed: describe([{argv!r}])")
    with _faults_with_code() as main:
        described: dict[str, Any] = main.describe(argv)
    return described


def setup_environment() -> Mapping[str, str]:
    """Set the variables that ``torch.distributed.init_process_group`` reads.

    Call this function in a script that srun or mpirun starts once per worker, if you
    cannot change the command (direct mode). Without srun or mpirun, the script is the
    only worker. Under torchrun or torchrun_hpc, nothing changes. The function prints
    the start line and warnings to stderr, and does not import torch.

    Returns:
        The variables that were set; empty if an agent had set them.

    Raises:
        LaunchError: A launch would be refused; the documentation explains the ``code``.
    """
    with _faults_with_code() as main:
        variables: Mapping[str, str] = main.setup_environment()
    return variables


@contextlib.contextmanager
def _faults_with_code() -> Iterator[Any]:
    """Put the code of a fault into its text: a traceback shows only the text."""
    from torchrun_hpc import errors  # noqa: PLC0415 - slow to import

    main = importlib.import_module("torchrun_hpc.main")
    try:
        yield main
    except errors.LaunchError as fault:
        raise errors.EmbeddedLaunchError(fault.code, str(fault)) from None

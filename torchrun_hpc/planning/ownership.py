"""The proof that nodes belong to the same job of the same user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.options.values import NONE, REQUIRE
from torchrun_hpc.planning.meeting import KeyFile

if TYPE_CHECKING:
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.planning.meeting import Meeting


def key_file(inputs: Inputs) -> KeyFile:
    """Return the file of the user's key, by default in the XDG configuration folder.

    The XDG Base Directory Specification ignores relative paths.
    """
    options, folder = inputs.options, inputs.environ.get("XDG_CONFIG_HOME", "")
    if options.hpc_auth == NONE:
        return KeyFile()
    default = f"{folder if folder.startswith('/') else '~/.config'}/torchrun_hpc/key"
    required = str(options["hpc_auth"]) if options.hpc_auth == REQUIRE else ""
    path = options.hpc_key_file
    source = str(options["hpc_key_file"]) if path else ""
    return KeyFile(path or default, source, required, not options.hpc_dry_run)


def check(inputs: Inputs, meeting: Meeting) -> None:
    """Check that a required proof is possible."""
    options = inputs.options
    if options.hpc_auth == REQUIRE and not meeting.has_coordinator:
        how = "direct mode" if inputs.mode.is_direct else meeting.backend
        text = f"{options['hpc_auth']}, but {how} cannot check a key. Start one task "
        text += "per node in a job, without --rdzv-backend, or pass --hpc-auth=auto"
        raise LaunchError("HPC239", text, everywhere=True)

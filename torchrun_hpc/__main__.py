"""``python -m torchrun_hpc``: torchrun for clusters."""

import socket
import sys

from torchrun_hpc.errors import Message
from torchrun_hpc.reporting import console

# Of what is needed beside torch, which is looked at later.
NEEDED = ("packaging", "psutil", "tomli")


def run() -> None:
    """Run the command; say so if this Python is not the one it was installed for."""
    try:
        # In a clone the folder is found by any Python, but not what it needs.
        from torchrun_hpc.main import main  # noqa: PLC0415

        main()
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        text = (
            f"on {socket.gethostname()}: {sys.executable} has no {error.name}: it is "
            "not the Python that torchrun_hpc was installed for. Activate the "
            "environment that has it, in the job script before srun"
        )
        console.write(Message("HPC152", text), "error")
        sys.exit(2)


if __name__ == "__main__":
    run()

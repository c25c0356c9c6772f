"""``python -m torchrun_hpc``: torchrun for clusters."""

import sys
from importlib.util import find_spec

from torchrun_hpc.launching import read_ahead
from torchrun_hpc.reporting import streams

# Required packages besides torch, which is checked later.
NEEDED = ("packaging", "psutil")


def run() -> None:
    """Run the command, if this Python has the required packages.

    In a clone, any Python finds the command in the working folder.
    """
    # A clone also has a folder packaging/. Python finds it, but it has no origin.
    missing = [n for n in NEEDED if getattr(find_spec(n), "origin", None) is None]
    if missing:
        import socket  # noqa: PLC0415 - rarely needed

        from torchrun_hpc.errors import Message  # noqa: PLC0415
        from torchrun_hpc.reporting import console  # noqa: PLC0415

        text = (
            f"on {socket.gethostname()}: {sys.executable} has no {missing[0]}: it is "
            "not the Python that torchrun_hpc was installed for. Activate the "
            "environment that has it, in the job script before srun"
        )
        console.write(Message("HPC152", text), "error")
        sys.exit(2)
    streams.open_closed()  # the next opened file gets their numbers
    read_ahead.start("torchrun_hpc.main")
    from torchrun_hpc.main import main  # noqa: PLC0415 - it needs them

    main()


if __name__ == "__main__":
    run()

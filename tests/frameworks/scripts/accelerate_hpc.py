"""The command ``accelerate``, which launches as torchrun_hpc does."""

from accelerate.commands.accelerate_cli import main

import torchrun_hpc.auto  # noqa: F401 - importing it is all that is needed

if __name__ == "__main__":
    main()

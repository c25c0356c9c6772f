"""``python -m torchrun_hpc``: torchrun for clusters."""

from torchrun_hpc.main import main

if __name__ == "__main__":
    main()

"""``python -m torchrun_hpc``: torchrun for clusters."""


def run() -> None:
    """Run the command."""
    from torchrun_hpc.launching import read_ahead  # noqa: PLC0415 - slow to import
    from torchrun_hpc.reporting import streams  # noqa: PLC0415

    streams.open_closed()  # the next opened file gets their numbers
    read_ahead.start("torchrun_hpc.main")
    from torchrun_hpc.main import main  # noqa: PLC0415 - it needs them

    main()


if __name__ == "__main__":
    run()

"""``python -m torchrun_hpc``: torchrun for clusters."""

import signal


def run() -> None:
    """Run the command."""
    # Until `main` handles Ctrl-C, it ends this process without a traceback. A job in
    # the background ignores it.
    is_handled = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    if is_handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from torchrun_hpc.preload import read_ahead  # noqa: PLC0415 - slow to import
    from torchrun_hpc.reporting import streams  # noqa: PLC0415

    streams.open_closed()  # the next opened file gets their numbers
    read_ahead.start("torchrun_hpc.main")
    from torchrun_hpc.main import main  # noqa: PLC0415 - it needs them

    if is_handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


if __name__ == "__main__":
    run()

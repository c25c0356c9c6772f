"""A worker that notes what happens to it, for signals at random moments.

    moments.py FOLDER RESTARTS

Adds lines to a file of its own: "begins", each signal, "done" at its end. SIGTERM and
SIGINT end it. In each attempt before the last one, rank 0 fails.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

FOLDER, RESTARTS = Path(sys.argv[1]), int(sys.argv[2])
RANK, ATTEMPT = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def note(what: str) -> None:
    """Add a line with the time."""
    with (FOLDER / RANK).open("a", encoding="utf-8") as file:
        file.write(f"{what} {time.time()}\n")


def take(number: int, _frame: FrameType | None) -> None:
    """Note a signal."""
    note(signal.Signals(number).name)
    if number != signal.SIGUSR1:
        sys.exit(1)


HANDLED = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
for each in HANDLED:
    signal.signal(each, take)
note("begins")
end = time.monotonic() + (2.5 if ATTEMPT == RESTARTS else 0.2)
while time.monotonic() < end:
    time.sleep(0.02)
if ATTEMPT < RESTARTS and RANK == "0":
    sys.exit(3)
while ATTEMPT < RESTARTS:  # until the agent ends it
    time.sleep(0.02)
for each in HANDLED:
    signal.signal(each, signal.SIG_IGN)
note("done")

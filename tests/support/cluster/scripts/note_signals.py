"""A worker that notes the signals it gets.

    signals.py FOLDER [SECONDS]

Makes a file of its own when it is ready. Ends when there is a file "end", or some
seconds after SIGUSR1 or SIGUSR2, and says what it got. SIGTERM and SIGINT also end it,
after the second that it takes to write a checkpoint.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

ENDING = {"SIGTERM", "SIGINT"}

folder = Path(sys.argv[1])
seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 900
rank = os.environ["RANK"]
got: list[str] = []
limits = [time.monotonic() + 900]


def take(number, _frame):
    got.append(signal.Signals(number).name)
    if got[-1] not in ENDING:
        limits.append(time.monotonic() + seconds)
    (folder / f"{rank}.got").write_text(" ".join(got))


for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, take)
(folder / f"{rank}.ready").touch()
while not (folder / "end").exists() and time.monotonic() < min(limits):
    if ENDING & {*got}:
        time.sleep(1)
        (folder / f"{rank}.saved").touch()
        break
    time.sleep(0.02)
sys.stdout.write(json.dumps({"RANK": rank, "got": got}) + "\n")

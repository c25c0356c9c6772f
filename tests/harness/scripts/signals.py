"""A worker that counts the signals it gets.

    signals.py FOLDER [SECONDS]

Writes host, agent and job into a file of its own when it is ready. Ends when there is
a file "end", or some seconds after its first signal, and says what it got.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 60
rank = os.environ["RANK"]
got = []
limits = [time.monotonic() + 80]


def take(number, _frame):
    limits.append(time.monotonic() + seconds)
    got.append(signal.Signals(number).name)
    (folder / f"{rank}.got").write_text(" ".join(got))


for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, take)
(folder / f"{rank}.tmp").write_text(
    f"{socket.gethostname()} {os.getppid()} {os.environ.get('SLURM_JOB_ID', '-')}"
)
(folder / f"{rank}.tmp").rename(folder / f"{rank}.ready")
while not (folder / "end").exists() and time.monotonic() < min(limits):
    time.sleep(0.02)
sys.stdout.write(json.dumps({"RANK": rank, "got": got}) + "\n")

"""Do something to the agent of torchrun_hpc on this node, and wait for its end.

    agent.py SIGNAL|wait SECONDS
    agent.py pid|cpu

Prints the seconds from the signal to its end, "alive" if it is still there after
SECONDS, "none" if there was no agent; or its number, or its CPU seconds so far.
"""

from __future__ import annotations

import signal
import sys
import time

import psutil


def agents() -> list[psutil.Process]:
    """Return the agents here: no shell around them, no worker of theirs."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:3] == ["-m", "torchrun_hpc"]:
            found.append(process)
    return found


found = agents()
if not found:
    sys.stdout.write("none\n")
    sys.exit()
if sys.argv[1] == "pid":
    sys.stdout.write(f"{found[0].pid}\n")
    sys.exit()
if sys.argv[1] == "cpu":
    sys.stdout.write(f"{sum(found[0].cpu_times()[:2])}\n")
    sys.exit()
start = time.monotonic()
if sys.argv[1] != "wait":
    for agent in found:
        agent.send_signal(getattr(signal, sys.argv[1]))
_, alive = psutil.wait_procs(found, timeout=float(sys.argv[2]))
sys.stdout.write("alive\n" if alive else f"{time.monotonic() - start:.2f}\n")

"""What a worker writes to stderr: through the agent's pipe, and without it.

    python benchmarks/stderr.py [--rate 200] [--seconds 3] [--rounds 3]

A program writes lines at a rate, in MB/s, and says how long that took. Both ways are
measured in turn, into a file and into a pipe. Fails if the way through the pipe takes
more than a tenth longer.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from typing import BinaryIO

from torchrun_hpc.failures.relay import Relay

MOST = 1.1

WRITER = """
import os, sys, time
rate, seconds = float(sys.argv[1]) * 1e6, float(sys.argv[2])
lines, written, start = (b"x" * 1023 + b"\\n") * 4, 0, time.perf_counter()
while written < rate * seconds:
    written += os.write(2, lines)
    ahead = written / rate - (time.perf_counter() - start)
    if ahead > 0.002:
        time.sleep(ahead)
print(time.perf_counter() - start)
"""


def write(relay: Relay | None, rate: float, seconds: float) -> float:
    """Let a program write to the stderr of this one; return the seconds it took."""
    command = [sys.executable, "-c", WRITER, str(rate), str(seconds)]

    def popen(stderr: BinaryIO | None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    worker = popen(None) if relay is None else relay.start(popen)
    output, _ = worker.communicate()
    if relay is not None:
        relay.close(10)
    return float(output)


def inside(rate: float, seconds: float, rounds: int) -> None:
    """Measure with the stderr that this process has; print the ratio."""
    pairs = [
        (write(Relay(), rate, seconds), write(None, rate, seconds))
        for _ in range(rounds)
    ]
    print(statistics.median(ours / plain for ours, plain in pairs))


def main() -> None:
    """Measure with a file and with a pipe."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=float, default=200, help="MB/s")
    parser.add_argument("--seconds", type=float, default=3, help="of each way")
    parser.add_argument("--rounds", type=int, default=3, help="of both ways")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args.rate, args.seconds, args.rounds)
        return
    again = [sys.executable, *sys.argv, "--inside"]
    failed = False
    for kind in ("file", "pipe"):
        with tempfile.TemporaryFile() as file:
            reader = None
            if kind == "pipe":
                reader = subprocess.Popen(
                    ["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
                )
            stderr = file if reader is None else reader.stdin
            done = subprocess.run(
                again, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True
            )
            if reader is not None:
                reader.communicate()
        ratio = float(done.stdout)
        failed |= ratio > MOST
        print(f"{args.rate:.0f} MB/s into a {kind}: {ratio:.3f} of the time without")
    if failed:
        sys.exit(f"more than {MOST}")


if __name__ == "__main__":
    main()

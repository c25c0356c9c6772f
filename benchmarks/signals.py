"""Whether a launch ends as it should if it gets a signal at any moment.

    python benchmarks/signals.py [MOMENTS] [SEED]

Two workers on each node; one node, or three of the test cluster (root, see
tests/support); by exec and preloaded; SIGTERM, SIGINT and SIGUSR1 to one agent. Half of
the signals aim at a start of workers, also of the restarted ones. The other half comes
at any time from the start of Python on. Prints each wrong end: a wrong exit code, a
traceback, a process that is left, or a signal without effect. Fails if there is one.
"""

from __future__ import annotations

import collections
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.cluster.moments import moments, strike, wrong  # noqa: E402
from tests.support.cluster.testbed import Cluster, missing  # noqa: E402

MOMENTS = 500
SEED = 1


def main() -> None:
    """Launch, count, and judge."""
    reason = missing()
    if reason is not None:
        sys.exit(f"this needs the test cluster: {reason}")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else MOMENTS
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else SEED  # noqa: PLR2004
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # by a shell, in background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ends: collections.Counter[str] = collections.Counter()
    faults, begin = 0, time.monotonic()
    with Cluster(("n1", "n2", "n3"), management="open", fast_names=str) as cluster:
        for moment in moments(seed, count):
            end = strike(moment, cluster if moment.nodes > 1 else None)
            fault = wrong(moment, end)
            ends[f"{moment.name} {moment.form} {moment.nodes}: {end.code}"] += 1
            if fault:
                faults += 1
                print(f"{fault}: {moment}\n{end}\n{end.stderr}", flush=True)
    for what, number in sorted(ends.items()):
        print(f"{what}: {number}")
    seconds = time.monotonic() - begin
    print(f"{count} signals in {seconds:.0f} s, {faults} wrong ends")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()

"""Open a shell on the login node of a test cluster: ``make cluster``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support import ROOT
from tests.support.cluster.links import shaped
from tests.support.cluster.testbed import PATH, Cluster, missing

GREETING = (
    "Three nodes, as in JUWELS Booster, with links of 1 Gbit/s. Try: "
    "srun -N3 --ntasks-per-node=1 python -m torchrun_hpc --nproc_per_node=2 "
    "examples/ddp.py  (leave: exit)"
)


def main() -> int:
    """Run the shell; return its exit code."""
    reason = missing()
    if reason is not None:
        print(f"No cluster here: {reason}", file=sys.stderr)
        return 1
    with Cluster() as cluster, shaped(cluster):  # without a rate, links are noise
        interactive = sys.stdin.isatty()
        if interactive:
            print(GREETING)
        shell = cluster.popen(
            ["bash", "--norc"],
            env={
                "PATH": f"{Path(sys.executable).parent}:{PATH}",
                "PS1": r"\u@\h:\w\$ ",
                "SYSTEMNAME": "juwelsbooster",
                "TERM": os.environ.get("TERM", "dumb"),
            },
            cwd=ROOT,
            stdin=None,
            stdout=None,
            stderr=None,
            new_session=False,
        )
        return shell.wait()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

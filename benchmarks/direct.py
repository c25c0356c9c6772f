"""Direct mode against srun alone, with the variables exported by hand.

    python benchmarks/direct.py [PAIRS]

On the test cluster (root, see tests/support): the time from srun to the first line of
the script on the last task. Two tasks on each node, on one node and on two; a machine
with fewer cores than tasks counts their starts one after the other. The two take turns,
and who goes first alternates. Fails if one node takes 0.1 s more than by hand.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.cluster.testbed import Cluster, missing  # noqa: E402

PAIRS = 20
LIMIT = 0.1

SCRIPT = """
import time
print(time.time())
"""

OURS = "exec python -m torchrun_hpc {script}"
BY_HAND = """
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
export MASTER_ADDR=10.20.0.1 MASTER_PORT=24680 GLOO_SOCKET_IFNAME=ib0
exec python {script}
"""


def seconds(cluster: Cluster, nodes: int, command: str) -> float:
    """Return the seconds from srun to the script on the last task."""
    environ = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "SYSTEMNAME": "juwelsbooster",
    }
    tasks = (f"-N{nodes}", "--ntasks-per-node=2")
    while cluster.run(["squeue", "--noheader"]).stdout:  # the last job still ends
        time.sleep(0.1)
    start = time.time()
    done = cluster.srun(*tasks, "sh", "-c", command, env=environ, cwd=ROOT)
    if done.returncode:
        sys.exit(f"failed:\n{command}\n{done.stderr}")
    return max(map(float, done.stdout.split())) - start


def main() -> None:
    """Measure, report, and judge."""
    reason = missing()
    if reason is not None:
        sys.exit(f"this needs the test cluster: {reason}")
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS
    more = {}
    with Cluster() as cluster, tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(SCRIPT)
        script.flush()
        commands = [text.format(script=script.name) for text in (OURS, BY_HAND)]
        for nodes in (1, 2):
            times: dict[str, list[float]] = {command: [] for command in commands}
            for number in range(-1, pairs):  # the first fills caches
                for command in commands if number % 2 else commands[::-1]:
                    taken = seconds(cluster, nodes, command)
                    if number >= 0:
                        times[command].append(taken)
            ours, by_hand = (statistics.median(times[command]) for command in commands)
            more[nodes] = ours - by_hand
            print(
                f"{2 * nodes} tasks: {ours:.3f} s, by hand {by_hand:.3f} s "
                f"({pairs} rounds): {more[nodes]:.3f} s more, ratio "
                f"{ours / by_hand:.2f}"
            )
    sys.exit(more[1] > LIMIT)


if __name__ == "__main__":
    main()

"""Time from srun to the first all-reduce: torchrun_hpc against stock torchrun.

    python benchmarks/launch.py [PAIRS]

On the test cluster (root, see tests/cluster), with the management network closed, on
three nodes of one worker. Stock torchrun gets every flag and variable by hand, so that
it works there. The two take turns, and who goes first alternates; what counts is the
ratio of the medians. Fails if it is above 0.85.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

from testbed import Cluster, missing  # noqa: E402

PAIRS = 10
LIMIT = 0.85

SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    print(time.time())
dist.destroy_process_group()
"""

OURS = "exec python -m torchrun_hpc --nproc_per_node=1 {script}"
STOCK = """
export GLOO_SOCKET_IFNAME=ib0 OMP_NUM_THREADS=1
if [ "$SLURM_NODEID" = 0 ]; then host=1; else host=0; fi
exec python -m torch.distributed.run --nproc_per_node=1 --nnodes=3 \
    --rdzv_backend=c10d --rdzv_id="$SLURM_JOB_ID" --rdzv_endpoint=jwb0001i:24680 \
    --rdzv_conf="is_host=$host" --local_addr="$(hostname)i" {script}
"""


def seconds(cluster: Cluster, command: str) -> float:
    """Return the seconds from srun to the first all-reduce; rank 0 says when."""
    environ = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "SYSTEMNAME": "juwelsbooster",
    }
    start = time.time()
    done = cluster.srun(
        "-N3", "--ntasks-per-node=1", "sh", "-c", command, env=environ, cwd=ROOT
    )
    if done.returncode:
        sys.exit(f"failed:\n{command}\n{done.stderr}")
    return float(done.stdout) - start


def main() -> None:
    """Measure, report, and judge."""
    reason = missing()
    if reason is not None:
        sys.exit(f"this needs the test cluster: {reason}")
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS
    times: dict[str, list[float]] = {"torchrun_hpc": [], "torchrun": []}
    with Cluster() as cluster, tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(SCRIPT)
        script.flush()
        commands = {
            "torchrun_hpc": OURS.format(script=script.name),
            "torchrun": STOCK.format(script=script.name),
        }
        for command in commands.values():
            seconds(cluster, command)  # bytecode and the file system's cache
        for number in range(pairs):
            order = list(commands) if number % 2 else list(commands)[::-1]
            for name in order:
                times[name].append(seconds(cluster, commands[name]))
    for name, taken in times.items():
        print(
            f"{name}: median {statistics.median(taken):.2f} s, "
            f"{min(taken):.2f} to {max(taken):.2f} s in {pairs} rounds"
        )
    ratios = sorted(
        ours / stock
        for ours, stock in zip(times["torchrun_hpc"], times["torchrun"], strict=True)
    )
    ratio = statistics.median(times["torchrun_hpc"]) / statistics.median(
        times["torchrun"]
    )
    print(
        f"ratio of the medians {ratio:.3f}; of the pairs: median "
        f"{statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}"
    )
    sys.exit(ratio > LIMIT)


if __name__ == "__main__":
    main()

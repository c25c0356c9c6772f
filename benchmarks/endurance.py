"""Whether a job that restarts every minute takes more and more of its nodes.

    python benchmarks/endurance.py [MINUTES]

On the test cluster (root, see tests/support): four nodes of one worker, each a fork.
After an all-reduce, the workers wait for the minute's end; then one of them fails, in
turn. Prints every ten minutes what a node takes; the first row is that of minute 5.
Fails if a node has more memory, open files or threads at the end than then, or if
later restarts print more lines.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from usage import agents, usage  # noqa: E402

from tests.support.cluster.testbed import Cluster, missing  # noqa: E402

if TYPE_CHECKING:
    from usage import Usage

MINUTES = 60
FIRST = 5  # minutes: until then everything has happened once
MORE = 1.0  # MiB that a node may have more at the end
NODES = ("n1", "n2", "n3", "n4")

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
end = float(sys.argv[1])
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if time.time() > end:
    dist.destroy_process_group()
    time.sleep(0.2)
    sys.exit()
time.sleep(60 - time.time() % 60 + 5 * (rank != attempt % 4))
sys.exit(3)
"""


def main() -> None:
    """Measure, report, and judge."""
    reason = missing()
    if reason is not None:
        sys.exit(f"this needs the test cluster: {reason}")
    minutes = int(sys.argv[1]) if len(sys.argv) > 1 else MINUTES  # more than ten
    with (
        Cluster(NODES, management="open", fast_names=str) as cluster,
        tempfile.TemporaryDirectory() as folder,
        (Path(folder) / "stderr").open("w+", encoding="utf-8") as stderr,
    ):
        script = Path(folder) / "restarts_every_minute.py"
        script.write_text(SCRIPT, encoding="utf-8")
        begin = time.time()
        job = cluster.popen(
            ["srun", "--nodes=4", "--ntasks-per-node=1", "python", "-m", "torchrun_hpc",
             f"--max-restarts={2 * minutes}",
             str(script), str(begin + 60 * minutes)],
            env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stderr,
        )  # fmt: skip
        rows = []
        for minute in (FIRST, *range(10, minutes, 10), minutes - 1):
            # In the middle of a minute no restart is under way.
            time.sleep(max(0, (begin // 60 + minute) * 60 + 30 - time.time()))
            found = {name: usage(agent) for name, agent in agents(NODES)}
            if job.poll() is not None or sorted(found) != sorted(NODES):
                stderr.seek(0)
                sys.exit(f"the job has ended early:\n{stderr.read()}")
            lines = Path(stderr.name).read_text(encoding="utf-8").count("\n")
            rows.append((minute, lines, found))
            print(f"minute {minute}: {lines} lines on stderr")
            for name, taken in sorted(found.items()):
                print(
                    f"  {name}: {taken.private:.1f} MiB, {taken.files} open files, "
                    f"{taken.threads} threads",
                    flush=True,
                )
        print(f"exit code: {job.wait(300)}")
        stderr.seek(0)
        print(stderr.read())
    sys.exit(job.returncode or not _is_steady(rows))


def _is_steady(rows: list[tuple[int, int, dict[str, Usage]]]) -> bool:
    (first, lines, then), (last, all_lines, now) = rows[0], rows[-1]
    return (all_lines - lines) / (last - first) <= lines / first and all(
        now[name].private <= then[name].private + MORE
        and now[name].files <= then[name].files + 1  # one may be open for a moment
        and now[name].threads <= then[name].threads
        for name in NODES
    )


if __name__ == "__main__":
    main()

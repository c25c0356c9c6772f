"""How fast a job starts on a slow file system with an empty cache.

    python benchmarks/cold.py [MILLISECONDS [ROUNDS]]

On the test cluster (root, see tests/support). On each host, Python, its packages and
torchrun_hpc are on a file system of `slow_files.py`, with a cache of its own. Measures
the time from srun to the first all-reduce, on one node of four workers and on three
nodes of one: with an empty cache (cold), and once more (warm). Prints the medians, and
of the last round what both jobs have asked of the file systems of all nodes.
"""

from __future__ import annotations

import collections
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import launch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.cluster.testbed import Cluster, missing

if TYPE_CHECKING:
    from collections.abc import Iterator

MILLISECONDS, ROUNDS = 2.0, 3
SLOW_FILES = Path(__file__).with_name("slow_files.py")
FOLDERS = (sysconfig.get_path("stdlib"), sys.prefix, str(launch.ROOT / "torchrun_hpc"))
SHAPES = {
    "1 node of 4 workers": (1, 4),
    "3 nodes of 1 worker": (3, 1),
}
WITHOUT = "without read-ahead"
NAMES = (launch.STOCK, launch.BY_HAND, launch.OURS, launch.EXEC, WITHOUT)


@contextmanager
def slow(
    cluster: Cluster, nodes: int, milliseconds: float, asked: collections.Counter[str]
) -> Iterator[None]:
    """Let the files of these nodes be slow; add to ``asked`` what was asked of them."""
    with ExitStack() as stack:
        for host in cluster.names[:nodes]:
            server = cluster.popen(
                [sys.executable, SLOW_FILES, str(milliseconds), *FOLDERS],
                host=host,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(_unmount, cluster, host, server, asked)
            for folder in FOLDERS:
                while cluster.run(["mountpoint", "-q", folder], host=host).returncode:
                    if server.poll() is not None:
                        sys.exit(f"{folder} cannot be mounted")
                    time.sleep(0.05)
        yield


def _unmount(
    cluster: Cluster,
    host: str,
    server: subprocess.Popen[str],
    asked: collections.Counter[str],
) -> None:
    for folder in FOLDERS:
        cluster.run(["umount", "--lazy", folder], host=host)  # a process may still end
    told, _ = server.communicate()
    asked.update(json.loads(told))


def main() -> None:
    """Measure, and report."""
    reason = missing()
    if reason is not None:
        sys.exit(f"this needs the test cluster: {reason}")
    words = sys.argv[1:]
    milliseconds = float(words[0]) if words else MILLISECONDS
    rounds = int(words[1]) if len(words) > 1 else ROUNDS
    with Cluster() as cluster, tempfile.TemporaryDirectory() as folder:
        bench = launch.Bench(cluster, Path(folder))
        (bench.folder / "meets.py").write_text(launch.SCRIPT, encoding="utf-8")
        launch.COMMANDS[WITHOUT] = launch.LAUNCHER.replace(
            "{options}", "--hpc-read-ahead=none {options}"
        )
        for name in NAMES:
            bench.start(name, 3, 1, "meets.py")  # bytecode
        for title, (nodes, workers) in SHAPES.items():
            cold = launch.Measured(f"{title}, {milliseconds:g} ms, cold", {})
            warm = launch.Measured(f"{title}, {milliseconds:g} ms, warm", {})
            requests = {}
            for _ in range(rounds):
                for name in launch.turns(cold, [*NAMES]):
                    asked: collections.Counter[str] = collections.Counter()
                    with slow(cluster, nodes, milliseconds, asked):
                        for measured in cold, warm:
                            begin, printed = bench.start(
                                name, nodes, workers, "meets.py"
                            )
                            met = max(line["met"] for line in printed)
                            measured.add(name, met - begin)
                    requests[name] = asked
            for measured in cold, warm:
                measured.report()
            for name, asked in requests.items():
                print(f"  {name}: {dict(asked)}")


if __name__ == "__main__":
    main()

"""Time from the environment to the plan, for a step of 4,096 nodes.

    python benchmarks/plan.py

Reads the host list, recognises the site, and makes the plan of a node in the middle,
with this machine's interfaces and a table in the place of the name server. Fails if
the median is above 20 ms, or if a process is started.
"""

from __future__ import annotations

import ipaddress
import statistics
import sys
import time
from typing import TYPE_CHECKING

from torchrun_hpc import sites
from torchrun_hpc.errors import Setting
from torchrun_hpc.host.network import Network, this_node
from torchrun_hpc.options.command_line import CommandLine
from torchrun_hpc.options.options import read
from torchrun_hpc.planning.inputs import Inputs, Node
from torchrun_hpc.planning.mode import choose_mode
from torchrun_hpc.planning.plan import make_plan, meet
from torchrun_hpc.preflight import of_process
from torchrun_hpc.schedulers.process import Process

if TYPE_CHECKING:
    from collections.abc import Mapping

NODES = 4096
ROUNDS = 50
LIMIT = 0.020  # seconds

ENVIRON = {
    "SYSTEMNAME": "juwelsbooster",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": f"jwb[0001-{NODES:04}]",
    "SLURM_JOB_NUM_NODES": str(NODES),
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": f"jwb[0001-{NODES:04}]",
    "SLURM_STEP_NUM_NODES": str(NODES),
    "SLURM_STEP_TASKS_PER_NODE": f"1(x{NODES})",
    "SLURM_NODEID": str(NODES // 2),
    "SLURM_PROCID": str(NODES // 2),
    "SLURMD_NODENAME": f"jwb{NODES // 2 + 1:04}",
}
CASES: dict[str, Mapping[str, Setting]] = {
    "nothing typed": {},
    "endpoint typed": {
        "rdzv_endpoint": Setting(f"jwb{NODES:04}:29400", "--rdzv-endpoint")
    },
}

STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system", "os.exec")


def resolve(host: str) -> tuple[ipaddress.IPv4Address, ...]:
    """Stand in for the name server: jwb0001i is 10.20.0.1, and a number is itself."""
    if host.startswith("jwb"):
        return (ipaddress.IPv4Address("10.20.0.0") + int(host.strip("jwbi")),)
    return (ipaddress.IPv4Address(host),)


def plan_once(given: Mapping[str, Setting]) -> float:
    """Return the seconds from the environment to the plan."""
    start = time.perf_counter()
    seen = of_process(Process(ENVIRON, ENVIRON["SLURMD_NODENAME"]))
    options = read(given)
    inputs = Inputs(
        mode=choose_mode(seen, CommandLine(options)),
        job=seen.job,
        site=sites.find(ENVIRON, "jwb0001"),
        network=Network(this_node().list_interfaces, resolve, lambda _address: None),
        options=options,
        environ=ENVIRON,
        command="python -m torchrun_hpc main.py",
        node=Node(workers=4, cpus=48),
    )
    plan = make_plan(inputs, meet(inputs))
    seconds = time.perf_counter() - start
    if (plan.meeting.nodes, plan.meeting.node_rank) != (NODES, NODES // 2):
        sys.exit("this is not the plan of that node")
    return seconds


def main() -> None:
    """Measure, report, and judge."""
    started = []

    def note(event: str, _arguments: object) -> None:
        if event in STARTS:
            started.append(event)

    sys.addaudithook(note)
    slow = False
    for name, given in CASES.items():
        times = [plan_once(given) for _ in range(ROUNDS)]
        median = statistics.median(times)
        slow |= median > LIMIT
        print(
            f"{NODES} nodes, {name}: median {median * 1e3:.1f} ms, "
            f"{min(times) * 1e3:.1f} to {max(times) * 1e3:.1f} ms in {ROUNDS} rounds"
        )
    print(f"processes started: {len(started)}")
    sys.exit(slow or bool(started))


if __name__ == "__main__":
    main()

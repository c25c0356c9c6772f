"""How fast a job starts, and restarts: torchrun_hpc against what else there is.

    python benchmarks/launch.py [--record] [ROUNDS]

On the test cluster (root, see tests/support), with the management network closed:

- the time from srun to the first all-reduce, on three nodes of one and of four workers,
  and on one of eight, of stock torchrun, of srun with one Python for each worker and
  the variables by hand, of torchrun_hpc, and of torchrun_hpc without preloading;
- a restart: the time from the end of a worker that fails to the script's first line on
  the last of four workers, and to the first one behind the import of torch;
- of a node of eight workers, the files that are opened below site-packages (strace),
  and the seconds of CPU time; the latter also of one worker, and of two workers whose
  script imports no torch;
- where a start of three nodes of one worker spends its time, on the head node.

Stock torchrun gets every flag and variable by hand, so that it works there. All take
turns, and the order alternates; what counts are ratios of medians. Fails if one is
above its limit. With --record, plots.py has the medians.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from measured import record  # noqa: E402

from tests.support.cluster.testbed import Cluster, missing  # noqa: E402

ROUNDS = 7
STOCK, BY_HAND, OURS, EXEC = "torchrun", "srun by hand", "torchrun_hpc", "by exec"

# Says when the first all-reduce was over.
SCRIPT = """
import json, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print(json.dumps({"met": time.time()}) + "\\n", end="")
dist.destroy_process_group()
"""

# Fails once; then says when its first line ran, and when it had imported torch.
FAILS = """
import time; first_line = time.time()
import json, os, torch
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(3)  # until all are there
    if os.environ["RANK"] == "1":
        print(json.dumps({"failed": time.time()}) + "\\n", end="")
        os._exit(1)
    time.sleep(60)
print(json.dumps({"first_line": first_line, "imported": time.time()}) + "\\n", end="")
"""

START = "start"  # of a process

# Notes what a launch on the head node imports, and when it starts processes.
NOTES = """
import os, sys, time
def note(event, arguments):
    if event in {"import", "os.fork", "subprocess.Popen"}:
        what = arguments[0] if event == "import" else "start"
        # A fork does not have the files that were opened here.
        notes = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(notes, f"{time.time()} {os.getpid()} {what}\\n".encode())
        os.close(notes)
if os.environ.get("SLURM_NODEID") == "0":
    note("import", ["sitecustomize"])
    sys.addaudithook(note)
"""
SHARES = """
import time; first_line = time.time()
import json, torch
import torch.distributed as dist
imported = time.time()
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    times = {"first_line": first_line, "imported": imported, "met": time.time()}
    print(json.dumps(times) + "\\n", end="")
dist.destroy_process_group()
"""

LAUNCHER = "exec python -m torchrun_hpc --nproc_per_node={workers} {options} {script}"
COMMANDS = {
    OURS: LAUNCHER,
    EXEC: LAUNCHER.replace("-m torchrun_hpc", "-m torchrun_hpc --hpc-preload=none"),
    BY_HAND: """
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
export MASTER_ADDR=10.20.0.1 MASTER_PORT=24680 GLOO_SOCKET_IFNAME=ib0 OMP_NUM_THREADS=1
exec python {script}
""",
    STOCK: """
export GLOO_SOCKET_IFNAME=ib0 OMP_NUM_THREADS=1
if [ "$SLURM_NODEID" = 0 ]; then host=1; else host=0; fi
exec python -m torch.distributed.run --nproc_per_node={workers} --nnodes={nodes} \
    --rdzv_backend=c10d --rdzv_id="$SLURM_JOB_ID" --rdzv_endpoint=jwb0001i:24680 \
    --rdzv_conf="is_host=$host" --local_addr="$(hostname)i" {options} {script}
""",
}


@dataclass
class Measured:
    """What was measured of one kind of start.

    Attributes:
        title: Its name.
        limits: What may not be above which part of what: two commands and the ratio.
        values: For each command one value for each round.
        unit: Of the values.
    """

    title: str
    limits: dict[tuple[str, str], float]
    values: dict[str, list[float]] = field(default_factory=dict)
    unit: str = "s"

    def add(self, command: str, value: float) -> None:
        """Note a value."""
        self.values.setdefault(command, []).append(value)

    def for_json(self) -> dict[str, object]:
        """Return what `plots.py` draws: of each command the median, and the range."""
        values = {
            name: {
                "median": round(statistics.median(found), 3),
                "range": [round(min(found), 3), round(max(found), 3)],
                "rounds": len(found),
            }
            for name, found in self.values.items()
        }
        return {"title": self.title, "unit": self.unit, "values": values}

    def report(self) -> bool:
        """Print medians and ratios; return whether all are within their limits."""
        print(f"\n{self.title}")
        medians = {name: statistics.median(v) for name, v in self.values.items()}
        for name, values in self.values.items():
            print(
                f"  {name:13} {medians[name]:10.2f} {self.unit}"
                f"   ({min(values):.2f} to {max(values):.2f}, {len(values)} rounds)"
            )
        is_good = True
        for (one, other), limit in self.limits.items():
            ratio = medians[one] / medians[other]
            is_good &= ratio <= limit
            print(f"  {one} / {other}: {ratio:.3f}, at most {limit:.2f}")
        return is_good


@dataclass(frozen=True)
class Bench:
    """The cluster, and the script on it.

    Attributes:
        cluster: Three nodes.
        folder: Has the scripts.
    """

    cluster: Cluster
    folder: Path

    def start(
        self,
        name: str,
        nodes: int,
        workers: int,
        script: str,
        options: str = "",
        **environ: str,
    ) -> tuple[float, list[dict[str, float]]]:
        """Start a command; return when srun was started, and what the workers printed.

        Args:
            name: Which command.
            nodes: Number of nodes.
            workers: And of workers on each.
            script: Name of the script.
            options: Options of the launcher.
            **environ: Further variables.
        """
        environ = environ | {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "SYSTEMNAME": "juwelsbooster",
        }
        tasks = workers if name == BY_HAND else 1
        command = COMMANDS[name].format(
            script=self.folder / script,
            nodes=nodes,
            workers=workers,
            options=options,
        )
        begin = time.time()
        done = self.cluster.srun(
            f"--nodelist=jwb[0001-000{nodes}]", f"--ntasks-per-node={tasks}",
            "sh", "-c", command, env=environ, cwd=ROOT, timeout=120,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"failed:\n{command}\n{done.stderr}")
        lines = (line for line in done.stdout.splitlines() if line.startswith("{"))
        return begin, [json.loads(line) for line in lines]


def first_all_reduce(
    bench: Bench, measured: Measured, nodes: int, workers: int
) -> None:
    """Measure the time from srun to the first all-reduce, once for each command."""
    for name in turns(measured, [STOCK, BY_HAND, OURS, EXEC]):
        begin, printed = bench.start(name, nodes, workers, "meets.py")
        measured.add(name, max(line["met"] for line in printed) - begin)


def restart(bench: Bench, to_first_line: Measured, to_import: Measured) -> None:
    """Measure a restart: from the end of a worker to the last of the new ones."""
    for name in turns(to_first_line, [STOCK, OURS, EXEC]):
        _, printed = bench.start(name, 1, 4, "fails.py", options="--max_restarts=1")
        (failed,) = [line["failed"] for line in printed if "failed" in line]
        again = [line for line in printed if "failed" not in line]
        to_first_line.add(name, max(line["first_line"] for line in again) - failed)
        to_import.add(name, max(line["imported"] for line in again) - failed)


def shares(bench: Bench, into: dict[str, Measured]) -> None:
    """Measure where the head node spends the time of a start."""
    notes = bench.folder / "notes"
    for name, measured in into.items():
        notes.unlink(missing_ok=True)
        begin, (said,) = bench.start(
            name, 3, 1, "shares.py", PYTHONPATH=str(bench.folder), NOTES=str(notes)
        )
        noted = [line.split(" ") for line in notes.read_text().splitlines()]
        launcher = noted[0][1]
        times = [
            (float(at), what)
            for at, process, what in noted
            if float(at) < said["first_line"] and (process == launcher or what == START)
        ]
        torch = [at for at, what in times if what.partition(".")[0] == "torch"]
        starts = [at for at, what in times if what == START]
        spawned = starts[-1] if starts else said["first_line"]
        imports = [at for at, what in times if at < spawned and what != START]
        ends = {
            "srun, Python": times[0][0],
            "launcher": torch[0] if torch else times[0][0],
            "import of torch": imports[-1],
            "meeting": spawned,
            "worker's start": said["first_line"],
            "worker's import": said["imported"],
            "all-reduce": said["met"],
        }
        for stage, end in ends.items():
            measured.add(stage, end - begin)
            begin = end


def turns(measured: Measured, names: list[str]) -> list[str]:
    """Return the order in which they take turns."""
    rounds = len(next(iter(measured.values.values()), []))
    return names if rounds % 2 else names[::-1]


def cpu_seconds(measured: Measured, script: Path, workers: int) -> None:
    """Measure the CPU time of a node's workers, without a scheduler."""
    for name, command in _on_this_machine(script, workers).items():
        before = os.times()
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        used = after.children_user + after.children_system
        measured.add(name, used - before.children_user - before.children_system)


def files_opened(measured: Measured, script: Path) -> None:
    """Count the files that a node of eight workers opens below site-packages."""
    for name, command in _on_this_machine(script).items():
        with tempfile.NamedTemporaryFile("r") as log:
            trace = ["strace", "-f", "-qq", "-e", "trace=open,openat", "-o", log.name]
            subprocess.run([*trace, *command], check=True, capture_output=True)
            opened = [line for line in log if "site-packages" in line]
        measured.add(name, sum("= -1" not in line for line in opened))


def _on_this_machine(script: Path, workers: int = 8) -> dict[str, list[str]]:
    python = [sys.executable, "-m"]
    words = ["--standalone", f"--nproc_per_node={workers}", str(script)]
    return {
        STOCK: [*python, "torch.distributed.run", *words],
        OURS: [*python, "torchrun_hpc", *words],
    }


def main() -> None:
    """Measure, report, and judge."""
    reason = missing()
    if reason is None and shutil.which("strace") is None:
        reason = "strace is missing"
    if reason is not None:
        sys.exit(f"this needs the test cluster: {reason}")
    words = [word for word in sys.argv[1:] if word != "--record"]
    rounds = int(words[0]) if words else ROUNDS
    starts = {
        (3, 1): {(OURS, STOCK): 0.60, (EXEC, STOCK): 0.80},
        (3, 4): {(OURS, STOCK): 0.25, (OURS, BY_HAND): 0.35},
        (1, 8): {(OURS, STOCK): 0.25},
    }
    titles = {
        (3, 1): "3 nodes of 1 worker",
        (3, 4): "3 nodes of 4 workers",
        (1, 8): "1 node of 8 workers",
    }
    measured = {
        shape: Measured(f"{titles[shape]}: to the first all-reduce", limits)
        for shape, limits in starts.items()
    }
    # Nothing is imported before it, in any form.
    first_line = Measured("a restart: to the first line", {})
    imported = Measured("a restart: to the end of the import", {(OURS, STOCK): 0.25})
    cpu = {
        8: Measured("8 workers: CPU time", {(OURS, STOCK): 1 / 4}),
        1: Measured("1 worker: CPU time", {(OURS, STOCK): 1.1}),
        2: Measured("2 workers without torch: CPU time", {(OURS, STOCK): 1.1}),
    }
    stages = {
        name: Measured(f"3 nodes of 1 worker, {name}: its stages on the head node", {})
        for name in COMMANDS
    }
    files = Measured(
        "8 workers: files opened below site-packages",
        {(OURS, STOCK): 1 / 7},
        unit="",
    )
    with Cluster() as cluster, tempfile.TemporaryDirectory() as folder:
        bench = Bench(cluster, Path(folder))
        texts = {
            "meets.py": SCRIPT,
            "fails.py": FAILS,
            "shares.py": SHARES,
            "prints.py": "print('done')\n",
            "sitecustomize.py": NOTES,
        }
        for name, text in texts.items():
            (bench.folder / name).write_text(text, encoding="utf-8")
        for name in COMMANDS:
            bench.start(name, 3, 1, "meets.py")  # bytecode, the file system's cache
        for _ in range(rounds):
            for (nodes, workers), into in measured.items():
                first_all_reduce(bench, into, nodes, workers)
            restart(bench, first_line, imported)
            for workers, into in cpu.items():
                name = "prints.py" if workers == 2 else "meets.py"  # noqa: PLR2004
                cpu_seconds(into, bench.folder / name, workers)
            shares(bench, stages)
        files_opened(files, bench.folder / "meets.py")
    parts = (
        *measured.values(),
        first_line,
        imported,
        *cpu.values(),
        files,
        *stages.values(),
    )
    found = [part.report() for part in parts]
    if "--record" in sys.argv:
        record("start.json", [part.for_json() for part in parts])
    sys.exit(not all(found))


if __name__ == "__main__":
    main()

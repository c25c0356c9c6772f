"""Rendezvous of many simulated nodes: torchrun_hpc against torch's own c10d.

    python benchmarks/rendezvous.py [--nodes 8,64] [--bound 60] [--window 10] [--record]
    python benchmarks/rendezvous.py --takeover 1024

Each node has a handler and a connection of its own, made through torch's registry of
rendezvous handlers. All get one start signal, before any socket is open; the time runs
until ``next_rendezvous()`` has returned on the last of them. Then all are asked
``num_nodes_waiting()`` ten times a second, as torch's agent does. Both kinds go through
the same functions here, with torch as it is installed; they differ in how a handler is
made, and in nothing else. Torch's own gets more and more nodes until they do not meet
within the bound.

The head node, node 0, is a process of its own, as on a cluster. The others are
threads, 16 in a process, or more where that would be more than 32 processes; one more
thread of each process asks all its handlers in turn. A node of ours has four open files
in its process (a connection, and an event loop with three), one of torch's has one;
each has one on the head node.

Everything runs in a network namespace that holds nothing else (``unshare``), so that
the counter of its loopback interface is the traffic: with the headers of TCP and IP,
acknowledgements and refused connections, each packet once, whichever its direction. No
name server can be reached from there.

With --takeover N, N + 1 nodes of ours meet, one of them a spare. Then the process of
node 0, which has the coordinator, is killed, and the time runs until the last of the
others is in the next round. Node 1 has a process of its own, too. Before, the bytes are
counted that they send while they wait.

All share the cores of one machine: a cluster is faster. The bytes of ours do not depend
on that; those of c10d do to a degree, since its nodes try again and again.

Fails if a target is missed whose number of nodes was measured.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import logging
import math
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a line per connection
os.environ.setdefault("OMP_NUM_THREADS", "1")  # no threads here before the fork

from measured import record
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from torchrun_hpc.options.options import Options
from torchrun_hpc.options.rdzv_conf import RdzvConf
from torchrun_hpc.options.values import C10D, SCHEDULER
from torchrun_hpc.planning.meeting import Meeting, Spares
from torchrun_hpc.rendezvous.handler import SchedulerRendezvous, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess

    from torch.distributed.elastic.rendezvous import RendezvousHandler

NODES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PROCESSES, NODES_PER_PROCESS = 32, 16  # at most, at least; beside the head node's
RATE = 10  # per second: torch's monitor_interval is 0.1 s
BEAT = 5  # seconds, of both kinds: a window holds whole ones
HOST = "127.0.0.1"
FIRST_PORT = 20000

OURS, STOCK = SCHEDULER, C10D
TITLES = {OURS: "torchrun_hpc", STOCK: "c10d"}

# Targets: seconds by number of nodes, and bytes of torch's own per byte of ours.
SECONDS = {1024: 2.0, 4096: 15.0}
COMPARED = 64
JOIN_RATIO = 15  # more is not possible with proofs of both sides
TAKEOVER_SECONDS = 3.0
AFTERWARDS_RATIO = 100

DISTURBED = 0.1  # share of a whole that is worth a remark

_INSIDE = "--inside-the-namespace"
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1  # linux/sockios.h, if.h
_STACK = 256 * 1024  # bytes of each thread


# --- one node ---------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What is started.

    Attributes:
        kind: Of the rendezvous, by its name in torch's registry.
        nodes: Number of nodes.
        port: Of the coordinator or store.
        bound: Seconds that the nodes may take to meet.
        window: Seconds for which they are asked afterwards.
        spares: How many of the nodes wait.
    """

    kind: str
    nodes: int
    port: int
    bound: int
    window: int
    spares: int = 0


def make_handler(job: Job, meeting: Meeting) -> RendezvousHandler:
    """Make the handler of one node; only torch's own connects already."""
    parameters = RendezvousParameters(
        backend=job.kind,
        endpoint=meeting.endpoint,
        run_id=meeting.launch_id,
        min_nodes=job.nodes,
        max_nodes=job.nodes,
        local_addr=HOST,
        join_timeout=job.bound + 60,
        is_host=int(meeting.is_coordinator),  # only torch's own asks
    )
    if job.kind == STOCK:
        return get_rendezvous_handler(parameters)
    conf = RdzvConf(join_timeout=job.bound + 60)
    asked = Options(rdzv_conf=conf, max_restarts=1)
    settings = settings_of(meeting, meeting.launch_id, asked, 30)
    return SchedulerRendezvous(meeting, settings, os.environ, address=HOST)


def make_meetings(job: Job, ranks: Iterable[int]) -> list[Meeting]:
    """Return what is planned on some nodes, before they meet."""
    hosts = tuple(f"n{number:04}" for number in range(job.nodes))
    # Members listen, too: each on an address of its own.
    addresses = tuple(
        f"127.0.{rank // 250}.{rank % 250 + 1}" for rank in range(job.nodes)
    )
    return [
        Meeting(
            backend=SCHEDULER,
            nodes=job.nodes,
            node_rank=rank,
            launch_id="benchmark",
            hosts=hosts,
            fast_hosts=addresses,
            spares=Spares(job.spares, after=job.bound),
            endpoint=f"{HOST}:{job.port}",
            connect_host=HOST,
            ports=(job.port,),
            coordinator=0,
            is_coordinator=rank == 0,
            local_address=addresses[rank] if job.spares else HOST,
            listen=(HOST, job.port) if rank == 0 else None,
        )
        for rank in ranks
    ]


# --- one process ------------------------------------------------------------------


@dataclass
class Joined:
    """What a process has to say when all its nodes have joined, or failed.

    Attributes:
        at: When the last one had, by the monotonic clock, which all processes share.
        cpu: Seconds of CPU time that it has used meanwhile.
        problems: What went wrong.
    """

    at: float
    cpu: float
    problems: list[str]


@dataclass
class Asked:
    """What a process has to say after the window.

    Attributes:
        rounds: How often it has asked each of its nodes.
        cpu: Seconds of CPU time that it has used meanwhile.
        problems: What went wrong.
    """

    rounds: int
    cpu: float
    problems: list[str]


def run_nodes(job: Job, ranks: range, parent: Connection) -> None:
    """Be some nodes; the parent says when they are to join, and to be asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.disable(logging.WARNING)  # a line for each heartbeat of c10d that fails
    threading.stack_size(_STACK)
    if 0 not in ranks:
        _share_process()
    start = threading.Event()
    handlers: list[RendezvousHandler] = []
    kept: list[object] = []  # what torch's agent keeps while its workers run
    times: list[float] = []
    problems: list[str] = []

    def join(meeting: Meeting) -> None:
        start.wait()
        try:
            handler = make_handler(job, meeting)
            kept.append(handler.next_rendezvous())
        except Exception as error:  # noqa: BLE001 - is reported
            problems.append(f"node {meeting.node_rank}: {error!r}")
        else:
            times.append(time.monotonic())
            handlers.append(handler)

    meetings = make_meetings(job, ranks)
    threads = [threading.Thread(target=join, args=[meeting]) for meeting in meetings]
    for thread in threads:
        thread.start()
    parent.send("ready")
    parent.recv()
    cpu = time.process_time()
    start.set()
    for thread in threads:
        thread.join()
    cpu = time.process_time() - cpu
    parent.send(Joined(max(times, default=0), cpu, problems))
    parent.recv()
    parent.send(ask(handlers, job.window))
    parent.recv()  # never comes


def _share_process() -> None:
    """Let many nodes share a process without the cost of that.

    No threads that wake up to claim the interpreter, no search of torch for garbage.
    """
    sys.setswitchinterval(1)
    gc.freeze()


def ask(handlers: Sequence[RendezvousHandler], window: float) -> Asked:
    """Do what torch's agent does while its workers run."""
    start, cpu = time.monotonic(), time.process_time()
    rounds = 0
    problems: list[str] = []
    try:
        while time.monotonic() < start + window and not problems:
            if sum(handler.num_nodes_waiting() for handler in handlers):
                problems.append("a node waits for a round that never was to be")
            rounds += 1
            time.sleep(max(0.0, start + rounds / RATE - time.monotonic()))
    except Exception as error:  # noqa: BLE001 - is reported
        problems.append(repr(error))
    return Asked(rounds, time.process_time() - cpu, problems)


def run_members(job: Job, ranks: range, parent: Connection) -> None:
    """Be some nodes of a job with a spare, which loses its coordinator."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.stack_size(_STACK)
    if len(ranks) > 1:
        _share_process()
    times: list[float] = []
    problems: list[str] = []

    def join(handler: RendezvousHandler) -> None:
        try:
            handler.next_rendezvous()
        except Exception as error:  # noqa: BLE001 - is reported
            problems.append(repr(error))
        times.append(time.monotonic())

    def join_all(joining: Iterable[RendezvousHandler]) -> list[threading.Thread]:
        threads = [threading.Thread(target=join, args=[each]) for each in joining]
        for thread in threads:
            thread.start()
        return threads

    meetings = make_meetings(job, ranks)
    handlers = [make_handler(job, meeting) for meeting in meetings]
    parent.send("ready")
    parent.recv()
    wait = job.nodes - job.spares
    threads = join_all(handlers)
    by_rank = dict(zip(ranks, threads, strict=True))
    spare_threads = [thread for rank, thread in by_rank.items() if rank >= wait]
    for thread in threads:
        if thread not in spare_threads:
            thread.join()
    parent.send(problems)
    parent.recv()
    # As torch's agents do: look, and meet again.
    active = [each for each, rank in zip(handlers, ranks, strict=True) if rank < wait]
    while active and not all(handler.num_nodes_waiting() for handler in active):
        time.sleep(1 / RATE)
    times.clear()
    threads = join_all(active) + spare_threads
    for thread in threads:
        thread.join()
    parent.send((max(times, default=0.0), problems))
    parent.recv()  # never comes


def measure_takeover(nodes: int, port: int, bound: int) -> float:
    """Return in how many seconds nodes are in a round that have lost the coordinator.

    Raises:
        NodeError: They are not.
    """
    job = Job(OURS, nodes + 1, port, bound, 0, spares=1)
    processes, pipes = start_processes(job, run_members)
    try:
        hear(pipes, bound)
        start = time.monotonic()
        tell(pipes)
        _raise_for([text for problems in hear(pipes, bound) for text in problems])
        print(
            f"{nodes} nodes and a spare have joined in {time.monotonic() - start:.2f} s"
        )
        time.sleep(2)  # until all know of each other
        before, window = traffic(), 2 * BEAT
        time.sleep(window)
        rate = (traffic() - before) / window / job.nodes
        print(f"at rest: {rate:.0f} bytes per second and node")
        tell(pipes)
        time.sleep(1)
        start = time.monotonic()
        processes[0].kill()
        found = hear(pipes[1:], bound)
        _raise_for([text for _, problems in found for text in problems])
        return max(float(at) for at, _ in found) - start
    finally:
        end_processes(processes, pipes)


# --- all nodes --------------------------------------------------------------------


@dataclass
class Result:
    """What was measured.

    Attributes:
        job: What was started.
        seconds: From the start signal until the last node had joined.
        others: Share of the machine that was not free for these nodes then.
        join_bytes: Until then, or until the bound.
        rate: Bytes per second afterwards.
        head_node: Share of a core that the head node's process used then.
        asked: How often each node was asked, as a share of what was meant.
        problem: Why there are no such numbers.
        is_late: Whether that is the bound.
    """

    job: Job
    seconds: float = 0
    others: float = 0
    join_bytes: int = 0
    rate: float = 0
    head_node: float = 0
    asked: float = 0
    problem: str = ""
    is_late: bool = False


class NodeError(Exception):
    """Something went wrong on a node."""


def start_processes(
    job: Job, run: Callable[[Job, range, Connection], None]
) -> tuple[list[ForkProcess], list[Connection]]:
    """Start the processes of a job, those of the first nodes first."""
    own = 1 + bool(job.spares)  # nodes that have a process of their own
    others = range(own, job.nodes)
    size = max(NODES_PER_PROCESS, math.ceil(len(others) / PROCESSES))
    parts = [range(rank, rank + 1) for rank in range(own)] + [
        others[first : first + size] for first in range(0, len(others), size)
    ]
    context = multiprocessing.get_context("fork")  # torch is imported once
    processes: list[ForkProcess] = []
    pipes: list[Connection] = []
    for ranks in parts:
        mine, theirs = context.Pipe()
        process = context.Process(target=run, args=(job, ranks, theirs))
        process.start()
        processes.append(process)
        pipes.append(mine)
    return processes, pipes


def end_processes(
    processes: Iterable[ForkProcess], pipes: Iterable[Connection]
) -> None:
    """End all processes of a job."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    for pipe in pipes:
        pipe.close()
    wait_for_silence()


def measure(job: Job) -> Result:
    """Start the nodes of a job, let them join, ask them, and end them."""
    result = Result(job)
    processes, pipes = start_processes(job, run_nodes)
    try:
        hear(pipes, 60)
        _measure_join(pipes, result)
        _measure_window(pipes, result)
    except (TimeoutError, NodeError) as problem:
        result.problem = str(problem)
    except EOFError:
        result.problem = "a process has ended"
    finally:
        end_processes(processes, pipes)
    return result


def _measure_join(pipes: Sequence[Connection], result: Result) -> None:
    before, busy, start = traffic(), cpu_time(), time.monotonic()
    tell(pipes)
    try:
        joined: list[Joined] = hear(pipes, result.job.bound)
    except TimeoutError:
        result.is_late = True
        raise
    finally:
        result.join_bytes = traffic() - before
    _raise_for([text for part in joined for text in part.problems])
    result.seconds = max(part.at for part in joined) - start
    taken = (time.monotonic() - start) * (os.cpu_count() or 1)
    own = sum(part.cpu for part in joined)
    result.others = max(0.0, cpu_time() - busy - own) / taken


def _measure_window(pipes: Sequence[Connection], result: Result) -> None:
    before, start = traffic(), time.monotonic()
    tell(pipes)
    time.sleep(result.job.window)
    result.rate = (traffic() - before) / (time.monotonic() - start)
    asked: list[Asked] = hear(pipes, result.job.bound)
    _raise_for([text for part in asked for text in part.problems])
    result.head_node = asked[0].cpu / result.job.window
    result.asked = min(part.rounds for part in asked) / (result.job.window * RATE)


def _raise_for(problems: Sequence[str]) -> None:
    if problems:
        raise NodeError(f"{problems[0]}, and {len(problems) - 1} more")


def tell(pipes: Iterable[Connection]) -> None:
    """Let all processes go on."""
    for pipe in pipes:
        pipe.send("go on")


def hear(pipes: Sequence[Connection], seconds: float) -> list[Any]:
    """Return what all processes say.

    Raises:
        TimeoutError: Some have said nothing.
        EOFError: One has ended.
    """
    end = time.monotonic() + seconds
    said: dict[int, Any] = {}
    while len(said) < len(pipes):
        waiting = [pipe for number, pipe in enumerate(pipes) if number not in said]
        ready = connection.wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError(f"not within {seconds:.0f} s")
        for number, pipe in enumerate(pipes):
            if pipe in ready:
                said[number] = pipe.recv()
    return [said[number] for number in range(len(pipes))]


# --- the machine ------------------------------------------------------------------


def enter_namespace() -> None:
    """Start this program again where there is no other network than loopback."""
    flags = ["--net"] if os.geteuid() == 0 else ["--net", "--map-root-user"]
    unshare = shutil.which("unshare")
    if unshare is None:
        sys.exit("this needs the program unshare, of util-linux")
    tried = subprocess.run(
        [unshare, *flags, "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        sys.exit(
            "this needs a network namespace of its own, and may not make one here: "
            f"{tried.stderr.strip()}. Run it as root, or where users may make "
            "namespaces (sysctl user.max_user_namespaces)"
        )
    # A program that replaces this one, so that Ctrl-C and exit code are its own.
    arguments = [sys.executable, __file__, *sys.argv[1:], _INSIDE]
    os.execv(unshare, ["unshare", *flags, *arguments])  # noqa: S606


def open_loopback() -> None:
    """Switch the loopback interface on, which is off in a new namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH22x", b"lo", 0)
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("H", answer, 16)
        request = struct.pack("16sH22x", b"lo", flags | _IFF_UP)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


def traffic() -> int:
    """Return the bytes that loopback has received so far, which are those sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    sys.exit("there is no loopback interface")


def cpu_time() -> float:
    """Return the seconds for which all processes of this machine have run."""
    user, nice, system = Path("/proc/stat").read_text().split()[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def wait_for_silence() -> None:
    """Wait until connections that were cut have said so."""
    last, now = -1, traffic()
    while now != last:
        time.sleep(0.3)
        last, now = now, traffic()


# --- what comes out ---------------------------------------------------------------

Results = dict[tuple[str, int], Result]


class Column(NamedTuple):
    """A quantity, in the table for both kinds."""

    title: str
    width: int
    value: Callable[[Result], str]
    at_bound: Callable[[Result], str] = lambda _result: "-"


def scaled(number: float) -> str:
    """Write a number of bytes: 345, 12.3k, 1.20M."""
    units = "", "k", "M", "G"
    power = min(int(math.log10(max(number, 1)) // 3), 3)
    number /= 1000**power
    digits = 0 if power == 0 else max(0, 2 - int(math.log10(number)))
    return f"{number:.{digits}f}{units[power]}"


COLUMNS = (
    Column("join, s", 7, lambda r: f"{r.seconds:.2f}", lambda r: f">{r.job.bound:.0f}"),
    Column(
        "join, bytes",
        7,
        lambda r: scaled(r.join_bytes),
        lambda r: f">{scaled(r.join_bytes)}",
    ),
    Column("then, bytes/s", 7, lambda r: scaled(r.rate)),
    Column("head node, % core", 12, lambda r: f"{100 * r.head_node:.1f}"),
)


def heading() -> str:
    """Return the first two lines of the table."""
    upper = "".join(f"   {c.title:>{2 * c.width + 1}}" for c in COLUMNS)
    lower = "".join(f"   {'ours':>{c.width}} {'c10d':>{c.width}}" for c in COLUMNS)
    return f"{'':6}{upper}\n{'nodes':>6}{lower}"


def row(nodes: int, results: Results) -> str:
    """Return a line of the table."""
    line = f"{nodes:6}"
    remarks = []
    for column in COLUMNS:
        line += "  "
        for kind in (OURS, STOCK):
            text = ""
            result = results.get((kind, nodes))
            if result is not None:
                late = column.at_bound(result) if result.is_late else "-"
                text = late if result.problem else column.value(result)
            line += f" {text:>{column.width}}"
    for kind in (OURS, STOCK):
        result = results.get((kind, nodes))
        if result is not None:
            remarks += [f"{TITLES[kind]}: {text}" for text in remarks_on(result)]
    return "   ".join([line, *remarks]).rstrip()


def remarks_on(result: Result) -> list[str]:
    """Say what makes the numbers of a line doubtful."""
    if result.problem:
        return [result.problem]
    remarks = []
    if result.seconds > 0.5 and result.others > DISTURBED:  # noqa: PLR2004
        share = f"{100 * result.others:.0f} %"
        remarks.append(f"disturbed, other processes took {share} of the machine")
    if result.asked < 1 - DISTURBED:
        share = f"{100 * result.asked:.0f} %"
        remarks.append(f"could be asked only {share} as often")
    return remarks


def judged(results: Results) -> list[tuple[bool, str]]:
    """Say of each target that was measured whether it is met, and by how much."""
    verdicts = []
    for nodes, limit in SECONDS.items():
        ours = results.get((OURS, nodes))
        if ours is not None:
            met = not ours.problem and ours.seconds < limit
            taken = ours.problem or f"{ours.seconds:.2f} s"
            text = f"{nodes} nodes of ours join in under {limit:.0f} s: {taken}"
            verdicts.append((met, text))
    pair = [results.get((kind, COMPARED)) for kind in (OURS, STOCK)]
    known = [result for result in pair if result is not None]
    if len(known) < len(pair):
        return verdicts
    ours, stock = known
    for what, limit, stocks_bytes, our_bytes in (
        ("for the join", JOIN_RATIO, stock.join_bytes, ours.join_bytes),
        ("per second afterwards", AFTERWARDS_RATIO, stock.rate, ours.rate),
    ):
        ratio = stocks_bytes / max(our_bytes, 1)
        missing = ours.problem or stock.problem
        text = (
            f"{COMPARED} nodes of ours send {limit} times fewer bytes {what}: "
            f"{missing or f'{ratio:.0f} times'}"
        )
        verdicts.append((not missing and ratio >= limit, text))
    return verdicts


# --- the record -------------------------------------------------------------------


def for_json(results: Results, bound: int) -> dict[str, object]:
    """Return what `plots.py` draws."""
    rows: dict[str, list[dict[str, object]]] = {TITLES[kind]: [] for kind in TITLES}
    for (kind, nodes), result in results.items():
        rows[TITLES[kind]].append(
            {
                "nodes": nodes,
                "seconds": round(result.seconds, 3),
                "join_bytes": round(result.join_bytes),
                "rate": round(result.rate),
                "problem": result.problem,
            }
        )
    return {"bound": bound, "kinds": rows}


# --- the program ------------------------------------------------------------------


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--nodes",
        metavar="N,N",
        type=lambda text: sorted(int(part) for part in text.split(",")),
        default=list(NODES),
        help="numbers of nodes (default: 8 to 4096)",
    )
    parser.add_argument(
        "--bound",
        type=int,
        default=60,
        metavar="SECONDS",
        help="how long nodes may take to meet; c10d gets no more of them then",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=2 * BEAT,
        metavar="SECONDS",
        help=f"how long to count afterwards, a multiple of {BEAT}",
    )
    parser.add_argument(
        "--takeover",
        type=int,
        metavar="N",
        help="only let N nodes lose their coordinator",
    )
    parser.add_argument(
        "--record", action="store_true", help="write results/rendezvous.json"
    )
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    explicit = parser.parse_args()
    if explicit.nodes[0] < 2 or explicit.window < BEAT or explicit.window % BEAT:  # noqa: PLR2004
        parser.error(f"two nodes at least, and a window of {BEAT}, {2 * BEAT}, … s")
    return explicit


def end(_number: int, _frame: object) -> None:
    """End, and with it all nodes."""
    sys.exit(1)


def main() -> None:
    """Measure, report, and judge."""
    explicit = options()
    if not explicit.inside_the_namespace:
        enter_namespace()
    open_loopback()
    signal.signal(signal.SIGTERM, end)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if explicit.takeover:
        seconds = measure_takeover(explicit.takeover, FIRST_PORT, explicit.bound)
        met = seconds < TAKEOVER_SECONDS
        print(
            f"{'met' if met else 'MISSED'}: {explicit.takeover} nodes that lose their "
            f"coordinator are in the next round in under {TAKEOVER_SECONDS:.0f} s: "
            f"{seconds:.2f} s"
        )
        sys.exit(not met)
    results: Results = {}
    ports = iter(range(FIRST_PORT, 2**16))
    kinds = [OURS, STOCK]
    print(heading())
    for nodes in explicit.nodes:
        for kind in list(kinds):
            job = Job(kind, nodes, next(ports), explicit.bound, explicit.window)
            results[kind, nodes] = measure(job)
            if kind == STOCK and results[kind, nodes].problem:
                kinds.remove(kind)
        print(row(nodes, results), flush=True)
    verdicts = judged(results)
    for met, text in verdicts:
        print(f"{'met' if met else 'MISSED'}: {text}")
    if explicit.record:
        record("rendezvous.json", for_json(results, explicit.bound))
    sys.exit(not all(met for met, _ in verdicts))


if __name__ == "__main__":
    main()

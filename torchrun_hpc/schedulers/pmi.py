"""PMI-1: the exchange of host names between tasks of Hydra (MPICH, Intel MPI) and Flux.

These launchers set ranks and sizes, but no names. Each task has a connection to its
process manager, over which MPI_Init exchanges addresses. The first task of each node
writes its host name. Rank 0 reads them and writes the whole list, so other tasks send
few requests. Sources: MPICH's ``src/pmi/src/pmi_wire.c`` and ``pmi_v1.c``; seen with
MPICH 4, 5 and Intel MPI 2021.

For Hydra, ``-hosts a,b,a`` are three nodes (MPICH 4 and 5) or two (Intel MPI). So the
host's name decides which tasks share a node.

A process that has used the connection counts as an MPI program. If it ends without
``finalize``, Hydra kills the node's other tasks. After ``finalize``, MPI_Init fails. So
`finalize` is for processes without MPI. `finalize_at_end` is for scripts: it finalizes
after the script has ended, unless the script itself has finalized.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import select
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrun_hpc import limits, programs, waiting
from torchrun_hpc.schedulers.job import as_identifier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# Number of the open file that leads to the process manager.
DESCRIPTOR = "PMI_FD"
# Host and port of the process manager, if there is no open file.
PORT = "PMI_PORT"
# Number of the task for a process manager with a port.
PORT_ID = "PMI_ID"
# Rank of the task.
RANK = "PMI_RANK"
# Number of all tasks.
SIZE = "PMI_SIZE"

# Names that no other program uses.
_KEY = "torchrun_hpc_head"  # rank 0's host, the launch's id, the number of parts
_HOST = "torchrun_hpc_host_{}"  # per node, the host of its first task
_HOSTS = "torchrun_hpc_hosts_{}"  # a part of the list of all hosts
_MAPPING = "PMI_process_mapping"

# Characters of a value. A line has at most 1024, including the names of store and key.
_LONGEST_VALUE = 512

# No machine has more. A wrong number would take too much memory.
MOST_TASKS = 2**22

_LONGEST = 2**16


@dataclass(frozen=True)
class Exchanged:
    """The facts that the tasks have exchanged; they are equal for all tasks."""

    first_host: str  # of rank 0
    instance: str  # of this launch: a random number from rank 0
    node_of_rank: tuple[int, ...] = ()  # for each rank, from 0; empty if unknown
    hosts: tuple[str, ...] = ()  # of each node; empty if unknown


class PmiError(Exception):
    """The process manager gave no answer, or a wrong one."""


_FAULTS = (PmiError, ValueError, OSError, OverflowError)


def exchange(
    environ: Mapping[str, str],
    hostname: str,
    wait: Callable[[float], None] = lambda _seconds: None,
    machine: str = "",
) -> Exchanged | None:
    """Exchange the hosts, which all tasks must do; ``None`` without an answer.

    The connection stays open and usable: nothing is finalized. ``wait`` is called from
    time to time with the seconds that this task has waited. ``machine`` is a text that
    differs between machines of the same name.
    """
    try:
        rank, size = int(environ.get(RANK, "")), int(environ.get(SIZE, ""))
        if not 0 <= rank < size <= MOST_TASKS:
            return None
        with _connection(environ) as manager:
            manager.start()
            mapping = parse_mapping(manager.get(_MAPPING), size)
            nodes = mapping or tuple(range(size))
            if rank == nodes.index(nodes[rank]):  # the node's first task
                host = f"{as_identifier(hostname)}/{as_identifier(machine)}"
                manager.put(_HOST.format(nodes[rank]), host)
            manager.ask("cmd=barrier_in", wait)
            if rank == 0:
                _write_hosts(manager, hostname, max(nodes) + 1)
            manager.ask("cmd=barrier_in", wait)
            first_host, _, rest = manager.get(_KEY).partition("/")
            instance, _, rest = rest.partition("/")
            parts = rest.partition("/")[0]
            if not parts:
                return None  # rank 0 could not write
            keys = (_HOSTS.format(part) for part in range(int(parts)))
            hosts = "".join(map(manager.get, keys))
            return Exchanged(first_host, instance, *_joined(nodes, hosts, mapping))
    except _FAULTS:
        return None


def _write_hosts(manager: _Manager, hostname: str, nodes: int) -> None:
    """Write the list of hosts in parts; then rank 0's host, an id, and their number."""
    names = (_HOST.format(node) for node in range(nodes))
    hosts = _each_once([manager.get(name) for name in names])
    parts = range(0, len(hosts), _LONGEST_VALUE)
    for number, start in enumerate(parts):
        manager.put(_HOSTS.format(number), hosts[start : start + _LONGEST_VALUE])
    manager.put(_KEY, f"{hostname}/{os.urandom(4).hex()}/{len(parts)}")


def _each_once(machines: Sequence[str]) -> str:
    """Write a list of hosts; a repeated host becomes ``#`` and its number."""
    numbers: dict[str, int] = {}
    names = []
    for number, machine in enumerate(machines):
        host = machine.partition("/")[0]
        names.append(f"#{numbers[machine]}" if machine in numbers else host)
        # A node without a name counts as a host of its own.
        numbers.setdefault(machine if host else f"#{number}", len(numbers))
    return ",".join(names)


def _joined(
    nodes: tuple[int, ...], hosts: str, mapping: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return each rank's node, and the nodes' names.

    ``nodes`` are each rank's node for the process manager, and `_each_once` wrote
    ``hosts``. Without a valid list of hosts, return ``mapping`` and no names.
    """
    written = hosts.split(",")
    if not hosts or len(written) != max(nodes) + 1:
        return mapping, ()
    names = [host for host in written if not host.startswith("#")]
    new = itertools.count()
    numbers = [int(host[1:]) if host.startswith("#") else next(new) for host in written]
    return tuple(numbers[node] for node in nodes), tuple(names)


def is_announced(environ: Mapping[str, str]) -> bool:
    """Return whether variables announce a process manager and other tasks."""
    manager = environ.get(DESCRIPTOR) or environ.get(PORT)
    return bool(manager) and environ.get(SIZE) != "1"


def finalize(environ: Mapping[str, str]) -> None:
    """Tell the process manager that this task ends, and will not use MPI."""
    with contextlib.suppress(*_FAULTS):
        if environ.get(DESCRIPTOR):
            _Manager(int(environ[DESCRIPTOR])).ask("cmd=finalize")


def finalize_at_end(environ: Mapping[str, str]) -> None:
    """Finalize when this process has ended, also after an exec; see `finalize`."""
    if not environ.get(DESCRIPTOR):
        return
    try:
        manager = int(environ[DESCRIPTOR])
        process = os.pidfd_open(os.getpid())
        try:
            files = manager, process
            programs.start("finalize_pmi", *map(str, files), pass_fds=files)
        finally:
            os.close(process)
    except (ValueError, OSError):  # an old kernel, a container
        finalize(environ)


_NUMBER = "[0-9]{1,7}"
_BLOCK = rf"(?:\({_NUMBER},{_NUMBER},{_NUMBER}\)|{_NUMBER})"
_PART = rf"(?:{_BLOCK}|\[{_BLOCK}(?:,{_BLOCK})*\]x{_NUMBER})"


def parse_mapping(text: str, size: int) -> tuple[int, ...]:
    """Return the node of each rank from ``(vector,(0,3,1))``; empty if malformed.

    The example means: from node 0, three nodes with one task each. MPICH 5 writes ``2``
    for ``(2,1,1)``, and ``[...]x3`` for three repetitions. The list repeats while tasks
    are left.
    """
    if not re.fullmatch(rf"\(vector,{_PART}(,{_PART})*\)", text):
        return ()
    blocks = list(itertools.islice(_blocks(text, size), size))
    node_of_task = (
        node
        for first, nodes, tasks in itertools.cycle(blocks)
        for node in range(first, first + nodes)
        for _ in range(tasks)
    )
    order = list(itertools.islice(node_of_task, size))
    numbers = {node: number for number, node in enumerate(dict.fromkeys(order))}
    return tuple(numbers[node] for node in order)


def _blocks(text: str, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield first node, number of nodes, and tasks on each, without empty blocks.

    A repetition is limited to ``most``.
    """
    for part in re.findall(_PART, text):
        inside, _, times = part.partition("]x")
        for _ in range(min(int(times or 1), most)):
            for block in re.findall(_BLOCK, inside):
                numbers = [int(number) for number in re.findall(_NUMBER, block)]
                first, nodes, tasks = numbers if len(numbers) > 1 else (*numbers, 1, 1)
                if nodes and tasks:
                    yield first, nodes, tasks


class _Manager:
    """A connection to the process manager; each question and each answer is a line."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._store = ""

    def start(self) -> None:
        self.ask("cmd=init pmi_version=1 pmi_subversion=1")
        self._store = self.ask("cmd=get_my_kvsname").get("kvsname", "")

    def ask(
        self, line: str, wait: Callable[[float], None] | None = None
    ) -> dict[str, str]:
        data = line.encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]
        words = (word.partition("=") for word in self.read(wait).split())
        return {name: value for name, _, value in words}

    def put(self, key: str, value: str) -> None:
        self.ask(f"cmd=put kvsname={self._store} key={key} value={value}")

    def get(self, key: str) -> str:
        answer = self.ask(f"cmd=get kvsname={self._store} key={key}")
        return answer.get("value", "") if answer.get("rc") == "0" else ""

    def read(self, wait: Callable[[float], None] | None = None) -> str:
        line, sources = b"", [self._descriptor]
        limit = math.inf if wait else limits.PMI_TIMEOUT
        while not line.endswith(b"\n"):
            if not waiting.until(
                lambda: select.select(sources, [], [], limits.WAIT_PAUSE)[0],
                limit,
                wait,
                pause=0,
            ):
                raise PmiError("no answer")
            byte = os.read(self._descriptor, 1)
            if not byte or len(line) > _LONGEST:
                raise PmiError("no line")
            line += byte
        return line.decode(errors="replace")


@contextlib.contextmanager
def _connection(environ: Mapping[str, str]) -> Iterator[_Manager]:
    if environ.get(DESCRIPTOR):
        yield _Manager(int(environ[DESCRIPTOR]))
        return
    host, _, port = environ.get(PORT, "").rpartition(":")
    if not host:
        raise PmiError("no process manager")
    with socket.create_connection((host, int(port)), limits.PMI_TIMEOUT) as connection:
        connection.settimeout(None)
        manager = _Manager(connection.fileno())
        manager.ask(f"cmd=initack pmiid={environ.get(PORT_ID, environ.get(RANK))}")
        for _ in ("size", "rank", "debug"):
            manager.read()
        yield manager
        manager.ask("cmd=finalize")

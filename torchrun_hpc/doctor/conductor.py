"""Task 0 of the doctor, which asks all tasks and collects their records."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torchrun_hpc import limits, waiting, wire
from torchrun_hpc.doctor import judgement, summary
from torchrun_hpc.doctor.launch import LaunchEnd, LaunchPart, cause_of
from torchrun_hpc.doctor.link import MOST_BYTES, Peer, merged
from torchrun_hpc.doctor.results import Link, NodeReport, size
from torchrun_hpc.errors import Message, count
from torchrun_hpc.rendezvous.errors import JobFailedError
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torchrun_hpc.doctor.judgement import Pair
    from torchrun_hpc.doctor.output import Tell
    from torchrun_hpc.doctor.place import Place
    from torchrun_hpc.doctor.results import DoctorReport
    from torchrun_hpc.rendezvous.client import Client

_T = TypeVar("_T")

_LOOKS = 3  # measurements of a doubtful pair
_TURNS_AGAIN = 4  # rounds with doubtful pairs: a bad node has many
_LAUNCHES = 2  # another one excludes a node that ended the first
_USUAL_MTU = 1500

# A worker repeats each operation for `limits.REPEAT_TIME`, at most 20 times after two
# others. Sums go twice, the others once; and each size is a quarter of the next one.
_OPERATIONS, _SIZES, _MOST = 6, 4, 20


@dataclass(frozen=True)
class Shown:
    """The reply of a task: its node's rank, and the report if it is the first task."""

    node_rank: int
    node: NodeReport | None = None


@dataclass(frozen=True)
class Turn:
    """Pairs that measure at the same time: a name, and each node's partner by rank."""

    name: str
    partners: Mapping[int, int]


@dataclass(frozen=True)
class TaskQuestion(Generic[_T]):
    """A question to tasks, what a task has done if it replies, and the reply's type."""

    name: str
    done: str
    form: type[_T]


SHOW = TaskQuestion("show", "tasks have joined", Shown)
PEERS = TaskQuestion("peers", "nodes know all others", bool)
MEASURE = TaskQuestion("measure", "nodes have measured a pair", Link)
LAUNCH = TaskQuestion("launch", "tasks have finished the launch", LaunchEnd)
STOP, END = "stop", "end"  # have no reply


class Conductor:
    """Task 0 of the examination."""

    def __init__(self, place: Place, tell: Tell) -> None:
        self._place = place
        self._tell = tell
        self._records = summary.Records()
        self._client: Client
        self._node_of: dict[int, int] = {}  # each task's node
        self._first: dict[int, int] = {}  # each node's first task

    def conduct(self, client: Client) -> DoctorReport:
        """Ask all tasks, and return the report."""
        self._client, tasks = client, range(self._place.task.size)
        shown = self._ask(SHOW, None, tasks)
        for task, reply in sorted(shown.items()):
            self._node_of[task] = reply.node_rank
            if reply.node is not None:
                self._first[reply.node_rank] = task
                self._records.nodes[reply.node_rank] = reply.node
        self._records.missing = sorted({*tasks} - shown.keys())
        self._measure_pairs()
        self._launch()
        client.ask_all(END, lambda _: None, self._records.missing)
        return summary.report(self._records, self._place)

    def _ask(
        self, what: TaskQuestion[_T], about: Any, tasks: Iterable[int], least: float = 0
    ) -> dict[int, _T]:
        """Ask tasks; return the replies by task, in the order of their arrival.

        ``least`` is the shortest wait in seconds.
        """
        asked, client = {*tasks}, self._client

        def wait(arrived: Callable[[], Mapping[int, Any]]) -> None:
            def report(waited: float) -> None:
                number = f"{len(asked & arrived().keys())} of {len(asked)}"
                after = f"after {waited:.0f} s of at most {limit:.0f} s"
                self._progress(f"{number} {what.done} {after}")

            def are_all() -> bool:
                return asked <= arrived().keys() or client.state.failure is not None

            def has_failed() -> bool:
                replies = arrived()
                return what == LAUNCH and any(
                    each is None or (isinstance(each, dict) and each.get("code"))
                    for each in map(replies.get, asked & replies.keys())
                )

            limit = max(self._place.wishes.timeout, least)
            waiting.until(lambda: are_all() or has_failed(), limit, report)
            limit = limits.FAILED_LAUNCH_TIMEOUT
            if has_failed() and not waiting.until(are_all, limit, report):
                client.ask_all(STOP, lambda _: None)
                waiting.until(are_all, limit, report)
            if (failure := client.state.failure) is not None:
                raise JobFailedError(failure)

        replies = {}
        for task, reply in client.ask_all(what.name, wait, about).items():
            with contextlib.suppress(WireError):  # a reply of another form
                if task in asked:
                    replies[task] = wire.decode(what.form, reply)
        return replies

    def _progress(self, text: str) -> None:
        self._tell(Message("HPC177", text))

    # --- pairs --------------------------------------------------------------------

    def _measure_pairs(self) -> None:
        records, hung = self._records, self._records.hung.keys()
        nodes = [node for node in records.nodes.values() if node.address and node.port]
        turns = judgement.rounds([node.rank for node in nodes])
        looks = defaultdict[Any, list[Link]](list)
        if turns:
            traffic = size(sum(map(_expected, nodes)) * len(turns))
            self._progress(
                f"{count(len(nodes), 'node')}: {count(sum(map(len, turns)), 'pair')} "
                f"in {count(len(turns), 'round')}, about {traffic} of traffic"
            )
            peers = [wire.encode(_peer(node)) for node in nodes]
            tasks = [self._first[node.rank] for node in nodes]
            self._ask(PEERS, peers, tasks)
        for look in range(_LOOKS):
            if look:
                doubtful = judgement.doubtful(_best(looks))
                turns = judgement.disjoint(doubtful)[:_TURNS_AGAIN]
            for number, together in enumerate(turns):
                left = [pair for pair in together if hung.isdisjoint(pair)]
                for link in self._measured(f"{look}/{number}", left):
                    looks[link.pair].append(link)
        records.links = _best(looks)

    def _measured(self, name: str, together: Sequence[Pair]) -> Iterator[Link]:
        """Let pairs measure; yield the links of pairs in which both replied."""
        partners = dict(together) | {second: first for first, second in together}
        turn = wire.encode(Turn(name, partners))
        tasks = [self._first[node] for node in partners]
        replies = self._ask(MEASURE, turn, tasks, limits.PAIR_TIMEOUT)
        halves = {self._node_of[task]: half for task, half in replies.items()}
        hung = partners.keys() - halves.keys()
        self._records.hung |= dict.fromkeys(sorted(hung), "during the measurements")
        for first, second in together:
            if hung.isdisjoint((first, second)):
                yield merged(halves[first], halves[second])

    # --- torch's collectives ------------------------------------------------------

    def _launch(self) -> None:
        records = self._records
        lost = {*judgement.unusable(records.links), *records.hung}
        hosts = records.hosts(self._place.meeting)
        for number in range(_LAUNCHES):
            able = records.nodes.keys() - lost
            tasks = {task: node for task, node in self._node_of.items() if node in able}
            if not tasks:
                return
            records.rows, records.workers = [], []
            ends = self._run(tasks, number)
            for task, end in ends.items():
                records.keep(tasks[task], end)
            hung = {node for task, node in tasks.items() if task not in ends}
            records.hung |= dict.fromkeys(sorted(hung), "during the launch")
            text, blamed = cause_of(ends, tasks, hosts)
            if text and (blamed or not hung):  # otherwise a consequence
                records.causes.append((text, blamed))
            lost |= {*blamed, *hung}
            if not (blamed or hung):
                return

    def _run(self, tasks: Mapping[int, int], number: int) -> dict[int, LaunchEnd]:
        nodes = [self._records.nodes[rank] for rank in sorted({*tasks.values()})]
        is_direct = self._place.mode.is_direct
        workers = len(tasks) if is_direct else sum(node.workers for node in nodes)
        hosts = tuple(node.host for node in nodes)
        part = LaunchPart(number, tasks, hosts, nodes[0].address or nodes[0].host)
        text = f"launching {count(workers, 'worker')}: a test of each device"
        if workers > 1:
            moved = size(_expected_of_collectives(self._place.wishes.max_bytes, nodes))
            text += f", then torch's collectives with about {moved} in and out of each"
        self._progress(text)
        limit = self._place.wishes.limit + limits.LAUNCH_MARGIN
        return self._ask(LAUNCH, wire.encode(part), tasks, limit)


def _best(looks: Mapping[Pair, Sequence[Link]]) -> list[Link]:
    return [judgement.best_of(*looks[pair]) for pair in sorted(looks)]


def _speed(node: NodeReport) -> float:
    """Return the bytes per second of a node's interface; infinity if unknown."""
    return node.job_interface.speed_mbit * 1e6 / 8 or math.inf


def _expected(node: NodeReport) -> float:
    return min(MOST_BYTES, _speed(node) * limits.SEND_TIME)


def _expected_of_collectives(max_bytes: int, nodes: Sequence[NodeReport]) -> float:
    in_time = limits.REPEAT_TIME * min(map(_speed, nodes))
    sizes = [max_bytes / 4**number for number in range(_SIZES)]
    return _OPERATIONS * sum((min(_MOST * n, in_time) + 2 * n for n in sizes), 0.0)


def _peer(node: NodeReport) -> Peer:
    mtu = node.job_interface.mtu or _USUAL_MTU
    return Peer(node.rank, node.address, node.port, mtu)

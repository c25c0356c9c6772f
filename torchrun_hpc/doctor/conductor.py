"""Task 0 of the doctor, which asks all tasks and collects their findings."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from torchrun_hpc import waiting, wire
from torchrun_hpc.doctor import causes, judgement, pairs, summary
from torchrun_hpc.doctor.launch import Ended, Part
from torchrun_hpc.doctor.link import MOST_BYTES, SENDING, Peer, merged
from torchrun_hpc.doctor.member import (
    END,
    LAUNCH,
    MEASURE,
    PEERS,
    SHOW,
    STOP,
    Shown,
    Turn,
)
from torchrun_hpc.doctor.results import Link
from torchrun_hpc.doctor.units import size
from torchrun_hpc.errors import Message, count
from torchrun_hpc.rendezvous.errors import JobFailedError
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torchrun_hpc.doctor.output import Tell
    from torchrun_hpc.doctor.pairs import Pair
    from torchrun_hpc.doctor.place import Place, Wishes
    from torchrun_hpc.doctor.results import Node, Report
    from torchrun_hpc.rendezvous.client import Client

_T = TypeVar("_T")

# Seconds: for a pair, in which one node can wait for the other; and for a launch to
# start and to end, besides the collectives.
_PAIR_TIMEOUT = 20.0
_GRACE = 160.0
_REST = 20.0  # for a failed launch to end everywhere

_LOOKS = 3  # measurements of a doubtful pair
_TURNS_AGAIN = 4  # rounds with doubtful pairs: a bad node has many
_LAUNCHES = 2  # the second excludes a node that ended the first
_USUAL_MTU = 1500

# A worker repeats each operation for 0.1 s, at most 20 times after two others. Sums go
# twice, the others once; and each size is a quarter of the next one.
_OPERATIONS, _SIZES, _MOST, _LONG_ENOUGH = 6, 4, 20, 0.1


class Conductor:
    """Task 0 of the examination."""

    def __init__(self, here: Place, wishes: Wishes, tell: Tell) -> None:
        self._here = here
        self._wishes = wishes
        self._tell = tell
        self._found = summary.Found()
        self._client: Client
        self._node_of: dict[int, int] = {}  # each task's node
        self._first: dict[int, int] = {}  # each node's first task

    def conduct(self, client: Client) -> Report:
        """Ask all tasks, and return the report."""
        self._client, found, tasks = client, self._found, range(self._here.task.size)
        shown = self._ask(SHOW, None, tasks, "tasks have joined", Shown)
        for task, each in sorted(shown.items()):
            self._node_of[task] = each.node_rank
            if each.node is not None:
                self._first[each.node_rank] = task
                found.nodes[each.node_rank] = each.node
        found.missing = sorted({*tasks} - shown.keys())
        self._measure_pairs()
        self._launch()
        client.ask_all(END, lambda _: None, found.missing)
        return summary.report(found, self._here, self._wishes.timeout)

    def _ask(  # noqa: PLR0913, PLR0917 - the last one is of a launch
        self,
        what: str,
        about: Any,
        tasks: Iterable[int],
        have: str,
        form: type[_T],
        least: float = 0,
    ) -> dict[int, _T]:
        """Ask tasks; return the replies by task, in the order of their arrival.

        ``have``, for progress messages, is what tasks have then done. ``form`` is the
        type of the replies. ``least`` is the shortest wait in seconds.
        """
        asked, client = {*tasks}, self._client

        def wait(arrived: Callable[[], Mapping[int, Any]]) -> None:
            def until(is_done: Callable[[], bool], limit: float) -> bool:
                def report(waited: float) -> None:
                    done = f"{len(asked & arrived().keys())} of {len(asked)} {have}"
                    after = f"after {waited:.0f} s of at most {limit:.0f} s"
                    self._progress(f"{done} {after}")

                return waiting.until(is_done, limit, report)

            def are_all() -> bool:
                return asked <= arrived().keys() or client.state.failure is not None

            def has_failed() -> bool:
                replies = arrived()
                return what == LAUNCH and any(
                    each is None or (isinstance(each, dict) and each.get("code"))
                    for each in map(replies.get, asked & replies.keys())
                )

            until(lambda: are_all() or has_failed(), max(self._wishes.timeout, least))
            if has_failed() and not until(are_all, _REST):
                client.ask_all(STOP, lambda _: None)
                until(are_all, _REST)
            if (failure := client.state.failure) is not None:
                raise JobFailedError(failure)

        replies = client.ask_all(what, wait, about)
        found = {}
        for task in [*replies]:
            with contextlib.suppress(WireError):  # a reply of another form
                found[task] = wire.decode(form, replies[task])
        return {task: reply for task, reply in found.items() if task in asked}

    def _progress(self, text: str) -> None:
        self._tell(Message("HPC177", text))

    # --- pairs --------------------------------------------------------------------

    def _measure_pairs(self) -> None:
        found = self._found
        nodes = [node for node in found.nodes.values() if node.address and node.port]
        wanted = pairs.rounds([node.rank for node in nodes])
        looks = defaultdict[Any, list[Link]](list)
        if wanted:
            traffic = size(sum(map(_expected, nodes)) * len(wanted))
            self._progress(
                f"{count(len(nodes), 'node')}: {count(sum(map(len, wanted)), 'pair')} "
                f"in {count(len(wanted), 'round')}, about {traffic} of traffic"
            )
            peers = [wire.encode(_peer(node)) for node in nodes]
            tasks = [self._first[node.rank] for node in nodes]
            self._ask(PEERS, peers, tasks, "nodes know all others", bool)
        for look in range(_LOOKS):
            if look:
                doubtful = judgement.doubtful(_best(looks))
                wanted = pairs.disjoint(doubtful)[:_TURNS_AGAIN]
            for number, together in enumerate(wanted):
                left = [pair for pair in together if found.hung.keys().isdisjoint(pair)]
                turn = f"{look}/{number}"
                for link in self._measured(turn, left):
                    looks[link.first, link.second].append(link)
        found.links = _best(looks)

    def _measured(self, name: str, together: Sequence[Pair]) -> Iterator[Link]:
        """Let pairs measure; yield the links of pairs in which both replied."""
        partners = {a: b for pair in together for a, b in (pair, pair[::-1])}
        turn = wire.encode(Turn(name, partners))
        tasks = [self._first[node] for node in partners]
        have = "nodes have measured a pair"
        seen = self._ask(MEASURE, turn, tasks, have, Link, _PAIR_TIMEOUT)
        halves = {self._node_of[task]: half for task, half in seen.items()}
        hung = partners.keys() - halves.keys()
        self._found.hung |= dict.fromkeys(sorted(hung), "during the measurements")
        for one, other in together:
            if hung.isdisjoint((one, other)):
                yield merged(halves[one], halves[other])

    # --- torch's collectives ------------------------------------------------------

    def _launch(self) -> None:
        found = self._found
        lost = {*judgement.unusable(found.links), *found.hung}
        hosts = found.hosts(self._here.meeting)
        for number in range(_LAUNCHES):
            able = found.nodes.keys() - lost
            tasks = {task: node for task, node in self._node_of.items() if node in able}
            if not tasks:
                return
            found.rows, found.workers = [], []
            ends = self._run(tasks, number)
            for task, end in ends.items():
                self._keep(tasks[task], end)
            hung = {node for task, node in tasks.items() if task not in ends}
            found.hung |= dict.fromkeys(sorted(hung), "during the launch")
            text, blamed = causes.cause(ends, tasks, hosts)
            if text and (blamed or not hung):  # otherwise a consequence
                found.causes.append((text, blamed))
            lost |= {*blamed, *hung}
            if not (blamed or hung):
                return

    def _run(self, tasks: Mapping[int, int], number: int) -> dict[int, Ended]:
        nodes = [self._found.nodes[rank] for rank in sorted({*tasks.values()})]
        is_direct = self._here.mode.is_direct
        workers = len(tasks) if is_direct else sum(node.workers for node in nodes)
        hosts = tuple(node.host for node in nodes)
        part = Part(number, tasks, hosts, nodes[0].address or nodes[0].host)
        moved = size(_expected_of_collectives(self._wishes.max_bytes, nodes))
        more = f", then torch's collectives with about {moved} in and out of each"
        text = f"launching {count(workers, 'worker')}: a test of each device"
        self._progress(text + more * (workers > 1))
        have, limit = "tasks have finished the launch", self._wishes.limit + _GRACE
        return self._ask(LAUNCH, wire.encode(part), tasks, have, Ended, limit)

    def _keep(self, rank: int, end: Ended) -> None:
        found, node = self._found, self._found.nodes[rank]
        found.rows += end.rows
        found.workers += end.workers
        found.backend = end.backend or found.backend
        for code, text, is_error in end.said:
            own = text.removeprefix(f"on {node.host}: ")
            if causes.is_refused(end) or not is_error:
                found.said.setdefault((code, own, is_error), set()).add(rank)
        if end.torch is not None:
            found.nodes[rank] = replace(node, torch=end.torch.after(node.torch))


def _best(looks: Mapping[Pair, Sequence[Link]]) -> list[Link]:
    return [judgement.best_of(*looks[pair]) for pair in sorted(looks)]


def _speed(node: Node) -> float:
    """Return the bytes per second of a node's interface; infinity if unknown."""
    own = (i.speed_mbit for i in node.interfaces if i.name == node.interface)
    return next(own, 0) * 1e6 / 8 or math.inf


def _expected(node: Node) -> float:
    return min(MOST_BYTES, _speed(node) * SENDING)


def _expected_of_collectives(max_bytes: int, nodes: Sequence[Node]) -> float:
    in_time = _LONG_ENOUGH * min(map(_speed, nodes))
    sizes = [max_bytes / 4**number for number in range(_SIZES)]
    return _OPERATIONS * sum((min(_MOST * n, in_time) + 2 * n for n in sizes), 0.0)


def _peer(shown: Node) -> Peer:
    mtu = next((i.mtu for i in shown.interfaces if i.name == shown.interface), 0)
    return Peer(shown.rank, shown.address, shown.port, mtu or _USUAL_MTU)

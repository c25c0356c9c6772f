"""What task 0 does: it asks all tasks, and collects what they have found."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from torchrun_hpc import wire
from torchrun_hpc.doctor import causes, judgement, pairs, summary
from torchrun_hpc.doctor.launch import Ended, Part
from torchrun_hpc.doctor.link import MOST_BYTES, SENDING, SILENT, Peer, Side, merged
from torchrun_hpc.doctor.member import (
    END,
    IMPORT_TIMEOUT,
    LAUNCH,
    MEASURE,
    PEERS,
    SHOW,
    TaskRecord,
    Turn,
)
from torchrun_hpc.doctor.results import Link, Torch
from torchrun_hpc.errors import Message, count
from torchrun_hpc.rendezvous.errors import JobFailedError
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torchrun_hpc.doctor.member import Member
    from torchrun_hpc.doctor.pairs import Pair
    from torchrun_hpc.doctor.results import Node, Report
    from torchrun_hpc.rendezvous.client import Client

_T = TypeVar("_T")

# Seconds.
_GRACE = 20.0  # more than the limit that the others have themselves
_SILENT_TIMEOUT = 5.0  # instead of the limit, for nodes that do not answer others
_POLL = 0.02
_REPORT_EVERY = 5.0

_LOOKS = 3  # at a pair that is doubtful
_TURNS_AGAIN = 4  # with pairs that are doubtful: a bad node has many
_LAUNCHES = 2  # the second one without a node that has ended the first
_USUAL_MTU = 1500
_NO_TORCH = "HPC018"

# A worker repeats each operation for 0.1 s, at most 20 times after two others. Sums go
# twice, the others once; and each size is a quarter of the next one.
_OPERATIONS, _SIZES, _MOST, _LONG_ENOUGH = 6, 4, 20, 0.1


class Conductor:
    """Task 0 of the examination.

    Args:
        member: What this task does as all do.
        tell: Shows a person how far it is.
    """

    def __init__(self, member: Member, tell: Callable[[Message], None]) -> None:
        self._member = member
        self._here = member.here
        self._timeout = member.wishes.timeout
        self._tell = tell
        self._found = summary.Found()
        self._first: dict[int, int] = {}  # the first task of each node
        self._client: Client

    def conduct(self, client: Client) -> Report:
        """Ask all tasks for all there is to know, and return the report."""
        self._client, size = client, self._here.task.size
        shown = self._ask(SHOW, None, range(size), "tasks have not come yet")
        tasks = [
            task
            for rank, task in sorted(_read(shown, TaskRecord).items())
            if self._is_valid(task, rank)
        ]
        self._found.missing = sorted({*range(size)} - {task.rank for task in tasks})
        for task in tasks:
            if task.node is not None:
                self._first[task.node_rank] = task.rank
                self._found.nodes[task.node_rank] = task.node
        self._measure_pairs()
        self._launch(tasks)
        client.questions.ask_all(END, lambda _: None)
        return summary.report(self._found, self._here, self._timeout)

    def _is_valid(self, task: TaskRecord, rank: int) -> bool:
        return (
            task.rank == rank
            and task.node_rank in range(self._here.meeting.nodes)
            and (task.node is None or task.node.rank == task.node_rank)
        )

    # --- pairs --------------------------------------------------------------------

    def _measure_pairs(self) -> None:
        """Let all nodes measure, and those pairs again that are doubtful."""
        nodes = self._found.nodes.values()
        peers = {n.rank: _peer(n) for n in nodes if n.address and n.port}
        wanted = pairs.rounds([*peers])
        looks = defaultdict[Any, list[Link]](list)
        if wanted:
            number, traffic = sum(map(len, wanted)), sum(map(_expected, nodes))
            self._progress(
                f"{count(len(peers), 'node')}: {count(number, 'pair')} in "
                f"{count(len(wanted), 'round')}, about "
                f"{_size(traffic * len(wanted))} of traffic"
            )
            known = [wire.encode(peer) for peer in peers.values()]
            tasks = [self._first[rank] for rank in peers]
            self._ask(PEERS, known, tasks, "tasks do not answer")
        for look in range(_LOOKS):
            if look:
                doubtful = judgement.doubtful(_best(looks))
                wanted = pairs.disjoint(doubtful)[:_TURNS_AGAIN]
            for number, together in enumerate(wanted):
                left = [p for p in together if self._found.hung.keys().isdisjoint(p)]
                turn = Turn(f"{look}/{number}", tuple(left), look == number == 0)
                for pair, link in self._measured(turn).items():
                    looks[pair].append(link)
        self._found.links = _best(looks)
        self._found.steady = judgement.steadiness(looks.values())

    def _measured(self, turn: Turn) -> dict[Pair, Link]:
        """Let pairs measure; return the links of those of which a node has answered."""
        tasks = {self._first[node]: node for node in itertools.chain(*turn.pairs)}
        partner = {a: b for pair in turn.pairs for a, b in (pair, pair[::-1])}

        def are_silent(left: set[int], replies: Mapping[int, Any]) -> bool:
            """Return whether others know of all that are left that they are silent."""
            of_others = (replies.get(self._first[partner[tasks[t]]]) for t in left)
            return all(side and side.get("problem") == SILENT for side in of_others)

        what = "nodes still measure pairs"
        replies = self._ask(
            MEASURE, wire.encode(turn), tasks, what, are_silent=are_silent
        )
        sides = {tasks[task]: side for task, side in _read(replies, Side).items()}
        hung = sorted({*tasks.values()} - sides.keys())
        self._found.hung |= dict.fromkeys(hung, "during the measurement of the pairs")
        return {
            (first, second): merged((first, second), sides[first], sides.get(second))
            for first, second in turn.pairs
            if first in sides
        }

    # --- torch's collectives ------------------------------------------------------

    def _launch(self, tasks: Sequence[TaskRecord]) -> None:
        """Launch the collectives; once more without a node that has ended them."""
        found = self._found
        lost = {*judgement.unusable(found.links), *found.hung}
        for number in range(_LAUNCHES):
            able = [task for task in tasks if task.node_rank not in lost]
            if not able:
                return
            ends = self._run(able, number)
            nodes = {task.rank: task.node_rank for task in able}
            hung = {node for task, node in nodes.items() if task not in ends}
            found.hung |= dict.fromkeys(sorted(hung), "during the launch")
            for task, end in ends.items():
                self._keep(nodes[task], end)
            text, blamed = causes.cause(ends, nodes, self._hosts)
            if text:
                found.causes.append((text, blamed))
            if not (blamed or hung):
                return
            lost |= {*blamed, *hung}

    def _run(self, able: Sequence[TaskRecord], number: int) -> dict[int, Ended]:
        """Let these tasks launch; return how that has ended, by task as they reply."""
        tasks = {task.rank: task.node_rank for task in able}
        nodes = sorted({*tasks.values()})
        part = Part(
            number,
            tasks,
            tuple(self._hosts[node] for node in nodes),
            able[0].address,
            is_whole=len(able) == self._here.task.size,
        )
        size = sum(task.workers for task in able)
        moved = _size(self._expected_of_collectives())
        text = f"a launch with {count(size, 'worker')}: a test of each device"
        more = f", and torch's collectives, about {moved} in and out of each"
        self._progress(text + more * (size > 1))
        limit = IMPORT_TIMEOUT + self._member.launch_timeout + _GRACE
        what = "tasks have not ended the launch"
        replies = self._ask(LAUNCH, wire.encode(part), tasks, what, limit)
        self._found.rows, self._found.workers = [], []
        return _read(replies, Ended)

    def _keep(self, rank: int, end: Ended) -> None:
        """Keep what a launch has found on a task of a node."""
        found, torch = self._found, end.torch
        found.rows += end.rows
        found.workers += end.workers
        found.backend = end.backend or found.backend
        for code, text, is_error in end.said:
            own = text.removeprefix(f"on {self._hosts[rank]}: ")
            if code == _NO_TORCH:
                torch = Torch(problem=own)
            elif causes.is_refused(end) or not is_error:
                ranks = found.said.setdefault((code, own, is_error), [])
                ranks += [rank] * (rank not in ranks)
        if torch is not None and rank in found.nodes:
            found.nodes[rank] = replace(found.nodes[rank], torch=torch)

    @property
    def _hosts(self) -> list[str]:
        nodes, size = self._found.nodes, self._here.meeting.nodes
        return [nodes[rank].host if rank in nodes else "" for rank in range(size)]

    def _expected_of_collectives(self) -> float:
        """Return about how many bytes go in and out of a worker."""
        speeds = [_speed(node) for node in self._found.nodes.values()]
        sizes = [self._member.wishes.max_bytes / 4**n for n in range(_SIZES)]
        in_time = _LONG_ENOUGH * min(speeds)
        each = (min(_MOST * size, in_time) + 2 * size for size in sizes)
        return _OPERATIONS * float(sum(each))

    # --- questions ----------------------------------------------------------------

    def _ask(  # noqa: PLR0913, PLR0917 - the last two are of one question each
        self,
        what: str,
        about: Any,
        tasks: Iterable[int],
        waits: str,
        least: float = 0,
        are_silent: Callable[[set[int], Mapping[int, Any]], bool] = lambda *_: False,
    ) -> dict[int, Any]:
        """Ask tasks, and wait as long as anything goes on; return what came, by rank.

        Args:
            what: The question.
            about: What they need to know.
            tasks: Their ranks.
            waits: Of those that have not replied yet, for a person.
            least: Seconds that they have in any case.
            are_silent: Returns whether nothing is to be expected of those that are
                left.
        """
        asked, own = {*tasks}, self._here.task.rank

        def wait(replies: dict[int, Any]) -> None:
            def answer() -> None:
                replies[own] = self._member.answer(what, about)

            if own in asked:
                threading.Thread(target=answer, daemon=True).start()
            start = since = reported = time.monotonic()
            before = 0
            while left := asked - replies.keys():
                now = time.monotonic()
                if len(replies) != before:
                    before, since = len(replies), now
                limit = max(self._timeout, least)
                if are_silent(left, replies):
                    limit = _SILENT_TIMEOUT
                if now - since > limit:
                    return
                if now - reported > _REPORT_EVERY:
                    reported = now
                    whole = f"{len(left)} of {len(asked)}"
                    self._progress(f"{whole} {waits} after {now - start:.0f} s")
                if self._client.failure is not None:
                    raise JobFailedError(self._client.failure)
                time.sleep(_POLL)

        found = self._client.questions.ask_all(what, wait, about)
        return {task: found[task] for task in [*found] if task in asked}

    def _progress(self, text: str) -> None:
        self._tell(Message("HPC177", text))


def _best(looks: Mapping[Pair, Sequence[Link]]) -> list[Link]:
    return [judgement.best_of(*looks[pair]) for pair in sorted(looks)]


def _read(replies: Mapping[int, Any], form: type[_T]) -> dict[int, _T]:
    """Return what other processes have written, but for what has not that form."""
    found = {}
    for task, reply in replies.items():
        with contextlib.suppress(WireError):
            found[task] = wire.decode(form, reply)
    return found


def _size(number: float) -> str:
    """Write a number of bytes."""
    is_large = number >= 2**30
    return f"{number / 2**30:.1f} GiB" if is_large else f"{number / 2**20:.1f} MiB"


def _speed(node: Node) -> float:
    """Return the bytes per second of a node's interface; infinity if not known."""
    own = (i.speed_mbit for i in node.interfaces if i.name == node.interface)
    return next(own, 0) * 1e6 / 8 or math.inf


def _expected(node: Node) -> float:
    """Return about how many bytes a node sends to another one."""
    return min(MOST_BYTES, _speed(node) * SENDING)


def _peer(shown: Node) -> Peer:
    """Return what the other nodes have to know of one."""
    up = [each for each in shown.interfaces if each.is_up and each.addresses]
    own = [each for each in up if each.name == shown.interface]
    return Peer(
        rank=shown.rank,
        address=shown.address,
        port=shown.port,
        mtu=own[0].mtu if own else _USUAL_MTU,
        others={each.name: each.addresses[0] for each in up if each not in own},
    )

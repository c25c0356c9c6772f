"""What task 0 does besides what each task does: it says what is next, and collects."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

from torchrun_hpc import wire
from torchrun_hpc.doctor import judgement, pairs, summary
from torchrun_hpc.doctor.examiner import IMPORT_TIMEOUT, LOOKS, Ended, TaskRecord
from torchrun_hpc.doctor.link import MOST_BYTES
from torchrun_hpc.doctor.results import Link, Torch
from torchrun_hpc.doctor.workers import NO_END
from torchrun_hpc.errors import Message, count
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrun_hpc.doctor.board import Board
    from torchrun_hpc.doctor.collectives import Settings
    from torchrun_hpc.doctor.examiner import Examiner
    from torchrun_hpc.doctor.pairs import Pair
    from torchrun_hpc.doctor.results import Node, Report

_T = TypeVar("_T")

# Seconds.
_GRACE = 5.0  # more than the limit that the others have themselves
_SILENT_TIMEOUT = 5.0  # instead of the limit, for nodes that have not answered others

_POLL, _POLL_EACH = 0.05, 0.002  # at least; and more where many are asked for
_REPORT_EVERY = 5.0
_ROUNDS_AGAIN = 4  # of pairs that are doubtful: a bad node has many
_USUAL_MTU = 1500

# How often a worker sends the largest size in one operation, at most: 22 times each
# size, where all but the largest two are a quarter of the next one.
_REPEATED = 22 * 7 / 3


class Conductor:
    """Task 0 of the examination.

    Args:
        examiner: What this task does as all do.
        tell: Shows a person how far it is.
    """

    def __init__(self, examiner: Examiner, tell: Callable[[Message], None]) -> None:
        self._examiner = examiner
        self._here = examiner.here
        self._options = examiner.options
        self._tell = tell
        self._found = summary.Found()

    def conduct(self, board: Board) -> Report:
        """Let all tasks do what is to be done, and return the report."""
        found, size = self._found, self._here.task.size
        keys = {rank: f"task/{rank}" for rank in range(size)}
        came = self._wait(board, keys, "tasks have not come yet")
        known = {rank: _received(value, TaskRecord) for rank, value in came.items()}
        tasks = [
            task
            for rank, task in sorted(known.items())
            if task is not None and self._is_valid(task, rank)
        ]
        found.missing = sorted(keys.keys() - {task["rank"] for task in tasks})
        found.nodes = [task["node"] for task in tasks if task["node"] is not None]
        able = self._collect_torch(board, tasks)
        self._measure_pairs(board)
        lost = {*judgement.unusable(found.links), *found.hung}
        self._run_collectives(
            board, [task for task in able if task["node_rank"] not in lost]
        )
        board.put("end", value=True)
        return summary.report(found, self._here, self._options.timeout)

    def _is_valid(self, task: TaskRecord, rank: int) -> bool:
        return (
            task["rank"] == rank
            and task["node_rank"] in range(self._here.meeting.nodes)
            and (task["node"] is None or task["node"]["rank"] == task["node_rank"])
        )

    def _collect_torch(
        self, board: Board, tasks: Sequence[TaskRecord]
    ) -> list[TaskRecord]:
        """Wait until torch is imported; return the tasks that have one."""
        keys = {task["rank"]: f"torch/{task['rank']}" for task in tasks}
        limit = IMPORT_TIMEOUT + _GRACE
        came = self._wait(board, keys, "tasks have not imported torch yet", limit)
        able = []
        for task in tasks:
            torch = _received(came.get(task["rank"]), Torch)
            if torch is None:
                self._found.hung[task["node_rank"]] = "while torch was imported"
            elif task["node"] is not None:
                task["node"]["torch"] = torch
            elif torch["problem"]:  # nothing else of this task is shown
                problem = f"task {task['rank']}: {torch['problem']}"
                self._found.problems[task["host"]] = problem
            if torch is not None and not torch["problem"]:
                able.append(task)
        return able

    def _measure_pairs(self, board: Board) -> None:
        """Let all nodes measure, and those pairs again that are doubtful."""
        members = [_peer(n) for n in self._found.nodes if n["address"] and n["port"]]
        board.put("members", members)
        wanted = pairs.rounds([each["rank"] for each in members])
        number, looks = sum(map(len, wanted)), defaultdict[Any, list[Link]](list)
        if number:
            again = (LOOKS - 1) * _ROUNDS_AGAIN * (len(members) // 2)
            most = (number + min(again, 2 * number)) * 2 * MOST_BYTES
            self._progress(
                f"{count(len(members), 'node')}: {count(number, 'pair')} in "
                f"{count(len(wanted), 'round')}, at most {_size(most)} of traffic"
            )
        for turn in range(LOOKS):
            if turn:
                doubtful = judgement.doubtful(_best(looks))
                wanted = pairs.disjoint(doubtful)[:_ROUNDS_AGAIN]
                board.put(f"again/{turn}", wanted)
            if not wanted:
                continue
            self._examiner.measure(board, members, wanted, turn)
            left = {each["rank"] for each in members} - self._found.hung.keys()
            keys = {rank: f"measured/{turn}/{rank}" for rank in left}
            ended = self._wait(board, keys, "nodes still measure pairs", are_nodes=True)
            hung = left - ended.keys()
            self._found.hung |= dict.fromkeys(hung, "while the pairs were measured")
            for pair in itertools.chain(*wanted):
                key = f"link/{turn}/{pair[0]}/{pair[1]}"
                link = _received(board.find(key), Link)
                if link is not None:
                    looks[pair].append(link)
        self._found.links = _best(looks)
        self._found.steady = judgement.steadiness(looks.values())

    def _run_collectives(self, board: Board, able: Sequence[TaskRecord]) -> None:
        """Let torch's collectives run on the tasks that are able to."""
        found, settings = self._found, {}
        size = sum(task["workers"] for task in able)
        if size > 1:
            settings = self._settings(able, size)
            # Sums go twice, gather once, and the root of a tree sends to all branches.
            moved = _REPEATED * (2 + 1 + 2 + math.ceil(math.log2(size)))
            again = 1 + (len({task["node_rank"] for task in able}) < size)  # in nodes
            most = _size(moved * again * self._options.max_bytes)
            self._progress(
                f"torch's collectives on {count(size, 'worker')}, at most {most} in "
                "and out of each"
            )
        elif self._here.task.size * self._here.workers > 1:
            reason = "fewer than two workers are able to, see the other findings"
            found.problems["no node has run them"] = reason
        for rank in range(self._here.task.size):
            board.put(f"workers/{rank}", settings.get(rank, []))
        self._examiner.work(board)
        keys = {rank: f"worked/{rank}" for rank in settings}
        what = "tasks have not ended torch's collectives"
        limit = self._options.collectives_timeout + _GRACE
        came = self._wait(board, keys, what, limit)
        failed: list[tuple[str, Ended]] = []
        for task in able if settings else ():
            ended = _received(came.get(task["rank"]), Ended)
            if ended is None:
                found.hung[task["node_rank"]] = "in torch's collectives"
                continue
            found.backend = found.backend or ended["backend"]
            found.rows += ended["rows"]
            if ended["problem"]:
                failed.append((task["host"], ended))
        found.problems |= _cause(failed)

    def _settings(
        self, able: Sequence[TaskRecord], size: int
    ) -> dict[int, list[Settings]]:
        """Return what the workers of each task are to know, by its rank."""
        ranks = itertools.count()
        nodes = sorted({task["node_rank"] for task in able})
        on_node, first = dict.fromkeys(nodes, 0), dict[int, int]()
        for task in able:
            first[task["rank"]] = on_node[task["node_rank"]]
            on_node[task["node_rank"]] += task["workers"]
        return {
            task["rank"]: [
                {
                    "rank": next(ranks),
                    "size": size,
                    "local_rank": first[task["rank"]] + local,
                    "local_size": on_node[task["node_rank"]],
                    "task_size": task["workers"],
                    "node_rank": nodes.index(task["node_rank"]),
                    "nodes": len(nodes),
                    "host": task["host"],
                    "address": able[0]["address"],
                    "port": able[0]["port"],
                    "max_bytes": self._options.max_bytes,
                    "timeout": self._options.collectives_timeout,
                }
                for local in range(task["workers"])
            ]
            for task in able
        }

    def _wait(
        self,
        board: Board,
        keys: Mapping[int, str],
        what: str,
        least: float = 0,
        *,
        are_nodes: bool = False,
    ) -> dict[int, Any]:
        """Wait for keys, as long as anything goes on; return what came, by rank.

        Args:
            board: Where they come.
            keys: One for each rank.
            what: Of those that have none yet, for a person.
            least: Seconds that they have in any case.
            are_nodes: Whether the ranks are those of nodes, of which others may know
                that they do not answer.
        """
        found, before = dict[int, Any](), (-1, -1)
        start = since = reported = time.monotonic()
        while True:
            left = [rank for rank in keys if rank not in found]
            came = {rank: board.find(keys[rank]) for rank in left}
            found |= {rank: value for rank, value in came.items() if value is not None}
            left = [rank for rank in left if rank not in found]
            if not left:
                return found
            now, state = time.monotonic(), (len(left), board.add("progress", 0))
            if state != before:
                before, since = state, now
            limit = max(self._options.timeout, least)
            if are_nodes and all(board.add(f"silent/{rank}", 0) for rank in left):
                limit = _SILENT_TIMEOUT
            if now - since > limit:
                return found
            if now - reported > _REPORT_EVERY:
                reported = now
                whole = f"{len(left)} of {len(keys)}"
                self._progress(f"{whole} {what} after {now - start:.0f} s")
            time.sleep(max(_POLL, len(left) * _POLL_EACH))

    def _progress(self, text: str) -> None:
        self._tell(Message("HPC177", text))


def _best(looks: Mapping[Pair, Sequence[Link]]) -> list[Link]:
    return [judgement.best_of(*looks[pair]) for pair in sorted(looks)]


def _cause(failed: Sequence[tuple[str, Ended]]) -> dict[str, str]:
    """Return where torch's collectives failed first, and why; nothing if they did not.

    Args:
        failed: Names of nodes, and how it ended there.
    """

    def order(each: tuple[str, Ended]) -> tuple[bool, bool, int]:
        problem = each[1]["problem"]
        is_late, is_killed = problem.startswith(NO_END), "was killed by" in problem
        return is_late, not is_killed, each[1]["order"]

    if not failed:
        return {}
    host, ended = min(failed, key=order)
    if ended["problem"].startswith(NO_END):  # on all, whichever hangs
        return {"all tasks": ended["problem"]}
    others = count(len(failed) - 1, "other task")
    also = f"; {others} failed after it" if len(failed) > 1 else ""
    return {host: ended["problem"] + also}


def _size(number: float) -> str:
    """Write a number of bytes."""
    is_large = number >= 2**30
    return f"{number / 2**30:.1f} GiB" if is_large else f"{number / 2**20:.1f} MiB"


def _received(value: Any, form: type[_T]) -> _T | None:
    """Return what another process has written; ``None`` if it has not that form."""
    with contextlib.suppress(WireError):
        return wire.decode(form, value)
    return None


def _peer(shown: Node) -> dict[str, Any]:
    """Return what the other nodes have to know of one."""
    up = [each for each in shown["interfaces"] if each["is_up"] and each["addresses"]]
    own = [each for each in up if each["name"] == shown["interface"]]
    return {
        "rank": shown["rank"],
        "address": shown["address"],
        "port": shown["port"],
        "mtu": own[0]["mtu"] if own else _USUAL_MTU,
        "others": {
            each["name"]: each["addresses"][0] for each in up if each not in own
        },
    }

"""The examination: what all tasks do, one thing after the other.

Task 0 conducts: it says what comes next, and collects.

=====================  =============================================================
key                    what the tasks tell each other
=====================  =============================================================
``task/RANK``          what a task shows of itself, and of its node
``torch/RANK``         what torch is there
``members``            the nodes that are there, and how to reach them
``link/TURN/A/B``      what two nodes have measured
``measured/TURN/RANK`` a node is through with all pairs of this turn
``again/TURN``         the pairs to be looked at once more
``silent/NODE``        how many nodes have got no answer of this one
``progress``           a number that grows as long as anything goes on
``workers/RANK``       what its workers are to run
``worked/RANK``        what became of that
``failed``             how many tasks have found that it has failed
``end``                there is no more
=====================  =============================================================
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shlex
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

from torchrun_hpc import network
from torchrun_hpc.commandline import command_line
from torchrun_hpc.commandline.options import wrong_line
from torchrun_hpc.doctor import judgement, node, pairs, place, results, summary
from torchrun_hpc.doctor.board import met
from torchrun_hpc.doctor.link import MOST_BYTES, SILENT, Links, Peer
from torchrun_hpc.doctor.results import Collective, Link, Node, NotMetError, Torch
from torchrun_hpc.doctor.workers import NO_END, Workers
from torchrun_hpc.errors import Message, count
from torchrun_hpc.launching import environment
from torchrun_hpc.launching.preflight import preflight
from torchrun_hpc.planning.endpoints import LOOPBACK
from torchrun_hpc.rendezvous import messages
from torchrun_hpc.rendezvous.client import JobFailedError
from torchrun_hpc.rendezvous.protocol import Kind
from torchrun_hpc.rendezvous.search import CoordinatorNotFoundError
from torchrun_hpc.reporting.description import check_form
from torchrun_hpc.schedulers import pmi

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrun_hpc.doctor.board import Board
    from torchrun_hpc.doctor.collectives import Settings
    from torchrun_hpc.doctor.pairs import Pair
    from torchrun_hpc.doctor.place import Place
    from torchrun_hpc.doctor.results import Report
    from torchrun_hpc.launching.abort import Known

    Members = Sequence[Mapping[str, Any]]  # the fields of each `Peer`

COMMAND = "python -m torchrun_hpc.doctor"

# Seconds: for the nodes to come, and for any progress of theirs, where nothing else is
# typed; to import torch; of torch's collectives, if not more is typed.
TIMEOUT = 60.0
_IMPORT_TIMEOUT = 120.0
_COLLECTIVES_TIMEOUT = 60.0
_GRACE = 5.0  # more than those who have that limit
_SILENT_TIMEOUT = 5.0  # instead, for nodes that have not answered others

_POLL, _POLL_EACH = 0.05, 0.002  # at least; and more where many are asked for
_REPORT_EVERY = 5.0
# A pair that is doubtful is looked at so often, in so many rounds: a bad node has many.
_LOOKS, _ROUNDS_AGAIN = 3, 4
_GIVEN_UP = 2  # nodes that got no answer of one: the others do not try
_USUAL_MTU = 1500

# How often a worker sends the largest size in one operation, at most: 22 times each
# size, where all but the largest two are a quarter of the next one.
_REPEATED = 22 * 7 / 3


class Options(NamedTuple):
    """What the user can choose.

    Attributes:
        max_bytes: The largest size of the collectives.
        timeout: Seconds for the nodes to come, and for any progress of theirs.
    """

    max_bytes: int = 16 * 2**20
    timeout: float = TIMEOUT


class TaskRecord(TypedDict):
    """What a task tells of itself; ``node`` is there for the first one of a node.

    Attributes:
        address: Where the workers' store would listen, if it were here.
        port: The same.
    """

    rank: int
    node_rank: int
    workers: int
    host: str
    address: str
    port: int
    node: Node | None


class Ended(TypedDict):
    """How torch's collectives have ended on a task.

    Attributes:
        backend: What has run them; empty if they have not come to their end.
        problem: Why they have not; empty also where they have failed elsewhere before.
        order: How many tasks had a problem by then, with this one.
        rows: Results that are this task's to report.
    """

    backend: str
    problem: str
    order: int
    rows: list[Collective]


def examine(
    argv: Sequence[str],
    options: Options,
    tell: Callable[[Message], None],
    known: Known,
    words: Sequence[str] | None = None,
) -> Report | None:
    """Examine the nodes of this step; see `torchrun_hpc.doctor.examine`.

    Args:
        argv: Options as the job's own line has them.
        options: What the user chose beside.
        tell: Shows a person how far it is.
        known: What is known where a fault is raised; filled in.
        words: The same line with the doctor's own options, to suggest another one.
    """
    command = shlex.join([*COMMAND.split(), *(argv if words is None else words)])
    with environment.without_empty_options():
        seen = known.preflight = preflight(command, exchange=True)
        if seen.job is not None and seen.job.pmi_is_open:
            pmi.finalize(seen.environ)  # the workers have no way to it
        line = command_line.parse([*argv, "SCRIPT"], seen.environ)
        if line.unknown:
            raise wrong_line(
                f"{line.unknown[0]} is no option of the doctor or torchrun"
            )
        if "hpc_dry_run" in line.options:
            raise wrong_line(
                f"{line.options['hpc_dry_run']}: the doctor has no dry run"
            )
        here = place.find(seen, line, known)
    variables = {k: str(v.value) for k, v in here.plan.environment.items()}
    environ = {**seen.environ, **variables}
    if here.plan.world.nodes == 2:  # noqa: PLR2004
        # A tree of two nodes exceeds what the interface carries: nccl-tests#196.
        environ.setdefault("NCCL_ALGO", "Ring")
    is_alone = here.task.size == 1
    address = LOOPBACK if is_alone else here.address or LOOPBACK
    with (
        contextlib.closing(Links(here.plan.launch_id, here.address)) as links,
        Workers(here.workers, environ, address) as workers,
    ):
        examiner = Examiner(here, options, tell, links, workers)
        try:
            with met(here.tasks_plan, environ, options.timeout, tell) as board:
                return examiner.run(board, seen.environ)
        except (CoordinatorNotFoundError, JobFailedError, TimeoutError) as error:
            own = (examiner.own or examiner.look(seen.environ))["node"]
            if own:
                own["torch"] = workers.torch(_IMPORT_TIMEOUT)
            found = summary.Found(nodes=[own] if own else [])
            report = summary.report(found, here, options.timeout)
            raise NotMetError(_why(error, here, options), report) from None


def _why(error: Exception, here: Place, options: Options) -> Message:
    if isinstance(error, CoordinatorNotFoundError):
        return messages.coordinator_missing(
            str(error), options.timeout, here.tasks_plan, "--timeout"
        )
    failure = error.failure if isinstance(error, JobFailedError) else None
    if failure is not None and failure.kind is not Kind.COORDINATOR:
        return messages.failed(failure, here.tasks_plan)
    rank = here.tasks_plan.rendezvous.coordinator
    text = f"node {rank} does not answer any more, so that this is all there is"
    return Message("HPC198", text)


class Examiner:
    """One task in the examination.

    Args:
        here: Where it is.
        options: What the user chose.
        tell: Shows a person how far it is.
        links: Measures what is between nodes.
        workers: Run torch's collectives.

    Attributes:
        own: What it shows of itself, once it has looked.
    """

    def __init__(
        self,
        here: Place,
        options: Options,
        tell: Callable[[Message], None],
        links: Links,
        workers: Workers,
    ) -> None:
        self._here = here
        self._options = options
        self._tell = tell
        self._links = links
        self._workers = workers
        self._found = summary.Found()
        self.own: TaskRecord | None = None

    def run(self, board: Board, environ: Mapping[str, str]) -> Report | None:
        """Do what a task does; return the report on task 0."""
        own, rank = self.look(environ), self._here.task.rank
        self.own = own
        board.put(f"task/{rank}", own)
        # Later, because it may take minutes; before the pairs, which it would disturb.
        torch = self._workers.torch(_IMPORT_TIMEOUT)
        board.put(f"torch/{rank}", results.printable(torch))
        if rank == 0:
            return self._conduct(board)
        members = board.get("members")
        if own["node"] is not None:
            self._measure(board, members, _rounds(members), 0)
            for turn in range(1, _LOOKS):
                self._measure(board, members, board.get(f"again/{turn}"), turn)
        self._work(board)
        board.get("end")
        return None

    # --- what each task does ------------------------------------------------------

    def look(self, environ: Mapping[str, str]) -> TaskRecord:
        """Look at this task, and, if it is the first one there, at its node."""
        here, shown = self._here, None
        if here.task.local_rank == 0:
            fast = here.plan.world.fast_hosts or (here.hostname,)
            following = fast[(here.node_rank + 1) % len(fast)]
            shown = node.examine(
                rank=here.node_rank,
                host=here.host,
                fast_host=here.fast_host,
                address=here.address,
                workers=here.workers * here.task.local_size,
                names=[
                    *dict.fromkeys(filter(None, (here.fast_host, fast[0], following)))
                ],
                network=network.this_node(),
                environ=environ,
            )
        if shown is not None:
            shown["port"] = self._links.port
            shown["wants_gpus"] = here.wants_gpus
            shown["findings"] = [*here.findings]
        record = TaskRecord(
            rank=here.task.rank,
            node_rank=here.node_rank,
            workers=here.workers,
            host=here.host,
            address=self._workers.address,
            port=self._workers.port,
            node=shown,
        )
        # Names and values are whatever somebody has set.
        return cast("TaskRecord", results.printable(record))

    def _measure(
        self,
        board: Board,
        members: Members,
        rounds: Sequence[Sequence[Pair]],
        turn: int,
    ) -> None:
        """Measure all pairs that this node is in."""
        peers = {each["rank"]: Peer(**each) for each in members}
        me = self._here.node_rank
        own_pairs = [
            (number, pair)
            for number, together in enumerate(rounds)
            for pair in together
            if me in pair and me in peers
        ]
        for number, (first, second) in own_pairs:
            own = peers[me]
            other = peers[second if me == first else first]
            if board.add(f"silent/{other.rank}", 0) >= _GIVEN_UP:
                continue
            name = f"{turn}/{first}/{second}"
            is_first = turn == number == 0
            link = self._links.measure(own, other, name, all_networks=is_first)
            if link is not None:
                board.put(f"link/{name}", link)
                if link["problem"] == SILENT:
                    board.add(f"silent/{other.rank}")
            board.add("progress")
        board.put(f"measured/{turn}/{me}", value=True)

    def _work(self, board: Board) -> None:
        """Run torch's collectives, if this task takes part."""
        rank, rows = self._here.task.rank, list[Collective]()
        settings = board.get(f"workers/{rank}")
        if settings:
            backend, problem = self._workers.run(
                settings, self._limit, rows.append, lambda: board.has("failed")
            )
            # The others fail soon after the first one, and know no cause.
            order = board.add("failed") if problem else 0
            ended = Ended(backend=backend, problem=problem, order=order, rows=rows)
            board.put(f"worked/{rank}", ended)

    # --- what task 0 does beside that ---------------------------------------------

    def _conduct(self, board: Board) -> Report:
        found, size = self._found, self._here.task.size
        keys = {rank: f"task/{rank}" for rank in range(size)}
        came = self._wait(board, keys, "tasks have not come yet")
        known = {rank: _received(value, TaskRecord) for rank, value in came.items()}
        tasks = [
            known[rank] for rank in sorted(known) if self._is_valid(known[rank], rank)
        ]
        found.missing = sorted(keys.keys() - {task["rank"] for task in tasks})
        found.nodes = [task["node"] for task in tasks if task["node"] is not None]
        able = self._conduct_torch(board, tasks)
        self._conduct_pairs(board)
        lost = {*judgement.unusable(found.links), *found.hung}
        self._conduct_collectives(
            board, [task for task in able if task["node_rank"] not in lost]
        )
        board.put("end", value=True)
        return summary.report(found, self._here, self._options.timeout)

    def _is_valid(self, task: TaskRecord | None, rank: int) -> bool:
        return (
            task is not None
            and task["rank"] == rank
            and task["node_rank"] in range(self._here.plan.world.nodes)
            and (task["node"] is None or task["node"]["rank"] == task["node_rank"])
        )

    def _conduct_torch(
        self, board: Board, tasks: Sequence[TaskRecord]
    ) -> list[TaskRecord]:
        """Wait until torch is imported; return the tasks that have one."""
        keys = {task["rank"]: f"torch/{task['rank']}" for task in tasks}
        limit = _IMPORT_TIMEOUT + _GRACE
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

    def _conduct_pairs(self, board: Board) -> None:
        """Let all nodes measure, and those pairs again that are doubtful."""
        members = [_peer(n) for n in self._found.nodes if n["address"] and n["port"]]
        board.put("members", members)
        wanted = _rounds(members)
        number, links = sum(map(len, wanted)), dict[Any, Link]()
        if number:
            again = (_LOOKS - 1) * _ROUNDS_AGAIN * (len(members) // 2)
            most = (number + min(again, 2 * number)) * 2 * MOST_BYTES
            self._progress(
                f"{count(len(members), 'node')}: {count(number, 'pair')} in "
                f"{count(len(wanted), 'round')}, at most {_size(most)} of traffic"
            )
        for turn in range(_LOOKS):
            if turn:
                doubtful = judgement.doubtful([*links.values()])
                wanted = pairs.disjoint(doubtful)[:_ROUNDS_AGAIN]
                board.put(f"again/{turn}", wanted)
            if not wanted:
                continue
            self._measure(board, members, wanted, turn)
            left = {each["rank"] for each in members} - self._found.hung.keys()
            keys = {rank: f"measured/{turn}/{rank}" for rank in left}
            ended = self._wait(board, keys, "nodes still measure pairs", are_nodes=True)
            hung = left - ended.keys()
            self._found.hung |= dict.fromkeys(hung, "while the pairs were measured")
            for pair in itertools.chain(*wanted):
                key = f"link/{turn}/{pair[0]}/{pair[1]}"
                link, before = _received(board.find(key), Link), links.get(pair)
                if link is not None:
                    links[pair] = judgement.best_of(before, link) if before else link
        self._found.links = [links[pair] for pair in sorted(links)]

    def _conduct_collectives(self, board: Board, able: Sequence[TaskRecord]) -> None:
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
        self._work(board)
        keys = {rank: f"worked/{rank}" for rank in settings}
        what, limit = "tasks have not ended torch's collectives", self._limit + _GRACE
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
                    "timeout": self._limit,
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

    @property
    def _limit(self) -> float:
        """Seconds of torch's collectives."""
        return max(_COLLECTIVES_TIMEOUT, self._options.timeout)

    def _progress(self, text: str) -> None:
        self._tell(Message("HPC177", text))


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


def _received(value: Any, form: Any) -> Any:
    """Return what another process has written; ``None`` if it has not that form."""
    with contextlib.suppress(TypeError, KeyError):
        check_form(value, form)
        return value
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


def _rounds(members: Members) -> list[list[Pair]]:
    return pairs.rounds([each["rank"] for each in members])

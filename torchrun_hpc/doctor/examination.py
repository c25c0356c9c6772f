"""The examination: what all tasks do, one thing after the other.

They meet in the coordinator of the job's own rendezvous, which keeps what they tell
each other: texts by key. Task 0 conducts: it says what comes next, and collects.

=====================  =============================================================
key                    what
=====================  =============================================================
``task/RANK``          what a task shows of itself, and of its node
``pairs``              the nodes that are there, and how to reach them
``link/TURN/A/B``      what two nodes have measured
``played/TURN/RANK``   a node is through with all pairs of this turn
``again``              the pairs to be looked at once more
``failed/RANK``        how many nodes have got no answer of this one
``workers/RANK``       what its workers are to run
``worked/RANK``        what became of that
``end``                there is no more
=====================  =============================================================
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

from torchrun_hpc import __version__, network
from torchrun_hpc.commandline import command_line
from torchrun_hpc.doctor import checks, judgement, node, pairs, place
from torchrun_hpc.doctor.link import MOST_BYTES, Links, Peer
from torchrun_hpc.doctor.results import SCHEMA, Collective, Finding, Link, Node, Report
from torchrun_hpc.doctor.workers import Workers
from torchrun_hpc.errors import Message, count
from torchrun_hpc.launching import environment
from torchrun_hpc.launching.preflight import preflight
from torchrun_hpc.rendezvous import messages
from torchrun_hpc.rendezvous.client import JobFailedError
from torchrun_hpc.rendezvous.connection import Connection
from torchrun_hpc.rendezvous.coordinator import Settings
from torchrun_hpc.rendezvous.protocol import Kind
from torchrun_hpc.rendezvous.search import CoordinatorNotFoundError
from torchrun_hpc.reporting.description import check_form
from torchrun_hpc.schedulers import pmi

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrun_hpc.doctor.pairs import Pair
    from torchrun_hpc.doctor.place import Place
    from torchrun_hpc.launching.abort import Known
    from torchrun_hpc.rendezvous.client import Client

# Seconds: for the nodes to come, and for any progress of theirs, where nothing else is
# typed; to import torch; of torch's collectives; of the whole.
TIMEOUT = 60.0
_IMPORT_TIMEOUT = 120.0
_COLLECTIVES_TIMEOUT = 60.0
_UNANSWERED = 5.0  # for nodes that have not answered others
_LONGEST = 3600.0

COMMAND = "python -m torchrun_hpc.doctor"

# Bytes: so the nodes meet also where packets of the size of the MTU are lost, and can
# say so.
_SEGMENT = 1000

_POLL = 0.05
_REPORT_EVERY = 5.0
_PROBED = 10  # nodes that have not come
_PROBE_TIMEOUT = 2.0
_LOOKS = 3  # at a pair that is doubtful
_GIVEN_UP = 2  # nodes that got no answer: the others do not try


class Options(NamedTuple):
    """What the user can choose.

    Attributes:
        max_bytes: The largest size of the collectives.
        timeout: Seconds for the nodes to come, and for any progress of theirs.
    """

    max_bytes: int = 16 * 2**20
    timeout: float = TIMEOUT


class _Task(TypedDict):
    """What a task tells of itself; ``node`` is there for the first one of a node."""

    rank: int
    node_rank: int
    local_rank: int
    local_size: int
    workers: int
    host: str
    address: str
    has_torch: bool
    node: Node | None


class NotMetError(Exception):
    """This task has not met the others; the report is of its own node."""

    def __init__(self, message: Message, report: Report) -> None:
        super().__init__(message.text)
        self.message = message
        self.report = report


def examine(
    argv: Sequence[str],
    options: Options,
    tell: Callable[[Message], None],
    known: Known,
) -> Report | None:
    """Examine the nodes of this step; see `torchrun_hpc.doctor.examine`.

    Args:
        argv: Options as the job's own line has them.
        options: What the user chose beside.
        tell: Shows a person how far it is.
        known: What is known where a fault is raised; filled in.
    """
    command = shlex.join([*COMMAND.split(), *argv])
    with environment.without_empty_options():
        seen = known.preflight = preflight(command, exchange=True)
        if seen.job is not None and seen.job.pmi_is_open:
            pmi.finalize(seen.environ)  # the workers have no way to it
        line = command_line.parse([*argv, "SCRIPT"], seen.environ)
        here = place.find(seen, line, known)
    return Examination(here, seen.environ, options, tell).run()


class Board:
    """What the tasks tell each other, kept by the coordinator.

    Args:
        client: The connection to it. Each question may raise `JobFailedError`.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def put(self, key: str, value: Any) -> None:
        """Set a value; it cannot be waited for before."""
        self._client.ask({"set": {key: json.dumps(value)}}, _LONGEST)

    def get(self, key: str) -> Any:
        """Wait for a value."""
        return json.loads(self._client.ask({"get": [key]}, _LONGEST)[0])

    def find(self, key: str) -> Any:
        """Return a value, or ``None`` if there is none yet."""
        return self.get(key) if self.has(key) else None

    def has(self, *keys: str) -> bool:
        """Say whether all of these exist."""
        return bool(self._client.ask({"check": keys}, _LONGEST))

    def add(self, key: str, number: int = 1) -> int:
        """Add to a number, 0 at first, and return it."""
        return int(self._client.ask({"add": key, "by": number}, _LONGEST))


class Examination:
    """An examination, as one task takes part in it.

    Args:
        here: Where this task is.
        environ: Environment of this process.
        options: What the user chose.
        tell: Shows a person how far it is.
    """

    def __init__(
        self,
        here: Place,
        environ: Mapping[str, str],
        options: Options,
        tell: Callable[[Message], None],
    ) -> None:
        self._place = here
        self._environ = environ
        self._options = options
        self._tell = tell
        self._started = datetime.now(timezone.utc)
        self._start = time.monotonic()
        self._links = Links(here.plan.launch_id)
        self._problems: dict[str, str] = {}  # of the collectives, by host
        self._hung: dict[int, str] = {}  # nodes, and what they were doing

    def run(self) -> Report | None:
        """Examine all nodes; return the report on task 0, nothing on the others.

        Raises:
            NotMetError: This task has not met the others.
            LaunchError: It cannot take part.
        """
        here = self._place
        variables = {k: str(v.value) for k, v in here.plan.environment.items()}
        environ = {**self._environ, **variables}
        if here.plan.world.nodes == 2:  # noqa: PLR2004
            # A tree of two nodes exceeds what the interface carries: nccl-tests#196.
            environ.setdefault("NCCL_ALGO", "Ring")
        with (
            contextlib.closing(self._links),
            Workers(here.workers, environ) as workers,
        ):
            try:
                with self._met() as board:
                    own = self._look_at_self(workers)
                    board.put(f"task/{here.task.rank}", own)
                    if here.task.rank == 0:
                        return self._conduct(board, workers, own)
                    self._follow(board, workers, own)
            except (CoordinatorNotFoundError, JobFailedError) as error:
                shown = self._look_at_self(workers)["node"]
                raise NotMetError(
                    self._why(error), self._report([shown] if shown else [], [], [])
                ) from None
        return None

    # --- to meet ------------------------------------------------------------------

    @contextlib.contextmanager
    def _met(self) -> Any:
        plan = self._place.meeting
        settings = Settings(
            job=plan.launch_id,
            run_id="doctor",
            nodes=plan.world.nodes,
            coordinator=0,
            max_restarts=0,
            join_timeout=int(self._options.timeout),
            silence_timeout=int(_LONGEST),
        )
        connection = Connection(
            plan,
            settings,
            self._environ,
            self._show,
            has_store=False,
            segment=_SEGMENT,
        )
        try:
            yield Board(connection.open(self._options.timeout))
        finally:
            connection.close()

    def _show(self, event: Mapping[str, Any]) -> None:
        message = messages.render(event, self._place.meeting)
        if message is not None and "looking" in event:
            self._tell(message)

    def _why(self, error: Exception) -> Message:
        plan = self._place.meeting
        if isinstance(error, JobFailedError):
            if error.failure.kind is Kind.COORDINATOR:
                text = "node 0 does not answer any more, so that this is all there is"
                return Message("HPC198", text)
            return messages.failed(error.failure, plan)
        return messages.coordinator_missing(str(error), self._options.timeout, plan)

    # --- what each task does ------------------------------------------------------

    def _look_at_self(self, workers: Workers) -> _Task:
        here, world = self._place, self._place.plan.world
        shown: Node | None = None
        if here.is_first_of_node:
            fast = world.fast_hosts or (here.hostname,)
            following = fast[(here.node_rank + 1) % len(fast)]
            names = [here.fast_host, fast[0], following]
            shown = node.examine(
                rank=here.node_rank,
                host=here.host,
                fast_host=here.fast_host,
                address=self._address(),
                workers=here.workers * here.task.local_size,
                names=[*dict.fromkeys(filter(None, names))],
                network=network.this_node(),
                environ=self._environ,
            )
        torch = workers.torch(_IMPORT_TIMEOUT)
        if shown is not None:
            shown["port"] = self._links.port
            shown["torch"] = torch
            shown["findings"] = [*here.findings]
        return _Task(
            rank=here.task.rank,
            node_rank=here.node_rank,
            local_rank=here.task.local_rank,
            local_size=here.task.local_size,
            workers=here.workers,
            host=here.host,
            address=self._address(),
            has_torch=not torch["problem"],
            node=shown,
        )

    def _address(self) -> str:
        """Return this node's address for the job; empty if it is not known."""
        where, own = self._place.plan.rendezvous, network.this_node()
        if where.local_address:
            return where.local_address
        for host in (self._place.fast_host, where.connect_host):
            for known in own.addresses_of(host):
                near = known if own.owner(known) else own.address_toward(known)
                if near is not None:
                    return str(near)
        return ""

    def _follow(self, board: Board, workers: Workers, own: _Task) -> None:
        members = board.get("pairs")
        if own["node"] is not None:
            for turn in range(_LOOKS):
                wanted = _rounds(members) if turn == 0 else board.get(f"again/{turn}")
                if not wanted:
                    break
                self._play(board, members, wanted, turn)
        self._work(board, workers, own["rank"])
        board.get("end")

    def _play(
        self,
        board: Board,
        members: Sequence[Mapping[str, Any]],
        rounds: Sequence[Sequence[Pair]],
        turn: int,
    ) -> None:
        """Measure all pairs that this node is in."""
        peers = {each["rank"]: Peer(**each) for each in members}
        me = self._place.node_rank
        own = peers.get(me)
        for number, together in enumerate(rounds):
            pair = next((p for p in together if me in p), None)
            if pair is None or own is None:
                continue
            first, second = pair
            other = peers[second if me == first else first]
            if board.add(f"failed/{other.rank}", 0) >= _GIVEN_UP:
                continue
            name = f"{turn}/{first}/{second}"
            all_networks = turn == number == 0
            link = self._links.measure(own, other, name, all_networks=all_networks)
            if link is not None:
                board.put(f"link/{name}", link)
                if link["problem"]:
                    board.add(f"failed/{other.rank}")
            board.add("progress")
        board.put(f"played/{turn}/{me}", value=True)

    def _work(self, board: Board, workers: Workers, rank: int) -> list[Collective]:
        """Run torch's collectives, if this task takes part."""
        settings, rows = board.get(f"workers/{rank}"), list[Collective]()
        if settings:
            limit = _COLLECTIVES_TIMEOUT
            backend, problem = workers.run(settings, limit, rows.append)
            within = [row for row in rows if row["scope"]]
            board.put(f"worked/{rank}", [backend, problem, within])
        return rows

    # --- what task 0 does beside that ---------------------------------------------

    def _conduct(self, board: Board, workers: Workers, own: _Task) -> Report:
        tasks = self._gather(board)
        nodes = [task["node"] for task in tasks if task["node"] is not None]
        links = self._links_of(board, nodes)
        lost = {*judgement.unusable(links), *self._hung}
        able = [t for t in tasks if t["has_torch"] and t["node_rank"] not in lost]
        rows, backend = self._collectives(board, workers, able)
        board.put("end", value=True)
        del own
        return self._report(nodes, links, rows, backend)

    def _gather(self, board: Board) -> list[_Task]:
        """Wait for all tasks, and return what they show."""
        size = self._place.task.size
        ranks = range(size)

        def arrived() -> list[int]:
            return [rank for rank in ranks if board.has(f"task/{rank}")]

        there = self._wait(
            lambda: (
                size if board.has(*(f"task/{r}" for r in ranks)) else len(arrived())
            ),
            size,
            self._options.timeout,
            "tasks are there" if self._place.plan.mode.is_direct else "nodes are there",
        )
        found = list[_Task]()
        for rank in ranks if there else arrived():
            task = board.get(f"task/{rank}")
            with contextlib.suppress(TypeError, KeyError):
                check_form(task, _Task)
                found.append(cast("_Task", task))
        return found

    def _wait(
        self, number: Callable[[], int], size: int, limit: float, what: str
    ) -> bool:
        """Wait for a number of things, and show how far it is; say whether all came."""
        start = reported = time.monotonic()
        while (there := number()) < size:
            now = time.monotonic()
            if now - start > limit:
                return False
            if now - reported > _REPORT_EVERY:
                reported = now
                self._progress(f"{there} of {size} {what} after {now - start:.0f} s")
            time.sleep(_POLL)
        return True

    def _progress(self, text: str) -> None:
        self._tell(Message("HPC177", text))

    def _links_of(self, board: Board, nodes: Sequence[Node]) -> list[Link]:
        """Let all nodes measure, and those pairs again that are doubtful."""
        members = [_peer(each) for each in nodes if each["address"] and each["port"]]
        board.put("pairs", members)
        wanted = _rounds(members)
        links: dict[Pair, Link] = {}
        number = sum(map(len, wanted))
        if number:
            most = number * 2 * MOST_BYTES / 2**30
            self._progress(
                f"{count(len(members), 'node')}: {count(number, 'pair')} in "
                f"{count(len(wanted), 'round')}, at most {most:.1f} GiB of traffic"
            )
        for turn in range(_LOOKS):
            if turn:
                doubtful = judgement.doubtful([*links.values()])
                wanted = pairs.disjoint(doubtful)[: pairs.MOST_ROUNDS]
                board.put(f"again/{turn}", wanted)
            if not wanted:
                break
            self._play(board, members, wanted, turn)
            self._until_played(board, members, turn)
            for pair in itertools.chain(*wanted):
                found = board.find(f"link/{turn}/{pair[0]}/{pair[1]}")
                with contextlib.suppress(TypeError, KeyError):
                    check_form(found, Link)
                    before = links.get(pair)
                    links[pair] = judgement.best_of(before, found) if before else found
        return [links[pair] for pair in sorted(links)]

    def _until_played(
        self, board: Board, members: Sequence[Mapping[str, Any]], turn: int
    ) -> None:
        """Wait until all nodes are through, or none has gone on for a while."""
        left = {each["rank"] for each in members} - self._hung.keys()
        before, since, reported = -1, time.monotonic(), time.monotonic()
        while left:
            left = {rank for rank in left if not board.has(f"played/{turn}/{rank}")}
            now, progress = time.monotonic(), board.add("progress", 0)
            if progress != before:
                before, since = progress, now
            is_lost = all(board.add(f"failed/{rank}", 0) for rank in left)
            limit = _UNANSWERED if is_lost else self._options.timeout
            if now - since > limit:
                self._hung |= dict.fromkeys(left, "while the pairs were measured")
                return
            if now - reported > _REPORT_EVERY:
                reported = now
                self._progress(f"{count(len(left), 'node')} still measuring pairs")
            if left:
                time.sleep(_POLL)

    def _collectives(
        self, board: Board, workers: Workers, able: Sequence[_Task]
    ) -> tuple[list[Collective], str]:
        """Let torch's collectives run where they can; return them and the backend."""
        size = sum(task["workers"] for task in able)
        is_able = size > 1 and any(task["rank"] == 0 for task in able)
        settings = self._settings(able, size) if is_able else {}
        for rank in range(self._place.task.size):
            board.put(f"workers/{rank}", settings.get(rank, []))
        if is_able:
            self._progress(f"torch's collectives on {count(size, 'worker')}")
        rows, backend = self._work(board, workers, 0), ""
        # Those that hang have their limit, and are late by as much as they began late.
        done = [f"worked/{rank}" for rank in settings]
        self._wait(
            lambda: sum(board.has(key) for key in done),
            len(done),
            self._options.timeout,
            "tasks have ended torch's collectives",
        )
        for task in able if is_able else ():
            outcome = board.find(f"worked/{task['rank']}")
            if outcome is None:
                self._hung[task["node_rank"]] = "in torch's collectives"
                continue
            used, problem, within = outcome
            backend = backend or str(used)
            rows += within if task["rank"] else []
            if problem:
                self._problems.setdefault(task["host"], problem)
        return rows, backend

    def _settings(
        self, able: Sequence[_Task], size: int
    ) -> dict[int, list[dict[str, Any]]]:
        """Return what the workers of each task are to know, by its rank."""
        address = able[0]["address"] if self._place.task.size > 1 else ""
        address = address or "127.0.0.1"
        port, ranks = network.free_port(address), itertools.count()
        nodes = sorted({task["node_rank"] for task in able})
        return {
            task["rank"]: [
                {
                    "rank": next(ranks),
                    "size": size,
                    "local_rank": task["local_rank"] + local,
                    "local_size": task["workers"] * task["local_size"],
                    "node_rank": nodes.index(task["node_rank"]),
                    "nodes": len(nodes),
                    "host": task["host"],
                    "address": address,
                    "port": port,
                    "max_bytes": self._options.max_bytes,
                    "timeout": _COLLECTIVES_TIMEOUT,
                }
                for local in range(task["workers"])
            ]
            for task in able
        }

    # --- the report ---------------------------------------------------------------

    def _report(
        self,
        nodes: Sequence[Node],
        links: Sequence[Link],
        rows: Sequence[Collective],
        backend: str = "",
    ) -> Report:
        plan = self._place.plan
        hosts = [*plan.world.hosts] or [""] * plan.world.nodes
        for each in nodes:
            hosts[each["rank"]] = each["host"] or hosts[each["rank"]]
        found = [
            *self._absent(nodes, hosts),
            *judgement.findings([x for x in links if not self._hangs(x)], hosts),
            *checks.findings(nodes, hosts),
            *judgement.of_collectives(rows, self._problems),
            *_of_launcher(nodes, hosts),
        ]
        return Report(
            schema=SCHEMA,
            launch_id=plan.launch_id,
            site=str(plan.site.value) if plan.site else "",
            started=self._started.isoformat(timespec="seconds"),
            seconds=time.monotonic() - self._start,
            torchrun_hpc=__version__,
            backend=backend,
            hosts=hosts,
            nodes=[*nodes],
            links=[*links],
            collectives=[*rows],
            findings=sorted(found, key=lambda each: not each["is_suspect"]),
        )

    def _hangs(self, link: Link) -> bool:
        """Say whether a link is that of a node that has stopped to answer."""
        return not {link["first"], link["second"]}.isdisjoint(self._hung)

    def _absent(self, nodes: Sequence[Node], hosts: Sequence[str]) -> list[Finding]:
        """Say which nodes have not come, and which have stopped to answer."""
        if self._place.task.rank:
            return []  # this task sees no other
        there = {each["rank"] for each in nodes}
        missing = [rank for rank in range(len(hosts)) if rank not in there]
        found = [
            Finding(
                code="HPC178",
                text=f"{hosts[rank] or f'node {rank}'} has not come within "
                f"{self._options.timeout:.0f} s{self._probed(rank, number)}",
                remedy="see what it has printed itself; if nothing, the launcher has "
                "not started it there",
                nodes=[rank],
                is_suspect=True,
            )
            for number, rank in enumerate(missing)
        ]
        return found + [
            Finding(
                code="HPC179",
                text=f"{hosts[rank]} has stopped to answer {what}",
                remedy="log in and look at its processes, and at the system's log",
                nodes=[rank],
                is_suspect=True,
            )
            for rank, what in self._hung.items()
        ]

    def _probed(self, rank: int, number: int) -> str:
        """Say whether a node that has not come can be reached from here."""
        world, (port, *_) = self._place.plan.world, self._place.meeting.rendezvous.ports
        if number >= _PROBED or not world.hosts:
            return ""
        names = dict.fromkeys((world.fast_hosts[rank], world.hosts[rank]))
        texts = []
        for name in filter(None, names):
            known = network.this_node().addresses_of(name)
            state = network.reach(str(known[0]), port, _PROBE_TIMEOUT) if known else ""
            where = f"{name} ({known[0]})" if known else name
            texts.append(f"{where} {state or 'does not resolve'}")
        return f"; from here: {', '.join(texts)}" if texts else ""


def _peer(shown: Node) -> dict[str, Any]:
    """Return what the other nodes have to know of one."""
    own = next(
        (i for i in shown["interfaces"] if i["name"] == shown["interface"]), None
    )
    others = {
        each["name"]: each["addresses"][0]
        for each in shown["interfaces"]
        if each["is_up"] and each["addresses"] and each["name"] != shown["interface"]
    }
    return {
        "rank": shown["rank"],
        "address": shown["address"],
        "port": shown["port"],
        "mtu": own["mtu"] if own else 1500,
        "others": others,
    }


def _rounds(members: Sequence[Mapping[str, Any]]) -> list[list[Pair]]:
    return pairs.rounds([each["rank"] for each in members])


def _of_launcher(nodes: Sequence[Node], hosts: Sequence[str]) -> list[Finding]:
    """Return what the launcher would say; the same of several nodes once."""
    found: dict[tuple[str, str], Finding] = {}
    for each in nodes:
        for finding in each["findings"]:
            host = hosts[each["rank"]] if len(hosts) > 1 and finding["nodes"] else ""
            text = f"on {host}: {finding['text']}" if host else finding["text"]
            found.setdefault(
                (finding["code"], finding["text"]), {**finding, "text": text}
            )
    return [*found.values()]

"""What each task does: it looks, measures, and runs torch's collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

from torchrun_hpc.doctor import node, pairs, results
from torchrun_hpc.doctor.link import SILENT, Peer
from torchrun_hpc.doctor.results import Collective, Node
from torchrun_hpc.host import network

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.doctor.board import Board
    from torchrun_hpc.doctor.link import Links
    from torchrun_hpc.doctor.pairs import Pair
    from torchrun_hpc.doctor.place import Place
    from torchrun_hpc.doctor.workers import Workers

    Members = Sequence[Mapping[str, Any]]  # the fields of each `Peer`

# Seconds: for the nodes to come, and for any progress of theirs, where nothing else is
# typed; to import torch; of torch's collectives, if not more is typed.
TIMEOUT = 60.0
IMPORT_TIMEOUT = 120.0
_COLLECTIVES_TIMEOUT = 60.0

LOOKS = 3  # at a pair that is doubtful
_GIVEN_UP = 2  # nodes that got no answer of one: the others do not try


class Options(NamedTuple):
    """What the user can choose.

    Attributes:
        max_bytes: The largest size of the collectives.
        timeout: Seconds for the nodes to come, and for any progress of theirs.
        files: Those that task 0 is to write.
    """

    max_bytes: int = 16 * 2**20
    timeout: float = TIMEOUT
    files: tuple[str, ...] = ()

    @property
    def collectives_timeout(self) -> float:
        """Seconds of torch's collectives."""
        return max(_COLLECTIVES_TIMEOUT, self.timeout)


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


class Examiner:
    """One task in the examination.

    Args:
        here: Where it is.
        options: What the user chose.
        links: Measures what is between nodes.
        workers: Run torch's collectives.

    Attributes:
        here: Where it is.
        options: What the user chose.
        own: What it shows of itself, once it has looked.
    """

    def __init__(
        self, here: Place, options: Options, links: Links, workers: Workers
    ) -> None:
        self.here = here
        self.options = options
        self.own: TaskRecord | None = None
        self._links = links
        self._workers = workers

    def introduce(self, board: Board, environ: Mapping[str, str]) -> None:
        """Look at this task, and let the others know."""
        self.own, rank = self.look(environ), self.here.task.rank
        board.put(f"task/{rank}", self.own)
        # Later, because it may take minutes; before the pairs, which it would disturb.
        torch = self._workers.torch(IMPORT_TIMEOUT)
        board.put(f"torch/{rank}", results.printable(torch))

    def follow(self, board: Board) -> None:
        """Do what task 0 says."""
        members = board.get("members")
        if self.own and self.own["node"] is not None:
            wanted = pairs.rounds([each["rank"] for each in members])
            self.measure(board, members, wanted, 0)
            for turn in range(1, LOOKS):
                self.measure(board, members, board.get(f"again/{turn}"), turn)
        self.work(board)
        board.get("end")

    def look(self, environ: Mapping[str, str]) -> TaskRecord:
        """Look at this task, and, if it is the first one there, at its node."""
        here, shown = self.here, None
        if here.task.local_rank == 0:
            fast = here.meeting.fast_hosts or (here.hostname,)
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

    def measure(
        self,
        board: Board,
        members: Members,
        rounds: Sequence[Sequence[Pair]],
        turn: int,
    ) -> None:
        """Measure all pairs that this node is in."""
        peers = {each["rank"]: Peer(**each) for each in members}
        me = self.here.node_rank
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

    def work(self, board: Board) -> None:
        """Run torch's collectives, if this task takes part."""
        rank, rows = self.here.task.rank, list[Collective]()
        settings = board.get(f"workers/{rank}")
        if settings:
            backend, problem = self._workers.run(
                settings,
                self.options.collectives_timeout,
                rows.append,
                lambda: board.has("failed"),
            )
            # The others fail soon after the first one, and know no cause.
            order = board.add("failed") if problem else 0
            ended = Ended(backend=backend, problem=problem, order=order, rows=rows)
            board.put(f"worked/{rank}", ended)

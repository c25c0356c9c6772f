"""Messages about the rendezvous."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from torchrun_hpc import __version__, waiting
from torchrun_hpc.errors import LaunchError, Message, to_copy
from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Failure  # noqa: TC001 - for wire.decode
from torchrun_hpc.host.network import join_endpoint, path_problem
from torchrun_hpc.names import host, nodes
from torchrun_hpc.planning.messages import nested
from torchrun_hpc.rendezvous.errors import Refused
from torchrun_hpc.reporting.console import reports_wait_for
from torchrun_hpc.variables import RUN_ID
from torchrun_hpc.wire import AnyText, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.rendezvous.errors import CoordinatorNotFoundError, RefusedError

_SHORT = 50  # characters of another node's values

_PORTS = "Give each launch its own port with --rdzv_endpoint=HOST:PORT, or use mpiexec"
_BOTH = "Its output shows both"


def names(ranks: Sequence[int], meeting: Meeting) -> str:
    """Write nodes of the job by name and rank."""
    return nodes(ranks, meeting.hosts)


def _own(meeting: Meeting) -> str:
    return host(meeting.node_rank, meeting.hosts)


def _head_node(meeting: Meeting) -> str:
    return f"the head node at {meeting.endpoint}"


# --- news while the job runs ------------------------------------------------------


class News:
    """News for the user while the job runs; by default a note."""

    def words(self, meeting: Meeting) -> Message | None:
        """Return the message; ``None`` if it is not due, or not on this node."""
        raise NotImplementedError

    def is_warning(self, meeting: Meeting) -> bool:  # noqa: ARG002 - of subclasses
        """Return whether it is a warning."""
        return False


class Alarm(News):
    """News that is a warning."""

    def is_warning(self, meeting: Meeting) -> bool:  # noqa: ARG002 - always
        """Return true."""
        return True


class AlarmOfSpares(News):
    """News that is a warning if spares can replace nodes."""

    def is_warning(self, meeting: Meeting) -> bool:
        """Return whether the job has spares."""
        return meeting.spares.number > 0


@dataclass(frozen=True)
class Waiting(News):
    """Nodes have not joined. Callers at `unproved` addresses may be some of them."""

    nodes: tuple[int, ...]
    seconds: int
    unproved: tuple[AnyText, ...]

    def words(self, meeting: Meeting) -> Message:
        """Name the nodes."""
        total = meeting.active
        text = f"{total - len(self.nodes)} of {total} nodes have joined after "
        text += f"{self.seconds} s. Waiting for {names(self.nodes, meeting)}. "
        text = f"{text}{meeting.hint}".rstrip(". ")
        if self.unproved:
            text += f". Ignored callers without a proof: {', '.join(self.unproved)}"
        return Message("HPC114", text)


@dataclass(frozen=True)
class Finishing(News):
    """Some nodes have finished, others have not."""

    nodes: tuple[int, ...]
    seconds: int

    def words(self, meeting: Meeting) -> Message:
        """Name the nodes that still run."""
        total = meeting.active
        text = (
            f"{total - len(self.nodes)} of {total} nodes have finished, the last one "
        )
        text += f"{self.seconds} s ago. Still running: {names(self.nodes, meeting)}"
        return Message("HPC120", text)


@dataclass(frozen=True)
class Silent(AlarmOfSpares):
    """Nodes have not answered for some seconds; they have `left` seconds."""

    nodes: tuple[int, ...]
    seconds: int
    left: int

    def words(self, meeting: Meeting) -> Message:
        """Name the consequence."""
        what = "The job ends"
        if meeting.spares.number:
            is_one = len(self.nodes) == 1
            what = "It counts as lost" if is_one else "They count as lost"
        return _no_answer(names(self.nodes, meeting), self.seconds, what, self.left)


@dataclass(frozen=True)
class Answering(News):
    """Nodes that did not answer have answered."""

    nodes: tuple[int, ...]

    def words(self, meeting: Meeting) -> Message:
        """Name the nodes."""
        verb = "answers" if len(self.nodes) == 1 else "answer"
        return _answers(names(self.nodes, meeting), verb)


@dataclass(frozen=True)
class Lost(News):
    """A node without a spare has lost its agent."""

    node: int

    def words(self, meeting: Meeting) -> Message:
        """Name the node."""
        who = f"the agent on {names([self.node], meeting)}"
        return Message("HPC123", f"{who} is gone. Waiting until it is started again")


@dataclass(frozen=True)
class Restart(News):
    """All workers are restarted."""

    round: int
    because: Failure

    def words(self, meeting: Meeting) -> Message:
        """Name the cause."""
        return report.restarted(self.round, self.because, meeting)


@dataclass(frozen=True)
class Replaced(Alarm):
    """Spares take part: `places` has their node ranks, the old nodes and the new ones.

    `round` is 0 if it is no restart.
    """

    places: tuple[tuple[int, int, int], ...]
    round: int
    because: Failure | None

    def words(self, meeting: Meeting) -> Message:
        """Name the nodes, and the cause of the restart."""
        text = "; ".join(
            f"{names([new], meeting)} replaces {names([old], meeting)} as node rank "
            f"{rank}"
            for rank, old, new in self.places
        )
        if self.round:
            why = self.because and f"{report.sentence(self.because, meeting)}. "
            text = f"restart {self.round} of all workers: {why or ''}{text}"
        return Message("HPC207", text)


@dataclass(frozen=True)
class Stranger(Alarm):
    """A refused agent claims to be one of these nodes; without nodes, it is unknown."""

    nodes: tuple[int, ...]
    because: AnyText

    def words(self, meeting: Meeting) -> Message:
        """Name it, and the reason."""
        claimed = names(self.nodes, meeting)
        who = f"an agent that claims to be {claimed}" if claimed else "an unknown agent"
        text = f"refused {who}: {self.because}. This job continues"
        return Message("HPC229", text)


@dataclass(frozen=True)
class Unproved(Alarm):
    """A caller has no proof that it belongs to the job. `key` names this node's key."""

    address: AnyText
    key: AnyText

    def words(self, meeting: Meeting) -> Message:  # noqa: ARG002 - no node
        """Name the caller, and what it may be."""
        text = f"ignored {self.address}, which does not prove that it belongs to this "
        text += "job. It belongs to another user or job, has another key, or runs an "
        return Message("HPC237", f"{text}older torchrun_hpc. Key here: {self.key}")


@dataclass(frozen=True)
class Differ(Alarm):
    """Nodes differ in what must be equal on all nodes: `nodes` has ranks by value."""

    nodes: Mapping[AnyText, tuple[int, ...]]

    def words(self, meeting: Meeting) -> Message:
        """Show the values."""
        return disagreement(self.nodes, meeting)


@dataclass(frozen=True)
class Excluded(Alarm):
    """A node is excluded, perhaps this one. Without a reason, it is a spare again."""

    node: int
    because: AnyText

    def words(self, meeting: Meeting) -> Message:
        """Name the node."""
        what = "a spare again, because the script also failed on another node"
        if self.because:
            what = f"excluded from this job: {self.because}"
        return Message("HPC208", f"{names([self.node], meeting)} is {what}")


@dataclass(frozen=True)
class Leased(Alarm):
    """A round waits for nodes that may have workers, for up to `left` seconds."""

    nodes: tuple[int, ...]
    left: int

    def words(self, meeting: Meeting) -> Message:
        """Name the nodes."""
        nodes = names(self.nodes, meeting)
        text = f"workers of an earlier round may still run on {nodes}. The next round "
        return Message("HPC214", f"{text}waits for them, for up to {self.left} s")


@dataclass(frozen=True)
class Suspended(AlarmOfSpares):
    """This node was suspended, and another one may have replaced it."""

    seconds: int

    def words(self, meeting: Meeting) -> Message:
        """Name the consequence."""
        text = f"was suspended for up to {self.seconds} s. Its workers are killed, "
        text += "because another node may have replaced it"
        return Message("HPC210", f"{_own(meeting)} {text}")


# From a coordinator. The others are from this node's own agent.
NewsOfCoordinator: TypeAlias = (
    Waiting | Finishing | Silent | Answering | Lost | Restart | Replaced | Stranger
    | Unproved | Differ | Excluded | Leased | Suspended
)  # fmt: skip


@dataclass(frozen=True)
class Looking(News):
    """The agent looks for the coordinator. The `problem` is what it has found instead.

    If `is_reached`, the coordinator's node has refused a connection.
    """

    seconds: int
    problem: str
    is_reached: bool = False

    def words(self, meeting: Meeting) -> Message | None:
        """Name the problem, when a report is due."""
        is_reporter = reports_wait_for(meeting.node_rank, meeting.coordinator)
        if not waiting.is_report_due(self.seconds, is_reporter=is_reporter):
            return None
        problem = _search_problem(self.problem, meeting, is_reached=self.is_reached)
        who = f"{_head_node(meeting)} ({meeting.connect_host})"
        text = f"still waiting for {who} after {self.seconds} s: {problem}"
        return Message("HPC113", text)


@dataclass(frozen=True)
class CoordinatorSilent(AlarmOfSpares):
    """The coordinator has not answered. With spares, it is on `node`."""

    seconds: int
    left: int
    node: int | None = None

    def words(self, meeting: Meeting) -> Message | None:
        """Name the consequence."""
        who = _coordinator(self.node, meeting)
        what = "The job ends" if self.node is None else "Another node takes over"
        return None if who is None else _no_answer(who, self.seconds, what, self.left)


@dataclass(frozen=True)
class CoordinatorAnswers(News):
    """A silent coordinator has answered after some seconds."""

    seconds: int
    node: int | None = None

    def words(self, meeting: Meeting) -> Message | None:
        """Name the coordinator."""
        who = _coordinator(self.node, meeting)
        after = f" after {self.seconds} s"
        return None if who is None else _answers(who, "answers", after)


@dataclass(frozen=True)
class TakesOver(Alarm):
    """This node becomes the coordinator instead of `node`."""

    node: int

    def words(self, meeting: Meeting) -> Message:
        """Name both nodes."""
        text = f"{_own(meeting)} cannot reach the coordinator on "
        text += f"{names([self.node], meeting)}, and takes over if enough nodes follow"
        return Message("HPC212", text)


@dataclass(frozen=True)
class Seeks(AlarmOfSpares):
    """With spares, this node looks for a new coordinator."""

    seconds: int
    left: int

    def words(self, meeting: Meeting) -> Message | None:
        """Name the time that is left, when a report is due."""
        if not waiting.is_report_due(self.seconds):
            return None
        text = f"has looked for the coordinator for {self.seconds} s. It gives up in "
        return Message("HPC218", f"{_own(meeting)} {text}{self.left} s")


def _no_answer(who: str, seconds: int, what: str, left: int) -> Message:
    text = f"no answer from {who} for {seconds} s. {what} in {left} s if this continues"
    return Message("HPC121", text)


def _answers(who: str, verb: str, after: str = "") -> Message:
    return Message("HPC160", f"{who} {verb} again{after}")


def _coordinator(node: int | None, meeting: Meeting) -> str | None:
    """Name the coordinator's node; return ``None`` if another node reports on it."""
    coordinator = meeting.coordinator if node is None else node
    if not reports_wait_for(meeting.node_rank, coordinator):
        return None
    if node is None:
        return _head_node(meeting)
    return f"the coordinator on {names([node], meeting)}"


def disagreement(ranks: Mapping[str, Sequence[int]], meeting: Meeting) -> Message:
    """Report that nodes differ, given node ranks by value; "" is no value."""
    shown = {printable(value, _SHORT): nodes for value, nodes in ranks.items()}
    who = "; ".join(
        f"{value or 'none'} on {names(nodes, meeting)}"
        for value, nodes in shown.items()
    )
    text = (
        f"the nodes have different values: {who}. Pass --hpc-site=NAME, or set each "
        "variable on all nodes or on none (mpirun: with or without -x NAME)"
    )
    return Message("HPC163", text)


# --- why a launch ends ------------------------------------------------------------


def coordinator_missing(
    error: CoordinatorNotFoundError,
    timeout: float,
    meeting: Meeting,
    option: str = "join_timeout",
) -> Message:
    """Report that no coordinator was found within `timeout` seconds, and why."""
    node = f"{meeting.endpoint} ({meeting.connect_host})"
    problem = _search_problem(str(error), meeting, is_reached=error.is_reached)
    text = f"no head node at {node} within {timeout:.0f} s ({option}): {problem}"
    return Message("HPC112", text)


def _search_problem(problem: str, meeting: Meeting, *, is_reached: bool) -> str:
    if is_reached:
        hint = f"Check that the job has started there. {meeting.hint}".rstrip(" .")
        return f"{problem}. {hint}"
    of_path, is_cause = path_problem(meeting.local_address, meeting.connect_host)
    if is_cause:
        return of_path
    problems = "; ".join(filter(None, (problem or "no answer yet", of_path)))
    return ". ".join(filter(None, (problems, meeting.network_hint)))


def refusal(
    refused: RefusedError,
    meeting: Meeting,
    run_id: str,
    environ: Mapping[str, str],
    key: str,
) -> LaunchError:
    """Return why the coordinator refuses this agent; `key` names this node's key."""
    endpoint = join_endpoint(meeting.connect_host, refused.port)
    node = f"the head node at {endpoint}"
    reason, outer = refused.reason, environ.get(RUN_ID, "")
    # The coordinator does not tell its own id.
    is_second = reason is (Refused.TAKEN if outer == run_id else Refused.RUN_ID)
    if is_second and (inside := nested(environ, outer)):
        return inside
    if reason is Refused.UNPROVED:
        text = f"{node} does not prove that it belongs to job {meeting.launch_id}. It "
        text += f"belongs to another job or user, or has another key. Key here: {key}. "
        text += "Pass the same --hpc-key-file=FILE on all nodes, or pass another port"
        return LaunchError("HPC119", text, others_know=True)
    if reason is Refused.TAKEN:
        text = f"{node} already has an agent of node {meeting.node_rank}. {_BOTH}. "
        text += "Start torchrun_hpc once on each node"
        return LaunchError("HPC115", text, others_know=True)
    remedy, verb = "Start one job step with the same command on all nodes", "has"
    if reason is Refused.VERSION:
        code, value, what = "HPC116", f"torchrun_hpc {__version__}", "version"
        remedy = "Load the same environment on all nodes"
    elif reason is Refused.RUN_ID:
        code, value, what = "HPC117", f"--rdzv_id={run_id}", "id"
        remedy = f"Leave it out if each node generates its own id. {_PORTS}"
    elif reason is Refused.STARTED:
        code, value, what = "HPC232", meeting.started, "command"
        verb, remedy = "runs", _PORTS
    elif reason is Refused.SPARES:
        code, value, what = "HPC206", f"--hpc-spares={meeting.spares.number}", "number"
    else:
        code, value, what, verb = "HPC118", f"{meeting.nodes} nodes", "number", "sees"
    text = f"this node {verb} {value}, but {node} {verb} another {what}. {_BOTH}. "
    return LaunchError(code, text + remedy, others_know=True)


def bad_nodes(ranks: Sequence[int], meeting: Meeting) -> Message:
    """Name the nodes that the next job should exclude."""
    text = f"lost or excluded nodes: {names(ranks, meeting)}"
    if meeting.spares.exclude:
        hosts = ",".join(filter(None, (meeting.hosts[rank] for rank in ranks)))
        option = to_copy(f"{meeting.spares.exclude}{hosts}")
        text += f". Exclude them from the next job:{option}"
    return Message("HPC213", text)

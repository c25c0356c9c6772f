"""The examination: all tasks of a step meet, and task 0 gets a report."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc import environment
from torchrun_hpc.doctor import place, summary
from torchrun_hpc.doctor.conductor import Conductor
from torchrun_hpc.doctor.member import Member
from torchrun_hpc.doctor.place import COMMAND
from torchrun_hpc.doctor.results import NotMetError
from torchrun_hpc.errors import Message
from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Kind
from torchrun_hpc.preflight import preflight
from torchrun_hpc.rendezvous import messages
from torchrun_hpc.rendezvous.client import Listener
from torchrun_hpc.rendezvous.connection import Connection, settings_of
from torchrun_hpc.rendezvous.errors import CoordinatorNotFoundError, JobFailedError
from torchrun_hpc.rendezvous.messages import Looking
from torchrun_hpc.reporting import console
from torchrun_hpc.schedulers import pmi

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchrun_hpc.agent.abort import LaunchState
    from torchrun_hpc.doctor.place import Place, Wishes
    from torchrun_hpc.doctor.results import Report
    from torchrun_hpc.rendezvous.messages import News
    from torchrun_hpc.rendezvous.protocol import Settings

# Seconds. A coordinator on task 0 waits for silent nodes, because task 0 limits each
# wait. A coordinator elsewhere gives up a node after `_SILENCE` seconds or more, and
# each node gives up a silent coordinator.
_LONGEST = 3600
_SILENCE = 15

# Bytes: so the tasks also meet if packets of the MTU's size are lost, and report it.
_SEGMENT = 1000


def examine(  # noqa: PLR0913, PLR0917 - the last two are of the command
    argv: Sequence[str],
    wishes: Wishes,
    tell: Callable[[Message], None],
    known: LaunchState,
    words: Sequence[str] | None = None,
    on_first: Callable[[], None] = lambda: None,
) -> Report | None:
    """Examine the nodes of this step; see `torchrun_hpc.doctor.examine`.

    ``words`` is the line with the doctor's own options, for messages. ``on_first`` is
    called on task 0 before the examination.
    """
    command = shlex.join([*COMMAND.split(), *(argv if words is None else words)])
    with environment.without_empty_options():
        seen = known.preflight = preflight(command, console.write)
        if seen.job is not None and seen.job.pmi_is_open:
            pmi.finalize(seen.environ)  # the launcher cannot
        here = place.find(seen, argv, known)
        where = known.meeting = here.tasks_meeting
    if here.task.rank == 0:
        on_first()
    member = Member(here, wishes, seen.environ)

    def hear(news: News) -> None:
        message = news.words(where) if isinstance(news, Looking) else None
        if message is not None:
            tell(message)

    conductor = Conductor(here, wishes, tell)  # keeps the start time
    connection = Connection(
        where,
        _settings(here, wishes.timeout),
        seen.environ,
        Listener(hear),
        segment=_SEGMENT,
        replies=member.replies,
    )
    member.key = connection.key
    try:
        client = connection.open(wishes.timeout)
        if here.task.rank == 0:
            return conductor.conduct(client)
        client.until(member.ended.is_set)
        if not member.was_late:
            return None
        why = _seen_alone("the other nodes did not wait for this one")
    except (CoordinatorNotFoundError, JobFailedError, TimeoutError) as error:
        why = _why(error, here, wishes.timeout)
    finally:
        member.close()
        connection.close()
    found = summary.Found(nodes={here.node_rank: member.look()})
    raise NotMetError(why, summary.report(found, here, wishes.timeout))


def _settings(here: Place, timeout: float) -> Settings:
    where = here.tasks_meeting
    has_limits = where.is_coordinator and here.task.rank == 0
    silence_timeout = _LONGEST if has_limits else max(_SILENCE, int(timeout))
    settings = settings_of(where, "doctor", silence_timeout)
    return replace(settings, join_timeout=_LONGEST)


def _why(error: Exception, here: Place, timeout: float) -> Message:
    where = here.tasks_meeting
    if isinstance(error, CoordinatorNotFoundError):
        return messages.coordinator_missing(error, timeout, where, "--timeout")
    if isinstance(error, JobFailedError) and error.failure.kind is not Kind.COORDINATOR:
        return report.failed(error.failure, where)
    return _seen_alone(f"node {where.coordinator} stopped answering")


def _seen_alone(why: str) -> Message:
    return Message("HPC198", f"{why}, so only this node was examined")

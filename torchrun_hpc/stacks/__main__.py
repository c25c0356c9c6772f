"""``python -m torchrun_hpc.stacks``: shows what a job's workers are doing."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from torchrun_hpc import limits
from torchrun_hpc.errors import Message, to_copy
from torchrun_hpc.preflight import preflight
from torchrun_hpc.reporting import console
from torchrun_hpc.stacks import collectives, service
from torchrun_hpc.stacks.sampling import received

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COMMAND = "python -m torchrun_hpc.stacks"

_EQUAL = "all ranks have called the same collectives"
_UNKNOWN = "no collectives are known: workers called none, or were not preloaded"

NOT_FOUND = 1  # exit code: no job, no stack, or a launch without an answer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="Show what the workers of a job are doing, merged over all ranks. "
        "Run it on any node of the job: srun --overlap --jobid=JOBID " + COMMAND,
    )
    parser.add_argument(
        "--collectives",
        action="store_true",
        help="show also which ranks did not call the latest collective",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    process = preflight(COMMAND)
    if process.task_rank:  # all tasks of a step would print the same
        return 0
    names = _of_job(process.job.launch_id if process.job else "")
    asked = [answer for name in names if (answer := _ask(name)) is not None]
    if not asked:
        text = f"no running torchrun_hpc job of yours on {process.hostname}. "
        text += "On a cluster:" + to_copy(f"srun --overlap --jobid=JOBID {COMMAND}")
        console.write(Message("HPC172", text), "error")
        return NOT_FOUND
    answers = [*filter(None, asked)]
    if args.json:
        console.output(json.dumps(answers, indent=2) + "\n")
    else:
        for answer in answers:
            lines = _lines(answer, with_collectives=args.collectives)
            console.output("\n".join(lines) + "\n")
    stacks = [stack for answer in answers for stack in received(answer["workers"])]
    has_stacks = any(not stack.problem for stack in stacks)
    return 0 if all(asked) and has_stacks else NOT_FOUND


def _of_job(launch_id: str) -> list[str]:
    """Return the sockets of this job's launches; without any, all sockets."""
    launches = [*service.launches()]
    job = launch_id.partition(".")[0]
    # A launch on one node has no job number.
    of_job = [name for other, name in launches if other.partition(".")[0] in (job, "")]
    return of_job if job and of_job else [name for _, name in launches]


def _ask(name: str) -> Mapping[str, Any] | None:
    """Return an agent's answer, empty without one; ``None`` if it is another user's."""
    try:
        return service.ask(name, limits.STACKS_COMMAND_TIMEOUT)
    except BlockingIOError:  # a full queue is not an agent's
        return None
    except OSError as error:
        text = f"the agent did not answer: {error.strerror or error}"
        console.write(Message("HPC173", text), "error")
        return {}


def _lines(answer: Mapping[str, Any], *, with_collectives: bool) -> list[str]:
    hosts = {stack["node"]: stack["host"] for stack in answer["workers"]}
    hosts = hosts if len(hosts) > 1 else {}
    stacks = received(answer["workers"])
    lines = [f"launch {answer['launch']}"] if answer["launch"] else []
    lines += collectives.render(stacks, hosts)
    if with_collectives and stacks:
        has_calls = any(group.calls for stack in stacks for group in stack.groups)
        equal = _EQUAL if has_calls else _UNKNOWN
        lines += collectives.compare(stacks, hosts) or [equal]
    if answer["missing"]:
        lines.append(f"no answer from {answer['missing']}")
    elif not stacks:
        lines.append("no workers are running")
    return lines


if __name__ == "__main__":
    sys.exit(main())

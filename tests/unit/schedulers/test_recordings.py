"""Every task of every recorded launch finds the job that it belongs to.

Beside its tasks a recording says what they have to find: a ``job``, or how they are
``refused``. Both were checked against the recording, not taken from the code: ids,
nodes and addresses are those of its variables, each source is one of them, and the
line starts the recorded command. The recorded host names show the node of a task.
"""

from __future__ import annotations

import json

import pytest

from tests.support.detection import outcome
from tests.support.juelich import tasks_at
from tests.support.recordings import ENVIRONMENTS, node_file, recorded, recordings
from torchrun_hpc.schedulers.pmi import Exchanged
from torchrun_hpc.schedulers.process import Process

# Unless the recording says otherwise.
USUAL = {"context": "step", "nodelist_is_shared": True}
WITHOUT = " without PMI"
# Recordings of Hydra that do not state the outcome without PMI.
ONLY_WITH_PMI = ("-packed", "-split-chunks")


def found_by(name, *, with_pmi):
    """Return what each task finds, and how many asked the process manager."""
    tasks = recorded(name)
    hosts = dict.fromkeys(host for _, host in tasks)
    places = tuple([*hosts].index(host) for _, host in tasks)
    job_ids = {environ.get("PBS_JOBID") for environ, _ in tasks} - {None}
    files = {f"/var/spool/pbs/aux/{one}": node_file(name) for one in job_ids}
    asked = []

    def exchange(environ):
        asked.append(environ)
        told = Exchanged(next(iter(hosts)), "0badcafe", places, tuple(hosts))
        return told if with_pmi else None

    found = [
        outcome(Process(environ, host, read=files.get, exchange=exchange))
        for environ, host in tasks
    ]
    return found, places, len(asked)


def as_recorded(job, like):
    """Return those fields of a job that a recording states."""
    line = job.once_per_node("train.py")
    found = {**vars(job), "context": job.context.value, "line": line}
    return json.loads(json.dumps({field: found[field] for field in like}))


@pytest.mark.parametrize("name", recordings(""))
def test_every_task_finds_its_job(name):
    expected = json.loads((ENVIRONMENTS / f"{name}.json").read_text("utf-8"))
    hosts = [host for _, host in recorded(name)]
    scheduler = expected.get("job", {}).get("scheduler", "")
    is_hydra = scheduler.startswith("Hydra")
    says_both = is_hydra and not name.endswith(ONLY_WITH_PMI)
    for how in ["", WITHOUT]:
        if not {f"job{how}", f"refused{how}"} & set(expected):
            assert how, "the recording does not say what is found"
            assert not says_both, "the recording does not say what is found without PMI"
            continue
        found, places, asked = found_by(name, with_pmi=not how)
        refused = expected.get(f"refused{how}", {})
        for rank, text in refused.items():
            assert found[int(rank)] == text
        if refused:  # the launcher ends the others with this one
            continue
        assert asked == is_hydra * len(found)
        for rank, (job, task) in enumerate(zip(found, tasks_at(places), strict=True)):
            assert not isinstance(job, str), job
            own = expected.get("job of task", {}).get(str(rank), {})
            wanted = USUAL | expected["job"] | expected.get(f"job{how}", {}) | own
            assert as_recorded(job, wanted) == wanted, (how, rank)
            is_outside = wanted["context"] == "allocation shell"
            assert job.node_rank == (None if is_outside else places[rank])
            assert (job.task, job.is_ranked) == (task, True)
            is_launched = wanted["scheduler"].startswith(("Hydra", "Open MPI"))
            assert job.hostname == (hosts[rank] if is_launched else "")
            assert job.own_name == ("" if is_outside else hosts[rank])
            assert job.pmi_is_open == (is_hydra and not how)

"""Ranks of a launcher and nodes of a scheduler together: the same on every node.

Each task sees its own rank, and how many there are on its own node only. What follows
from that must be the same for all of them, or some task must refuse it.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nodes import outcome, reader, tasks_at

from torchrun_hpc.schedulers.pmi import Exchanged
from torchrun_hpc.schedulers.process import Process

HOSTS = ("jwb0001", "jwb0002", "jwb0003", "jwb0004")


# --- launches of every kind ---------------------------------------------------------


def open_mpi_5(task, node, _places):
    return {
        "OMPI_COMM_WORLD_RANK": task.rank,
        "OMPI_COMM_WORLD_SIZE": task.size,
        "OMPI_COMM_WORLD_LOCAL_RANK": task.local_rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": task.local_size,
        "PMIX_NAMESPACE": "prterun-jwb0001-8511@1",
        "PMIX_SERVER_URI2": f"prterun-jwb0001-8511@0.{node};tcp4://127.0.0.1:51163",
    }


def open_mpi_4(task, node, places):
    return {
        **open_mpi_5(task, node, places),
        "PMIX_NAMESPACE": "959053825",
        "PMIX_SERVER_URI2": f"959053824.{node};tcp4://127.0.0.1:49047",
        "OMPI_MCA_orte_hnp_uri": "959053824.0;tcp://10.10.0.1:43695",
        "OMPI_MCA_orte_num_nodes": max(places) + 1,
    }


def hydra(task, _node, _places):
    return {
        "PMI_RANK": task.rank,
        "PMI_SIZE": task.size,
        "MPI_LOCALRANKID": task.local_rank,
        "MPI_LOCALNRANKS": task.local_size,
    }


def pals(task, node, _places):
    return {
        "PALS_RANKID": task.rank,
        "PALS_NODEID": node,
        "PALS_LOCAL_RANKID": task.local_rank,
        "PALS_LOCAL_SIZE": task.local_size,
        "PALS_APID": "5b0de0e3-7c5f-4b4c-9dc2-1f0b2a1c7d11",
        "PMI_SIZE": task.size,
    }


def flux(task, _node, places):
    return {
        "FLUX_JOB_ID": "\u0192D2e73NP",
        "FLUX_JOB_SIZE": task.size,
        "FLUX_JOB_NNODES": max(places) + 1,
        "FLUX_TASK_RANK": task.rank,
        "FLUX_TASK_LOCAL_ID": task.local_rank,
    }


def jsrun(task, _node, _places):
    return {
        "JSM_NAMESPACE_RANK": task.rank,
        "JSM_NAMESPACE_SIZE": task.size,
        "JSM_NAMESPACE_LOCAL_RANK": task.local_rank,
        "JSM_NAMESPACE_LOCAL_SIZE": task.local_size,
        "PMIX_NAMESPACE": "csm-42-1",
    }


# The variables, and whether the process manager answers.
KINDS = {
    "Open MPI 4": (open_mpi_4, False),
    "Open MPI 5": (open_mpi_5, False),
    "Hydra": (hydra, True),
    "Hydra alone": (hydra, False),
    "PALS": (pals, False),
    "Flux": (flux, True),
    "jsrun": (jsrun, False),
}

FILE = "/var/spool/pbs/aux/17[3].server"
PBS = {"PBS_JOBID": "17[3].server", "PBS_NODEFILE": FILE}


def launch(kind, places, extra=None, job=PBS):
    """Return what all tasks of a launch find: jobs, or texts of refusals.

    Args:
        kind: One of `KINDS`.
        places: For each rank its node.
        extra: Number of nodes that the job has besides; ``None`` without a job.
        job: Variables of the job.
    """
    variables, answers = KINDS[kind]
    exchanged = Exchanged(HOSTS[0], "0badcafe", tuple(places)) if answers else None
    number = max(places) + 1 + (extra or 0)
    files = {} if extra is None else {FILE: "\n".join(HOSTS[:number])}
    return [
        outcome(
            Process(
                {
                    **({} if extra is None else job),
                    **{k: f"{v}" for k, v in variables(task, node, places).items()},
                },
                HOSTS[node],
                read=reader(files),
                exchange=lambda _: exchanged,
            )
        )
        for node, task in zip(places, tasks_at(places), strict=True)
    ]


def jobs_of(kind, places, extra=None, job=PBS):
    """Return the jobs of all tasks, of which none refuses."""
    found = launch(kind, places, extra, job)
    assert not [text for text in found if isinstance(text, str)]
    return found


# --- how many nodes there are, and what is started ----------------------------------

EVEN = {
    "one on each": [0, 1, 2],
    "two on each": [0, 0, 1, 1],
    "all on one": [0, 0],
    "in turn": [0, 1, 0, 1],
}
UNEVEN = {
    "2 and 1": [0, 0, 1],
    "1 and 2": [0, 1, 1],
    "3 and 2": [0, 0, 0, 1, 1],
    "2, 1 and 1": [0, 0, 1, 2],
    "1, 1 and 2": [0, 1, 2, 2],
    "1, 2 and 1": [0, 1, 1, 2],
    "in turn, 2 and 1": [0, 1, 0],
    "in turn, 2, 2 and 1": [0, 1, 2, 0, 1],
}
PLACES = EVEN | UNEVEN
NO_JOB, THESE, MORE = "no job", "a job of these nodes", "a job of one node more"
JOBS = {NO_JOB: None, THESE: 0, MORE: 1}

ALL_AGREE = "all agree"
REFUSED = "refused"  # by one task at least, which ends the others
# Known to be inconsistent, where the launcher does not say on how many nodes it is:
TOO_MANY = "too many"  # all agree, each is a worker, and GROUP_WORLD_SIZE is too large
SAME_MODE = "same mode"  # each is a worker, and only GROUP_WORLD_SIZE differs
DIFFER = "differ"  # some wait for others, which are workers, until they give up

# What does not follow from the number of tasks on one's own node: 2 of 4 may be on two
# nodes, or on three. It is clear to the last node, if it knows which one it is.
FIRST = {"2, 1 and 1": SAME_MODE}
MIDDLE = {"1, 2 and 1": SAME_MODE}
IN_MORE = {
    "2 and 1": REFUSED,
    "1 and 2": REFUSED,
    "in turn, 2 and 1": REFUSED,
    "3 and 2": TOO_MANY,
    "in turn, 2, 2 and 1": TOO_MANY,
    "2, 1 and 1": DIFFER,
    "1, 2 and 1": DIFFER,
    "1, 1 and 2": REFUSED,
}
IN_NONE = IN_MORE | {
    "3 and 2": REFUSED,
    "in turn, 2, 2 and 1": REFUSED,
    "1, 1 and 2": DIFFER,
}
# A task that knows how many nodes are in front sees that one of them has several tasks.
COUNTED = FIRST

EXCEPTIONS = {
    "Open MPI 5": {
        NO_JOB: IN_NONE | COUNTED,
        THESE: FIRST | MIDDLE,
        MORE: IN_MORE | COUNTED,
    },
    "PALS": {
        NO_JOB: IN_NONE | COUNTED | {"1, 1 and 2": REFUSED},
        THESE: FIRST | MIDDLE,
        MORE: IN_MORE | COUNTED,
    },
    "Hydra alone": {NO_JOB: IN_NONE, THESE: FIRST | MIDDLE, MORE: IN_MORE},
    "jsrun": {NO_JOB: IN_NONE, THESE: FIRST | MIDDLE, MORE: IN_MORE},
    # mpirun counts the nodes, or the tasks have told each other.
    "Open MPI 4": {},
    "Hydra": {},
    "Flux": {},
}


def verdict(found, nodes):
    """Say how far the tasks agree on the number of nodes."""
    refusals = [text for text in found if isinstance(text, str)]
    if refusals:
        assert {text[:6] for text in refusals} == {"HPC034"}
        return REFUSED
    if len({job.has_several_tasks for job in found}) > 1:
        return DIFFER
    numbers = {len(job.nodes) for job in found}
    if len(numbers) > 1:
        return SAME_MODE
    return ALL_AGREE if numbers == {nodes} else TOO_MANY


@pytest.mark.parametrize("where", JOBS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_tasks_agree_on(kind, where):
    """Whoever is not refused goes to the same place, as the same launch."""
    exceptions = EXCEPTIONS[kind].get(where, {})
    assert not EVEN.keys() & exceptions.keys()  # these are never refused
    for case, places in PLACES.items():
        found = launch(kind, places, JOBS[where])
        expected = exceptions.get(case, ALL_AGREE)
        assert verdict(found, max(places) + 1) == expected, case
        jobs = [job for job in found if hasattr(job, "nodes")]
        assert len({job.launch_id for job in jobs}) <= 1, case
        assert len({job.nodes[0] for job in jobs}) <= 1, case
        assert len({job.head_candidates for job in jobs}) <= 1, case
        assert len({job.allocated_nodes for job in jobs if where != NO_JOB}) <= 1, case


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_nodes(kind):
    """Rank 0 is on node 0, and tasks of one node are on one node."""
    for case, places in PLACES.items():
        found = launch(kind, places, JOBS[THESE])
        assert [job.node_rank for job in found] == places, case
        assert {job.nodes[0] for job in found} == {HOSTS[0]}, case
    # Without names, all of them only if the launcher counts the nodes.
    known = PLACES if kind in {"Open MPI 4", "Hydra", "Flux"} else EVEN
    for case, places in known.items():
        assert [job.node_rank for job in launch(kind, places)] == places, case


# --- launch id ----------------------------------------------------------------------

LAUNCH_IDS = {
    "Open MPI 4": ("959053825", "959053825"),
    "Open MPI 5": ("prterun-jwb0001-8511-1", "prterun-jwb0001-8511-1"),
    "Hydra": ("0badcafe", "17_3.0badcafe"),
    "Hydra alone": ("mpiexec", "17_3"),
    "PALS": ("5b0de0e3", "17_3.5b0de0e3"),
    "Flux": ("fD2e73NP", "17_3.fD2e73NP"),
    "jsrun": ("csm-42-1", "17_3.csm-42-1"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_launch_id(kind):
    alone, in_a_job = LAUNCH_IDS[kind]
    assert {job.launch_id for job in jobs_of(kind, [0, 1])} == {alone}
    assert {job.launch_id for job in jobs_of(kind, [0, 1], 0)} == {in_a_job}


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "Hydra alone"])
@pytest.mark.parametrize("extra", [None, 0])
def test_two_launches_in_one_job_differ(kind, extra, monkeypatch):
    """By what the launcher calls itself, or what the first task says."""
    one = jobs_of(kind, [0, 1], extra)[0].launch_id
    make, answers = KINDS[kind]

    def another(*args):
        names = ("8511", "959053825", "5b0de0e3", "D2e73NP", "csm-42-1")
        found = {name: f"{value}" for name, value in make(*args).items()}
        for name in names:
            found = {k: v.replace(name, name[::-1]) for k, v in found.items()}
        return found

    monkeypatch.setitem(KINDS, kind, (another, answers))
    if kind == "Hydra":
        real = Exchanged
        monkeypatch.setitem(globals(), "Exchanged", lambda h, _, p: real(h, "face", p))
    assert jobs_of(kind, [0, 1], extra)[0].launch_id != one


@pytest.mark.parametrize(
    ("job_id", "expected"),
    [
        ("17[3].server", "17_3"),
        ("17[12].server.site.example", "17_12"),
        ("17.server", "17"),
        ("\u0661[\u0663].server", "----"),
        ("a b/c\n.server", "a-b-c-"),
    ],
)
def test_launch_id_of_the_job(job_id, expected):
    job = PBS | {"PBS_JOBID": job_id}
    for kind, (alone, in_a_job) in LAUNCH_IDS.items():
        launch_ids = {job.launch_id for job in jobs_of(kind, [0, 1], 0, job)}
        same = {alone} if alone == in_a_job else {in_a_job.replace("17_3", expected)}
        assert launch_ids == same, kind


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1))
def test_characters_of_a_launch_id(name):
    environ = {
        **{k: f"{v}" for k, v in open_mpi_5(tasks_at([0])[0], 0, [0]).items()},
        "PMIX_NAMESPACE": name,
    }
    job = outcome(Process(environ, HOSTS[0]))
    assert re.fullmatch("[A-Za-z0-9._-]+", job.launch_id)
    assert len(job.launch_id) == len(name)

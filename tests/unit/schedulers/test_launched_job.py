"""Ranks of a launcher and nodes of a scheduler together: the same on every node.

Each task sees its own rank, and how many there are on its own node only. What follows
from that must be the same for all of them, or some task must refuse it.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.detection import detected, outcome, with_changes
from tests.support.launch_examples import FILE, HOSTS, PBS, kinds, launch


def found_by(kind, places, extra=None):
    """Return what all tasks of a launch find: jobs, or texts of refusals.

    ``extra`` is the number of nodes that the job has besides; without it, no job.
    """
    if extra is None:
        return [outcome(process) for process in launch(kind, places)]
    files = {FILE: "\n".join(HOSTS[: max(places) + 1 + extra])}
    return [outcome(process) for process in launch(kind, places, PBS, files)]


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
    """Return how far the tasks agree on the number of nodes."""
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
@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_what_the_tasks_agree_on(kind, where):
    """Whoever is not refused goes to the same place, as the same launch."""
    exceptions = EXCEPTIONS[kind].get(where, {})
    assert not EVEN.keys() & exceptions.keys()  # these are never refused
    for case, places in PLACES.items():
        found = found_by(kind, places, JOBS[where])
        expected = exceptions.get(case, ALL_AGREE)
        assert verdict(found, max(places) + 1) == expected, case
        jobs = [job for job in found if hasattr(job, "nodes")]
        assert len({job.launch_id for job in jobs}) <= 1, case
        assert len({job.nodes[0] for job in jobs}) <= 1, case
        assert len({job.head_candidates for job in jobs}) <= 1, case
        assert len({job.allocated_nodes for job in jobs if where != NO_JOB}) <= 1, case


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_ranks_of_nodes(kind):
    """Rank 0 is on node 0, and tasks of one node are on one node."""
    for case, places in PLACES.items():
        found = found_by(kind, places, JOBS[THESE])
        assert [job.node_rank for job in found] == places, case
        assert {job.nodes[0] for job in found} == {HOSTS[0]}, case
    # Without names, all of them only if the launcher counts the nodes.
    known = EVEN if EXCEPTIONS[kind] else PLACES
    for case, places in known.items():
        assert [job.node_rank for job in found_by(kind, places)] == places, case


# --- launch id ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", kinds())
def test_launch_id(kind):
    """It is the launcher's own name, behind the number of the job if all know it."""
    alone, in_a_job = kinds()[kind].launch_ids
    assert {job.launch_id for job in found_by(kind, [0, 1])} == {alone}
    assert {job.launch_id for job in found_by(kind, [0, 1], 0)} == {in_a_job}


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1))
def test_characters_of_a_launch_id(name):
    process = with_changes(launch("Open MPI 5", [0])[0], {"PMIX_NAMESPACE": name})
    job = detected(process)
    assert re.fullmatch("[A-Za-z0-9._-]+", job.launch_id)
    assert len(job.launch_id) == len(name)

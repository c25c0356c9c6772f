"""Detectors, their variables, and the nodes of a job."""

from __future__ import annotations

from dataclasses import fields

import pytest

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.schedulers import DETECTORS, flux, slurm
from torchrun_hpc.schedulers.detector import (
    Allocation,
    Detector,
    Variables,
    hosts_in,
    read_layout,
)
from torchrun_hpc.schedulers.job import LaunchContext, Task
from torchrun_hpc.schedulers.openmpi import MPIRUN
from torchrun_hpc.schedulers.slurm import SRUN


def parts(detector, **changes):
    """Return all parts of a record, with changes; one of ... is left out."""
    found = {field.name: getattr(detector, field.name) for field in fields(detector)}
    return {k: v for k, v in (found | changes).items() if v is not ...}


def lacking(detector):
    """Return what a record needs, and does not have."""
    is_scheduler = detector.detect is not None
    has_nodes = detector.allocation is not None
    are_kept = not all(
        marker.startswith(detector.prefixes) for marker in detector.markers
    )
    rules = {
        "a name and markers": detector.name and detector.markers,
        "either task_layout or detect": is_scheduler is (detector.task_layout is None),
        "allocation if it has detect, and only then": has_nodes is is_scheduler,
        "rank if it has task_layout": detector.rank or is_scheduler,
        "daemons if it has detect": detector.daemons or not is_scheduler,
        "prefixes and daemons, or neither": (not detector.prefixes)
        is (not detector.daemons),
        "markers that begin with its prefixes": not (detector.prefixes and are_kept),
        "node_name if it has task_pid": detector.node_name or not detector.task_pid,
        "promise if it has detect, or none": is_scheduler or not detector.promise,
    }
    return [rule for rule, holds in rules.items() if not holds]


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda detector: detector.name)
def test_parts_that_belong_together(detector):
    assert lacking(detector) == []


# The record, its changes, and what it needs.
WRONG = {
    "no name": (flux, {"name": ""}, "a name and markers"),
    "no markers": (slurm, {"markers": ()}, "a name and markers"),
    "neither kind": (flux, {"task_layout": ...}, "either task_layout or detect"),
    "both kinds": (
        slurm,
        {"task_layout": flux.task_layout},
        "either task_layout or detect",
    ),
    "a scheduler without nodes": (slurm, {"allocation": ...}, "allocation if it has"),
    "a launcher with nodes": (
        flux,
        {"allocation": slurm.allocation},
        "allocation if it has",
    ),
    "a launcher without ranks": (flux, {"rank": ()}, "rank if it has task_layout"),
    "a prefix alone": (flux, {"daemons": ()}, "prefixes and daemons, or neither"),
    "daemons alone": (flux, {"prefixes": ()}, "prefixes and daemons, or neither"),
    "a marker that would stay": (
        flux,
        {"markers": ("JOB_ID",)},
        "markers that begin with",
    ),
    "a scheduler that cannot be seen": (
        slurm,
        {"prefixes": (), "daemons": ()},
        "daemons if it has detect",
    ),
}


@pytest.mark.parametrize(("module", "changes", "needs"), WRONG.values(), ids=WRONG)
def test_parts_that_do_not_belong_together(module, changes, needs):
    rules = lacking(Detector(**parts(module.DETECTOR, **changes)))
    assert any(rule.startswith(needs) for rule in rules)


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda detector: detector.name)
def test_what_a_person_types(detector):
    line = detector.launcher.once_per_node(2, "COMMAND")
    assert line.startswith(f"{detector.launcher.name} ")
    assert "COMMAND" in line
    assert "2" in line
    assert "{" not in line


def test_a_rank_counts_with_what_has_to_be_set_with_it():
    detector = Detector(**parts(flux.DETECTOR, rank=("RANK", "SIGN")))
    for environ in ({"RANK": "1"}, {"SIGN": "1"}, {"RANK": "", "SIGN": "1"}):
        assert not detector.has_rank(environ)
    assert detector.has_rank({"RANK": "1", "SIGN": "1"})
    assert not Detector(**parts(slurm.DETECTOR, rank=())).has_rank({"RANK": "1"})


# --- its variables --------------------------------------------------------------------

ENVIRON = {"A": "", "B": "7", "C": "x", "D": "9" * 300, "E": "0"}
VARIABLES = Variables(ENVIRON, "Grid Engine", "SGE_*")


def test_the_first_that_is_set_counts():
    assert VARIABLES.first("A", "B", "C") == "7"
    assert VARIABLES.name("A", "B", "C") == "B"
    assert VARIABLES.integer("A", "B", "C") == 7
    assert VARIABLES.first("A", "missing") == ""
    assert VARIABLES.integer_or_zero("A", "missing") == 0
    layout = read_layout(VARIABLES, ("B", "B", "E", "A", "B"), {"nodes": "N"}, nodes=2)
    assert (layout.task, layout.nodes) == (Task(7, 7, 0, 7), 2)
    sources = {"task": "B", "tasks": "B", "local_rank": "E", "local_size": "B"}
    assert layout.provenance == sources | {"nodes": "N"}


def test_shown():
    assert VARIABLES.shown("A", "B") == "B='7'"
    assert VARIABLES.shown("A") == "A=''"
    assert VARIABLES.shown("D") == f"D='{'9' * 200}...'"


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("A", "HPC020", "A is not set, but other variables show that Grid Engine"),
        ("C", "HPC021", "C='x' is not a whole number"),
        ("D", "HPC021", "D='999"),
    ],
)
def test_what_cannot_be_read_is_the_same_on_all_nodes(name, code, message):
    with pytest.raises(LaunchError, match=f"^{message}") as caught:
        VARIABLES.integer(name)
    assert (caught.value.code, caught.value.everywhere) == (code, True)


# --- the nodes of a job ---------------------------------------------------------------

PROVENANCE = {"nodes": "NODES", "launch_id": "JOB"}


def test_hosts_in():
    lines = ["n2", "", "# a comment", " n1.site  # another", "n2"]
    assert hosts_in(lines, "FILE") == ["n2", "n1.site", "n2"]
    assert hosts_in(["n2 4", "n1"], "FILE", counts=True) == ["n2", "n1"]


@pytest.mark.parametrize(
    ("line", "counts"),
    [("n1 4", False), ("n1 4 4", True), ("n1 x", True), ("n 1", False), ("-n", False)],
)
def test_an_entry_that_is_no_host(line, counts):
    with pytest.raises(LaunchError, match=f"^FILE .* entry 2 is '{line}'") as caught:
        hosts_in(["n1", line], "FILE", counts=counts)
    assert caught.value.code == "HPC140"


@pytest.mark.parametrize(
    ("nodes", "hostname", "context", "rank"),
    [
        (("n1", "n2"), "n2.site", LaunchContext.BATCH_SCRIPT, 1),
        (("n1", "n2"), "login", LaunchContext.ALLOCATION_SHELL, None),
        (("n1",), "login", LaunchContext.BATCH_SCRIPT, None),
    ],
)
def test_job_of_script(nodes, hostname, context, rank):
    allocation = Allocation("PBS", "7", nodes, PROVENANCE, host_file="$FILE")
    job = allocation.job_of_script(hostname, MPIRUN)
    assert (job.context, job.node_rank, job.nodes) == (context, rank, nodes)
    assert (job.task, job.allocated_nodes) == (Task(), len(nodes))
    assert job.host_file == "$FILE"
    assert allocation.job_of_script(hostname, SRUN).host_file == ""

"""The parts of each record belong together."""

from __future__ import annotations

from dataclasses import fields

import pytest

from torchrun_hpc.schedulers import DETECTORS, flux, slurm
from torchrun_hpc.schedulers.detector import Detector


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


@pytest.mark.parametrize("case", WRONG)
def test_parts_that_do_not_belong_together(case):
    module, changes, needs = WRONG[case]
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

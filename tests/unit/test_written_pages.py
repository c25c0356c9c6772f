"""README and the pages that are made from something else are as that says."""

from __future__ import annotations

import re

import pytest
from pages import ROOT, block, blocks
from programs import load

DOCS = ROOT / "docs"

PICTURES = load(DOCS / "write_pictures.py")
SYMPTOMS = load(DOCS / "write_symptoms.py")
PLOTS = load(ROOT / "benchmarks" / "plots.py")


def test_readme_is_short_and_has_the_two_commands_first():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100
    lines = blocks("README.md")[0].text.splitlines()
    typed = [line.partition("#")[0].strip() for line in lines]
    assert typed == ["make demo", "make test"]


def test_readme_shows_a_failure_as_tests_have_seen_it():
    shown = block("README.md", "HPC125")
    assert shown.text in [each.text for each in blocks("docs/failures.md")]


def test_the_page_of_symptoms_is_written_from_the_messages():
    page = (DOCS / "symptoms.md").read_text(encoding="utf-8")
    assert page == SYMPTOMS.text(), "python docs/write_symptoms.py"


def test_every_message_is_at_one_symptom():
    page = (DOCS / "symptoms.md").read_text(encoding="utf-8")
    places = re.findall(r"^<!-- ((?:HPC\d{3} ?)+) ?-->$", page, re.MULTILINE)
    codes = [code for place in places for code in place.split()]
    start_line = "HPC001"  # is no symptom
    assert sorted([*codes, start_line]) == sorted(SYMPTOMS.described())


@pytest.mark.parametrize("name", PICTURES.PICTURES)
def test_a_picture_is_as_it_is_drawn(name):
    drawn = PICTURES.PICTURES[name]
    kept = (DOCS / "images" / name).read_text(encoding="utf-8")
    assert kept == drawn, "python docs/write_pictures.py"


def test_plots_show_what_was_recorded():
    for name, drawn in PLOTS.drawn().items():
        kept = (DOCS / "images" / name).read_text(encoding="utf-8")
        assert kept == drawn, "python benchmarks/plots.py"

"""What a release states in several places."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from torchrun_hpc import __version__

ROOT = Path(__file__).parents[2]


def test_changelog_and_citation_are_of_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)", changelog, re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    date = citation["date-released"].isoformat()
    assert headings[:2] == ["[Unreleased]", f"[{__version__}] - {date}"]
    assert citation["version"] == __version__

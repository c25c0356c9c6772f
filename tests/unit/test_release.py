"""What a release states in several places."""

from __future__ import annotations

import re

import yaml
from packaging.version import Version

from tests.support import ROOT
from torchrun_hpc import __version__


def test_changelog_and_citation_are_of_the_latest_release():
    """The code has this version, or is on the way to a later one."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)", changelog, re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    released, date = citation["version"], citation["date-released"].isoformat()
    assert headings[:2] == ["[Unreleased]", f"[{released}] - {date}"]
    version = Version(__version__)
    assert version == Version(released) or (
        version.is_devrelease and version > Version(released)
    )

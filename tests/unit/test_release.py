"""What a release states in several places, and what the place that hosts it reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from torchrun_hpc import __version__

ROOT = Path(__file__).parents[2]
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"

# https://github.com/citation-file-format/citation-file-format/blob/1.2.0/schema.json
CFF_NEEDS = {"authors", "cff-version", "message", "title"}
CFF_KNOWS = CFF_NEEDS | {
    *("abstract", "commit", "contact", "date-released", "doi", "identifiers"),
    *("keywords", "license", "license-url", "preferred-citation", "references"),
    *("repository", "repository-artifact", "repository-code", "type", "url"),
    "version",
}


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_changelog_and_citation_are_of_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)", changelog, re.MULTILINE)
    citation = read(ROOT / "CITATION.cff")
    date = citation["date-released"].isoformat()
    assert headings[:2] == ["[Unreleased]", f"[{__version__}] - {date}"]
    assert citation["version"] == __version__


def test_the_citation_is_valid():
    citation = read(ROOT / "CITATION.cff")
    assert set(citation) >= CFF_NEEDS
    assert set(citation) <= CFF_KNOWS
    assert citation["cff-version"] == "1.2.0"
    assert all({"name"} == set(author) for author in citation["authors"])


# https://docs.github.com/en/communities, "Syntax for GitHub's form schema".
ATTRIBUTES = {
    "dropdown": {"label", "description", "options", "multiple", "default"},
    "input": {"label", "description", "placeholder", "value"},
    "markdown": {"value"},
    "textarea": {"label", "description", "placeholder", "value", "render"},
}


@pytest.mark.parametrize("name", ["bug", "site"])
def test_a_form_is_valid(name):
    form = read(FORMS / f"{name}.yml")
    assert set(form) == {"name", "description", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    for field in form["body"]:
        assert set(field) <= {"type", "id", "attributes", "validations"}
        assert set(field["attributes"]) <= ATTRIBUTES[field["type"]]
        assert set(field.get("validations", {})) <= {"required"}
        assert all(isinstance(o, str) for o in field["attributes"].get("options", []))
    for one in ([f["id"] for f in fields], [f["attributes"]["label"] for f in fields]):
        assert len(set(one)) == len(fields) > 0

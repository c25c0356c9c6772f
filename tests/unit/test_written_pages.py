"""README and the pages that are made from something else are as that says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.doctor_reports import hostile_report, make_report
from tests.support.pages.blocks import block, blocks
from tests.support.python_programs import load
from torchrun_hpc import wire

DOCS = ROOT / "docs"

PICTURES = load(DOCS / "write_pictures.py")
REPORT = load(DOCS / "write_report.py")
CONSTANTS = load(DOCS / "write_constants.py")
PLOTS = load(ROOT / "benchmarks" / "plots.py")


def test_readme_is_short_and_has_the_two_commands():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100
    lines = block("README.md", "make demo").text.splitlines()
    typed = [line.partition("#")[0].strip() for line in lines]
    assert typed == ["make demo", "make test"]


EXAMPLES = [each for each in blocks("tests/README.md") if each.language == "python"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each.heading)
def test_examples_of_tests_pass(example):
    """The examples that need a cluster are tests of the files in their titles."""
    names: dict[str, Any] = {}
    exec(example.text, names)  # noqa: S102
    tests = [each for name, each in names.items() if name.startswith("test_")]
    assert tests
    if example.title:
        _, _, body = example.text.partition("def test_")
        assert body in (ROOT / example.title).read_text(encoding="utf-8")
    else:
        for test in tests:
            test()


def test_readme_shows_a_failure_as_tests_have_seen_it():
    shown = block("README.md", "HPC125")
    assert shown.text in [each.text for each in blocks("docs/troubleshooting.md")]


@pytest.mark.parametrize(
    ("file", "written"),
    [(REPORT.FILE, REPORT.text), (REPORT.SCHEMA_FILE, REPORT.schema_text)],
)
def test_the_fields_of_the_doctors_report(file, written):
    kept = file.read_text(encoding="utf-8")
    assert kept == written(), "python docs/write_report.py"


@pytest.mark.parametrize(
    ("file", "written"),
    [
        (CONSTANTS.VARIABLES_FILE, CONSTANTS.variables_text),
        (CONSTANTS.LIMITS_FILE, CONSTANTS.limits_text),
    ],
)
def test_variables_and_limits(file, written):
    kept = file.read_text(encoding="utf-8")
    assert kept == written(), "python docs/write_constants.py"


KINDS: dict[str, Any] = {"object": dict, "array": list, "string": str}
KINDS |= {"boolean": bool, "integer": int, "number": (int, float), "null": type(None)}


def fits(value, form, schema):
    """Return whether a value is as a schema says, as far as ours go."""
    if "$ref" in form:
        form = schema["$defs"][form["$ref"].removeprefix("#/$defs/")]
    if "anyOf" in form:
        return any(fits(value, each, schema) for each in form["anyOf"])
    if not isinstance(value, KINDS[form["type"]]) or form.get("const", value) != value:
        return False
    if "properties" in form:
        known = form["properties"]
        return value.keys() == known.keys() == {*form["required"]} and all(
            fits(value[name], known[name], schema) for name in known
        )
    if form["type"] == "object":
        form, value = {"items": form["additionalProperties"]}, [*value.values()]
    elif form["type"] != "array":
        return True
    forms = form.get("prefixItems") or [form["items"]] * len(value)
    pairs = zip(value, forms, strict=True)
    return all(fits(part, each, schema) for part, each in pairs)


def test_a_report_is_as_its_schema_says():
    schema = json.loads(REPORT.schema_text())
    assert schema["$id"] == schema["properties"]["schema"]["const"]
    for report in (
        make_report(3, slow=[1]),
        make_report(1, nodes=()),
        hostile_report(),
    ):
        found = json.loads(json.dumps(wire.encode(report)))
        assert fits(found, schema, schema)
        changes: list[dict[str, Any]]
        changes = [{"seconds": "1"}, {"nodes": [{}]}, {"schema": "other"}]
        for wrong in changes:
            assert not fits(found | wrong, schema, schema)


@pytest.mark.parametrize("name", PICTURES.PICTURES)
def test_a_picture_is_as_it_is_drawn(name):
    drawn = PICTURES.PICTURES[name]
    kept = (DOCS / "images" / name).read_text(encoding="utf-8")
    assert kept == drawn, "python docs/write_pictures.py"


def test_plots_show_what_was_recorded():
    for name, drawn in PLOTS.drawn().items():
        kept = (DOCS / "images" / name).read_text(encoding="utf-8")
        assert kept == drawn, "python benchmarks/plots.py"

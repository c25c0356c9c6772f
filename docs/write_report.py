"""Write the fields of the doctor's report: ``python docs/write_report.py``.

reference.md gets them as a table, and doctor-report.schema.json as a JSON Schema.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from torchrun_hpc.doctor import results

FILE = Path(__file__).with_name("reference.md")
SCHEMA_FILE = Path(__file__).with_name("doctor-report.schema.json")
MARK = "<!-- Written by docs/write_report.py from torchrun_hpc.doctor.results. -->\n"

TYPES = (
    *(results.DoctorReport, results.Finding, results.NodeReport),
    *(results.InterfaceReport, results.Folder, results.GpuReport, results.Torch),
    *(results.Link, results.WorkerReport, results.Collective),
)
_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string"}
_SCALARS[types.NoneType] = "null"


def _documented(kind: type) -> tuple[str, dict[str, str]]:
    """Return what a type is, and what its fields are."""
    title, _, attributes = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    parts = re.findall(
        r"^ {4}(\w+): (.*?)(?=^ {4}\w+: |\Z)", attributes, re.DOTALL | re.MULTILINE
    )
    fields = {name: " ".join(text.split()).replace("``", "`") for name, text in parts}
    return title.splitlines()[0], fields


def fields(kind: type) -> str:
    """Return one type as rows of the table: its name, then its fields."""
    first, texts = _documented(kind)
    rows = "".join(
        f"| `{name}` | {_written(hint)} | {texts[name]} |\n"
        for name, hint in typing.get_type_hints(kind).items()
    )
    return f"| **{kind.__name__}** | | {first} |\n{rows}"


def _written(hint: object) -> str:
    """Write a type for a person."""
    return re.sub(r"\b[\w.]+\.(?=\w)|<class '|'>", "", str(hint)).replace("|", "or")


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a report."""
    kinds = {kind.__name__: _object(kind) for kind in TYPES}
    report = kinds.pop("DoctorReport")
    report["properties"]["schema"]["const"] = results.SCHEMA
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": results.SCHEMA,
        **report,
        "$defs": kinds,
    }


def _object(kind: type) -> dict[str, Any]:
    first, texts = _documented(kind)
    hints = typing.get_type_hints(kind)
    properties = {
        name: {"description": texts[name], **_form(hint)}
        for name, hint in hints.items()
    }
    return {
        "description": first,
        "type": "object",
        "properties": properties,
        "required": [*hints],
    }


def _form(hint: Any) -> dict[str, Any]:
    """Return the schema of a type hint."""
    parts = typing.get_args(hint)
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if is_dataclass(hint):
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if isinstance(hint, types.UnionType):
        return {"anyOf": [*map(_form, parts)]}
    if typing.get_origin(hint) is Mapping:
        return {"type": "object", "additionalProperties": _form(parts[1])}
    if ... in parts:
        return {"type": "array", "items": _form(parts[0])}
    return {
        "type": "array",
        "prefixItems": [*map(_form, parts)],
        "minItems": len(parts),
        "maxItems": len(parts),
    }


def schema_text() -> str:
    """Return the whole file."""
    return json.dumps(schema(), indent=1) + "\n"


def text() -> str:
    """Return the whole page."""
    head, _, _ = FILE.read_text(encoding="utf-8").partition(MARK)
    table = "| field | type | meaning |\n|---|---|---|\n" + "".join(map(fields, TYPES))
    return f"{head}{MARK}\n{table}"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")

"""What the benchmarks have measured, kept in results/ for plots.py."""

from __future__ import annotations

import json
import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("results")


def record(name: str, data: object) -> None:
    """Keep what a benchmark has measured, and when and with what.

    Args:
        name: Of the file in results/.
        data: What was measured, for JSON.
    """
    measured = {
        "date": date.today().isoformat(),  # noqa: DTZ011 - the day is enough
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch").partition("+")[0],
    }
    text = json.dumps({"measured": measured, "results": data}, indent=1)
    (FOLDER / name).write_text(text + "\n", encoding="utf-8")


def recorded(name: str) -> Any:
    """Return what a benchmark has recorded."""
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))["results"]

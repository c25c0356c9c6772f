"""An attack on a launch by another user's program; see scripts/hostile.py."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING

from tests.support.cluster.commands import SCRIPTS
from tests.support.cluster.real_job import Program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.cluster.real_job import RealJob, Words


@contextlib.contextmanager
def attacked(job: RealJob, folder: Path, *stores: str) -> Iterator[dict[str, int]]:
    """Let the program do to a job of n9 what it can.

    Args:
        job: The launch.
        folder: Where the program leaves a marker if anybody runs what it sends.
        *stores: The ``HOST:PORT`` of the workers' stores.

    Yields:
        How often it did what, while its connections are open.
    """
    marker = folder / "marker"
    places = (f"10.10.0.1:{job.port()}", *stores)
    script: Words = (SCRIPTS / "hostile.py", marker, job.launch_id(), *places)
    with Program(job.cluster, (sys.executable, *script), host=job.hosts[0]) as program:
        program.says("}\n")
        did: dict[str, int] = json.loads(program.stdout)
        yield did
    expected = {"held": 300, "pretended": 27, "disclosed": 0}
    assert did["garbage"] >= 11, (did, job.output)
    assert {name: did[name] for name in expected} == expected, job.output
    assert job.output.count("HPC237]: ignored 10.10.0.1, which") == 1, job.output
    assert not marker.exists(), job.output
    assert "Traceback" not in job.output, job.output

"""A job fails: all agents end, and the last line says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from faults import FAULTS
from faults_page import check, do
from jobs import Job

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster


@pytest.mark.parametrize("name", ["agent_killed", "head_killed"])
def test_lost(name: str, juelich: Cluster, tmp_path: Path) -> None:
    job = Job(juelich, juelich.names, tmp_path, FAULTS[name].form)
    check(do([name], job))

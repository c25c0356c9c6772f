"""``--hpc-bind``: each worker has CPUs of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bound import assert_bound, needs_two_cpus

if TYPE_CHECKING:
    from pathlib import Path


@needs_two_cpus
def test_forks_have_cpus_of_their_own(tmp_path: Path) -> None:
    assert_bound(tmp_path, "--hpc-preload=torch")

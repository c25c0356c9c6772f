"""``--hpc-bind``: each worker has CPUs of its own."""

from __future__ import annotations

from bound import assert_bound, needs_two_cpus


@needs_two_cpus
def test_forks_have_cpus_of_their_own(tmp_path):
    assert_bound(tmp_path, "--hpc-preload=torch")

"""Each worker has all CPUs of its node, or with ``--hpc-bind`` CPUs of its own."""

from __future__ import annotations

import json

from tests.support.cluster.bound import ALL, assert_bound, needs_two_cpus
from tests.support.cluster.commands import WORLD
from tests.support.processes import run_launcher


@needs_two_cpus
def test_forks_have_cpus_of_their_own(tmp_path):
    assert_bound(tmp_path)


@needs_two_cpus
def test_the_agents_import_takes_no_cpus_from_its_workers():
    """Due to the abbreviation, the agent imports torch before it counts its CPUs."""
    places = ",".join(f"{{{cpu}}}" for cpu in ALL)
    environ = {"OMP_PROC_BIND": "close", "OMP_PLACES": places}
    done = run_launcher("--nproc_per_nod=2", WORLD, **environ)
    assert done.code == 0, done.err
    assert [json.loads(line)["cpus"] for line in done.out.splitlines()] == [ALL, ALL]
    assert done.err.count("HPC227") == 1, done.err
    assert f"({ALL[0]}) when they import torch (OMP_PROC_BIND=close, " in done.err
    assert "HPC092" not in done.err

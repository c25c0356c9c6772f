"""A job fails: all agents end, and the last line says why."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.support.cluster import failing_jobs as failures
from tests.support.cluster.faults import FAULTS
from tests.support.cluster.training_job import TrainingJob
from tests.support.pages import faults_page


def test_an_exception_in_one_worker(juelich, tmp_path):
    failures.check("exception", juelich, tmp_path)


@pytest.mark.parametrize("name", ["agent_killed", "head_killed"])
def test_lost(name, juelich, tmp_path):
    job = TrainingJob(juelich, juelich.names, tmp_path, FAULTS[name].form)
    with closing(job):
        faults_page.check(faults_page.do([name], job))

"""Scripts that exec and fork start."""

from __future__ import annotations

import json

import pytest

from tests.support.forks import ForkingProcess
from tests.support.processes import clean_environ, run_python

BEGIN = "from tests.support.both_forms import main\n"


@pytest.fixture(scope="session")
def forks():
    with ForkingProcess(BEGIN) as started:
        yield started


@pytest.fixture
def in_both_forms(tmp_path, forks):
    """Run words, return code, stdout and stderr by exec, and the same by fork.

    With other variables, or something closed, Python is started for it.
    """

    def run(*words, preparation="", scripts=(), environ=None, closed=""):
        program = f"main({preparation!r}, {words!r}, {scripts!r})"
        if environ or closed:
            done = run_python(
                *("-c", BEGIN + program),
                cwd=tmp_path,
                environ=clean_environ() | (environ or {}),
                before=["sh", "-c", f'exec "$0" "$@" {closed}'],
            )
        else:
            done = forks.run(program, cwd=tmp_path)
        assert done.code == 0, done.err
        results = json.loads(done.out)
        return results if scripts else results[0]

    return run

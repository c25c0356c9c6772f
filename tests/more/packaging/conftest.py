"""The sdist and the wheel, built once."""

from __future__ import annotations

import sys

import pytest

from tests.support import ROOT
from tests.support.patience import PATIENCE
from tests.support.processes import clean_environ, run

# Nothing of the repository can be imported by what is started here.
ENVIRON = {k: v for k, v in clean_environ().items() if k != "PYTHONPATH"}


def run_tool(*command, limit=PATIENCE):
    return run([sys.executable, "-m", *command], environ=ENVIRON, cwd="/", limit=limit)


@pytest.fixture(scope="session")
def tool():
    return run_tool


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Build the sdist, and the wheel from the sdist."""
    folder = tmp_path_factory.mktemp("built")
    done = run_tool("build", "--no-isolation", f"--outdir={folder}", str(ROOT))
    assert done.code == 0, done.out + done.err
    return folder

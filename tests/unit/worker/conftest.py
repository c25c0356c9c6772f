"""Scripts that are started by exec and by fork."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from programs import run_python

DRIVER = Path(__file__).with_name("both_forms.py")


@pytest.fixture
def in_both_forms(tmp_path):
    """Run words, return code, stdout and stderr by exec, and the same by fork."""

    def run(*words, preparation="", environ=None, closed=""):
        done = run_python(
            *(DRIVER, preparation, *words),
            cwd=tmp_path,
            environ={**os.environ, **(environ or {})},
            before=["sh", "-c", f'exec "$0" "$@" {closed}'],
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run

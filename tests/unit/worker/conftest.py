"""Scripts that are started by exec and by fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DRIVER = Path(__file__).with_name("both_forms.py")


@pytest.fixture
def in_both_forms(tmp_path):
    """Run words, return code, stdout and stderr by exec, and the same by fork."""

    def run(*words, preparation="", environ=None, closed=""):
        done = subprocess.run(
            [
                *("sh", "-c", f'exec "$0" "$@" {closed}'),
                *(sys.executable, DRIVER, preparation, *words),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run

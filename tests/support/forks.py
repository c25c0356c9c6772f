"""Programs that run as forks of one process, which has imported what they need.

Each does all that a program of its own does, but for the start of Python and imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support import ROOT
from tests.support.patience import PATIENCE

# The last line of the fork is the program, so that it ends as Python ends.
_DRIVER = """\
import json, os, signal, sys, tempfile
{imports}
for asked in map(json.loads, sys.stdin):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            signal.alarm({patience})
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            break
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = [os.pread(f.fileno(), 10**7, 0).decode() for f in (out, err)]
        print(json.dumps([code, *texts]), flush=True)
else:
    os._exit(0)
os.closerange(3, 100)
os.chdir(asked["cwd"])
os.environ.update(asked["environ"])
exec(asked["program"])
"""


class Forks:
    """A process from which programs are forked, until it is closed.

    Args:
        imports: Statements, whose names the programs have.
    """

    def __init__(self, imports):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER.format(imports=imports, patience=PATIENCE)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.communicate()

    def run(self, program, *, cwd, environ=None):
        """Run a program, as `programs.run_python` does, and return the outcome."""
        asked = {"program": program, "cwd": str(cwd), "environ": environ or {}}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess(program, *answer)

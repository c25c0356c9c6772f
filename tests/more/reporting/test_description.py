"""A shell reads the lines that a description has for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support.patience import PATIENCE
from torchrun_hpc.reporting import description

ODD = [
    "plain", "", "two words", "$HOME", "`id`", "$(id)", "it's", 'say "so"', "ü\u2028",
    "back\\slash", "a\nb", "*", "~", "!x", "#", "a;b&c|d>e", "--flag=a b",
]  # fmt: skip
TELL = "import json, os, sys; print(json.dumps([os.environ.get('ODD'), sys.argv[1:]]))"


def test_a_shell_reads_what_was_meant():
    for value in ODD:
        command = [sys.executable, "-S", "-c", TELL, *ODD]
        lines = description.shell_lines({"ODD": value}, command)
        done = subprocess.run(
            ["sh", "-eu"],
            input="\n".join(lines),
            env={**os.environ, "PYTHONUTF8": "1"},
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=True,
            timeout=PATIENCE,
        )
        assert json.loads(done.stdout) == [value, ODD]

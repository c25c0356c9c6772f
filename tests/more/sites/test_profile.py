"""A profile, beside bash: a value that is taken is bash's, too."""

from __future__ import annotations

import subprocess

from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchrun_hpc.sites import profile

NAMES = ("NCCL_A", "NCCL_B")
SHOW = 'printf "\\0%s\\0%s" "$NCCL_A" "$NCCL_B"'

PIECES = st.sampled_from(
    [
        *("NCCL_A=", "export NCCL_A=", "NCCL_B=", "export ", "a=", "1", "x,y:z/1.5%"),
        *('"', "'", "$NCCL_B", "$", "a b", "#", " #", " ", "\t"),
        *("\\", "\\\n", "\u2028"),
        *("if true; then\n", "if false; then\n", "else\n", "fi\n", "true\n"),
        *("f() {\n", "}\n", "f\n", "list=(\n", ")\n", "cat <<END\n", "END\n"),
        *("for a in 1 2; do\n", "done\n", "case 1 in\n", "1) ", ";;\n", "esac\n"),
        *("\n", "\n", "\n", ";", "&&", "="),
    ]
)  # fmt: skip


@settings(max_examples=1000, deadline=None)
@example(["NCCL_A='a \"b\" \\n'  # why\n"])
@example(["if true; then a=1; fi\n", "NCCL_A=1\n"])
@example(["list=(\n", "NCCL_A=1\n", ")\n"])
@example(["cat <<END\n", "NCCL_A=1\n", "END\n"])
@given(st.lists(PIECES, max_size=20))
def test_a_value_is_that_of_bash(pieces):
    text = "".join(pieces)
    found = profile.parse("FILE", text, NAMES).variables
    if not found:
        return
    for option, program in (("-nc", text), ("-c", f'eval "$0"; {SHOW}')):
        done = subprocess.run(
            ["/bin/bash", option, program, text], env={"PATH": "/nowhere"},
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode != 0:  # bash cannot run it either
            return
    values = dict(zip(NAMES, done.stdout.split("\0")[-2:], strict=True))
    for name, setting in found.items():
        assert setting.value == values[name], text

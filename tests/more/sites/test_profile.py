"""A profile, beside bash: bash gives a taken variable the same value."""

from __future__ import annotations

import subprocess

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from torchrun_hpc.sites import profile

NAMES = ("NCCL_A", "NCCL_B")
SHOW = 'printf "\\0%s\\0%s" "$NCCL_A" "$NCCL_B"'

VALUES = ("1", "x,y:z/1.5%", "", "'a\"'", '"a b"', "'#'", "a#b", "=", "1 # why", "fi")
SETS = [f"{e}{n}={v}" for e in ("", "export ") for n in NAMES for v in VALUES]
OTHERS = """
a=1|done=1|fi_x=1|: ${a:=1}|export a="$NCCL_A"|true|# NCCL_A=3 (|a='
NCCL_A=3|'|a="|"|a=b\\|a=(|)|a=(x|x)|cat <<END|END
if true; then|if false; then|if false; then a=1|if false|then|else|elif true; then|fi
if true; then a=1; fi|if false; then NCCL_A=3; fi|true && if false; then
for a in 1 2; do|for NCCL_A in 1 2; do|while false; do|while false; do a=1|done
until true|do|do a=1|case 2 in|case 2 in 1) a=1|1)|*)|;;|esac
f() {|f() { a=1|f() { a=1; }|f ()|{|}|f|( a=1|(|{ a=1; }|g() (
false &&|true \\|\\||a=1 \\||[ -d /x ] \\|\\| return 0
[ -d /x ] && return|exit 0|exec true
unset NCCL_A|NCCL_A[0]=2|read NCCL_A|printf -v NCCL_A 2|declare NCCL_A=4|NCCL_A+=5
NCCL_A=1 NCCL_B=2|NCCL_A=$a|NCCL_A=$(true)|NCCL_A=`true`|NCCL_A=1;|NCCL_A=1 true
\\export NCCL_A=7|[ 1 ] && export NCCL_A=8|eval NCCL_A=9|local NCCL_A=3
"""
LINES = [
    line.replace("\0", "|")
    for each in OTHERS.strip().splitlines()
    for line in each.replace("\\|", "\0").split("|")
]


def of_bash(text):
    """Return the values that bash has in the end, if it can run the text."""
    for option, program in (("-nc", text), ("-c", f"trap '{SHOW}' EXIT; eval \"$0\"")):
        done = subprocess.run(
            ["/bin/bash", option, program, text], env={"PATH": "/nowhere"},
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if option == "-nc" and done.returncode != 0:
            return None
    values = done.stdout.split("\0")
    return dict(zip(NAMES, values[-2:], strict=True))


@settings(max_examples=300, deadline=None, derandomize=True)
@example(["if false; then a=1", "NCCL_A=1", "fi"], 0)
@example(["a=(", "done", "export NCCL_A=f", ")"], 0)
@example(["[ -d /x ] || return 0", "NCCL_A=1"], 0)
@example(["NCCL_A=1", "unset NCCL_A"], 0)
@example(["1&&#x", "NCCL_A=f"], 0)
@given(
    st.lists(st.sampled_from(LINES) | st.sampled_from(SETS), max_size=8),
    st.integers(0, len(SETS) - 1),
)
def test_a_value_is_that_of_bash(lines, last):
    text = "\n".join([*lines, SETS[last]])
    found = profile.parse("FILE", text, NAMES).variables
    assume(found)
    values = of_bash(text)
    assume(values is not None)
    for name, setting in found.items():
        assert setting.value == values.get(name), text

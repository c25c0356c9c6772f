"""Jobs in which one rank does not come to a collective, and what is reported.

Each job has two workers on each node. Rank 3 is the odd one.
"""

from __future__ import annotations

import re
from importlib.metadata import version

from packaging.version import Version

from tests.support.cluster.commands import FORMS, JUELICH, SCRIPTS, launch

HAS_RECORDER = Version(version("torch")) >= Version("2.11")  # for gloo

_ODD = r"1 rank \(3, jwb0002\)"
_OTHERS = r"\d of \d ranks \(0-2(,4-5)?\)"
_SOME = r" *\d (of \d ranks|rank) \(.*\): all_reduce at stays_away.py:\d+"
_USUAL = rf"  {_OTHERS}: all_reduce at stays_away.py:\d+"


def _call(rest, number=4):
    return rf"all_reduce {number} of group 0 \(float32\[1024\]\): {_OTHERS}; {rest}"


def _behind(number=4):
    last = f"its last was all_reduce {number - 1}"
    return _call(f"{_ODD} did not call it, {last}", number)


def _at(place):
    return rf"\* {_ODD}: {place} at stays_away.py:\d+"


_UNKNOWN = _call(f"nothing is known of {_ODD}")

# By case of scripts/stays_away.py: the line about the collective, which only forks
# have; the line about most ranks; and the line about the odd one.
CASES = {
    "skipped": (_call(f"{_ODD} called barrier"), _USUAL, _at("barrier")),
    "order": (
        _call(rf"{_ODD} called broadcast \(float32\[1024\]\)"),
        _USUAL,
        _at("broadcast"),
    ),
    "group": (_behind(), _USUAL, _at("all_reduce")),
    "sleep": (_behind(), _USUAL, _at("odd")),
    "overflow": (_behind(34), _USUAL, _at("odd")),
    "loader": (_behind(), _USUAL, _at("__next__")),
    "monitored": (
        "",
        rf"  {_OTHERS}: monitored_barrier at stays_away.py:\d+",
        _at("odd"),
    ),
    "stopped": (
        _UNKNOWN,
        _USUAL.strip(),
        rf"no stack from {_ODD}: it is stopped \(SIGSTOP\)",
    ),
    # The others fail at once. By exec, one can still be ending when it is asked.
    "gone": (_UNKNOWN, _SOME, rf"no stack from {_ODD}: it has ended"),
    # The rank that receives too much aborts; the others see only that.
    "shape": (
        rf".*; {_ODD} called all_reduce \(float32\[2048\]\).*",
        _SOME,
        rf". {_ODD}: all_reduce at stays_away.py:\d+",
    ),
}


# What the last line says of the odd one: with its call's number, or its place.
_ABSENT = (
    r"rank 3 on jwb0002 (probably )?did not call \w+ (\d+.*|at stays_away.py:\d+); "
)
_IN = r"it was in {} at stays_away.py:\d+"
WAS = {
    "skipped": _IN.format("barrier"),
    "order": _IN.format("broadcast"),
    "group": _IN.format("all_reduce"),
    **dict.fromkeys(("sleep", "overflow", "monitored"), _IN.format("odd")),
    "loader": _IN.format("__next__"),
    "stopped": r"it is stopped \(SIGSTOP\)",
    "gone": "it has ended",
}


def run(cluster, cases, *options, form="fork", nodes=2, first=""):
    """Run a job with a restart after each of these cases, and check its reports."""
    written = _launch(cluster, cases, *options, form=form, nodes=nodes, first=first)
    reports = explained(written)
    assert len(reports) == len(cases), written
    for case, lines in zip(cases, reports, strict=True):
        check(case, lines, form)
    # The notes about the restarts, and the last line.
    *named, _, last = re.findall(r"HPC12[58]\]: [^:]*: (.*)", written)
    # Without calls, nobody is named if the odd rank is the first to fail.
    may_be_first = ("shape",) if _has_calls(form) else ("shape", "order")
    for case, sentence in zip(cases, [*named, last], strict=True):
        if case not in may_be_first:
            assert re.fullmatch(_ABSENT + WAS[case], sentence), (case, written)


def _has_calls(form):
    return form == "fork" and HAS_RECORDER


def dead(cluster):
    """Run a job in which rank 3 is killed; return what is written to stderr."""
    return _launch(cluster, ["killed"], form="fork", nodes=2)


def _launch(cluster, cases, *options, form, nodes, first=""):
    options = ("--nproc_per_node=2", f"--max_restarts={len(cases) - 1}", *options)
    done = launch(
        cluster,
        *options,
        script=[SCRIPTS / "stays_away.py", ",".join(cases), "3"],
        nodes=nodes,
        first=first,
        environ=JUELICH | FORMS[form] | {"TORCH_FR_BUFFER_SIZE": "20"},
    )
    assert done.returncode == 1, done
    return done.stderr


def check(case, lines, form="fork"):
    """Check the lines about a hang."""
    assert len(lines) <= 6, lines
    of_collective, *places = CASES[case]
    for wanted in filter(None, [*places, of_collective if _has_calls(form) else ""]):
        assert any(re.fullmatch(wanted, line) for line in lines), (case, wanted, lines)


def explained(stderr):
    """Return, for each report, the lines about the hang."""
    reports = re.split(r"HPC125\]: the job has failed.*\(local rank|HPC128\]:", stderr)
    form = r"torchrun_hpc:     ([ *]*(?:\w+ \d+ of group |no |\d).*)"
    return [re.findall(form, report) for report in reports[1:]]

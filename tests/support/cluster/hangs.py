"""Jobs in which one rank does not come to a collective, and what is reported.

Each job has two workers on each node. Rank 3 is the odd one.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

from packaging.version import Version

from tests.support.cluster.commands import FORMS, JUELICH, SCRIPTS
from tests.support.cluster.real_job import launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.cluster.testbed import Cluster

HAS_RECORDER = Version(version("torch")) >= Version("2.11")  # for gloo

_ODD = r"1 rank \(3, jwb0002\)"
_OTHERS = r"\d of \d ranks \(0-2(,4-5)?\)"
_SOME = r" *\d (of \d ranks|rank) \(.*\): all_reduce at stays_away.py:\d+"
# The beginning of the last line, with the number of the missing call or its place.
_ABSENT = (
    r"rank 3 on jwb0002 (probably )?did not call \w+ (\d+.*|at stays_away.py:\d+); "
)


def _call(rest: str, number: int = 4) -> str:
    return rf"all_reduce {number} of group 0 \(float32\[1024\]\): {_OTHERS}; {rest}"


def _behind(number: int = 4) -> str:
    last = f"its last was all_reduce {number - 1}"
    return _call(f"{_ODD} did not call it, {last}", number)


def _usual(place: str) -> str:
    return rf"  {_OTHERS}: {place} at stays_away.py:\d+"


def _at(place: str) -> str:
    return rf"\* {_ODD}: {place} at stays_away.py:\d+"


def _in(place: str) -> str:
    return rf"it was in {place} at stays_away.py:\d+"


_UNKNOWN = _call(f"nothing is known of {_ODD}")


class Case(NamedTuple):
    """The patterns of the lines about a case of scripts/stays_away.py.

    Attributes:
        call: The line about the collective. Only forks have it.
        odd: The line about the stack of the odd rank.
        last: The end of the report's last line. None: another rank may be the first
            to fail, and nobody is named.
        others: The line about the stacks of most ranks.
    """

    call: str
    odd: str
    last: str | None
    others: str = _usual("all_reduce")


CASES = {
    "skipped": Case(_call(f"{_ODD} called barrier"), _at("barrier"), _in("barrier")),
    "order": Case(
        _call(rf"{_ODD} called broadcast \(float32\[1024\]\)"),
        _at("broadcast"),
        _in("broadcast"),
    ),
    "group": Case(_behind(), _at("all_reduce"), _in("all_reduce")),
    "sleep": Case(_behind(), _at("odd"), _in("odd")),
    "overflow": Case(_behind(34), _at("odd"), _in("odd")),
    "loader": Case(_behind(), _at("__next__"), _in("__next__")),
    "monitored": Case("", _at("odd"), _in("odd"), _usual("monitored_barrier")),
    "stopped": Case(
        _UNKNOWN,
        rf"no stack from {_ODD}: it is stopped \(SIGSTOP\)",
        r"it is stopped \(SIGSTOP\)",
        _usual("all_reduce").strip(),
    ),
    # The others fail at once. By exec, one can still be ending when it is asked.
    "gone": Case(
        _UNKNOWN, rf"no stack from {_ODD}: it has ended", "it has ended", _SOME
    ),
    # The rank that receives too much aborts. The others see only that, and on a busy
    # machine the odd rank may already write its traceback.
    "shape": Case(
        rf".*; {_ODD} called all_reduce \(float32\[2048\]\).*",
        rf". {_ODD}: \w+ .*\.py:\d+",
        None,
        _SOME,
    ),
}


def run(
    cluster: Cluster,
    cases: Sequence[str],
    *,
    form: str = "fork",
    nodes: int = 2,
    first: str = "",
) -> None:
    """Run a job with a restart after each of these cases, and check its reports."""
    written = stderr_of(cluster, cases, form=form, nodes=nodes, first=first)
    reports = explained(written)
    assert len(reports) == len(cases), written
    for case, lines in zip(cases, reports, strict=True):
        check(case, lines, form)
    # The notes about the restarts, and the last line.
    *named, _, last = re.findall(r"HPC12[58]\]: [^:]*: (.*)", written)
    for case, sentence in zip(cases, [*named, last], strict=True):
        expected = CASES[case].last
        # Without calls, another rank may be the first to fail.
        if expected is not None and (case != "order" or _has_calls(form)):
            assert re.fullmatch(_ABSENT + expected, sentence), (case, written)


def _has_calls(form: str) -> bool:
    return form == "fork" and HAS_RECORDER


def stderr_of(
    cluster: Cluster,
    cases: Sequence[str],
    *,
    form: str = "fork",
    nodes: int = 2,
    first: str = "",
) -> str:
    """Run a job with a restart after each of these cases; return its stderr."""
    done = launch(
        cluster,
        *("--nproc_per_node=2", f"--max_restarts={len(cases) - 1}"),
        script=[SCRIPTS / "stays_away.py", ",".join(cases), "3"],
        nodes=nodes,
        first=first,
        environ=JUELICH | FORMS[form] | {"TORCH_FR_BUFFER_SIZE": "20"},
    )
    assert done.returncode == 1, done
    return done.stderr


def check(case: str, lines: Sequence[str], form: str = "fork") -> None:
    """Check the lines about a hang."""
    assert len(lines) <= 6, lines
    call, odd, _, others = CASES[case]
    for wanted in filter(None, [others, odd, call if _has_calls(form) else ""]):
        assert any(re.fullmatch(wanted, line) for line in lines), (case, wanted, lines)


def explained(stderr: str) -> list[list[str]]:
    """Return, for each report, the lines about the hang."""
    reports = re.split(r"HPC125\]: the job has failed.*\(local rank|HPC128\]:", stderr)
    form = r"torchrun_hpc:     ([ *]*(?:\w+ \d+ of group |no |\d).*)"
    return [re.findall(form, report) for report in reports[1:]]

"""CPUs of all threads of workers, if OpenMP libraries bind threads by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.cluster.bound import ALL, needs_two_cpus
from tests.support.cluster.commands import require
from tests.support.cluster.openmp import CASES, SCRIPT, is_installed, launch

if TYPE_CHECKING:
    from tests.support.cluster.openmp import Case

FORMS = {"exec": "none", "fork": "torch"}

pytestmark = [
    needs_two_cpus,
    pytest.mark.parametrize("form", FORMS),
    pytest.mark.parametrize("case", CASES),
]


@pytest.fixture
def script(tmp_path):
    """Return the path of a script that writes the CPUs of its threads."""
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path / "script.py")


def known(name: str) -> Case:
    is_missing = CASES[name].library and not is_installed()
    require("install.sh all: LLVM's OpenMP" if is_missing else None)
    return CASES[name]


def test_workers_that_are_not_bound(case, form, script):
    """All start with the node's CPUs; a warning names the variables that take them."""
    option = f"--hpc-preload={FORMS[form].replace('torch', 'auto')}"
    reports, said = launch(known(case), option, script=script)
    assert len(reports) == 2
    narrowed = CASES[case].binds_at_import and form == "exec"
    for report in reports:
        assert report["start"][0] == ALL
        assert (report["import"][0] != ALL) == narrowed, report
    assert said.count("HPC227") == narrowed, said
    for name in CASES[case].variables if narrowed else ():
        assert f"{name}=" in said
    assert "HPC169" not in said


def test_workers_that_are_bound(case, form, script):
    """No thread leaves its worker's share, nor do DataLoader processes."""
    reports, said = launch(
        known(case), "--hpc-bind=even", f"--hpc-preload={FORMS[form]}", script=script
    )
    shares = [set(report["start"][0]) for report in reports]
    assert [len(share) for share in shares].count(0) == 0
    assert sorted(cpu for share in shares for cpu in share) == ALL
    for report, share in zip(reports, shares, strict=True):
        for masks in report.values():
            if isinstance(masks, list):
                assert all(set(mask) <= share for mask in masks), report
    is_refused = CASES[case].moves_forks and form == "fork"
    assert said.count("HPC169") == is_refused, said
    assert "HPC227" not in said

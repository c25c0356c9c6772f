"""The table of ``make matrix``: what pytest says, rows, and the page."""

from __future__ import annotations

import matrix
import pytest
from matrix import CHECKS, Case, Row

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest">
<testcase classname="c" name="test_both[c10d]" time="1.5"><properties>
<property name="release" value="ranks" /><property name="release" value="restarts" />
</properties></testcase>
<testcase classname="c" name="test_port"><properties>
<property name="release" value="port" /><property name="other" value="x" />
</properties><failure message="AssertionError: n9: a warning&#10;torchrun_hpc: HPC055\
&#10;srun: error: n9: task 0: Exited&#10;assert 1 == 0&#10; +  where 1 = x.y">long
</failure></testcase>
<testcase classname="c" name="test_old"><properties>
<property name="release" value="dry run" /></properties>
<skipped type="pytest.skip" message="this torch cannot">x</skipped></testcase>
<testcase classname="" name="test_x.py"><error message="collection failure" />
</testcase>
</testsuite></testsuites>
"""
PINNED = """# comment
hypothesis==6.1
mypy==2.4
numpy==2.4.6
pytest==9.2.0
pytest-rerunfailures==16.7
pytest-timeout==2.4.0
pytest-xdist==3.8.0
torch==2.13.0
uv==0.13  # why
"""
PAGE = f"# Title\n\nfirst\n\n{matrix.BEGIN}\n{matrix.END}\n\nlast\n"


def row(version: str, outcome: str = "ok", *notes: str) -> Row:
    cells = {"torch": version, "Python": "3.11.7", "date": "2026-01-02"}
    return Row(cells | dict.fromkeys(CHECKS, outcome), notes)


# --- what pytest says -------------------------------------------------------------


def test_read_tests() -> None:
    assert matrix.read_tests(REPORT, ["direct", "training"]) == [
        Case("test_both[c10d]", ("ranks", "restarts"), "ok"),
        Case("test_port", ("port",), "failed", "torchrun_hpc: HPC055"),
        Case("test_old", ("dry run",), "-", "this torch cannot"),
        Case("test_x.py", ("direct", "training"), "failed", "collection failure"),
    ]


def test_an_error_counts_also_where_the_test_was_skipped() -> None:
    report = (
        '<testsuite><testcase name="t"><skipped message="left out"/>'
        '<error message="at its end"/></testcase></testsuite>'
    )
    (test,) = matrix.read_tests(report, ["unit"])
    assert (test.outcome, test.reason) == ("failed", "at its end")


def test_the_whole_message_is_in_the_text() -> None:
    report = (
        '<testsuite><testcase name="t"><failure message="first [+5 more lines]">'
        "def test():\n&gt;   f()\nE   ValueError: first\nE     last\n\na.py:3: Error"
        "</failure></testcase></testsuite>"
    )
    (test,) = matrix.read_tests(report, ["unit"])
    assert test.reason == "last"


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("AssertionError: wrong\nassert 1 == 0", "AssertionError: wrong"),
        ("assert 1 == 0\n  +  where 1 = f()", "assert 1 == 0"),
        (
            "AssertionError: assert [1] == []\n  Full diff:\n  + 1",
            "AssertionError: assert [1] == []",
        ),
        ("srun: error: n9\nassert 1 == 0", "assert 1 == 0"),
        ("srun: error: n9", "srun: error: n9"),
        ("E: first\n\n  last  \n", "last"),
        ("", "no message"),
        ("x" * 300, "x" * 199 + "…"),
    ],
)
def test_last_line(message: str, line: str) -> None:
    assert matrix.last_line(message) == line


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["ok", "ok"], "ok"),
        (["ok", "-"], "ok"),
        (["-", "-"], "-"),
        (["ok", "failed", "-"], "failed"),
        ([], "failed"),
    ],
)
def test_outcome_of_a_check(outcomes: list[matrix.Outcome], expected: str) -> None:
    tests = [Case("other", ("port",), "failed")]
    tests += [Case("test", ("ranks", "elastic"), outcome) for outcome in outcomes]
    assert matrix.outcome_of("ranks", tests) == expected


# --- rows -------------------------------------------------------------------------


def test_a_good_row() -> None:
    made = matrix.make_row("2.4.1", "3.11.7", "2026-01-02", [Case("t", CHECKS, "ok")])
    assert made == row("2.4.1")
    assert made.is_good
    assert made.release == (2, 4)


def test_a_row_with_failures() -> None:
    tests = [
        Case("a", CHECKS[3:], "ok"),
        Case("b", ("unit",), "-", "some `other` reason"),
        Case("c", ("ranks",), "failed", "it broke"),
        Case("d", ("port",), "-", "not told: another test of the check ran"),
    ]
    made = matrix.make_row("2.0.1", "3.11.7", "2026-01-02", tests)
    assert [made.cells[check] for check in CHECKS[:4]] == [
        "-",
        "failed",
        "failed",
        "ok",
    ]
    assert not made.is_good
    assert made.notes == (
        "- torch 2.0.1, unit: `b` was left out: `some 'other' reason`",
        "- torch 2.0.1, ranks: `c` failed: `it broke`",
        f"- torch 2.0.1, {CHECKS[2]}: no test ran",
    )


def test_a_row_of_what_could_not_be_installed() -> None:
    made = matrix.failed_row("2.7", "2026-01-02", "error: no\nno solution found\n")
    assert made.notes == ("- torch 2.7 could not be tried: `no solution found`",)
    assert not made.is_good


# --- the table --------------------------------------------------------------------


def test_a_table_is_read_as_it_was_written() -> None:
    rows = [
        row("2.0.1", "failed", "- torch 2.0.1, unit: `a` failed: `b | c`"),
        row("2.7", "failed", "- torch 2.7 could not be tried: `d`"),
        row("2.15.0"),
    ]
    assert matrix.read_table(matrix.write_table(rows)) == rows


def test_a_table_of_other_checks_can_be_read() -> None:
    (read,) = matrix.read_table(
        "| torch | old |\n| --- | --- |\n| 2.4.1 | **failed** |\n"
    )
    assert read.cells == dict.fromkeys(CHECKS, "") | {
        "torch": "2.4.1",
        "old": "failed",
    }
    with_new = matrix.write_table([read])
    assert "old" not in with_new


def test_merging_keeps_the_rest_of_the_page() -> None:
    page = matrix.merge(
        PAGE, [row("2.10.0"), row("2.4.0", "failed", "- torch 2.4.0 a")]
    )
    page = matrix.merge(page, [row("2.4.1"), row("2.0.1", "-", "- torch 2.0.1 b")])
    before, _, rest = page.partition(matrix.BEGIN)
    table, _, after = rest.partition(matrix.END)
    assert before == "# Title\n\nfirst\n\n"
    assert after == "\n\nlast\n"
    assert [row.cells["torch"] for row in matrix.read_table(table)] == [
        *("2.0.1", "2.4.1", "2.10.0"),
    ]
    assert "2.4.0" not in page
    assert "- torch 2.0.1 b\n" in table
    assert matrix.merge(page, []) == page


def test_a_page_without_a_place_for_the_table() -> None:
    with pytest.raises(matrix.MatrixError, match="has no lines"):
        matrix.merge("# Title\n", [])


def test_the_page_of_this_project_has_one() -> None:
    page = matrix.merge(matrix.PAGE.read_text(encoding="utf-8"), [])
    assert matrix.merge(page, []) == page


# --- what is installed ------------------------------------------------------------


def test_requirements() -> None:
    tools = [
        *("hypothesis==6.1", "pytest==9.2.0", "pytest-rerunfailures==16.7"),
        *("pytest-timeout==2.4.0", "pytest-xdist==3.8.0"),
    ]
    assert matrix.requirements("2.2", PINNED) == ["torch==2.2.*", "numpy<2", *tools]
    assert matrix.requirements("2.15", PINNED) == [
        *("torch==2.15.*", "numpy==2.4.6"),
        *tools,
    ]


def test_the_tools_are_pinned() -> None:
    text = matrix.REQUIREMENTS.read_text(encoding="utf-8")
    assert len(matrix.requirements("2.4", text)) == 2 + len(matrix.TOOLS)


@pytest.mark.parametrize("explicit", ["2", "2.x", "newest"])
def test_what_is_no_release(
    explicit: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["matrix.py", explicit])
    with pytest.raises(SystemExit):
        matrix.main()
    said = f"{explicit!r} is no minor release of torch, such as 2.4"
    assert said in capsys.readouterr().err

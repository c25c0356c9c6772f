"""Golden files: the comparison, and that each file belongs to a test."""

from __future__ import annotations

import pytest

from tests.support.golden import compare, is_updating, page, without_test

PAGE = "=== one ===\na\nb\n\n=== none ===\n\n"


def test_a_page_has_all_cases():
    assert page({"one": ["a", "b"], "none": ""}) == PAGE


@pytest.mark.parametrize(
    ("environ", "updates"),
    [({}, False), ({"UPDATE": ""}, False), ({"UPDATE": "1", "CI": ""}, True)],
)
def test_one_variable_updates_the_files(environ, updates):
    assert is_updating(environ) is updates


def test_nothing_is_updated_in_ci():
    with pytest.raises(pytest.UsageError):
        is_updating({"UPDATE": "1", "CI": "true"})


@pytest.mark.parametrize("before", [None, "=== one ===\na\n", f"{PAGE}\n"])
def test_another_text_is_shown_or_written(before, tmp_path):
    path = tmp_path / "golden" / "module.test.txt"
    if before is not None:
        compare(path, before, updates=True)
    with pytest.raises(pytest.fail.Exception, match="UPDATE=1") as caught:
        compare(path, PAGE, updates=False)
    assert (path.read_text() if path.exists() else None) == before
    assert str(path) in str(caught.value)
    assert "\n+" in str(caught.value).replace("\n-", "\n+")
    compare(path, PAGE, updates=True)
    compare(path, PAGE, updates=False)
    assert path.read_text() == PAGE


def test_each_file_belongs_to_a_test():
    """``UPDATE=1`` removes the others."""
    files = without_test()
    if is_updating():
        for path in files:
            path.unlink()
    else:
        assert not files


def test_a_file_without_its_test_is_found(tmp_path):
    (tmp_path / "golden").mkdir()
    for name in ("module.is_there", "module.is_gone", "module.has_none", "gone.test"):
        (tmp_path / "golden" / f"{name}.txt").touch()
    (tmp_path / "test_module.py").write_text(
        "def test_is_there(\n    golden, tmp_path\n):\n    pass\n\n"
        "def test_has_none(tmp_path):\n    pass\n"
    )
    names = [path.name for path in without_test(tmp_path)]
    assert names == ["gone.test.txt", "module.has_none.txt", "module.is_gone.txt"]

"""``python -m torchrun_hpc.explain``."""

from __future__ import annotations

import pytest

from torchrun_hpc.explain import main, parts


@pytest.fixture
def explain(capsys):
    def run(*codes):
        code = main(codes)
        return code, *capsys.readouterr()

    return run


TYPED = ("HPC125", "hpc125 ", "125", "error[HPC125]:")


@pytest.mark.parametrize(
    ("wanted", "title"),
    [
        *((typed, "HPC125: The job has failed") for typed in TYPED),
        *((typed, "HPC014: Wrong value of an option") for typed in ("13", "hpc14")),
    ],
)
def test_a_code(wanted, title, explain):
    code, out, err = explain(wanted)
    assert (code, err) == (0, "")
    assert out.startswith(f"{title}\n\n")
    assert "\n\nFix: " in out
    assert "](" not in out  # no links


def test_a_link_leaves_its_page(explain):
    """Without a page, "the whole script" would refer to nothing."""
    _, out, _ = explain("HPC235")
    assert out.endswith(" (docs/checkpoints.md#a-launcher-that-does-not-end).\n")


def test_an_older_code(explain):
    older = {
        old: code
        for part in parts().values()
        for code, entry in part.items()
        if code != "intro"
        for old in entry.get("aliases", ())
    }
    old, new = older.popitem()
    assert explain(old) == explain(new)


def test_several_codes_are_apart(explain):
    _, first, _ = explain("HPC010")
    _, second, _ = explain("HPC011")
    assert explain("HPC010", "HPC011") == (0, f"{first}\n{second}", "")


def test_without_a_code_all_are_listed(explain):
    code, out, err = explain()
    assert (code, err) == (0, "")
    count = sum(name != "intro" for part in parts().values() for name in part)
    assert len(out.splitlines()) == count
    assert "HPC125  The job has failed\n" in out


@pytest.mark.parametrize("wanted", ["HPC999", "", "what\x1b"])
def test_an_unknown_code(wanted, explain):
    code, out, err = explain("HPC125", wanted)
    assert (code, out) == (2, "")
    assert err.startswith("torchrun_hpc: error[HPC245]: there is no message ")
    assert "\x1b" not in err
    assert "Did you mean" not in err

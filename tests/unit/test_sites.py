from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchrun_hpc import sites
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.inputs import Value

JSC = sites.find({}, Value("jsc", "--hpc-site"))


@pytest.mark.parametrize("system", ["juwels", "juwelsbooster", "jurecadc", "jusuf"])
def test_recognised_by_value(system):
    assert sites.find({"SYSTEMNAME": system}) == JSC


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SYSTEMNAME": ""},
        {"SYSTEMNAME": "jupiter"},
        {"SYSTEMNAME": "jedi"},
        {"SYSTEMNAME": "hdfml"},
        {"SYSTEMNAME": "JUWELS"},
        {"SYSTEMNAME": "juwels "},
        {"SYSTEMNAME": "juwelscluster"},
        {"SYSTEM": "juwels"},
    ],
)
def test_not_recognised(environ):
    assert sites.find(environ) is None


@pytest.mark.parametrize("environ", [{}, {"SYSTEMNAME": "juwels"}])
def test_switched_off(environ):
    assert sites.find(environ, Value("none", "--hpc-site")) is None


def test_by_name_wherever_we_are():
    found = sites.find({"SYSTEMNAME": "jedi"}, Value("jsc", "PET_HPC_SITE"))
    assert found.name == "jsc"
    assert found.rewrite("jwb0001") == "jwb0001i"


@pytest.mark.parametrize("wanted", ["juwels", "JSC", "None", ""])
def test_unknown_name_lists_the_known_ones(wanted):
    message = f"--hpc-site={wanted}: there is no such site; type one of jsc, none"
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}$"):
        sites.find({"SYSTEMNAME": "juwels"}, Value(wanted, "--hpc-site"))


def test_every_site_is_described():
    loaded = sites.load()
    assert [site.name for site in loaded] == ["jsc"]
    for site in loaded:
        assert site.variable
        assert site.values


@pytest.mark.parametrize("file", sorted(Path(sites.__file__).parent.glob("*.toml")))
def test_every_site_names_its_source(file):
    assert "source = " in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "fast"),
    [
        # compute nodes of the four systems
        ("jwc09n012", "jwc09n012i"),
        ("jwb0001", "jwb0001i"),
        ("jrc0001", "jrc0001i"),
        ("jsfc001", "jsfc001i"),
        ("jwb0001.juwels", "jwb0001i.juwels"),
        ("jwlogin01.juwels", "jwlogin01i.juwels"),
        ("jwb0001.juwels.fzj2.de", "jwb0001i.juwels.fzj2.de"),
        # rewritten before
        ("jwb0001i", "jwb0001i"),
        ("jwb0001i.juwels", "jwb0001i.juwels"),
        ("jwlogin01i.juwels2", "jwlogin01i.juwels2"),
        # not the name of a node
        ("localhost", "localhost"),
        ("juwels-login", "juwels-login"),
        ("gateway.n1", "gateway.n1"),
        ("", ""),
    ],
)
def test_juelich_names(name, fast):
    assert JSC.rewrite(name) == fast


labels = st.text("jwbri019-", min_size=1, max_size=6)


@given(st.lists(labels, min_size=1, max_size=3).map(".".join))
@example("jwb0001")
@example("jwb0001.juwels")
def test_rewriting_twice_changes_nothing_more(name):
    once = JSC.rewrite(name)
    assert JSC.rewrite(once) == once
    assert once.replace("i", "") == name.replace("i", "")
    assert (once != name) is name.partition(".")[0][-1].isdigit()

"""Files of sites: the user's, the administrator's, explicit ones, and broken ones."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from torchrun_hpc import sites
from torchrun_hpc.errors import LaunchError, Setting
from torchrun_hpc.sites.site import read_sites

OURS = [site.name for site in sites.load({}, folders=())]


def system(name, recognise="", title="A system", more=""):
    """Write the description of a system."""
    markers = f"recognise = [{recognise}]\n" if recognise else ""
    return f'[{name}]\ntitle = "{title}"\nsource = "a/page"\n{markers}{more}\n'


def site_file(folder, name, *systems):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text('centre = "A centre"\n' + "".join(systems), encoding="utf-8")
    return file


class Folders(NamedTuple):
    """Those in which there may be files beside ours, the first one stronger."""

    users: Path
    administrators: Path


@pytest.fixture
def folders(tmp_path):
    return Folders(tmp_path / "user", tmp_path / "administrator")


def find(folders, environ=(), host="", explicit=None):
    wanted = None if explicit is None else Setting(str(explicit), "--hpc-site")
    return sites.find(dict(environ), host, wanted, folders=folders)


# --- files beside ours ------------------------------------------------------------


def test_a_file_adds_systems(folders):
    file = site_file(
        folders.users,
        "a.toml",
        system(
            "mine",
            "{ variable = 'MINE', values = ['yes'] }, { host = 'm[0-9]+' }",
            more=(
                "[mine.hosts]\npattern = '^m'\nreplacement = 'fast-'\n"
                "examples = { m1 = 'fast-1' }\n"
                "[mine.variables]\nNCCL_SOCKET_IFNAME = 'ib0'\n"
            ),
        ),
        system("other"),
    )
    assert find(folders, {"MINE": "yes"}) == sites.Site(
        name="mine",
        title="A system",
        centre="A centre",
        source="a/page",
        file=str(file),
        markers=(sites.Marker("MINE", ("yes",)), sites.Marker(pattern="m[0-9]+")),
        pattern="^m",
        replacement="fast-",
        variables={"NCCL_SOCKET_IFNAME": "ib0"},
        examples={"m1": "fast-1"},
        found_by="MINE=yes",
    )
    assert find(folders, {"MINE": "no"}, "m12").found_by == "host name m12"
    assert find(folders, {"MINE": "no"}, "m12x") is None
    assert find(folders, explicit="other").title == "A system"
    assert find(folders, {"SYSTEMNAME": "juwels"}).name == "jsc"
    names = [site.name for site in sites.load({}, folders)]
    assert names == ["mine", "other", *OURS]


def test_stronger_files_are_asked_first(folders):
    site_file(folders.administrators, "a.toml", system("weaker", "{ host = 'n1' }"))
    environ = {"SYSTEMNAME": "juwels"}
    assert find(folders, environ, "n1").name == "weaker"
    site_file(folders.users, "z.toml", system("stronger", "{ host = 'n[0-9]' }"))
    assert find(folders, environ, "n1").name == "stronger"
    assert find(folders, environ, "n").name == "jsc"
    site_file(folders.users, "z.toml", system("weaker", title="user's"))
    assert find(folders, explicit="weaker").title == "user's"
    assert find(folders, host="n1") is None


@pytest.mark.parametrize("where", ["users", "administrators"])
def test_the_same_name_replaces_ours(where, folders):
    marker = "{ variable = 'SYSTEMNAME', values = ['jupiter'] }"
    site_file(getattr(folders, where), "a.toml", system("jsc", marker, "JUPITER"))
    assert find(folders, explicit="jsc").title == "JUPITER"
    assert find(folders, {"SYSTEMNAME": "jupiter"}).title == "JUPITER"
    assert find(folders, {"SYSTEMNAME": "juwels"}) is None
    assert sorted(s.name for s in sites.load({}, folders)) == sorted(OURS)


def test_variables_of_a_centre_are_asked_before_those_of_schedulers(folders):
    site_file(
        folders.users,
        "a.toml",
        system("by-host", "{ host = 'n1' }"),
        system("by-known", "{ variable = 'PBS_JOBID', values = ['x'] }"),
        system("by-new", "{ variable = 'ZZZ', pattern = 'x*' }"),
    )
    environ = {"PBS_JOBID": "x", "ZZZ": "xx"}
    assert find(folders, environ, "n1").name == "by-new"
    assert find(folders, environ | {"ZZZ": "xxy"}, "n1").name == "by-known"
    for unset in ({}, {"ZZZ": "", "PBS_JOBID": ""}):
        assert find(folders, unset, "n1").name == "by-host"
    names = [site.name for site in sites.load({}, folders)][:3]
    assert names == ["by-new", "by-known", "by-host"]


def test_what_is_no_file_of_sites_is_left_out(folders):
    site_file(folders.users, "a.toml", system("mine"))
    for name in ("a.toml~", ".#b.toml", "notes.txt", "b.toml.off"):
        (folders.users / name).write_text("[", encoding="utf-8")
    assert len(sites.load({}, folders)) == 1 + len(OURS)
    not_a_folder = folders.users / "notes.txt"
    assert len(sites.load({}, [not_a_folder, folders.users / "none"])) == len(OURS)


def test_two_files_of_a_place_that_disagree(folders):
    site_file(folders.users, "a.toml", system("mine"))
    site_file(folders.users, "b.toml", system("mine"))
    both = f"{folders.users}/a.toml and {folders.users}/b.toml"
    message = f"{both} both describe mine. Remove one, or pass --hpc-site=none"
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}$") as fault:
        find(folders)
    assert fault.value.code == "HPC049"


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"XDG_CONFIG_HOME": "{home}/xdg", "HOME": "{home}"}, "xdg"),
        ({"XDG_CONFIG_HOME": "", "HOME": "{home}"}, "home"),
        ({"XDG_CONFIG_HOME": "xdg", "HOME": "{home}"}, "home"),
        ({"HOME": "{home}"}, "home"),
        ({"HOME": "."}, "etc"),
        ({}, "etc"),
    ],
)
def test_where_files_are_looked_for(environ, found, tmp_path, monkeypatch):
    assert Path("/etc/torchrun_hpc/sites") == sites.ADMINISTRATORS
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sites, "ADMINISTRATORS", tmp_path / "etc")
    for name, folder in {
        "xdg": tmp_path / "xdg" / "torchrun_hpc" / "sites",
        "home": tmp_path / ".config" / "torchrun_hpc" / "sites",
        "etc": tmp_path / "etc",
    }.items():
        site_file(folder, "a.toml", system("mine", title=name))
    environ = {k: v.format(home=tmp_path) for k, v in environ.items()}
    found_site = sites.find(environ, "", Setting("mine", "--hpc-site"))
    assert found_site is not None
    assert found_site.title == found


# --- an explicit file ------------------------------------------------------------


def test_the_only_system_of_a_file_that_is_passed(tmp_path, folders):
    """No other file is read."""
    site_file(folders.users, "broken.toml", "[")
    file = site_file(tmp_path, "mine", system("mine", "{ host = 'elsewhere' }"))
    found = find(folders, {"SYSTEMNAME": "juwels"}, "n1", file)
    assert (found.name, found.found_by) == ("mine", f"--hpc-site={file}")


def test_a_file_in_this_folder_needs_its_ending(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site_file(tmp_path, "mine.toml", system("mine"))
    assert find([], explicit="mine.toml").file == "mine.toml"
    with pytest.raises(LaunchError, match="no such site") as fault:
        find([], explicit="mine")
    assert fault.value.code == "HPC040"


def test_the_recognised_system_of_a_file_that_is_passed(tmp_path):
    file = site_file(
        tmp_path,
        "mine.toml",
        system("one", "{ host = 'n1' }"),
        system("two", "{ variable = 'ZZZ', values = ['2'] }"),
        system("three"),
    )
    found = find([], {"ZZZ": "2"}, "n1", file)
    assert (found.name, found.found_by) == ("two", f"--hpc-site={file}, ZZZ=2")
    with pytest.raises(LaunchError, match="none of them is recognised here") as fault:
        find([], {"SYSTEMNAME": "juwels"}, "n2", file)
    assert fault.value.code == "HPC048"
    assert f"--hpc-site={file} describes one, two, three, and" in str(fault.value)
    assert str(fault.value).endswith("pass a name: --hpc-site=one")


# --- broken files -----------------------------------------------------------------

WHOLE = r'''# a comment
centre = "A centre"

[mine]
title = """
a long
title"""
source = "a/page"   # with a comment
recognise = [
    # [mine.hosts]
    { variable = "MINE", values = ["a", "b"] },
    { variable = "MINE", pattern = '[c-z]+' },
    { host = 'm[0-9]+' },
]

[mine.hosts]
pattern = '^m([0-9]+)'
replacement = 'fast-\1'
examples = { m1 = "fast-1", "m1.net" = "fast-1.net" }

[mine.variables]
NCCL_SOCKET_IFNAME = "ib"
GLOO_SOCKET_IFNAME = "ib0,ib1"

[mine.profile]
file = "/etc/nccl.sh"
names = ["NCCL_A"]
'''

# How to break `WHOLE`: the text that is replaced, and its replacements.
ANOTHER = "[o]\ntitle='t'\nsource='s/s'\n"
BROKEN = {
    "= 'fast": ["'fast"],
    '"ib0,ib1"': ['"""ib0', '"^lo"', '"=ib0"', '"ib0, ib1"', '"ib0,"', '" ib0"',
                  '"ib0,,ib1"'],
    "[mine.variables]": ["[mine]"],
    "[mine.variables]\n": [f"{ANOTHER}variables=1\n[p]\n", f"{ANOTHER}hosts=1\n[p]\n"],
    "source =": ["hosts = 1 #", "#"],
    "title =": ["titel ="],
    "[mine]\ntitle": ["title"],
    "replacement": ["replace"],
    "{ variable": ["{ varable"],
    'centre = "A centre"': [""],
    "examples": ["#"],
    '"A centre"': ["1"],
    '"a/page"': ['""', '"a/page"\nbind = "gpus"', '"a/page"\nbind = true',
                 '"a/page"\nkey_file = "keys/mine"',
                 '"a/page"\nkey_file = "$HOME/mine"'],
    "mine": ["Mine", "none", '"m/e"'],
    "{ host = 'm[0-9]+' },\n]": [f"]\n{ANOTHER}recognise='A'"],
    "{ host = 'm[0-9]+' }": ["'host'", "{}"],
    '["a", "b"]': ["[]", '"a"'],
    '"b"]': ['""]'],
    "{ host": ["{ variable = 'A', host"],
    '"MINE", values': ['"my one", values'],
    "NCCL_SOCKET_IFNAME": ["nccl_X", "NCCL_x", "PET_X", "OMP_NUM_THREADS", "RANK",
                           "LOCAL_WORLD_SIZE"],
    "/etc/nccl.sh": ["~/nccl.sh"],
    "file =": ["#"],
    "names =": ["#"],
    '"NCCL_A"': ['"NCCL_*"', '"MASTER_ADDR"'],
    "host = 'm[0-9]+'": ["file = 'x'", "file = '/etc/x'"],
    '"ib"': ['""', "0", r'"i\u0000b"'],
    '{ m1 = "fast-1", "m1.net" = "fast-1.net" }': ["{}"],
    "'^m([0-9]+)'": ["'^m([0-9]+'", "'m{99999999999999999999}'", "'([0-9]+)'",
                     "'^[mf]([^.]+)'"],
    r"fast-\1": [r"fast-\2", r"\g<x>"],
    "'m[0-9]+'": ["'*'"],
    "'[c-z]+'": ["'[z-c]+'"],
    '"fast-1.net"': ['"fast-2.net"'],
}  # fmt: skip
PYTHONS = re.compile(r"((TOML|work): ).+(?=[.] Correct)")


def test_every_fault_has_file_and_key(tmp_path, golden):
    errors = {}
    for old, new in ((old, new) for old, each in BROKEN.items() for new in each):
        assert old in WHOLE
        broken = WHOLE.replace(old, new)
        unix, windows = (
            fault_of(tmp_path, broken.replace("\n", end).encode())
            for end in ("\n", "\r\n")
        )
        assert windows == unix
        assert unix.startswith("HPC043 ")
        assert unix.endswith(". Correct it, or pass --hpc-site=none")
        assert "\n" not in unix
        errors[f"{old!r} -> {new!r}"] = PYTHONS.sub(r"\1PYTHON'S REASON", unix)
    golden(errors)


def fault_of(folder, written):
    """Return the code and the message for a file, without its name."""
    file = folder / "mine.toml"
    file.write_bytes(written)
    with pytest.raises(LaunchError, match=f"^{file}[,:] ") as fault:
        read_sites(file, everywhere=True)
    return f"{fault.value.code} {str(fault.value).removeprefix(str(file))[2:]}"


def test_what_is_no_toml(tmp_path):
    assert fault_of(tmp_path, 'centre = "A"\n# Jülich'.encode("latin-1")).startswith(
        "HPC043 this is not TOML: 'utf-8' codec"
    )
    assert fault_of(tmp_path, f"a = {'1' * 5000}\n\n# end".encode()).startswith(
        "HPC043 this is not TOML: "
    )


def test_what_would_be_read_for_ever(tmp_path):
    pipe, large = tmp_path / "pipe.toml", tmp_path / "large.toml"
    os.mkfifo(pipe)
    large.write_text("#" * 20_001)
    (tmp_path / "link.toml").symlink_to("pipe.toml")
    link, device = tmp_path / "link.toml", Path("/dev/zero")
    for path in (pipe, link, large, device, Path("\0/x.toml")):
        with pytest.raises(LaunchError) as fault:
            read_sites(path, everywhere=True)
        assert fault.value.code == "HPC041"


def test_what_cannot_be_read(tmp_path, folders):
    with pytest.raises(LaunchError) as missing:
        read_sites(tmp_path / "mine.toml", everywhere=True)
    error = missing.value
    # Others may have it.
    assert (error.code, error.everywhere) == ("HPC041", False)
    assert str(error) == (
        f"{tmp_path}/mine.toml cannot be read: No such file or directory. Correct "
        "that, or pass --hpc-site=none"
    )
    (folders.users / "mine.toml").mkdir(parents=True)
    with pytest.raises(LaunchError, match="Is a directory") as fault:
        find(folders)
    assert fault.value.code == "HPC041"


@pytest.mark.parametrize(
    ("home", "place", "everywhere"),
    [
        ("home", "home/.config/torchrun_hpc/sites", True),
        ("home", "etc", False),
        ("", "etc", False),
    ],
)
def test_whose_faults_all_nodes_find(home, place, everywhere, tmp_path, monkeypatch):
    monkeypatch.setattr(sites, "ADMINISTRATORS", tmp_path / "etc")
    site_file(tmp_path / place, "mine.toml")
    environ = {"HOME": str(tmp_path / home) if home else ""}
    with pytest.raises(LaunchError, match=r"no system is described: begin") as fault:
        sites.find(environ, "")
    assert (fault.value.code, fault.value.everywhere) == ("HPC043", everywhere)

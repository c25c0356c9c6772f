"""Files of sites: the user's, the administrator's, typed ones, and broken ones."""

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
    assert found_site.title == found


# --- a file that is typed ---------------------------------------------------------


def test_the_only_system_of_a_typed_file(tmp_path, folders):
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


def test_the_recognised_system_of_a_typed_file(tmp_path):
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

# The message of a broken file: how to break `WHOLE`, as pairs of old and new text.
BROKEN = {
    "HPC043 this is not TOML: Expected '='": [("= 'fast", "'fast")],
    "HPC043 this is not TOML:": [
        ('"ib0,ib1"', '"""ib0'),
        ("[mine.variables]", "[mine]"),
        ("source =", "hosts = 1 #"),
    ],
    "HPC043 mine.titel: there is no such key. Did you mean title? There are: title,": [
        ("title =", "titel =")
    ],
    "HPC043 title: there is no such key. There are: mine, centre": [
        ("[mine]\ntitle", "title")
    ],
    "HPC043 mine.hosts.replace: there is no such key. Did you mean replacement?": [
        ("replacement", "replace")
    ],
    "HPC043 mine.recognise.varable: there is no such key. Did you mean variable?": [
        ("{ variable", "{ varable")
    ],
    "HPC043 centre: this is missing": [('centre = "A centre"', "")],
    "HPC043 mine.source: this is missing": [("source =", "#")],
    "HPC043 mine.hosts.examples: this is missing": [("examples", "#")],
    "HPC043 centre: this is not text: put it into quotes": [('"A centre"', "1")],
    "HPC043 mine.source: '' is empty": [('"a/page"', '""')],
    "HPC043 Mine: 'Mine' is not a name: a-z, 0-9, -, _; not none": [("mine", "Mine")],
    "HPC043 none: 'none' is not a name: a-z, 0-9,": [("mine", "none")],
    "HPC043 m/e: 'm/e' is not a name: a-z, 0-9": [("mine", '"m/e"')],
    "HPC043 o.variables: this is a table: NAME = VALUE": [
        ("[mine.variables]\n", "[o]\ntitle='t'\nsource='s/s'\nvariables=1\n[p]\n")
    ],
    "HPC043 o.hosts: this is a table, with pattern, replacement, examples": [
        ("[mine.variables]\n", "[o]\ntitle='t'\nsource='s/s'\nhosts=1\n[p]\n")
    ],
    "HPC043 o.recognise: this is not a list: put it into brackets": [
        ("{ host = 'm[0-9]+' },\n]", "]\n[o]\ntitle='t'\nsource='s/s'\nrecognise='A'")
    ],
    "HPC043 mine.recognise: this is a table, with variable, values, pattern, host": [
        ("{ host = 'm[0-9]+' }", "'host'")
    ],
    "HPC043 mine.recognise: give variable and values, variable and pattern, host, ": [
        ('["a", "b"]', "[]"),
        ("{ host", "{ variable = 'A', host"),
        ("{ host = 'm[0-9]+' }", "{}"),
    ],
    "HPC043 mine.recognise.values: this is not a list: put it into brackets": [
        ('["a", "b"]', '"a"')
    ],
    "HPC043 mine.recognise.values: '' is empty": [('"b"]', '""]')],
    "HPC043 mine.recognise.variable: 'my one' is not a variable: A-Z, 0-9, _": [
        ('"MINE", values', '"my one", values')
    ],
    "HPC043 mine.bind: 'gpus' is not one of gpu, even, none": [
        ('"a/page"', '"a/page"\nbind = "gpus"')
    ],
    "HPC043 mine.bind: this is not text: put it into quotes": [
        ('"a/page"', '"a/page"\nbind = true')
    ],
    "HPC043 mine.variables.nccl_X: 'nccl_X' is not a variable: A-Z, 0-9, _": [
        ("NCCL_SOCKET_IFNAME", "nccl_X")
    ],
    "HPC043 mine.variables.NCCL_x: 'NCCL_x' is not a variable: A-Z, 0-9, _": [
        ("NCCL_SOCKET_IFNAME", "NCCL_x")
    ],
    "HPC043 mine.variables.PET_X: only torchrun or the user sets PET_X": [
        ("NCCL_SOCKET_IFNAME", "PET_X")
    ],
    "HPC043 mine.variables.OMP_NUM_THREADS: only torchrun": [
        ("NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")
    ],
    "HPC043 mine.variables.RANK: only torchrun or the user sets RANK": [
        ("NCCL_SOCKET_IFNAME", "RANK")
    ],
    "HPC043 mine.variables.LOCAL_WORLD_SIZE: only torchrun or the user sets": [
        ("NCCL_SOCKET_IFNAME", "LOCAL_WORLD_SIZE")
    ],
    "HPC043 mine.key_file: 'keys/mine' is not a path: ~/FILE": [
        ('"a/page"', '"a/page"\nkey_file = "keys/mine"')
    ],
    "HPC043 mine.key_file: '$HOME/mine' is not a path: ~/FILE": [
        ('"a/page"', '"a/page"\nkey_file = "$HOME/mine"')
    ],
    "HPC043 mine.profile.file: '~/nccl.sh' is not a path: /path/to/file": [
        ("/etc/nccl.sh", "~/nccl.sh")
    ],
    "HPC043 mine.profile.file: this is missing": [("file =", "#")],
    "HPC043 mine.profile.names: this is missing": [("names =", "#")],
    "HPC043 mine.profile.names: 'NCCL_*' is not a variable: A-Z, 0-9, _": [
        ('"NCCL_A"', '"NCCL_*"')
    ],
    "HPC043 mine.profile.names: only torchrun or the user sets MASTER_ADDR": [
        ('"NCCL_A"', '"MASTER_ADDR"')
    ],
    "HPC043 mine.recognise.file: 'x' is not a path: /path/to/file": [
        ("host = 'm[0-9]+'", "file = 'x'")
    ],
    "HPC043 mine: nodes can differ in a file, so a marker file allows no hosts, ": [
        ("host = 'm[0-9]+'", "file = '/etc/x'")
    ],
    "HPC043 mine.variables.NCCL_SOCKET_IFNAME: '' is empty": [('"ib"', '""')],
    "HPC043 mine.variables.NCCL_SOCKET_IFNAME: this is not text: put it into quotes": [
        ('"ib"', "0")
    ],
    "HPC043 mine.variables.NCCL_SOCKET_IFNAME: "
    r"'i\x00b' is empty or unprintable": [('"ib"', r'"i\u0000b"')],
    "HPC043 mine.variables.GLOO_SOCKET_IFNAME: '": [
        ('"ib0,ib1"', '"^lo"'),
        ('"ib0,ib1"', '"=ib0"'),
        ('"ib0,ib1"', '"ib0, ib1"'),
        ('"ib0,ib1"', '"ib0,"'),
        ('"ib0,ib1"', '" ib0"'),
        ('"ib0,ib1"', '"ib0,,ib1"'),
    ],
    "HPC043 mine.hosts.examples: give at least one: NODE = its fast name": [
        ('{ m1 = "fast-1", "m1.net" = "fast-1.net" }', "{}")
    ],
    "HPC043 mine.hosts.pattern: '^m([0-9]+' does not work: missing )": [
        ("'^m([0-9]+)'", "'^m([0-9]+'")
    ],
    "HPC043 mine.hosts.pattern: 'm{99999999999999999999}' does not work:": [
        ("'^m([0-9]+)'", "'m{99999999999999999999}'")
    ],
    "HPC043 mine.hosts.replacement: "
    r"'fast-\\2' does not work: invalid group": [(r"fast-\1", r"fast-\2")],
    "HPC043 mine.hosts.replacement: "
    r"'\\g<x>' does not work: unknown group name 'x'": [(r"fast-\1", r"\g<x>")],
    "HPC043 mine.recognise.host: '*' does not work: nothing to repeat": [
        ("'m[0-9]+'", "'*'")
    ],
    "HPC043 mine.recognise.pattern: '[z-c]+' does not work: bad character range z-c": [
        ("'[c-z]+'", "'[z-c]+'")
    ],
    "HPC043 mine.hosts.examples: the rule turns 'm1.net' into 'fast-1.net'": [
        ('"fast-1.net"', '"fast-2.net"')
    ],
    "HPC043 mine.hosts.examples: the rule turns 'm1' into 'mfast-1', not 'fast-1'.": [
        ("'^m([0-9]+)'", "'([0-9]+)'")
    ],
    "HPC043 mine.hosts.examples: the rule turns 'fast-1' into 'fast-ast-1', not": [
        ("'^m([0-9]+)'", "'^[mf]([^.]+)'")
    ],
}
FAULTS = [
    (message, *change) for message, changes in BROKEN.items() for change in changes
]


@pytest.mark.parametrize(("message", "old", "new"), FAULTS)
def test_every_fault_has_file_and_key(message, old, new, tmp_path):
    assert old in WHOLE
    broken = WHOLE.replace(old, new)
    for end in ("\n", "\r\n"):  # of Unix, and of Windows
        error = fault_of(tmp_path, broken.replace("\n", end).encode())
        assert error.startswith(message)
        assert error.endswith(". Correct it, or pass --hpc-site=none")
        assert "\n" not in error


def fault_of(folder, written):
    """Return the code and the message for a file, without its name."""
    file = folder / "mine.toml"
    file.write_bytes(written)
    with pytest.raises(LaunchError, match=f"^{file}[,:] ") as fault:
        read_sites(file, everywhere=True)
    return f"{fault.value.code} {str(fault.value).removeprefix(str(file))[2:]}"


def test_a_wrong_interface_for_gloo_is_told_how_it_is_right(tmp_path):
    error = fault_of(tmp_path, WHOLE.replace('"ib0,ib1"', '"^lo"').encode())
    assert "IFNAME: '^lo' is not exact names, as in ib0,ib1. Correct it" in error


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

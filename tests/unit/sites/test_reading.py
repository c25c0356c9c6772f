"""Files of sites: the user's, the administrator's, typed ones, and broken ones."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

from torchrun_hpc import sites
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.setting import Setting
from torchrun_hpc.sites.reading import line_of, read

OURS = [site.name for site in sites.load({}, folders=())]


def system(name, recognise="", title="A system", more=""):
    """Write the description of a system."""
    signs = f"recognise = [{recognise}]\n" if recognise else ""
    return f'[{name}]\ntitle = "{title}"\nsource = "a/page"\n{signs}{more}\n'


def site_file(folder, name, *systems):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text('centre = "A centre"\n' + "".join(systems), encoding="utf-8")
    return file


@pytest.fixture
def users(tmp_path):
    return tmp_path / "user"


@pytest.fixture
def administrators(tmp_path):
    return tmp_path / "administrator"


@pytest.fixture
def folders(users, administrators):
    return [users, administrators]


def find(folders, environ=(), host="", explicit=None):
    wanted = None if explicit is None else Setting(str(explicit), "--hpc-site")
    return sites.find(dict(environ), host, wanted, folders=folders)


# --- files beside ours ------------------------------------------------------------


def test_a_file_adds_systems(users, folders):
    file = site_file(
        users,
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
        signs=(sites.Sign("MINE", ("yes",)), sites.Sign(pattern="m[0-9]+")),
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


def test_stronger_files_are_asked_first(users, administrators, folders):
    site_file(administrators, "a.toml", system("weaker", "{ host = 'n1' }"))
    environ = {"SYSTEMNAME": "juwels"}
    assert find(folders, environ, "n1").name == "weaker"
    site_file(users, "z.toml", system("stronger", "{ host = 'n[0-9]' }"))
    assert find(folders, environ, "n1").name == "stronger"
    assert find(folders, environ, "n").name == "jsc"


@pytest.mark.parametrize("where", ["users", "administrators"])
def test_the_same_name_replaces_ours(where, folders, request):
    sign = "{ variable = 'SYSTEMNAME', values = ['jupiter'] }"
    folder = request.getfixturevalue(where)
    site_file(folder, "a.toml", system("jsc", sign, "JUPITER"))
    assert find(folders, explicit="jsc").title == "JUPITER"
    assert find(folders, {"SYSTEMNAME": "jupiter"}).title == "JUPITER"
    assert find(folders, {"SYSTEMNAME": "juwels"}) is None
    assert sorted(s.name for s in sites.load({}, folders)) == sorted(OURS)


def test_the_users_replaces_the_administrators(users, administrators, folders):
    site_file(users, "a.toml", system("same", title="user's"))
    site_file(administrators, "a.toml", system("same", "{ host = 'n1' }", "admin's"))
    assert find(folders, explicit="same").title == "user's"
    assert find(folders, host="n1") is None


def test_a_new_variable_is_asked_first(users, folders):
    site_file(
        users,
        "a.toml",
        system("by-host", "{ host = 'n1' }"),
        system("by-known", "{ variable = 'SYSTEMNAME', values = ['x'] }"),
        system("by-new", "{ variable = 'ZZZ', pattern = 'x+' }"),
    )
    environ = {"SYSTEMNAME": "x", "ZZZ": "xx"}
    assert find(folders, environ, "n1").name == "by-new"
    assert find(folders, environ | {"ZZZ": "xxy"}, "n1").name == "by-known"
    assert find(folders, {"ZZZ": "", "SYSTEMNAME": ""}, "n1").name == "by-host"
    names = [site.name for site in sites.load({}, folders)][:3]
    assert names == ["by-new", "by-known", "by-host"]


def test_an_empty_variable_is_unset(users, folders):
    site_file(users, "a.toml", system("any", "{ variable = 'ZZZ', pattern = '.*' }"))
    assert find(folders, {"ZZZ": "0"}).found_by == "ZZZ=0"
    assert find(folders, {"ZZZ": ""}) is None
    assert find(folders, {}) is None


def test_what_is_no_file_of_sites_is_left_out(users, folders):
    site_file(users, "a.toml", system("mine"))
    for name in ("a.toml~", ".#b.toml", "notes.txt", "b.toml.off"):
        (users / name).write_text("[", encoding="utf-8")
    assert len(sites.load({}, folders)) == 1 + len(OURS)
    not_a_folder = users / "notes.txt"
    assert len(sites.load({}, [not_a_folder, users / "none"])) == len(OURS)


def test_two_files_of_a_place_that_disagree(users, folders):
    site_file(users, "a.toml", system("mine"))
    site_file(users, "b.toml", system("mine"))
    message = (
        f"{users}/b.toml and {users}/a.toml both describe mine. Remove one, or type "
        "--hpc-site=none"
    )
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


def test_the_administrators_folder():
    assert Path("/etc/torchrun_hpc/sites") == sites.ADMINISTRATORS


# --- a file that is typed ---------------------------------------------------------


def test_the_only_system_of_a_typed_file(tmp_path):
    file = site_file(tmp_path, "mine", system("mine", "{ host = 'elsewhere' }"))
    found = find([], {"SYSTEMNAME": "juwels"}, "n1", file)
    assert (found.name, found.found_by) == ("mine", f"--hpc-site={file}")


def test_a_file_in_this_folder_needs_its_ending(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site_file(tmp_path, "mine.toml", system("mine"))
    assert find([], explicit="mine.toml").file == "mine.toml"
    with pytest.raises(LaunchError, match="no such site") as fault:
        find([], explicit="mine")
    assert fault.value.code == "HPC040"


def test_a_typed_file_reads_no_other(tmp_path, users):
    site_file(users, "broken.toml", "[")
    file = site_file(tmp_path, "mine.toml", system("mine"))
    assert find([users], explicit=file).name == "mine"


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
    assert str(fault.value).endswith("type a name: --hpc-site=one")


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
'''

FILE = "mine.toml"

# By code and place: what is replaced by what, and the message.
BROKEN = {
    ("HPC042", "line 18"): {
        "no value": ("= 'fast", "'fast", "this is not TOML: Expected '='"),
    },
    ("HPC042", "line 24"): {
        "not closed": ('"ib0,ib1"', '"""ib0', "this is not TOML:"),
        # the parser gives no line for this one
        "a huge number": ('"A centre"', "1" * 5000, "this is not TOML:"),
    },
    ("HPC042", "line 21"): {
        "twice": ("[mine.variables]", "[mine]", "this is not TOML:"),
    },
    ("HPC043", "line 5, mine.titel"): {
        "unknown": (
            *("title =", "titel ="),
            "there is no such key. Did you mean title? There are: title, source,",
        ),
    },
    ("HPC043", "line 4, title"): {
        "outside": (
            *("[mine]\ntitle", "title"),
            "there is no such key. There are: centre",
        ),
    },
    ("HPC043", "line 18, mine.hosts.replace"): {
        "unknown in hosts": (
            *("replacement", "replace"),
            "there is no such key. Did you mean replacement? There are:",
        ),
    },
    ("HPC043", "line 9, mine.recognise.varable"): {
        "unknown in a sign": (
            *("{ variable", "{ varable"),
            "there is no such key. Did you mean variable? There are:",
        ),
    },
    ("HPC044", "line 1, centre"): {
        "no centre": ('centre = "A centre"', "", "this is missing"),
    },
    ("HPC044", "line 4, mine.source"): {
        "no source": ("source =", "#", "this is missing"),
    },
    ("HPC044", "line 16, mine.hosts.examples"): {
        "no examples": ("examples", "# ", "this is missing"),
    },
    ("HPC045", "line 1"): {
        "no system": (
            *(WHOLE[WHOLE.index("[mine]") :], ""),
            "there is no system: begin one with [NAME]",
        ),
    },
    ("HPC045", "line 2, centre"): {
        "centre is a number": (
            *('"A centre"', "1"),
            "this is not text: put it into quotes",
        ),
    },
    ("HPC045", "line 8, mine.source"): {
        "empty": ('"a/page"', '""', "this is empty"),
    },
    ("HPC045", "line 4, Mine"): {
        "name of a site": (
            *("mine", "Mine"),
            "a site's name is of lower-case letters, digits, - and _; not none",
        ),
    },
    ("HPC045", "line 4, none"): {
        "none": ("mine", "none", "a site's name is of lower-case"),
    },
    ("HPC045", 'line 4, "m/e"'): {
        "quoted name": ("mine", '"m/e"', "a site's name is of lower"),
    },
    ("HPC042", "line 16"): {
        "hosts twice": ("source =", "hosts = 1 #", "this is not TOML:"),
    },
    ("HPC045", "line 24, o.variables"): {
        "variables is text": (
            *("[mine.variables]\n", "[o]\ntitle='t'\nsource='s/s'\nvariables=1\n[p]\n"),
            "this is a table: NAME = VALUE",
        ),
    },
    ("HPC045", "line 24, o.hosts"): {
        "hosts is a number": (
            *("[mine.variables]\n", "[o]\ntitle='t'\nsource='s/s'\nhosts=1\n[p]\n"),
            "this is a table, with pattern, replacement, examples",
        ),
    },
    ("HPC045", "line 17, o.recognise"): {
        "recognise is text": (
            "{ host = 'm[0-9]+' },\n]",
            "]\n[o]\ntitle='t'\nsource='s/s'\nrecognise='SYSTEMNAME'",
            "this is a list: [{ variable",
        ),
    },
    ("HPC045", "line 9, mine.recognise"): {
        "a sign is text": (
            *("{ host = 'm[0-9]+' }", "'host'"),
            "this is a table, with variable, values, pattern, host",
        ),
        "a sign of too much": (
            *("{ host", "{ variable = 'A', host"),
            "each entry has variable and values, or variable and pa",
        ),
        "a sign of nothing": (
            *("{ host = 'm[0-9]+' }", "{}"),
            "each entry has variable and values, or variable and pa",
        ),
        "values is text": (
            *('["a", "b"]', '"a"'),
            'values is a list: ["juwels", "jusuf"]',
        ),
        "no values": ('["a", "b"]', "[]", 'values is a list: ["juwels", "jusuf"]'),
        "an empty value": ('"b"]', '""]', "this is empty"),
        "a variable's name": (
            *('"MINE", values', '"my one", values'),
            "'my one' is not a variable: A to Z, 0 to 9, _",
        ),
    },
    ("HPC045", "line 9, mine.bind"): {
        "no way to bind": (
            *('"a/page"', '"a/page"\nbind = "gpus"'),
            "'gpus' is no way to bind. Did you mean gpu? There are: gpu, even, none",
        ),
        "a way to bind that is no text": (
            *('"a/page"', '"a/page"\nbind = true'),
            "this is not text: put it into quotes",
        ),
    },
    ("HPC045", "line 22, mine.variables.nccl_socket_IFNAME"): {
        "a variable to set": (
            *("NCCL_SOCKET", "nccl_socket"),
            "'nccl_socket_IFNAME' is not a variable: A to Z, 0 to 9, _",
        ),
    },
    ("HPC045", "line 22, mine.variables.PET_NNODES"): {
        "a variable of torchrun": (
            *("NCCL_SOCKET_IFNAME", "PET_NNODES"),
            "PET_NNODES is torchrun's, or the user's, to set",
        ),
    },
    ("HPC045", "line 22, mine.variables.OMP_NUM_THREADS"): {
        "a variable that has an option": (
            *("NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"),
            "OMP_NUM_THREADS is torchrun's, or the user's, to set",
        ),
    },
    ("HPC045", "line 22, mine.variables.NCCL_SOCKET_IFNAME"): {
        "an unset value": ('"ib"', '""', "this is empty"),
        "a value that is a number": (
            *('"ib"', "0"),
            "this is not text: put it into quotes",
        ),
        "a value with zero": (
            *('"ib"', r'"i\u0000b"'),
            "the value has unprintable characters",
        ),
    },
    ("HPC045", "line 19, mine.hosts.examples"): {
        "no example": (
            *('{ m1 = "fast-1", "m1.net" = "fast-1.net" }', "{}"),
            "give at least one: NODE = its fast name",
        ),
    },
    ("HPC046", "line 17, mine.hosts.pattern"): {
        "pattern": (
            *("'^m([0-9]+)'", "'^m([0-9]+'"),
            "'^m([0-9]+' does not work: missing ), unterminated subpattern",
        ),
        "huge pattern": (
            *("'^m([0-9]+)'", "'m{99999999999999999999}'"),
            "'m{99999999999999999999}' does not work:",
        ),
    },
    ("HPC046", "line 18, mine.hosts.replacement"): {
        "replacement": (
            *(r"fast-\1", r"fast-\2"),
            r"'fast-\\2' does not work: invalid group reference 2",
        ),
        "named group": (
            *(r"fast-\1", r"\g<x>"),
            r"'\\g<x>' does not work: unknown group name 'x'",
        ),
    },
    ("HPC046", "line 9, mine.recognise"): {
        "pattern of a host": (
            *("'m[0-9]+'", "'*'"),
            "'*' does not work: nothing to repeat",
        ),
        "pattern of a variable": (
            *("'[c-z]+'", "'[z-c]+'"),
            "'[z-c]+' does not work: bad character range z-c",
        ),
    },
    ("HPC047", 'line 19, mine.hosts.examples."m1.net"'): {
        "example": (
            *('"fast-1.net"', '"fast-2.net"'),
            "the rule makes 'fast-1.net' of 'm1.net', not 'fast-2.net'; and",
        ),
    },
    ("HPC047", "line 19, mine.hosts.examples.m1"): {
        "not idempotent": (
            *("'^m([0-9]+)'", "'([0-9]+)'"),
            "the rule makes 'mfast-1' of 'm1', not 'fast-1'",
        ),
        "grows": (
            WHOLE[WHOLE.index("pattern = '^m") : WHOLE.index(', "m1.net"')],
            "pattern = '$'\nreplacement = 'i'\nexamples = { m1 = \"m1i\"",
            "the rule makes 'm1ii' of 'm1i', not 'm1i'; and what has",
        ),
    },
}

BROKEN["HPC045", "line 23, mine.variables.GLOO_SOCKET_IFNAME"] = {
    f"gloo {value!r}": ('"ib0,ib1"', f'"{value}"', "gloo takes exact names of inter")
    for value in ("^lo", "=ib0", "ib0, ib1", "ib0,", " ib0", "ib0,,ib1")
}
FAULTS = {
    name: (code, place, *rest)
    for (code, place), faults in BROKEN.items()
    for name, rest in faults.items()
}


def fault_of(path, *, everywhere=True):
    with pytest.raises(LaunchError) as fault:
        read(path, everywhere=everywhere)
    assert fault.value.everywhere is everywhere
    return fault.value


def test_the_whole_file_is_right(tmp_path):
    file = tmp_path / FILE
    file.write_text(WHOLE, encoding="utf-8")
    (site,) = read(file, everywhere=True)
    assert site.name == "mine"
    assert len(site.signs) == 3
    assert site.rewrite("m12.net") == "fast-12.net"


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_has_file_line_and_key(fault, tmp_path):
    code, place, old, new, text = FAULTS[fault]
    assert old in WHOLE
    file = tmp_path / FILE
    broken = WHOLE.replace(old, new)
    for end in ("\n", "\r\n"):  # of Unix, and of Windows
        file.write_bytes(broken.replace("\n", end).encode())
        error = fault_of(file)
        assert error.code == code
        assert str(error).startswith(f"{file}, {place}: {text}")
        assert str(error).endswith(". Mend it, or type --hpc-site=none")
        assert "\n" not in str(error)


def test_what_is_not_text(tmp_path):
    file = tmp_path / FILE
    file.write_bytes('centre = "A"\n# Jülich'.encode("latin-1"))
    error = fault_of(file)
    assert error.code == "HPC042"
    assert str(error).startswith(f"{file}, line 2: this is not TOML: 'utf-8' codec")


@pytest.mark.parametrize("everywhere", [True, False])
def test_who_reports(everywhere, tmp_path):
    file = site_file(tmp_path, FILE)
    assert fault_of(file, everywhere=everywhere).code == "HPC045"


def test_what_would_be_read_for_ever(tmp_path):
    pipe, large = tmp_path / "pipe.toml", tmp_path / "large.toml"
    os.mkfifo(pipe)
    large.write_text("#" * 20_001)
    for path in (pipe, large, Path("/dev/zero"), Path("\0/x.toml")):
        with pytest.raises(LaunchError) as fault:
            read(path, everywhere=True)
        assert fault.value.code == "HPC041"


def test_what_cannot_be_read(tmp_path, users, folders):
    with pytest.raises(LaunchError) as missing:
        read(tmp_path / FILE, everywhere=True)
    error = missing.value
    # Others may have it.
    assert (error.code, error.everywhere) == ("HPC041", False)
    assert str(error) == (
        f"{tmp_path}/{FILE} cannot be read: No such file or directory. Mend that, or "
        "type --hpc-site=none"
    )
    (users / FILE).mkdir(parents=True)
    with pytest.raises(LaunchError, match="Is a directory") as fault:
        find(folders)
    assert fault.value.code == "HPC041"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(users, folders):
    file = site_file(users, FILE, system("mine"))
    file.chmod(0)
    with pytest.raises(LaunchError, match="Permission denied") as fault:
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
    site_file(tmp_path / place, FILE)
    environ = {"HOME": str(tmp_path / home) if home else ""}
    with pytest.raises(LaunchError) as fault:
        sites.find(environ, "")
    assert (fault.value.code, fault.value.everywhere) == ("HPC045", everywhere)


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ((), 1),
        (("centre",), 2),
        (("mine",), 4),
        (("mine", "title"), 5),
        (("mine", "source"), 8),
        (("mine", "recognise"), 9),
        (("mine", "hosts"), 16),
        (("mine", "hosts", "pattern"), 17),
        (("mine", "hosts", "examples"), 19),
        (("mine", "hosts", "examples", "m1.net"), 19),
        (("mine", "hosts", "missing"), 16),
        (("mine", "title", "missing"), 5),
        (("mine", "variables", "GLOO_SOCKET_IFNAME"), 23),
        (("missing",), 1),
    ],
)
def test_lines_of_keys(key, line):
    assert line_of(WHOLE, key) == line


def test_lines_of_other_spellings():
    text = "a.b.c = 1\n\n[[d]]\ne = [\n1,\n\n]\n[ f . 'g' ]\n h.i = {}\n"
    keys = {("a", "b", "c"): 1, ("d",): 3, ("f", "g"): 8, ("f", "g", "h", "i"): 9}
    assert {key: line_of(text, key) for key in keys} == keys


def test_every_code_stands_once_in_the_code_and_is_tested():
    used = []
    for file in Path(sites.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)
        ]
        used += [t for t in texts if re.fullmatch("HPC[0-9]{3}", str(t))]
    assert sorted(used) == [f"HPC04{digit}" for digit in range(10)]
    tests = Path(__file__).read_text(encoding="utf-8")
    assert [code for code in used if f'"{code}"' not in tests] == []

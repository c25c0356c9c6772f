"""Files of sites: the user's, the administrator's, typed ones, and broken ones."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc import sites
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.setting import Setting
from torchrun_hpc.sites import reading
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
    sign = "{ variable = 'SYSTEMNAME', values = ['jupiter'] }"
    site_file(getattr(folders, where), "a.toml", system("jsc", sign, "JUPITER"))
    assert find(folders, explicit="jsc").title == "JUPITER"
    assert find(folders, {"SYSTEMNAME": "jupiter"}).title == "JUPITER"
    assert find(folders, {"SYSTEMNAME": "juwels"}) is None
    assert sorted(s.name for s in sites.load({}, folders)) == sorted(OURS)


def test_a_new_variable_is_asked_first(folders):
    site_file(
        folders.users,
        "a.toml",
        system("by-host", "{ host = 'n1' }"),
        system("by-known", "{ variable = 'SYSTEMNAME', values = ['x'] }"),
        system("by-new", "{ variable = 'ZZZ', pattern = 'x*' }"),
    )
    environ = {"SYSTEMNAME": "x", "ZZZ": "xx"}
    assert find(folders, environ, "n1").name == "by-new"
    assert find(folders, environ | {"ZZZ": "xxy"}, "n1").name == "by-known"
    for unset in ({}, {"ZZZ": "", "SYSTEMNAME": ""}):
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
    both = f"{folders.users}/b.toml and {folders.users}/a.toml"
    message = f"{both} both describe mine. Remove one, or type --hpc-site=none"
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

# The message of a broken file: how to break `WHOLE`, as pairs of old and new text.
BROKEN = {
    "HPC042 line 18: this is not TOML: Expected '='": [("= 'fast", "'fast")],
    "HPC042 line 24: this is not TOML:": [('"ib0,ib1"', '"""ib0')],
    "HPC042 line 21: this is not TOML:": [("[mine.variables]", "[mine]")],
    "HPC042 line 16: this is not TOML:": [("source =", "hosts = 1 #")],
    "HPC043 line 5, mine.titel: "
    "there is no such key. Did you mean title? There are: title,": [
        ("title =", "titel =")
    ],
    "HPC043 line 4, title: there is no such key. There are: centre": [
        ("[mine]\ntitle", "title")
    ],
    "HPC043 line 18, mine.hosts.replace: "
    "there is no such key. Did you mean replacement?": [("replacement", "replace")],
    "HPC043 line 9, mine.recognise.varable: "
    "there is no such key. Did you mean variable?": [("{ variable", "{ varable")],
    "HPC044 line 1, centre: this is missing": [('centre = "A centre"', "")],
    "HPC044 line 4, mine.source: this is missing": [("source =", "#")],
    "HPC044 line 16, mine.hosts.examples: this is missing": [("examples", "#")],
    "HPC045 line 2, centre: this is not text: put it into quotes": [
        ('"A centre"', "1")
    ],
    "HPC045 line 8, mine.source: this is empty": [('"a/page"', '""')],
    "HPC045 line 4, Mine: "
    "a site's name is of lower-case letters, digits, - and _; not none": [
        ("mine", "Mine")
    ],
    "HPC045 line 4, none: a site's name is of lower-case": [("mine", "none")],
    'HPC045 line 4, "m/e": a site\'s name is of lower-case': [("mine", '"m/e"')],
    "HPC045 line 24, o.variables: this is a table: NAME = VALUE": [
        ("[mine.variables]\n", "[o]\ntitle='t'\nsource='s/s'\nvariables=1\n[p]\n")
    ],
    "HPC045 line 24, o.hosts: this is a table, with pattern, replacement, examples": [
        ("[mine.variables]\n", "[o]\ntitle='t'\nsource='s/s'\nhosts=1\n[p]\n")
    ],
    "HPC045 line 17, o.recognise: this is a list: [{ variable": [
        ("{ host = 'm[0-9]+' },\n]", "]\n[o]\ntitle='t'\nsource='s/s'\nrecognise='A'")
    ],
    "HPC045 line 9, mine.recognise: "
    "this is a table, with variable, values, pattern, host": [
        ("{ host = 'm[0-9]+' }", "'host'")
    ],
    "HPC045 line 9, mine.recognise: "
    "each entry has variable and values, or variable and pattern, or host": [
        ("{ host", "{ variable = 'A', host"),
        ("{ host = 'm[0-9]+' }", "{}"),
    ],
    'HPC045 line 9, mine.recognise: values is a list: ["juwels", "jusuf"]': [
        ('["a", "b"]', '"a"'),
        ('["a", "b"]', "[]"),
    ],
    "HPC045 line 9, mine.recognise: this is empty": [('"b"]', '""]')],
    "HPC045 line 9, mine.recognise: 'my one' is not a variable: A to Z, 0 to 9, _": [
        ('"MINE", values', '"my one", values')
    ],
    "HPC045 line 9, mine.bind: "
    "'gpus' is no way to bind. Did you mean gpu? There are: gpu,": [
        ('"a/page"', '"a/page"\nbind = "gpus"')
    ],
    "HPC045 line 9, mine.bind: this is not text: put it into quotes": [
        ('"a/page"', '"a/page"\nbind = true')
    ],
    "HPC045 line 22, mine.variables.nccl_X: "
    "'nccl_X' is not a variable: A to Z, 0 to 9, _": [("NCCL_SOCKET_IFNAME", "nccl_X")],
    "HPC045 line 22, mine.variables.NCCL_x: "
    "'NCCL_x' is not a variable: A to Z, 0 to 9, _": [("NCCL_SOCKET_IFNAME", "NCCL_x")],
    "HPC045 line 22, mine.variables.PET_X: "
    "PET_X is torchrun's, or the user's, to set": [("NCCL_SOCKET_IFNAME", "PET_X")],
    "HPC045 line 22, mine.variables.OMP_NUM_THREADS: OMP_NUM_THREADS is torchrun's": [
        ("NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")
    ],
    "HPC045 line 22, mine.variables.NCCL_SOCKET_IFNAME: this is empty": [
        ('"ib"', '""')
    ],
    "HPC045 line 22, mine.variables.NCCL_SOCKET_IFNAME: "
    "this is not text: put it into quotes": [('"ib"', "0")],
    "HPC045 line 22, mine.variables.NCCL_SOCKET_IFNAME: "
    "the value has unprintable characters": [('"ib"', r'"i\u0000b"')],
    "HPC045 line 23, mine.variables.GLOO_SOCKET_IFNAME: "
    "gloo takes exact names of interfaces": [
        ('"ib0,ib1"', '"^lo"'),
        ('"ib0,ib1"', '"=ib0"'),
        ('"ib0,ib1"', '"ib0, ib1"'),
        ('"ib0,ib1"', '"ib0,"'),
        ('"ib0,ib1"', '" ib0"'),
        ('"ib0,ib1"', '"ib0,,ib1"'),
    ],
    "HPC045 line 19, mine.hosts.examples: give at least one: NODE = its fast name": [
        ('{ m1 = "fast-1", "m1.net" = "fast-1.net" }', "{}")
    ],
    "HPC046 line 17, mine.hosts.pattern: '^m([0-9]+' does not work: missing )": [
        ("'^m([0-9]+)'", "'^m([0-9]+'")
    ],
    "HPC046 line 17, mine.hosts.pattern: 'm{99999999999999999999}' does not work:": [
        ("'^m([0-9]+)'", "'m{99999999999999999999}'")
    ],
    "HPC046 line 18, mine.hosts.replacement: "
    r"'fast-\\2' does not work: invalid group": [(r"fast-\1", r"fast-\2")],
    "HPC046 line 18, mine.hosts.replacement: "
    r"'\\g<x>' does not work: unknown group name 'x'": [(r"fast-\1", r"\g<x>")],
    "HPC046 line 9, mine.recognise: '*' does not work: nothing to repeat": [
        ("'m[0-9]+'", "'*'")
    ],
    "HPC046 line 9, mine.recognise: '[z-c]+' does not work: bad character range z-c": [
        ("'[c-z]+'", "'[z-c]+'")
    ],
    'HPC047 line 19, mine.hosts.examples."m1.net": '
    "the rule makes 'fast-1.net' of 'm1.net'": [('"fast-1.net"', '"fast-2.net"')],
    "HPC047 line 19, mine.hosts.examples.m1: "
    "the rule makes 'mfast-1' of 'm1', not 'fast-1';": [("'^m([0-9]+)'", "'([0-9]+)'")],
    "HPC047 line 19, mine.hosts.examples.m1: "
    "the rule makes 'fast-ast-1' of 'fast-1', not": [
        ("'^m([0-9]+)'", "'^[mf]([^.]+)'")
    ],
}
FAULTS = [
    (message, *change) for message, changes in BROKEN.items() for change in changes
]


@pytest.mark.parametrize(("message", "old", "new"), FAULTS)
def test_every_fault_has_file_line_and_key(message, old, new, tmp_path):
    assert old in WHOLE
    broken = WHOLE.replace(old, new)
    for end in ("\n", "\r\n"):  # of Unix, and of Windows
        error = fault_of(tmp_path, broken.replace("\n", end).encode())
        assert error.startswith(message)
        assert error.endswith(". Mend it, or type --hpc-site=none")
        assert "\n" not in error


def fault_of(folder, written):
    """Return the code and the message for a file, without its name."""
    file = folder / "mine.toml"
    file.write_bytes(written)
    with pytest.raises(LaunchError, match=f"^{file}, ") as fault:
        read(file, everywhere=True)
    return f"{fault.value.code} {str(fault.value).removeprefix(f'{file}, ')}"


def test_what_is_no_toml(tmp_path):
    """The parser names no line."""
    assert fault_of(tmp_path, 'centre = "A"\n# Jülich'.encode("latin-1")).startswith(
        "HPC042 line 2: this is not TOML: 'utf-8' codec"
    )
    assert fault_of(tmp_path, f"a = {'1' * 5000}\n\n# end".encode()).startswith(
        "HPC042 line 3: this is not TOML: "
    )


def test_what_would_be_read_for_ever(tmp_path):
    pipe, large = tmp_path / "pipe.toml", tmp_path / "large.toml"
    os.mkfifo(pipe)
    large.write_text("#" * 20_001)
    (tmp_path / "link.toml").symlink_to("pipe.toml")
    link, device = tmp_path / "link.toml", Path("/dev/zero")
    for path in (pipe, link, large, device, Path("\0/x.toml")):
        with pytest.raises(LaunchError) as fault:
            read(path, everywhere=True)
        assert fault.value.code == "HPC041"


def test_what_cannot_be_read(tmp_path, folders):
    with pytest.raises(LaunchError) as missing:
        read(tmp_path / "mine.toml", everywhere=True)
    error = missing.value
    # Others may have it.
    assert (error.code, error.everywhere) == ("HPC041", False)
    assert str(error) == (
        f"{tmp_path}/mine.toml cannot be read: No such file or directory. Mend that, "
        "or type --hpc-site=none"
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
    with pytest.raises(LaunchError, match=r"there is no system: begin one") as fault:
        sites.find(environ, "")
    assert (fault.value.code, fault.value.everywhere) == ("HPC045", everywhere)


def test_lines_of_keys():
    keys = {("mine", "hosts", "missing"): 16, ("mine", "title", "missing"): 5, (): 1}
    assert {key: line_of(WHOLE, key) for key in keys} == keys
    text = "a.b.c = 1\n\n[[d]]\ne = [\n1,\n\n]\n[ f . 'g' ]\n h.i = {}\n"
    keys = {("a", "b", "c"): 1, ("d",): 3, ("f", "g"): 8, ("f", "g", "h", "i"): 9}
    assert {key: line_of(text, key) for key in keys} == keys


def line_by_trying(text, key):
    """Find a line by the definition: parse the first line, the first two, and so on."""
    table = reading._table_of(text)
    while key and not reading._has(table, key):
        key = key[:-1]
    lines = text.split("\n")
    begin = 0
    for end in range(len(lines) if key else 0):
        try:
            table = reading._table_of("\n".join(lines[: end + 1]))
        except ValueError:
            continue
        if reading._has(table, key):
            break
        begin = end + 1
    return begin + 1


# Strings, comments and brackets hide one another.
VALUES = [
    *(
        "1",
        "''",
        '""',
        "[]",
        "{}",
        "[{}]",
        "'['",
        "'#'",
        '"]"',
        r'"\""',
        r"'\'",
        r'"\\"',
    ),
    *("{ a = '}' }", "[\n]", "[\n\n1,\n\n]", "[ # ]\n]", "[ # '\n\n'#', [\n] ]"),
    *('"""\n"""', "'''\n'''", '"""\n[x]\n"""""', "'''\n[\n'''''", '"""\\"""\n"""'),
    *('["""\n]""",\n]', '"""a""b"\n"""', "'''a''b'\n'''", r'"""\\"""', "'''\\'''"),
    *("['''\n''', \"\"\"\n\"\"\"]", '"""\\\n\n  """', '"""#"""', "'''#'''", '"""\'"""'),
]
# Of the keys each is new: the braces get the number of the statement.
STATEMENTS = [
    *(
        "",
        " ",
        "# [",
        "# '",
        '# """',
        "[t{}]",
        "[[t{}]]",
        "[t0.u{}]",
        "[ t{} . 'u' ]#[",
    ),
    *("k{} = VALUE", " k{}.a = VALUE # ]", '"[{}" = VALUE', "'#{}' = VALUE"),
]


def statements():
    drawn = st.tuples(st.sampled_from(STATEMENTS), st.sampled_from(VALUES))
    return st.lists(drawn, max_size=8)


def keys_of(table, above=()):
    for name, value in table.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from keys_of(value, (*above, name))


@given(statements(), st.sampled_from(["", "\n"]))
def test_a_line_is_that_of_the_definition(drawn, end):
    written = (
        statement.replace("{}", str(number)).replace("VALUE", value)
        for number, (statement, value) in enumerate(drawn)
    )
    text = "\n".join(written) + end
    keys = [*keys_of(reading._table_of(text))]
    for key in ((), ("missing",), *keys, *((*key, "missing") for key in keys)):
        assert line_of(text, key) == line_by_trying(text, key)


LARGE = {
    "blank lines": "\n" * 4_000,
    "comments": "#[\n" * 5_000,
    "a list": "a = [{}]\n".format("\n" * 9_000),
    "a text": "a = '''{}'''\n".format("\n" * 9_000),
    "statements": "".join(f"k{number}=1\n" for number in range(2_000)),
}


@pytest.mark.parametrize("kind", LARGE)
def test_the_line_in_a_large_file_is_found_by_few_parses(kind, monkeypatch):
    before = LARGE[kind]
    parsed, parse = [], reading._table_of
    monkeypatch.setattr(
        reading, "_table_of", lambda text: parsed.append(text) or parse(text)
    )
    line = before.count("\n") + 1
    assert line_of(f"{before}key = 1\n", ("key",)) == line
    assert len(parsed) <= 16

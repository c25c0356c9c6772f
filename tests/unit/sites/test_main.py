"""``python -m torchrun_hpc.sites``."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from tests.support.recordings import recorded
from torchrun_hpc import sites
from torchrun_hpc.sites.__main__ import main

MINE = """centre = "A centre"
[mine]
title = "My machines"
source = "a/page"
recognise = [{ host = 'm[0-9]+' }]
[other]
title = "Others"
source = "a/page"
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Make an empty environment on a machine called m1."""
    for name in os.environ:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(socket, "gethostname", lambda: "m1")
    monkeypatch.setattr(sites, "ADMINISTRATORS", tmp_path / "etc")


@pytest.fixture
def run(capsys):
    def run(*args):
        code = main(args)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / ".config" / "torchrun_hpc" / "sites" / "mine.toml"
    file.parent.mkdir(parents=True)
    file.write_text(MINE, encoding="utf-8")
    return file


def marked(out):
    return [line.split()[1] for line in out.splitlines() if line.startswith("*")]


@pytest.mark.parametrize("args", [(), ("list",)])
def test_list(args, run):
    code, out, err = run(*args)
    assert (code, err, marked(out)) == (0, "", [])
    lines = out.splitlines()
    for site in sites.load({}, folders=()):
        (line,) = [line for line in lines if line.split()[0] == site.name]
        assert line.endswith(f" {site.title}; {site.centre}")
    assert "SYSTEMNAME=juwels or juwelsbooster or jurecadc or jusuf" in out
    assert "jwb0001 -> jwb0001i\n" in out
    assert "NCCL_SOCKET_IFNAME=hsn, and 7 more\n" in out
    assert out.count("by name only") == 5


def test_list_marks_the_site_of_this_machine(run, mine, monkeypatch):
    assert mine.exists()
    assert marked(run()[1]) == ["mine"]
    monkeypatch.setenv("PET_HPC_SITE", "lumi")
    assert marked(run()[1]) == ["lumi"]
    monkeypatch.setenv("PET_HPC_SITE", "none")
    assert marked(run()[1]) == []


FULL = """centre = "A centre"
[mine]
title = "My machines"
source = "a/page"
recognise = [{ variable = 'MINE', values = ['a', 'b'] }, { host = 'm[0-9]+' }]
preload = ["torch"]
bind = "gpu"
auth = "require"
key_file = "~/k"
hosts.pattern = '^m([0-9]+)'
hosts.replacement = 'fast-\\1'
hosts.examples = { m1 = "fast-1", "m1.net" = "fast-1.net" }
variables.NCCL_SOCKET_IFNAME = "ib"
variables.NCCL_DEBUG = "WARN"
[other]
title = "Others"
source = "a/page"
profile.file = "FOLDER/profile"
profile.names = ["NCCL_A", "NCCL_B"]
variables.NCCL_B = "1"
"""
UNKNOWN = FULL.replace("title", "titel", 1)
# Exit code, arguments, variables, and the text of the file of sites.
COMMANDS: dict[str, tuple[int, str, dict[str, str], str]] = {
    "show the sites of a file": (0, "show FILE", {}, FULL),
    "show one site": (0, "show mine", {}, FULL),
    "show no site": (0, "show none", {}, FULL),
    "show an unknown site": (2, "show jcs", {}, FULL),
    "show, and the file is broken": (2, "show jsc", {}, "["),
    "list, and the file is broken": (2, "", {}, "["),
    "here, by a variable": (0, "here", {"MINE": "b"}, FULL),
    "here, by the host name": (0, "here", {}, FULL),
    "here, by a name": (0, "here", {"PET_HPC_SITE": "mine"}, FULL),
    "here, by a file": (0, "here", {"PET_HPC_SITE": "FILE"}, FULL),
    "here, switched off": (1, "here", {"PET_HPC_SITE": "none"}, FULL),
    "here, an unknown site": (2, "here", {"PET_HPC_SITE": "jcs"}, FULL),
    "here, and the file is broken": (2, "here", {}, "["),
    "check two files": (0, "check OURS FILE", {}, MINE),
    "check a missing file, a wrong one and a good one": (
        *(2, "check FOLDER/none FILE OURS"),
        {},
        UNKNOWN,
    ),
    "check a profile": (0, "check FILE", {}, FULL),
}


def test_commands(run, mine, monkeypatch, golden):
    ours = Path(sites.__file__).parent / "alcf.toml"
    places = {"OURS": ours, "FILE": mine, "FOLDER": mine.parent}

    def placed(text):
        return replaced(text, {name: str(path) for name, path in places.items()})

    (mine.parent / "profile").write_text("NCCL_A=1\nexport NCCL_B=2\nNCCL_C=3\n")
    texts = {}
    for case, (expected, words, environ, text) in COMMANDS.items():
        mine.write_text(placed(text), encoding="utf-8")
        with monkeypatch.context() as patching:
            for name, value in environ.items():
                patching.setenv(name, placed(value))
            code, out, err = run(*placed(words).split())
        assert code == expected, case
        assert bool(out) is (code < 2 or case.endswith("a good one")), case
        shown = replaced(out + err, {str(path): name for name, path in places.items()})
        shown = re.sub("There are: .*", "There are: ...", shown)
        texts[case] = re.sub("not TOML: .*[.] Correct", "not TOML: .... Correct", shown)
    golden(texts)


def replaced(text, words):
    for old, new in words.items():
        text = text.replace(old, new)
    return text


def test_here_is_none(run, monkeypatch):
    monkeypatch.setenv("CLUSTER_NAME", "eiger")
    code, out, err = run("here")
    assert (code, err) == (1, "")
    assert out.split()[0] == "none"
    assert "host name m1\n" in out
    assert "CLUSTER_NAME=eiger\n" in out
    markers = [marker for site in sites.load({}, folders=()) for marker in site.markers]
    for name in {marker.variable for marker in markers if marker.variable}:
        assert (f" {name} is not set\n" in out) is (name != "CLUSTER_NAME")


@pytest.mark.parametrize(
    ("job", "name_of_file"),
    [
        ({"PBS_JOBID": "7.server"}, "PBS_NODEFILE"),
        ({"LSB_JOBID": "7"}, "LSB_DJOB_HOSTFILE"),
    ],
)
def test_the_jobs_nodes_are_read_from_its_file(
    run, monkeypatch, mine, job, name_of_file
):
    """As by the launcher itself."""
    hosts = mine.parents[3] / "hosts"
    hosts.write_text("m8\nm9\n", encoding="utf-8")
    for name, value in (job | {name_of_file: str(hosts)}).items():
        monkeypatch.setenv(name, value)
    assert marked(run("list")[1]) == ["mine"]
    code, out, err = run("here")
    assert (code, err) == (0, "")
    assert "host name m8" in out


def test_here_is_where_the_jobs_first_node_is(run, monkeypatch, mine):
    mine.write_text(MINE.replace("m[0-9]+", "jwb0001"), encoding="utf-8")
    environ, _ = recorded("slurm-srun-3-nodes")[2]
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(mine.parents[3]))
    monkeypatch.delenv("SYSTEMNAME", raising=False)
    assert "host name jwb0001\n" in run("here")[1]


PROFILES = {
    "good": (b"NCCL_A=1\nexport NCCL_B=2\nNCCL_C=3\n", ""),
    "only for a shell": (b"NCCL_A=$HOME\nNCCL_C=3\n", "HPC248"),
    "the site has a value": (b"NCCL_B=$HOME\n", ""),
    "not text": (b"\xff", "HPC247"),
    "missing": (None, "HPC247"),
}


def test_check_reads_the_profile(run, mine, golden):
    mine.write_text(FULL.replace("FOLDER", str(mine.parent)), encoding="utf-8")
    file = mine.parent / "profile"
    texts = {}
    for case, (content, expected) in PROFILES.items():
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        code, out, err = run("check", str(mine))
        assert (code, out) == (0, f"{mine}: ok: mine, other\n")
        assert re.findall("HPC...", err) == [expected] * bool(expected)
        texts[case] = err.replace(str(file), "FILE")
    golden(texts)


@pytest.mark.parametrize("args", [("shwo",), ("show",), ("check",), ("here", "x")])
def test_wrong_use(args, capsys):
    with pytest.raises(SystemExit) as left:
        main(args)
    assert left.value.code == 2
    assert "usage: python -m torchrun_hpc.sites" in capsys.readouterr().err

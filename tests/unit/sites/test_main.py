"""``python -m torchrun_hpc.sites``."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.support.juelich import recorded
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


def test_show(run):
    code, out, err = run("show", "aurora")
    assert (code, err) == (0, "")
    site = {site.name: site for site in sites.load({}, folders=())}["aurora"]
    for text in (site.name, site.title, site.centre, site.source, site.file):
        assert f" {text}\n" in out
    assert "FI_MR_CACHE_MONITOR=userfaultfd\n" in out
    for host, fast in site.examples.items():
        assert f" {host} -> {fast}\n" in out
    assert f" {site.pattern}\n" in out
    assert f" {site.replacement}\n" in out
    assert all(f" {marker}\n" in out for marker in site.markers)


def test_show_a_file(run, mine):
    options = 'preload = ["torch"]\nbind = "gpu"\nauth = "require"\nkey_file = "~/k"'
    text = MINE.replace('"a/page"', f'"a/page"\n{options}', 1)
    mine.write_text(text, encoding="utf-8")
    code, out, _ = run("show", str(mine))
    assert code == 0
    for text in ("My machines", "Others", "by name only"):
        assert text in out
    words = [line.split() for line in out.splitlines()]
    assert not {"pattern", "replacement", "examples"} & {line[0] for line in words}
    assert [line for line in words if "hpc_" in line[-1]] == [
        ["options", "hpc_preload=torch"],
        ["hpc_bind=gpu"],
        ["hpc_auth=require"],
        ["hpc_key_file=~/k"],
    ]
    assert run("show", "none")[0::2] == (0, "")


def test_show_what_there_is_not(run):
    code, out, err = run("show", "jcs")
    assert (code, out) == (2, "")
    assert err.startswith(
        "torchrun_hpc: error[HPC040]: site=jcs: there is no such site"
    )
    assert "Did you mean jsc?" in err
    assert err.count("\n") == 1


def test_here(run, monkeypatch):
    monkeypatch.setenv("NCAR_HOST", "derecho")
    code, out, err = run("here")
    assert (code, err) == (0, "")
    assert out.split()[0] == "derecho"
    assert "NCAR_HOST=derecho\n" in out
    assert "ncar.toml" in out


def test_here_as_it_was_typed(run, monkeypatch, mine):
    monkeypatch.setenv("PET_HPC_SITE", "jsc")
    assert "PET_HPC_SITE=jsc\n" in run("here")[1]
    monkeypatch.setenv("PET_HPC_SITE", str(mine))
    assert f"PET_HPC_SITE={mine}, host name m1\n" in run("here")[1]
    monkeypatch.setenv("PET_HPC_SITE", "none")
    code, out, err = run("here")
    assert (code, err) == (1, "")
    assert out.split() == ["none", "PET_HPC_SITE=none"]
    monkeypatch.setenv("PET_HPC_SITE", "jcs")
    code, out, err = run("here")
    assert (code, out) == (2, "")
    assert "error[HPC040]: PET_HPC_SITE=jcs: there is no such site" in err


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


def test_check(run, mine):
    ours = Path(sites.__file__).parent / "alcf.toml"
    code, out, err = run("check", str(ours), str(mine))
    assert (code, err) == (0, "")
    assert out == f"{ours}: ok: polaris, aurora\n{mine}: ok: mine, other\n"


def test_check_says_what_is_wrong_in_each(run, mine, tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text(MINE.replace("title", "titel"), encoding="utf-8")
    missing = tmp_path / "missing.toml"
    code, out, err = run("check", str(broken), str(mine), str(missing))
    assert (code, out) == (2, f"{mine}: ok: mine, other\n")
    first, second = err.splitlines()
    assert first.startswith(
        f"torchrun_hpc: error[HPC043]: {broken}, mine.titel: there is no such"
    )
    assert second.startswith(f"torchrun_hpc: error[HPC041]: {missing} cannot be read")


NOT_TAKEN = (
    "warning[HPC248]: FILE: not taken: NCCL_A (line 1, only a shell can tell its "
    "value). Export what you need, or remove the names from the site file\n"
)
MISSING = (
    "note[HPC247]: FILE cannot be read: No such file or directory. Site other takes "
    "variables of NCCL from it. Mount it on this node, or export them: NCCL_A\n"
)
PROFILES = {
    "good": (b"NCCL_A=1\nexport NCCL_B=2\nNCCL_C=3\n", ""),
    "only for a shell": (b"NCCL_A=$HOME\nNCCL_C=3\n", NOT_TAKEN),
    "the site has a value": (b"NCCL_B=$HOME\n", ""),
    "not text": (b"\xff", "warning[HPC247]: FILE cannot be read: 'utf-8' codec "),
    "missing": (None, MISSING),
}


@pytest.mark.parametrize("case", PROFILES)
def test_check_reads_the_profile(run, mine, tmp_path, case):
    content, said = PROFILES[case]
    file = tmp_path / "profile"
    if content is not None:
        file.write_bytes(content)
    mine.write_text(
        f'{MINE}variables.NCCL_B = "1"\nprofile.file = "{file}"\n'
        'profile.names = ["NCCL_A", "NCCL_B"]\n',
        encoding="utf-8",
    )
    code, out, err = run("check", str(mine))
    assert (code, out) == (0, f"{mine}: ok: mine, other\n")
    assert err.startswith(
        f"torchrun_hpc: {said}".replace("FILE", str(file)) * bool(said)
    )
    assert err.count("\n") == bool(said)


@pytest.mark.parametrize("args", [(), ("here",), ("show", "jsc")])
def test_a_broken_file_of_the_user(args, run, mine):
    mine.write_text("[", encoding="utf-8")
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith(f"torchrun_hpc: error[HPC043]: {mine}: this is not TOML: ")


@pytest.mark.parametrize("args", [("shwo",), ("show",), ("check",), ("here", "x")])
def test_wrong_use(args, capsys):
    with pytest.raises(SystemExit) as left:
        main(args)
    assert left.value.code == 2
    assert "usage: python -m torchrun_hpc.sites" in capsys.readouterr().err

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support import ROOT
from torchrun_hpc import files, sites
from torchrun_hpc.errors import LaunchError, Setting
from torchrun_hpc.sites import Marker


def find(environ=(), host="", explicit=None):
    """Find one of our own sites: no other folder is read."""
    wanted = None if explicit is None else Setting(explicit, "--hpc-site")
    return sites.find(dict(environ), host, wanted, folders=())


OURS = {site.name: site for site in sites.load({}, folders=())}
WITH_RULE = [name for name, site in OURS.items() if site.pattern]
JSC = OURS["jsc"]

POLARIS_JOB = "308834.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov"
AURORA_JOB = "12345.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov"

# From real systems: the site, what shows it, and the rest of its environment.
SHOWN = [
    ("jsc", "SYSTEMNAME=juwels", "jwc09n012", {"SLURM_CLUSTER_NAME": "juwels"}),
    ("jsc", "SYSTEMNAME=juwelsbooster", "jwb0001.juwels", {}),
    ("jsc", "SYSTEMNAME=jurecadc", "jrc0001", {}),
    ("jsc", "SYSTEMNAME=jusuf", "jsfc001", {}),
    ("derecho", "NCAR_HOST=derecho", "deg0001", {"PBS_JOBID": "1.desched1"}),
    ("derecho", "PBS_JOBID=1473351.desched1", "deg0001", {}),
    ("derecho", "PBS_JOBID=17[3].desched1.hsn.de.hpc.ucar.edu", "dec0001", {}),
    ("polaris", f"PBS_JOBID={POLARIS_JOB}", "x3102c0s13b0n0", {}),
    ("polaris", "PBS_JOBID=2024[7].polaris-pbs-01", "x3102c0s13b0n0", {}),
    ("polaris", "host name x3102c0s13b0n0.hsn.cm.polaris.alcf.anl.gov", "", {}),
    ("polaris", "host name polaris-login-02", "", {}),
    ("aurora", f"PBS_JOBID={AURORA_JOB}", "x4117c0s6b0n0", {}),
    ("aurora", "host name x4117c0s6b0n0.hostmgmt2308.cm.aurora.alcf.anl.gov", "", {}),
    ("aurora", "host name aurora-uan-0009", "", {}),
    ("frontier", "LMOD_SYSTEM_NAME=frontier", "frontier05084", {}),
    ("frontier", "host name frontier00001", "", {"SLURM_CLUSTER_NAME": "frontier"}),
    ("frontier", "host name frontier00001.frontier.olcf.ornl.gov", "", {}),
    ("frontier", "host name login07.frontier.olcf.ornl.gov", "", {}),
    ("el-capitan", "host name elcap1", "", {}),
    ("el-capitan", "host name tuolumne1001", "", {"SYS_TYPE": "toss_4_x86_64_ib_cray"}),
    ("el-capitan", "host name rzadams1004.llnl.gov", "", {}),
    ("el-capitan", "host name tioga18", "", {}),
    ("el-capitan", "host name rzvernal10", "", {}),
    ("el-capitan", "host name tenaya4", "", {}),
    ("lumi", "SLURM_CLUSTER_NAME=lumi", "nid005001", {}),
    ("alps", "CLUSTER_NAME=clariden", "nid006365", {"SLURM_CLUSTER_NAME": "clariden"}),
    ("alps", "CLUSTER_NAME=daint", "nid005471", {}),
    ("alps", "CLUSTER_NAME=santis", "nid005487", {}),
    ("olivia", "SLURM_CLUSTER_NAME=olivia", "gpu-1-43", {}),
    ("setonix", "PAWSEY_CLUSTER=setonix", "nid002001", {}),
    ("perlmutter", "NERSC_HOST=perlmutter", "nid001000", {"LMOD_SYSTEM_NAME": "x"}),
]

# Clouds: what their images have, and what is also there on other machines.
FILES = {
    "aws-efa": ("/etc/parallelcluster/cfnconfig", "/opt/amazon/efa"),
    "azure-nd-h100": (
        "/opt/microsoft/ndv5/topo.xml",
        *("/opt/microsoft/ndv4-topo.xml", "/opt/microsoft/ndv5-topo.xml"),
    ),
    "azure-nd-a100": (
        "/opt/microsoft/ndv4/topo.xml",
        *("/opt/microsoft/ndv4-topo.xml", "/opt/microsoft/ndv5-topo.xml"),
    ),
    "google-a3-mega": (
        "/var/lib/tcpxo/lib64/nccl-env-profile.sh",
        *("/slurm/scripts", "/usr/local/gib"),
    ),
    "google-gib": ("/etc/profile.d/nccl-gib.sh", "/slurm/scripts", "/usr/local/gib"),
}


def surroundings(found_by, host, rest):
    """Return the environment and the host that a line of the table describes."""
    if found_by.startswith("host name "):
        return rest, found_by.removeprefix("host name ")
    name, _, value = found_by.partition("=")
    return {name: value, **rest}, host


ELSEWHERE = [
    ({}, ""),
    ({}, "localhost"),
    # Jülich's systems whose nodes have no names with an i
    ({"SYSTEMNAME": "jupiter"}, "jpbo-001-01.jupiter.internal"),
    ({"SYSTEMNAME": "jedi"}, "jpbot-001-17.jupiter.internal"),
    ({"SYSTEMNAME": "hdfml"}, "hdfmlc01"),
    # neighbours, and systems that need nothing
    ({"NCAR_HOST": "casper", "PBS_JOBID": "1.casper-pbs"}, "crhtc53"),
    ({"PBS_JOBID": "1.crux-pbs-0001.head.cm.crux.alcf.anl.gov"}, "x1000c0s0b0n0"),
    ({"PBS_JOBID": "1.sophia-pbs-01.lab.alcf.anl.gov"}, "sophia-gpu-01"),
    ({"LMOD_SYSTEM_NAME": "crusher"}, "crusher001"),
    ({"TACC_SYSTEM": "frontera", "LMOD_SYSTEM_NAME": "frontera"}, "c123-456"),
    ({}, "andes-login1.olcf.ornl.gov"),
    ({"LMOD_SYSTEM_NAME": "perlmutter", "NERSC_HOST": "cori"}, "nid001000"),
    ({}, "lassen123"),
    ({"CLUSTER_NAME": "eiger", "SLURM_CLUSTER_NAME": "eiger"}, "nid001000"),
    ({"PAWSEY_CLUSTER": "garrawarla"}, "nid001000"),
    # names that say nothing: a blade, a node of any HPE Cray, a node
    ({}, "x3102c0s13b0n0"),
    ({}, "x4117c0s6b0n0"),
    ({}, "nid001023"),
    ({}, "gpu-1-43"),
    ({}, "mel2001"),
    # markers that are almost there
    ({"SYSTEMNAME": ""}, "jwb0001"),
    ({"SYSTEMNAME": "JUWELS"}, "jwb0001"),
    ({"SYSTEMNAME": "juwels "}, "jwb0001"),
    ({"SYSTEMNAME": "juwelscluster"}, "jwb0001"),
    ({"SYSTEM": "juwels"}, "jwb0001"),
    ({"SLURM_CLUSTER_NAME": "lumi-login"}, "nid005001"),
    ({"PBS_JOBID": "1.polarispbs01"}, "x3102c0s13b0n0"),
    ({"PBS_JOBID": "1.desched"}, "deg0001"),
    ({"PBS_JOBID": "1.desched1x"}, "deg0001"),
    ({"PBS_JOBID": "1.casper.desched1"}, "deg0001"),
    ({}, "frontier1"),
    ({}, "myfrontier00001"),
    ({}, "frontier00001x"),
    ({}, "tuolumne"),
    ({}, "xpolaris-login-02"),
    ({}, "polaris.alcf.anl.gov.example.org"),
]


@pytest.mark.parametrize(("name", "found_by", "host", "rest"), SHOWN)
def test_recognised_from_its_own_environment_only(name, found_by, host, rest):
    environ, host = surroundings(found_by, host, rest)
    found = find(environ, host)
    assert (found.name, found.found_by) == (name, found_by)
    for site in OURS.values():
        if site.name != name:
            assert not any(marker.match(environ, host) for marker in site.markers)


@pytest.mark.parametrize("name", FILES)
def test_a_cloud_is_recognised_by_a_file_of_its_image(name, monkeypatch):
    own, *others = FILES[name]
    monkeypatch.setattr(files, "exists", {own, *others}.__contains__)
    found = find({"SLURM_CLUSTER_NAME": "mine"}, "mine-gpu-1")
    assert (found.name, found.found_by) == (name, f"file {own}")
    monkeypatch.setattr(files, "exists", {*others}.__contains__)
    assert find({"SLURM_CLUSTER_NAME": "mine"}, "mine-gpu-1") is None


def test_every_file_is_in_the_table():
    markers = {k: m.file for k, s in OURS.items() for m in s.markers if m.file}
    assert markers == {name: own for name, (own, *_) in FILES.items()}


def test_a_file_or_a_folder_that_exists(tmp_path):
    assert Marker(file=str(tmp_path)).match({}, "") == f"file {tmp_path}"
    assert not Marker(file=f"{tmp_path}/x").match({}, "")


def test_not_recognised():
    markers = [marker for site in OURS.values() for marker in site.markers]
    for environ, host in ELSEWHERE:
        assert find(environ, host) is None, (environ, host)
        assert not any(s.match(environ, host) for s in markers), (environ, host)


@pytest.mark.parametrize("name", OURS)
@given(data=st.data())
def test_each_sign_shows_its_site_and_no_other(name, data):
    """A new site needs no line in the tables above."""
    for marker in (m for m in OURS[name].markers if not m.file):
        texts = (
            st.sampled_from(marker.values)
            if marker.values
            else matching(marker.pattern)
        )
        text = data.draw(texts, str(marker))
        environ, host = ({marker.variable: text}, "") if marker.variable else ({}, text)
        matches = [
            k
            for k, site in OURS.items()
            for s in site.markers
            if s.match(environ, host)
        ]
        assert set(matches) == {name}
        assert find(environ, host).name == name


@functools.cache
def matching(pattern):
    return st.from_regex(pattern, fullmatch=True, alphabet=st.characters(codec="ascii"))


def test_every_site_is_in_the_documentation():
    page = (ROOT / "docs" / "run.md").read_text("utf-8")
    missing = [site.title for site in OURS.values() if f"| {site.title} | " not in page]
    assert not missing, f"docs/run.md has no row of {missing}"
    for name, site in OURS.items():
        if not site.markers:
            assert f"--hpc-site={name}`" in page, f"docs/run.md: how {name} is typed"


def test_variables_are_asked_in_order_and_before_host_names():
    environ = {"PBS_JOBID": AURORA_JOB, "SLURM_CLUSTER_NAME": "lumi"}
    assert find(environ, "tioga18").name == "aurora"
    assert find(environ | {"SYSTEMNAME": "jusuf"}, "tioga18").name == "jsc"
    assert find(environ | {"SYSTEMNAME": "jedi"}, "tioga18").name == "aurora"
    assert find({"SLURM_CLUSTER_NAME": "lumi"}, "tioga18").name == "lumi"
    assert find({"SLURM_CLUSTER_NAME": ""}, "tioga18").name == "el-capitan"


def test_by_name_wherever_we_are():
    for name, site in OURS.items():
        found = find({"SYSTEMNAME": "juwels"}, "tioga18", name)
        assert (found.name, found.found_by) == (name, f"--hpc-site={name}")
        assert found.variables == site.variables


@pytest.mark.parametrize("environ", [{}, {"SYSTEMNAME": "juwels"}])
def test_switched_off_reads_no_file(environ, tmp_path):
    (tmp_path / "broken.toml").write_text("[", encoding="utf-8")
    none = Setting("none", "--hpc-site")
    assert sites.find(environ, "tioga18", none, folders=[tmp_path]) is None


@pytest.mark.parametrize(
    ("wanted", "nearest"),
    [
        ("JSC", "jsc"),
        ("dericho", "derecho"),
        ("polarys", "polaris"),
        ("isambard", "isambard-ai"),
        ("None", ""),
        # a system's own name
        ("juwels", "jsc"),
        ("daint", "alps"),
        ("Tuolumne", "el-capitan"),
        # nothing is near
        ("zzz", ""),
        ("", ""),
    ],
)
def test_unknown_name_suggests_the_nearest_and_lists_all(wanted, nearest):
    message = (
        f"--hpc-site={wanted}: there is no such site. "
        f"{f'Did you mean {nearest}? ' if nearest else ''}"
        f"There are: {', '.join(OURS)}, none. A file also works: /path/to/site.toml"
    )
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}$") as fault:
        find({"SYSTEMNAME": "juwels"}, "", wanted)
    assert (fault.value.code, fault.value.everywhere) == ("HPC040", True)


def test_every_site_does_something_that_can_be_looked_up():
    for name, site in OURS.items():
        # a reader can find a page, a repository, or a recipe
        assert re.search(r"recipe|\w/\w", site.source), name
        assert site.pattern or site.variables, name
        unverified = "unverified" in site.title
        assert unverified is name.startswith(("aws", "azure", "google", "jupiter"))
        assert hash(site), name


def test_what_stops_nccl_is_explained_in_the_file():
    """If the plugin is missing. It is set only if the centre documents it."""
    plugin = [site for site in OURS.values() if "NCCL_NET" in site.variables]
    assert plugin
    for site in plugin:
        text = " ".join(Path(site.file).read_text("utf-8").replace("\n#", "").split())
        assert "NCCL_NET stops NCCL" in text, site.file


def test_nothing_is_set_for_ranks_that_mpiexec_has_started():
    variables = {name for site in OURS.values() for name in site.variables}
    assert not [name for name in variables if name.startswith("CCL_")]


# --- names of nodes ---------------------------------------------------------------


def test_only_where_there_is_a_rule_names_are_rewritten():
    assert WITH_RULE
    for name in OURS.keys() - set(WITH_RULE):
        assert OURS[name].rewrite("jwb0001") == "jwb0001", name


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


@pytest.mark.parametrize("system", ["polaris", "aurora"])
@pytest.mark.parametrize(
    ("suffix", "changed"),
    [
        ("", True),
        ("-hsn0", True),
        ("-hsn1.hsn.cm.SYSTEM.alcf.anl.gov", True),
        (".hostmgmt.cm.SYSTEM.alcf.anl.gov", True),
        (".hostmgmt2308.cm.SYSTEM.alcf.anl.gov", True),
        (".hsn.cm.SYSTEM.alcf.anl.gov", True),
        # of another network or system, which no rule is known for
        (".lab.alcf.anl.gov", False),
        (".hsn.cm.crux.alcf.anl.gov", False),
        ("-ib0", False),
    ],
)
def test_argonne_names(system, suffix, changed):
    name = "x3102c0s13b0n0" + suffix.replace("SYSTEM", system)
    fast = f"x3102c0s13b0n0.hsn.cm.{system}.alcf.anl.gov"
    assert OURS[system].rewrite(name) == (fast if changed else name)
    login = f"{system}-login-02"
    assert OURS[system].rewrite(login) == login


@pytest.mark.parametrize("name", WITH_RULE)
@given(data=st.data())
def test_rewriting_twice_changes_nothing_more(name, data):
    site = OURS[name]
    host = data.draw(
        st.from_regex(site.pattern)
        | st.sampled_from([*site.examples, *site.examples.values()])
        | st.text("x0123456789csbn-.hjwi", max_size=20)
    )
    once = site.rewrite(host)
    assert site.rewrite(once) == once


labels = st.text("jwbri019-", min_size=1, max_size=6)


@given(st.lists(labels, min_size=1, max_size=3).map(".".join))
@example("jwb0001")
@example("jwb0001.juwels")
def test_juelich_inserts_an_i_where_a_label_ends_in_a_digit(name):
    once = JSC.rewrite(name)
    assert once.replace("i", "") == name.replace("i", "")
    assert (once != name) is name.partition(".")[0][-1].isdigit()

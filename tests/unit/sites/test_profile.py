"""A node's own profile: what is taken, and what is not; nothing is executed."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc.errors import Setting
from torchrun_hpc.sites import load, profile
from torchrun_hpc.sites.profile import Profile
from torchrun_hpc.sites.site import Site

FILE = "/etc/nccl.sh"
ALLOWED = ("NCCL_A", "NCCL_B")
SHELL = "only a shell can tell its value"


def parse(text):
    found = profile.parse(FILE, text, ALLOWED)
    assert all(s.source.startswith(f"{FILE}, line ") for s in found.variables.values())
    return {k: s.value for k, s in found.variables.items()}, found.skipped


TAKEN = {
    "": {},
    "NCCL_A=1": {"NCCL_A": "1"},
    "export NCCL_A=1\nNCCL_B=2\n": {"NCCL_A": "1", "NCCL_B": "2"},
    "  export   NCCL_A=x,y:z/1.5^%@+- ": {"NCCL_A": "x,y:z/1.5^%@+-"},
    'NCCL_A="AWS Libfabric"': {"NCCL_A": "AWS Libfabric"},
    "NCCL_A='a \"b\"'  # why": {"NCCL_A": 'a "b"'},
    "NCCL_A=1 # why\r\n# NCCL_B=2\r\n": {"NCCL_A": "1"},
    "NCCL_A=a#b": {"NCCL_A": "a#b"},
    "NCCL_A==ib0": {"NCCL_A": "=ib0"},
    "NCCL_A=\nNCCL_B=''": {},  # as good as unset
    "NCCL_A=1\nNCCL_A=2": {"NCCL_A": "2"},
    "NCCL_A=1\nNCCL_A=": {},
    "NCCL_A=$X\nNCCL_A=2": {"NCCL_A": "2"},
    "nccl_a=1\nNCCL_AB=1": {},
    "if true; then source x; fi\nNCCL_A=1": {"NCCL_A": "1"},
    "if a; then\nx=1\nelif b; then\nx=2\nelse\nx=3\nfi\nNCCL_A=1": {"NCCL_A": "1"},
    "f() {\n  local=1\n}\nf\nNCCL_A=1": {"NCCL_A": "1"},
    "for n in 1; do\nx=1\ndone\nNCCL_A=1": {"NCCL_A": "1"},
    "list=(\n a\n)\nNCCL_A=1": {"NCCL_A": "1"},
    "# if (\nNCCL_A=1": {"NCCL_A": "1"},
    "NCCL A=1\nexportNCCL_A=1\n=1\n${NCCL_A}": {},
}


@pytest.mark.parametrize("text", TAKEN)
def test_taken(text):
    found, skipped = parse(text)
    assert found == TAKEN[text]
    assert not skipped.keys() & {*ALLOWED}


SKIPPED = {
    "NCCL_A=$(touch FILE)": SHELL,
    "NCCL_A=`touch FILE`": SHELL,
    'export NCCL_A="$(touch FILE)"': SHELL,
    "NCCL_A='$(touch FILE)'": SHELL,
    "NCCL_A=1; touch FILE": SHELL,
    "NCCL_A=1 touch FILE": SHELL,
    "NCCL_A=1 && touch FILE": SHELL,
    "NCCL_A=<(touch FILE)": SHELL,
    "NCCL_A=${X:-1}": SHELL,
    "NCCL_A=1 NCCL_B=2": SHELL,
    "NCCL_A=~/x": SHELL,
    "NCCL_A=/dev/*": SHELL,
    "NCCL_A=a\\ b": SHELL,
    'NCCL_A="a': SHELL,
    'NCCL_A="a""b"': SHELL,
    'NCCL_A="a\tb"': SHELL,
    "NCCL_A=a\x1b[31m": SHELL,
    "NCCL_A=a\x00": SHELL,
    "NCCL_A=1\ndeclare -x NCCL_A=2": SHELL,
    "NCCL_A=1\nNCCL_A+=2": SHELL,
    "[ -e /x ] && export NCCL_A=1": SHELL,
    "export NCCL_B=1 NCCL_A=2": SHELL,
    "NCCL_A=1 #a\nNCCL_A=$X": SHELL,  # the last line counts
    "if [ -e /x ]; then\nNCCL_A=1\nelse\nNCCL_A=2\nfi": SHELL,
    "f() {\n    export NCCL_A=1\n}": SHELL,
    "case $x in\n  a) y=1;;\n  *)\n  NCCL_A=1;;\nesac": SHELL,
    "if x\nthen # why\nNCCL_A=1\nelif y; then\nNCCL_A=2\nfi": SHELL,
    "cat > x <<END\nNCCL_A=1\nEND": SHELL,
}


@pytest.mark.parametrize("text", SKIPPED)
def test_skipped_and_not_executed(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, skipped = parse(text)
    assert "NCCL_A" not in found
    line = max(i for i, part in enumerate(text.split("\n"), 1) if "NCCL_A" in part)
    assert skipped["NCCL_A"] == f"line {line}, {SKIPPED[text]}"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["PATH", "LD_PRELOAD", "NCCL_AB", "PET_NNODES"])
def test_a_name_that_the_site_does_not_allow(name):
    assert parse(f"export {name}=/tmp/x") == (
        {},
        {name: "line 1, the site does not allow it"},
    )


LINES = st.lists(
    st.sampled_from(
        ["NCCL_A=", "export ", "NCCL_B=", "1", '"', "'", "$X", "a b", "#", "\n", "if (",
         "fi", "{", "}", "<<", "`", "\\", "\t", "\u2028", "\r"]
    ),
    max_size=25,
).map("".join)  # fmt: skip


@given(LINES | st.text(max_size=60))
def test_no_text_is_too_wrong(text):
    found, skipped = parse(text)
    assert found.keys() <= {*ALLOWED}
    assert not found.keys() & skipped.keys()
    for value in found.values():
        assert value.isprintable()
        assert not {*value} & {*"$`"}


# --- the file -----------------------------------------------------------------------


def of(path):
    site = Site("here", "", "", "", "", profile=str(path), profile_names=ALLOWED)
    return profile.of_site(site)


def test_a_file(tmp_path):
    file = tmp_path / "nccl.sh"
    file.write_text("#!/bin/sh\nexport NCCL_A=1\n", encoding="utf-8")
    assert of(file) == Profile({"NCCL_A": Setting("1", f"{file}, line 2")})


def test_a_site_without_a_profile_reads_nothing():
    assert profile.of_site(None) == of("") == Profile()


@pytest.mark.timeout(20)
def test_files_that_cannot_be_read(tmp_path):
    large, binary, fifo = (tmp_path / name for name in ("large", "binary", "fifo"))
    large.write_bytes(b"NCCL_A=1\n" * 1_200_000)
    binary.write_bytes(b"NCCL_A=1\n\x7fELF\xff\xfe")
    os.mkfifo(fifo)
    problems = {
        tmp_path / "missing": "No such file or directory",
        tmp_path: "Is a directory",
        large: "It has more than 100,000 bytes",
        binary: "'utf-8' codec can't decode byte 0xff in position 13: invalid start "
        "byte",
        fifo: "It is not a file",
        "/dev/zero": "It is not a file",
    }
    for file, problem in problems.items():
        assert of(file) == Profile(problem=problem), file


# --- profiles of clouds, in the form that their sources document --------------------

# google/nccl-plugin-gpudirect-tcpxo: the forms of its lines, with some of its names.
TCPXO = """\
#!/bin/bash
: "${NCCL_LIB_DIR:?is not set}"
host_nic="eth0"
gpu_nics="eth1,eth2"
find_nics() {
    for each in /sys/class/net/*; do
        gpu_nics="$each"
    done
}
find_nics
export LD_LIBRARY_PATH="${NCCL_LIB_DIR}:${LD_LIBRARY_PATH}"
export NCCL_FASTRAK_IFNAME="${gpu_nics}"
export NCCL_SOCKET_IFNAME="${host_nic}"
export NCCL_CROSS_NIC=0
export NCCL_PROTO=Simple,LL128
export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
export NCCL_TUNER_PLUGIN=libnccl-tuner.so
export NCCL_TUNER_CONFIG_PATH=${NCCL_LIB_DIR}/a3plus_tuner_config.textproto
export NCCL_DEBUG=WARN
export NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY=/dev/aperture_devices
"""
# Azure/azhpc-images: components/customizations/ndv5.sh.
NDV5 = """\
NCCL_IB_PCI_RELAXED_ORDERING=1
NCCL_TOPO_FILE=/opt/microsoft/ndv5/topo.xml
NCCL_IGNORE_CPU_AFFINITY=1
"""
CLOUDS = {
    "google-a3-mega": (
        TCPXO,
        "CROSS_NIC PROTO TUNER_PLUGIN FASTRAK_LLCM_DEVICE_DIRECTORY",
        "FASTRAK_IFNAME SOCKET_IFNAME TUNER_CONFIG_PATH DEBUG",
    ),
    "azure-nd-h100": (
        NDV5,
        "IB_PCI_RELAXED_ORDERING TOPO_FILE IGNORE_CPU_AFFINITY",
        "",
    ),
}


@pytest.mark.parametrize("name", CLOUDS)
def test_the_profile_of_a_cloud(name):
    text, taken, skipped = CLOUDS[name]
    (site,) = load({}, (), Setting(name, "--hpc-site"))
    found = profile.parse(site.profile, text, site.profile_names)
    assert {*found.variables} == {f"NCCL_{name}" for name in taken.split()}
    not_taken = {f"NCCL_{name}" for name in skipped.split()}
    assert {name for name in found.skipped if name.startswith("NCCL")} == not_taken
    # The site has its own values, except one that is the user's.
    assert not_taken - {"NCCL_DEBUG"} <= site.variables.keys()
